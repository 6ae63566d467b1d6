"""A live cluster as a cluster file: what its gateway says of its workers, and the costs that these have measured.

What nobody has measured keeps the scheduler's own assumption, and is named, so that it can be set by hand.
"""

from __future__ import annotations

import re
from collections import Counter

import msgspec

from ..link_cost import LINK_DELAY, LINK_RATE
from ..sim.compute import ModelError, StepTime
from ..sim.spec import ClusterSpec, NodeSpec, WorkerSpec
from ..types import Role
from .base import BackendError, Found
from .http import Address, get

#: The terms of `scheduler/cost.py` as workers' metrics name them, in that order.
TERMS = ("step", "prompt_token", "prompt_context_token", "decoding_sequence", "decoding_context_token")

_SAMPLE = re.compile(r'^pyengine_cost_seconds\{worker="([^"]+)",per="(\w+)"\} (\S+)$', re.MULTILINE)
_SAMPLES = re.compile(r'^pyengine_cost_samples_total\{worker="([^"]+)"\} (\S+)$', re.MULTILINE)
_STEPS = re.compile(r'^pyengine_worker_steps_total\{worker="([^"]+)"\} (\S+)$', re.MULTILINE)
_SECONDS = re.compile(r'^pyengine_worker_seconds_total\{worker="([^"]+)",of="(\w+)"\} (\S+)$', re.MULTILINE)
_POLICY = re.compile(r'^pyengine_conductor_plans_total\{policy="([^"]+)"\}', re.MULTILINE)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the gateway's /cluster tells."""

    worker: str
    role: Role
    node: str
    model: str
    block_tokens: int
    block_bytes: int
    layers: int
    pages: int
    pool_slots: int
    max_tokens_per_step: int
    max_sequences: int


async def discover(address: Address) -> Found:
    """Raises BackendError: nobody there, no worker, another kind of gateway."""
    try:
        status, body = await get(address, "/cluster")
        _, metrics = await get(address, "/metrics")
    except OSError as error:
        raise BackendError(f"no gateway answers at {address.url}: {error}") from None
    if status != 200:
        raise BackendError(
            f"{address.url}/cluster answers {status}: name a cluster file for the simulation (--cluster)"
        )
    try:
        workers = msgspec.json.decode(body, type=list[Facts])
    except msgspec.DecodeError as error:
        raise BackendError(f"{address.url}/cluster is of another version: {error}") from None
    if not workers:
        raise BackendError(f"{address.url} knows no worker yet: wait until /health is 200")
    return describe(workers, metrics.decode(errors="replace"))


def describe(workers: list[Facts], metrics: str) -> Found:
    """Raises BackendError if the workers are of several models: one is simulated at a time."""
    if len({worker.model for worker in workers}) > 1:
        raise BackendError("its workers serve several models, and one is simulated at a time: write a cluster file")
    assumed = [
        f"links: {LINK_RATE:g} bytes/s and {LINK_DELAY:g} s, what the conductor assumes of a link nobody has measured"
    ]
    models, unmeasured = {}, []
    for worker in workers:
        # One that has not worked yet is like one of its role that has.
        alike = [worker, *(other for other in workers if other.role is worker.role)]
        known = next(((other.worker, fit) for other in alike if (fit := _fit(other.worker, metrics)) is not None), None)
        if known is None:
            unmeasured.append(worker.worker)
            continue
        models[worker.worker] = known[1]
        if known[0] != worker.worker:
            assumed.append(f"costs of {worker.worker}: those of {known[0]}, as it has measured none itself")
    first = workers[0]
    nodes = Counter(worker.node for worker in workers)
    if len(nodes) < len(workers):
        assumed.append(f"{len(workers)} workers on {len(nodes)} nodes: each is simulated on a node of its own")
    spec = ClusterSpec(
        workers=tuple(
            WorkerSpec(
                role=worker.role,
                count=1,
                model=worker.worker,
                pages=worker.pages,
                max_tokens_per_step=worker.max_tokens_per_step,
                max_sequences=worker.max_sequences,
                step_overhead=_beside(worker.worker, metrics),
            )
            for worker in workers
        ),
        node=NodeSpec(
            dram_tokens=min(worker.pool_slots for worker in workers) * first.block_tokens,
            link_rate=LINK_RATE,
            link_delay=LINK_DELAY,
        ),
        block_tokens=first.block_tokens,
        kv_bytes=max(first.block_bytes // first.block_tokens, 1),
        layers=first.layers,
    )
    policy = _POLICY.search(metrics)
    return Found(spec, models, unmeasured, policy[1] if policy else None, assumed)


def _fit(worker: str, metrics: str) -> StepTime | None:
    """The worker's own cost model; None before it has measured a step. Its steps are as long as they were on average: a
    fit of relative errors is below the mean where steps vary, by their variance.
    """
    measured = {name: float(count) for name, count in _SAMPLES.findall(metrics)}
    terms = {term: float(value) for name, term, value in _SAMPLE.findall(metrics) if name == worker}
    if not measured.get(worker) or set(TERMS) - set(terms):
        return None
    predicted, factor = _seconds(worker, "predicted", metrics), 1.0
    if predicted:
        factor = _seconds(worker, "model", metrics) / predicted
    try:
        return StepTime.from_fit(
            worker,
            [factor * terms[term] for term in TERMS],
            about=f"the worker {worker}, fitted by itself",
            source=f"{measured[worker]:,.0f} steps of a live cluster",
        )
    except ModelError as error:
        raise BackendError(f"{worker} says of its costs what cannot be: {error}") from None


def _beside(worker: str, metrics: str) -> float:
    """Seconds of a step that the worker's loop has spent beside the model, on average; 0 before the first."""
    steps = float(dict(_STEPS.findall(metrics)).get(worker, 0.0))
    return _seconds(worker, "loop", metrics) / steps if steps else 0.0


def _seconds(worker: str, of: str, metrics: str) -> float:
    return sum(float(value) for name, what, value in _SECONDS.findall(metrics) if (name, what) == (worker, of))
