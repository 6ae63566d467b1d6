"""Goal: a replica spread over several processes shares KV with every other: each rank its strips of every block.

Method: workers of one and of two ranks on a random model with eight KV heads, over real pools; tokens against the model
alone. A rank is killed in the midst of a write. What ranks compute: tests/model/test_parallel.py.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from pyengine.backend import Slice, WorkerBroken
from pyengine.checkpoint import Checkpoint, resolve
from pyengine.ranks import Message, Store
from pyengine.scheduler.types import SamplingParams
from tests.model.checkpoints import write_tiny
from tests.worker.harness import Cluster

pytest.importorskip("torch", reason="needs the torch extra")

from pyengine.backends.torch import ParallelTorchBackend, TorchBackend
from pyengine.llm import LLM

BLOCK = 16
TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


def prompt(length: int, seed: int) -> list[int]:
    generator = random.Random(f"{length}/{seed}")
    return [generator.randrange(256) for _ in range(length)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("ranks")
    model = write_tiny(folder / "model", num_attention_heads=8, num_key_value_heads=8)
    return resolve(str(model), folder)


class Oracle:
    """The model in one process, with no pool and no batch."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._backend = TorchBackend(checkpoint, threads=1)
        self._backend.allocate(32)

    def tokens(self, ids: list[int]) -> list[int]:
        ids, pages = list(ids), np.arange(32, dtype=np.int32)
        start, first = 0, len(ids)
        while len(ids) < first + TOKENS:
            chosen = self._backend.execute([Slice(np.array(ids[start:], np.uint32), start, pages, GREEDY)])
            start = len(ids)
            ids += chosen
        return ids[first:]


@pytest.fixture(scope="module")
def oracle(checkpoint: Checkpoint) -> Oracle:
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def cluster(checkpoint: Checkpoint) -> Iterator[Cluster]:
    """Workers `two` (ranks) and `one` on node a, `far` on node b."""
    with Cluster() as cluster:
        backends = {
            "two": ParallelTorchBackend(checkpoint, 2, threads=1),
            "one": TorchBackend(checkpoint, threads=1),
            "far": TorchBackend(checkpoint, threads=1),
        }
        for node in ("a", "b"):
            cluster.add_node(node, 256, backends["one"])
        for name, backend in backends.items():
            cluster.add_worker(name, "b" if name == "far" else "a", backend)
        yield cluster


PAIRS = [("two", "one"), ("one", "two"), ("two", "far"), ("far", "two")]


