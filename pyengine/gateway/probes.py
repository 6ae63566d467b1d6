"""Whether this gateway lives, whether it can serve, and whether all of the cluster does what it should.

    /livez           the loop turns. If not: start it again.
    /readyz          the conductor is there, and a worker for each part of some model. If not: send nothing here.
    /health          the same, as vLLM has it; with the workers.
    /health?deep=1   everybody who should be there is, every loop turns, no medium fails, and a token has gone through
                     each worker: prefill, transfer, decode. If not: its text names who it is.

A worker whose loop hangs goes on sending heartbeats, as those have a thread of their own. So what counts is its
progress, as the conductor sees it, and a request that it answers. `within`: seconds that one may take, or a loop may
stand still (default 10: longer than a step of a big prompt takes on a slow machine).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.responses import Response

from pyengine.gateway.errors import ApiError
from pyengine.gateway.request import ErrorKind, Request, Terms
from pyengine.gateway.service import Model, Service
from pyengine.gateway.tracing import Timeline
from pyengine.scheduler.types import Role, SamplingParams, Slo, WorkerInfo

JSON = "application/json"
WITHIN = 10.0
#: Of `within`, seconds.
SHORTEST, LONGEST = 0.5, 120.0
#: Who asks again sooner (seconds) gets the last answer: whoever watches is not to become the load.
KEPT = 2.0
#: Paths that are tried at once. A larger cluster is tried a part at a time.
MAX_PATHS = 64
#: Before everybody: a probe asks whether a worker works, not how much it has to do.
FIRST = 1 << 20
#: Shorter than a block, so nothing of it is kept; ends by its length only.
PROMPT = (1, 2)
TOKENS = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, seed=0)
TENANT = "pyengine health"


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at. detail: what was found; if it is not ok, why not, and what to do."""

    check: str
    ok: bool
    detail: str


class Path(NamedTuple):
    """Workers that a request may take. Equal: of role both."""

    model: Model
    prefill: WorkerInfo
    decode: WorkerInfo


class Probe:
    """A request that nobody counts. In the service's table it stands beside those of clients."""

    def __init__(self, service: Service, request: Request) -> None:
        self.request = request
        self.timeline: Timeline | None = None
        self.done = asyncio.Event()
        self._service = service

    def progressed(self, _: float) -> None:
        if self.request.done:
            self.done.set()

    def close(self, _: str = "") -> None:
        self._service.withdraw(self)


def add_probes(app: FastAPI, service: Service) -> None:
    """Adds /livez and /readyz."""

    @app.get("/livez")
    async def livez() -> Response:
        return _answer([Check("loop", service.ticking, "turns" if service.ticking else "its clock has stopped")])

    @app.get("/readyz")
    async def readyz() -> Response:
        return _answer(ready(service))


