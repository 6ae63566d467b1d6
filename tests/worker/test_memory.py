"""Goal: a worker takes no more memory after 10,000 steps than after the first ones.

Method: random traffic through a prefill and a decode worker of one node (hand-offs, prompts for one worker alone,
prefixes that are reused, aborts, preemptions), in two parts with a rest behind each. Then nothing that the parts of a
worker hold may be longer than at the first rest, and the process may hold no more blocks of Python's memory (one for
every fourth step would show) and no more memory of the system, but for what the allocators keep.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pyengine.backend import Backend
from pyengine.backends import lacking, load_backend
from pyengine.backends.fake import FakeBackend
from pyengine.scheduler.types import SamplingParams
from pyengine.worker import core
from pyengine.worker.core import Worker
from tests.model.checkpoints import write_tiny
from tests.worker.harness import Cluster, Request

#: Requests at once, of which each has 1 to 40 tokens of prompt behind one of a few prefixes.
AT_ONCE = 12
STEPS = 10_000
#: JAX on a CPU takes longer for a step of a model so small; a leak in every fourth would show as well.
JAX_STEPS = 2_000
#: Steps before the first rest at least: by then what is kept has been made, JAX's fast ways to its programs too.
FIRST = 1_000
PAGES = 24
PREFIXES = [[(7 * i + k) % 251 for i in range(16 * k)] for k in range(4)]


class Traffic:
    """Random requests of one seed for a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.random = random.Random(0)
        self.running: list[Request] = []

    def steps(self) -> int:
        return sum(worker.counters["steps"] for worker in self.cluster.workers.values())

    def run(self, steps: int) -> None:
        """So many steps, and then until nothing is under way."""
        until = self.steps() + steps
        while self.steps() < until:
            while len(self.running) < AT_ONCE:
                self.running.append(self.submit())
            if self.random.random() < 0.01:
                index = self.random.randrange(len(self.running))
                self.cluster.abort(self.running[index])
                self.drop(index)
            self.cluster.step()
            for index in reversed(range(len(self.running))):
                if self.running[index].over:
                    assert self.running[index].failed is None, self.running[index].failed
                    self.drop(index)
        self.cluster.run(*self.running)
        while self.running:
            self.drop(0)
        self.cluster.settle()
        for worker in self.cluster.workers.values():
            # What whoever sends heartbeats and messages takes.
            worker.take_ended()
            worker.accepted.clear()
            worker.mover.loads.clear()
            worker.batcher.pool.take_changes()

    def submit(self) -> Request:
        choose = self.random
        prompt = choose.choice(PREFIXES) + [choose.randrange(256) for _ in range(choose.randint(1, 40))]
        sampling = SamplingParams(temperature=0.0, max_tokens=choose.randint(1, 40), ignore_eos=True)
        prefill = choose.choice(["prefill", "decode"])
        return self.cluster.submit(prompt, prefill, "decode", sampling=sampling)

    def drop(self, index: int) -> Request:
        request = self.running.pop(index)
        del self.cluster.requests[request.number, request.attempt]
        return request


def lengths(worker: Worker) -> dict[str, int]:
    """Of all containers that a worker's parts have, by where they are."""
    parts = {"worker": worker, "batcher": worker.batcher, "pool": worker.batcher.pool, "mover": worker.mover}
    parts |= {"queue": worker.batcher._queue}
    parts |= {f"queue.{name}": part for name, part in vars(worker.batcher._queue).items() if hasattr(part, "__dict__")}
    return {
        f"{part}.{name}": len(value)
        for part, owner in parts.items()
        for name, value in vars(owner).items()
        if hasattr(value, "__len__")
    }


def resident() -> int:
    """Bytes of the process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


@pytest.fixture(params=["fake beside the host", "torch", "jax"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Backend]:
    if request.param in ("torch", "jax"):
        if reason := lacking(request.param):
            pytest.skip(reason)
        folder = str(write_tiny(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1))
        cache = tmp_path_factory.mktemp("cache")
        return lambda: load_backend(request.param, folder, cache=cache, threads=1)
    return lambda: FakeBackend(layers=1, kv_heads=1, head_dim=2, overlaps=1)


def test_nothing_grows_in_10_000_steps(
    make: Callable[[], Backend], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = JAX_STEPS if request.node.callspec.params["make"] == "jax" else STEPS
    monkeypatch.setattr(core, "REMEMBERED_ENDS", steps // 100)
    with Cluster() as cluster:
        cluster.add_node("a", 64, make())
        for name in ("prefill", "decode"):
            backend = make()
            cluster.add_worker(name, "a", backend, pages=PAGES, max_sequences=8)
            backend.warm_up(64, 8)  # what compiles programs keeps them: all, before anything is counted
        traffic = Traffic(cluster)
        traffic.run(max(steps // 5, FIRST))
        before = {name: lengths(worker) for name, worker in cluster.workers.items()}
        gc.collect()
        blocks, memory = sys.getallocatedblocks(), resident()
        traffic.run(steps)
        for name, worker in cluster.workers.items():
            after = lengths(worker)
            # Pages go from one list of the pool to another, and who has left a line is still in it until his turn.
            most = {where: max(length, PAGES) for where, length in before[name].items()}
            grown = {where: length for where, length in after.items() if length > most[where]}
            assert not grown, f"longer than before, at rest: {grown}"
        assert cluster.workers["decode"].counters["preempted"] > 0
        gc.collect()
        assert sys.getallocatedblocks() - blocks < steps // 4
        # Far below what so many steps could leave behind, above what an arena of malloc takes at once.
        assert resident() - memory < 8 << 20