@pytest.mark.parametrize("length", [15, 64, 90])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " to ".join(pair))
def test_kv_is_handed_on(pair: tuple[str, str], length: int, cluster: Cluster, oracle: Oracle) -> None:
    """Through one arena, and from node to node; a partial block too."""
    prefill, decode = pair
    ids = prompt(length, PAIRS.index(pair))
    stored = cluster.workers[prefill].mover.counters["stored_blocks"]
    loaded = cluster.workers[decode].mover.counters["loaded_blocks"]
    request = cluster.submit(ids, prefill, decode, sampling=GREEDY)
    cluster.run(request)
    assert request.failed is None and request.ids == oracle.tokens(ids)
    blocks = -(-length // BLOCK)
    assert cluster.workers[prefill].mover.counters["stored_blocks"] == stored + blocks
    assert cluster.workers[decode].mover.counters["loaded_blocks"] == loaded + blocks
    assert cluster.workers[decode].counters["recomputed"] == 0
    cluster.settle()


@pytest.mark.parametrize(("first", "second"), [("two", "one"), ("one", "two")])
def test_kv_is_reused(first: str, second: str, cluster: Cluster, oracle: Oracle) -> None:
    """From the pool: what one kind of worker has cached, written through, the other finds."""
    ids = prompt(100, 10 + (first == "two"))
    for worker in (first, second):
        request = cluster.submit(ids, worker, worker, sampling=GREEDY)
        cluster.run(request)
        cluster.settle()
        assert request.ids == oracle.tokens(ids)
    assert request.tiers == {"dram": 96}


def test_damage_for_one_rank_is_damage_for_all(cluster: Cluster, oracle: Oracle) -> None:
    """Only the last head of a layer is damaged, which the leader has not: the block is not used, and told to be bad."""
    ids = prompt(80, 20)
    cluster.run(cluster.submit(ids, "one", "one", sampling=GREEDY))
    cluster.settle()
    spec = cluster.workers["one"].backend.namespace.kv
    descriptors, size, slots = cluster._pools["one"].share()
    with mmap.mmap(descriptors[0], size) as arena:
        for slot in range(slots):
            arena[4096 + slot * -(-spec.block_bytes // 4096) * 4096 + 8 * spec.strip_bytes - 1] ^= 1
    for descriptor in descriptors:
        os.close(descriptor)
    two = cluster.workers["two"]
    failures, corrupt = (
        two.mover.counters["checksum_failures"],
        cluster.counter("a", "pyengine_checksum_failures_total"),
    )
    request = cluster.submit(ids, "two", "two", sampling=GREEDY)
    cluster.run(request)
    assert request.ids == oracle.tokens(ids)
    assert two.mover.counters["checksum_failures"] == failures + 1
    assert cluster.counter("a", "pyengine_checksum_failures_total") == corrupt + 1
    cluster.settle()


def test_ranks_follow_to_a_new_daemon(cluster: Cluster, oracle: Oracle) -> None:
    cluster.replace_daemon("a", 256)
    ids = prompt(70, 30)
    for number, (prefill, decode) in enumerate(PAIRS[:2]):
        request = cluster.submit(ids[number:], prefill, decode, sampling=GREEDY)
        cluster.run(request)
        assert request.failed is None and request.ids == oracle.tokens(ids[number:])
    cluster.settle()


def test_a_rank_that_dies_while_it_writes(checkpoint: Checkpoint, oracle: Oracle) -> None:
    """Its block is never readable, the slot stays taken until its worker has let go, and then nothing is held.

    Method: the rank is stopped as it is told to store, so that the leader has stored its part and waits for it.
    """
    with Cluster() as cluster:
        backend, other = ParallelTorchBackend(checkpoint, 2, threads=1), TorchBackend(checkpoint, threads=1)
        cluster.add_node("a", 64, other)
        cluster.add_worker("two", "a", backend)
        cluster.add_worker("one", "a", other)
        (pid,) = backend.ranks.pids
        tell, told = backend.ranks.tell, threading.Event()

        def stopping(message: Message, descriptors: Sequence[int] = ()) -> None:
            if isinstance(message, Store):
                os.kill(pid, signal.SIGSTOP)
                told.set()
            tell(message, descriptors)

        backend.ranks.tell = stopping  # type: ignore[method-assign]
        ids = prompt(50, 40)
        request = cluster.submit(ids, "two", "one", sampling=GREEDY)
        broken: list[BaseException] = []

        def lead() -> None:
            try:
                while True:
                    cluster.step("two")
            except WorkerBroken as error:
                broken.append(error)

        leader = threading.Thread(target=lead)
        leader.start()
        while not told.is_set():
            cluster.step("one")
        cluster.step("one")
        assert not request.over and cluster.counter("a", "pyengine_pool_blocks", state="reserved") == 4
        os.kill(pid, signal.SIGKILL)
        leader.join()
        assert "rank 1 was killed by SIGKILL" in str(broken[0])
        assert cluster.counter("a", "pyengine_pool_blocks", state="reserved") == 4, "its leader has not let go yet"
        cluster.workers["two"].mover.close()
        cluster.until(lambda: request.over, "one")
        del cluster.workers["two"], cluster._pools["two"]
        assert request.failed is not None and request.failed.kind == "retry"
        again = cluster.submit(ids, "one", "one", sampling=GREEDY)
        cluster.run(again)
        assert again.ids == oracle.tokens(ids) and again.cached == 0, "nothing of it was published"
        cluster.settle()
        backend.close()


def test_llm(checkpoint: Checkpoint, oracle: Oracle, tmp_path: Path) -> None:
    ids = [prompt(40, 50), prompt(17, 51)]
    with LLM(str(checkpoint.folder), tp=2, threads=1, pages=32, dram_bytes=8 << 20, state_dir=tmp_path) as llm:
        for completion, each in zip(llm.generate(ids, GREEDY), ids, strict=True):
            assert completion.token_ids == oracle.tokens(each)

        def breaks(*_: object) -> None:
            raise MemoryError

        llm._engine.worker.batcher.plan = breaks  # type: ignore[method-assign,assignment]  # a new worker takes over
        with pytest.raises(RuntimeError, match="MemoryError"):
            llm.generate(ids, GREEDY)
        assert [each.cached_tokens for each in llm.generate(ids, GREEDY)] == [32, 16]