class Deep:
    """The deep check of one gateway: one at a time, whatever anybody asks for, and its answer is kept a while."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running: asyncio.Task[list[Check]] | None = None
        self._key = 0.0
        self._until = -math.inf

    async def answer(self, http: HttpRequest) -> Response:
        """Who comes while one is under way is told what that finds, within its own time.

        Raises ApiError 400 for a `within` that is none, 403 for what a page of another origin had a browser fetch.
        """
        # Such a request (of an image, say) has no Origin header: so the door does not know it.
        if http.headers.get("sec-fetch-site") == "cross-site" and "origin" not in http.headers:
            raise ApiError(403, "pages of other origins may not start a deep check", code="forbidden_origin")
        within = _within(http)
        now = time.monotonic()
        task = self._running
        if task is None or (task.done() and (self._key != within or now >= self._until)):
            task = self._running = asyncio.create_task(self._look(within))
            self._key = within
        return _answer(await asyncio.shield(task))

    async def _look(self, within: float) -> list[Check]:
        checks = ready(self._service)
        if all(check.ok for check in checks[:1]):  # without a conductor nothing is known of anybody
            checks += parts(self._service.cluster.counters, within)
            checks += await _try_paths(self._service, within)
        self._until = time.monotonic() + KEPT
        return checks


def ready(service: Service) -> list[Check]:
    """The conductor first."""
    up = service.conductor_up
    checks = [Check("conductor", up, "is connected" if up else f"does not answer at {service.config.conductor}")]
    if not service.models:
        checks.append(Check("workers", False, "none has come yet"))
    lacking = {name: _lacking(service, name) for name in service.models}
    for name, parts_ in sorted(lacking.items()):
        # One model that is served is enough to send requests here.
        served = any(not missing and service.is_read(known) for known, missing in lacking.items())
        text = f"no worker for {' and '.join(parts_)}" if parts_ else "can be served"
        if not parts_ and not service.is_read(name):
            text = "its vocabulary is being read"
        checks.append(Check(f"model {name}", served, text))
    return checks


def _lacking(service: Service, model: str) -> list[str]:
    roles = [worker.role for worker in service.cluster.workers if worker.model == model]
    return [
        part
        for part, there in (
            ("prefill", any(role.prefills for role in roles)),
            ("decode", any(role.decodes for role in roles)),
        )
        if not there
    ]


def parts(counters: Mapping[str, float], within: float) -> list[Check]:
    """What the conductor and daemons say of each worker and node, by their samples. Pure."""
    checks = []
    for sample, value in sorted(counters.items()):
        name, _, rest = sample.partition("{")
        labels = dict(pair.split("=", 1) for pair in rest.rstrip("}").split(",") if "=" in pair)
        who = {label: value.strip('"') for label, value in labels.items()}
        if name == "pyengine_worker_up":
            worker = f"worker {who['worker']}"
            stalled = counters.get(f'pyengine_worker_stalled_seconds{{worker="{who["worker"]}"}}', 0.0)
            if not value:
                checks.append(Check(worker, False, "is gone, or silent, without a word: see its log, start it again"))
            elif stalled > within:
                checks.append(Check(worker, False, f"its loop has stood still for {stalled:.1f} s: start it again"))
            else:
                checks.append(Check(worker, True, f"its loop turned {stalled:.1f} s ago"))
        elif name == "pyengine_node_up":
            text = "its daemon is heard" if value else "its daemon is gone: see its log, start it again"
            checks.append(Check(f"node {who['node']}", bool(value), text))
        elif name == "pyengine_tier_trouble" and value:
            text = "can only be read" if value == 1 else "has failed"
            checks.append(Check(f"node {who['node']}", False, f"its {who['tier']} {text}: look at the device"))
    return checks


def paths(models: Mapping[str, Model], workers: tuple[WorkerInfo, ...]) -> list[Path]:
    """So few that each worker is on one. Pure."""
    found = []
    for name, model in sorted(models.items()):
        mine = [worker for worker in workers if worker.model == name]
        both = [worker for worker in mine if worker.role is Role.BOTH]
        first = [worker for worker in mine if worker.role is Role.PREFILL]
        then = [worker for worker in mine if worker.role is Role.DECODE]
        found += [Path(model, worker, worker) for worker in both]
        first, then = (first or both, then or both) if first or then else ([], [])
        if first and then:
            for at in range(max(len(first), len(then))):
                found.append(Path(model, first[at % len(first)], then[at % len(then)]))
    return found


async def _try_paths(service: Service, within: float) -> list[Check]:
    tried = paths(service.models, service.cluster.workers)
    begin = service.probed % max(len(tried), 1)
    some = (tried[begin:] + tried[:begin])[:MAX_PATHS]
    service.probed += len(some)
    return list(await asyncio.gather(*(_try(service, path, within) for path in some)))


async def _try(service: Service, path: Path, within: float) -> Check:
    """One token through prefill, and one through decode."""
    wanted = {path.prefill.worker, path.decode.worker}
    others = tuple(sorted(worker.worker for worker in service.cluster.workers if worker.worker not in wanted))
    began = time.monotonic()
    terms = Terms(arrived=began, slo=Slo(), priority=FIRST, tenant=TENANT)
    request = service.request(path.model, PROMPT, TOKENS, terms, patience=0.0, excluded=others)
    probe = Probe(service, request)
    name = f"path {path.prefill.worker} -> {path.decode.worker}"
    service.send(probe)
    try:
        async with asyncio.timeout(within):
            await probe.done.wait()
    except TimeoutError:
        return _late(service, path, name, request, within)
    finally:
        probe.close()
    took = 1000.0 * (time.monotonic() - began)
    error = request.error
    if error is None:
        return Check(name, True, f"answered in {took:.1f} ms")
    if error.kind is ErrorKind.BUSY:
        return Check(name, True, f"not tried, there is too much to do: {error}")
    return Check(name, False, str(error))


def _late(service: Service, path: Path, name: str, request: Request, within: float) -> Check:
    if not service.conductor_up or (request.plan is None and not request.tokens):
        return Check(name, False, f"the conductor has given it no workers within {within:g} s")
    worker, node = (path.decode, path.decode.node) if request.tokens else (path.prefill, path.prefill.node)
    waiting = [
        value
        for sample, value in service.cluster.counters.items()
        if sample.startswith("vllm:num_requests_waiting{") and f'worker="{worker.worker}"' in sample
    ]
    if sum(waiting) > 1:
        return Check(name, True, f"no token of {worker.worker} within {within:g} s, behind {sum(waiting):g} requests")
    what = "second" if request.tokens else "first"
    return Check(name, False, f"no {what} token of {worker.worker} ({node.node}) within {within:g} s")


def _within(http: HttpRequest) -> float:
    given = http.query_params.get("within", str(WITHIN))
    try:
        within = float(given)
    except ValueError:
        within = math.nan
    if not SHORTEST <= within <= LONGEST:
        text = f"within: is {given!r}; send a number of seconds from {SHORTEST:g} to {LONGEST:g}"
        raise ApiError(400, text, param="within")
    return within


def _answer(checks: list[Check]) -> Response:
    ok = all(check.ok for check in checks)
    ill = [f"{check.check}: {check.detail}" for check in checks if not check.ok]
    body = {"status": "ok" if ok else "unavailable", "failing": ill, "checks": checks}
    return Response(msgspec.json.encode(body), 200 if ok else 503, media_type=JSON)
