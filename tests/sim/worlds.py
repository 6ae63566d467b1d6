"""Small clusters and traces for the simulator's tests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from pyengine.scheduler.sim.cluster import Simulation
from pyengine.scheduler.sim.compute import Coefficients, StepTime
from pyengine.scheduler.sim.spec import ClusterSpec, NodeSpec, RunSpec, WorkerSpec
from pyengine.scheduler.sim.trace import Request
from pyengine.scheduler.types import Role

BLOCK = 16
KV_BYTES = 1024


def blocks(*path: int) -> tuple[bytes, ...]:
    """Keys of a prefix; paths that begin alike share keys."""
    keys: list[bytes] = []
    for step in path:
        parent = keys[-1] if keys else b"trace"
        keys.append(hashlib.blake2b(parent + step.to_bytes(4, "little"), digest_size=16).digest())
    return tuple(keys)


def request(arrival: float, path: Iterable[int], rest: int = 5, output: int = 4, **more: object) -> Request:
    """A prompt of these blocks and `rest` tokens behind them."""
    keys = blocks(*path)
    return Request(arrival, len(keys) * BLOCK + rest, output, keys, **more)  # type: ignore[arg-type]


def model(folder: Path, **seconds: float) -> str:
    """A cost model of these coefficients, as a file."""
    fields = {"token": 1e-4, "pair": 1e-9, "decode": 1e-2, "sequence": 1e-3, "context": 1e-7} | seconds
    path = folder / f"{hashlib.blake2b(repr(sorted(fields.items())).encode(), digest_size=4).hexdigest()}.toml"
    StepTime(path.stem, "a test's", "made up", Coefficients(**fields)).save(path)
    return str(path)


def cluster(
    time: str, prefill: int = 1, decode: int = 1, both: int = 0, *, node: NodeSpec | None = None, **more: object
) -> ClusterSpec:
    """A cluster of workers with this cost model. more: of WorkerSpec, or slo."""
    slo = {"slo": more.pop("slo")} if "slo" in more else {}
    sizes = {"pages": 200, "max_tokens_per_step": 128, "max_sequences": 16}
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.BOTH: both}
    workers = tuple(
        WorkerSpec(role=role, count=count, model=time, **(sizes | more))  # type: ignore[arg-type]
        for role, count in counts.items()
        if count
    )
    return ClusterSpec(
        workers=workers,
        node=node or NodeSpec(dram_tokens=4096, link_rate=1e8, device_rate=1e9, ssd_rate=1e8),
        block_tokens=BLOCK,
        kv_bytes=KV_BYTES,
        layers=4,
        **slo,  # type: ignore[arg-type]
    )


def simulated(requests: list[Request], spec: ClusterSpec, **run: object) -> Simulation:
    """A run that is over, everything checked."""
    simulation = Simulation(requests, spec, RunSpec(**run))  # type: ignore[arg-type]
    simulation.run()
    check(simulation)
    return simulation


def check(simulation: Simulation) -> None:
    """Nothing contradicts itself; the conductor knows what nodes have; every request has one outcome."""
    simulation.check()
    index = simulation.conductor.index
    for name, node in simulation.nodes.items():
        if node.up:
            assert index.count(name) == node.pool.count
            assert index.digest(name) == node.pool.digest
    outcomes = simulation.measure.report("").records.outcome
    assert len(outcomes) == len(simulation.requests)
    if simulation.complete:
        assert all(0 <= outcome <= 2 for outcome in outcomes)
