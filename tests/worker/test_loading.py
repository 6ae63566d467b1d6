"""Goal: a prefix that is loaded layer by layer beside the step that goes on from it is the same as one that is loaded
before, and no strip that is not intact lets a wrong token or block out.

Method: a cluster in one process (harness.py) over the fake backend, whose next token is a hash of all KV bytes; workers
of one node find in its pool what another has computed. `fake_tokens` is the oracle. Arenas rot behind everybody's back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyengine import _native, kv_mover, loading
from pyengine.backend import Pending, Readable, Slice, Written
from pyengine.backends import load_backend
from pyengine.backends.fake import FakeBackend
from pyengine.kv_mover import Pool
from pyengine.scheduler.types import SamplingParams
from tests.model.checkpoints import write_tiny
from tests.worker.harness import PATIENCE, Cluster, Request
from tests.worker.test_streaming import (
    CHUNK,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    STRIPS,
    Model,
    ask,
    backend,
    cluster_of,
    oracle,
    prompt,
)
from tests.worker.test_worker import flip_arena

BLOCK_BYTES = 128 << 10
#: Before the slots of an arena.
ARENA_HEAD = 4096


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is a part, of however few blocks."""
    monkeypatch.setattr(loading, "PART_BYTES", 1)


class Asking(FakeBackend):
    """Calls `at` within a step when it asks for a layer: those before it are computed."""

    def __init__(self, at: Callable[[int], None] | None = None, layerwise: bool = True) -> None:
        super().__init__(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
        self.layerwise = layerwise
        self.at = at

    def submit(self, slices: list[Slice], written: Written | None = None, readable: Readable | None = None) -> Pending:
        def ask(layer: int) -> None:
            assert readable is not None
            if self.at is not None:
                self.at(layer)
            readable(layer)

        return super().submit(slices, written, None if readable is None else ask)


class Held:
    """A pool whose strips from this layer on are only read when `gate` is. loads: first strips that were read."""

    def __init__(self, pool: _native.PoolClient, layer: int = LAYERS) -> None:
        self._pool = pool
        self._first = layer * STRIPS // LAYERS
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.loads: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def load(self, slot: int, generation: int, into: Any, first_strip: int = 0, run: int = 1, stride: int = 1) -> bool:
        if first_strip >= self._first:
            self.reached.set()
            assert self.gate.wait(PATIENCE), "nobody let it go on"
        self.loads.append(first_strip)
        return self._pool.load(slot, generation, into, first_strip, run, stride)


def two_workers(model: Asking, wrap: Callable[[_native.PoolClient], Pool] | None = None) -> Cluster:
    """One computes, and the other finds it in the pool of their node."""
    cluster = Cluster()
    cluster.add_node("a", 256, backend())
    cluster.add_worker("first", "a", backend(), pages=256, max_tokens=CHUNK)
    cluster.add_worker("second", "a", model, pages=256, max_tokens=CHUNK, wrap=wrap)
    return cluster


def cache(cluster: Cluster, tokens: list[int]) -> None:
    request = cluster.submit(tokens, "first", "first")
    cluster.run(request)
    cluster.settle()


def again(cluster: Cluster, tokens: list[int]) -> Request:
    return cluster.submit(tokens, "second", "second")


def test_layers_come_while_the_step_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layers are computed before strips of the last are even looked at."""
    pools: list[Held] = []

    def wrap(pool: _native.PoolClient) -> Held:
        pools.append(Held(pool, LAYERS - 1))
        return pools[-1]

    def at(layer: int) -> None:
        if layer == LAYERS - 1:
            pools[0].gate.set()

    with two_workers(Asking(at), wrap) as cluster:
        tokens = prompt(200)
        cache(cluster, tokens)
        batcher = cluster.workers["second"].batcher
        observed: list[int] = []
        monkeypatch.setattr(batcher, "observe", lambda work, _: observed.append(work.prefill_tokens))
        request = again(cluster, tokens)
        cluster.run(request)
        assert request.ids == oracle(tokens, 8)
        assert request.cached == 192 and request.tiers == {"dram": 192}
        assert observed == [0] * 7, "what a step waits for is not what it takes"
        strips = STRIPS // LAYERS
        assert pools[0].loads == [layer * strips for layer in range(LAYERS) for _ in range(12)]
        cluster.settle()


@pytest.mark.parametrize("way", ["tcp", "arena"])
def test_layerwise_is_whole(way: str) -> None:
    """Hand-offs that end in every kind of block, several at once, and their prompts once more: the same tokens, as
    many of them cached, the same counts of blocks.
    """
    lengths = [CHUNK, CHUNK - 1, CHUNK + 1, 2 * CHUNK + 15, 300, 20, 5]
    stories: list[Any] = []
    for layerwise in (True, False):
        began: list[int] = []
        with cluster_of(way, Model(layerwise=layerwise)) as cluster:
            decode = cluster.workers["decode"]
            decode.backend.layerwise = layerwise
            begin = decode.mover.loader.begin

            def noted(
                slots: Any, pages: Any, first_block: int = 0, begin: Any = begin, began: list[int] = began
            ) -> Any:
                began.append(len(slots))
                return begin(slots, pages, first_block)

            decode.mover.loader.begin = noted  # type: ignore[method-assign]
            requests = [ask(cluster, prompt(length)) for length in lengths]
            cluster.run(*requests)
            cluster.settle()
            cluster.add_worker("third", cluster.node_of["decode"], Model(layerwise=layerwise), max_tokens=CHUNK)
            more = [cluster.submit(prompt(length), "third", "third") for length in lengths]
            cluster.run(*more)
            cluster.settle()
            for request, other, length in zip(requests, more, lengths, strict=True):
                assert request.ids == oracle(prompt(length)), length
                assert other.ids == oracle(prompt(length), 8), length
            # All but the prompt of one block, which is a part of its own in any case.
            assert len(began) == (len(lengths) if layerwise else 0)
            counters = [worker.mover.counters for worker in cluster.workers.values()]
            stories.append(([(request.cached, request.tiers) for request in more], counters))
    assert stories[0] == stories[1]


def test_layerwise_is_whole_in_torch(tmp_path: Path) -> None:
    """The same with a real model: no layer is computed before its strips are there."""
    pytest.importorskip("torch", reason="needs the torch extra")
    folder = write_tiny(tmp_path / "tiny")
    prompts = [prompt(length, length) for length in (64, 100, 33, 200)]
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    stories = []
    for layerwise in (True, False):
        first, second = (load_backend("torch", str(folder), cache=tmp_path, threads=1) for _ in range(2))
        first.layerwise = second.layerwise = layerwise
        with Cluster() as cluster:
            cluster.add_node("a", 256, second)
            cluster.add_worker("prefill", "a", first, pages=256, max_tokens=64)
            worker = cluster.add_worker("decode", "a", second, pages=256, max_tokens=64)
            requests = [cluster.submit(each, "prefill", "decode", sampling=sampling) for each in prompts]
            cluster.run(*requests)
            cluster.settle()
            stories.append(([request.ids for request in requests], worker.mover.counters))
    assert stories[0] == stories[1]


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("block", [0, 7])
def test_a_rotten_strip_is_found_by_the_step_that_needs_it(layer: int, block: int) -> None:
    """Who goes on from it starts anew without the block, who is in the same step or shares the prefix gets right
    tokens, and the block is gone from the pool.
    """
    with two_workers(Asking()) as cluster:
        tokens = prompt(200)
        cache(cluster, tokens)
        other = again(cluster, prompt(40, 1))
        worker = cluster.workers["second"]
        cluster.until(lambda: len(other.tokens) > 0)
        flip_arena(ARENA_HEAD + block * BLOCK_BYTES + layer * BLOCK_BYTES // LAYERS + 100, 1)
        requests = [again(cluster, tokens), again(cluster, tokens[:180] + prompt(20, 2))]
        cluster.run(other, *requests)
        assert other.ids == oracle(prompt(40, 1), 8)
        assert requests[0].ids == oracle(tokens, 8)
        assert requests[1].ids == oracle(tokens[:180] + prompt(20, 2), 8)
        found = worker.mover.counters["checksum_failures"]
        assert found in (1, 2), "each who reads it may say so"
        assert worker.counters["recomputed"] == 0, "nothing was computed twice"
        assert cluster.counter("a", "pyengine_checksum_failures_total", where="arena") == found
        cluster.settle()


def test_who_streams_to_another_node_beside_a_rotten_strip_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In one step one sequence loads, and a hand-off leaves: what has left of it is good, and what is left follows."""
    # However busy the machine is, what is asked of the pool is answered before the next step.
    monkeypatch.setattr(kv_mover, "ANSWER", PATIENCE)
    both: list[int] = []
    pools: list[Held] = []

    def wrap(pool: _native.PoolClient) -> Held:
        pools.append(Held(pool, LAYERS - 1))
        return pools[-1]

    class Both(FakeBackend):
        """told: of how many layers, in steps that stream and load."""

        def submit(
            self, slices: list[Slice], written: Written | None = None, readable: Readable | None = None
        ) -> Pending:
            def tell(layer: int) -> None:
                assert written is not None
                written(layer)
                both.extend([layer] * (readable is not None))

            def ask(layer: int) -> None:
                assert readable is not None
                if layer == LAYERS - 1:
                    pools[0].gate.set()
                readable(layer)

            return super().submit(slices, None if written is None else tell, None if readable is None else ask)

    with Cluster() as cluster:
        cluster.add_node("a", 256, backend())
        cluster.add_node("b", 256, backend())
        cluster.add_worker("first", "a", backend(), pages=256, max_tokens=CHUNK)
        model = Both(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
        model.layerwise = True
        worker = cluster.add_worker("second", "a", model, pages=256, max_tokens=2 * CHUNK, wrap=wrap)
        cluster.add_worker("decode", "b", backend(), pages=256, max_tokens=CHUNK)
        tokens, long = prompt(200), prompt(8 * CHUNK, 1)
        cache(cluster, tokens)
        flip_arena(ARENA_HEAD + 7 * BLOCK_BYTES + (LAYERS - 1) * BLOCK_BYTES // LAYERS + 100, 1)
        sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        hand_off = cluster.submit(long, "second", "decode", sampling=sampling)
        cluster.until(lambda: worker.counters["prefill"] > 0)
        request = cluster.submit(tokens, "second", "second", changes={"priority": 1})
        cluster.run(request, hand_off)
        assert both == list(range(LAYERS - 1)), "all layers but the rotten one had left"
        assert request.ids == oracle(tokens, 8) and hand_off.ids == oracle(long)
        assert worker.mover.counters["checksum_failures"] == 1
        said = [record for record in caplog.records if "step of 2 sequences" in record.message]
        assert [(record.levelname, record.exc_info) for record in said] == [("WARNING", None)]
        cluster.settle()


def test_a_rotten_hand_off_is_mended_at_decode() -> None:
    """Found in a later layer of a hand-off: its leading blocks are loaded once more, the rest is computed."""
    flipped: list[int] = []
    with cluster_of("arena", Model()) as cluster:
        decode = cluster.workers["decode"]
        begin = decode.mover.loader.begin

        def rot(slots: Any, pages: Any, first_block: int = 0) -> Any:
            if not flipped:
                flipped.append(slots[5].slot)
                flip_arena(ARENA_HEAD + flipped[0] * BLOCK_BYTES + 2 * BLOCK_BYTES // LAYERS + 100, 1)
            return begin(slots, pages, first_block)

        decode.mover.loader.begin = rot  # type: ignore[method-assign]
        tokens = prompt(200)
        request = ask(cluster, tokens)
        cluster.run(request)
        assert request.ids == oracle(tokens)
        assert decode.mover.counters["checksum_failures"] == 1
        assert decode.counters["recomputed"] == 200 - 5 * 16
        cluster.settle()


def test_a_step_that_fails_beside_a_load_is_computed_again() -> None:
    """Alone, as any: what was loaded is good."""
    failures = [1]
    pools: list[Held] = []

    def wrap(pool: _native.PoolClient) -> Held:
        # What had come before the step began would not be asked for in it.
        pools.append(Held(pool, LAYERS - 1))
        return pools[-1]

    def fail(layer: int) -> None:
        if layer == 1:
            pools[0].gate.set()
            if failures:
                failures.pop()
                raise ArithmeticError("a layer failed")

    with two_workers(Asking(fail), wrap) as cluster:
        tokens = prompt(200)
        cache(cluster, tokens)
        request = again(cluster, tokens)
        cluster.run(request)
        assert not failures and request.ids == oracle(tokens, 8) and request.cached == 192
        cluster.settle()


@pytest.mark.parametrize("end", ["abort", "daemon"])
def test_who_ends_beside_a_load_is_waited_for(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No page is given to anybody, and no link let go of, while it is still copied into."""
    pools: list[Held] = []

    def wrap(pool: _native.PoolClient) -> Held:
        pools.append(Held(pool, 1))
        return pools[-1]

    real = loading.Loading.cancel

    def cancel(self: loading.Loading) -> None:
        pools[0].gate.set()
        real(self)
        assert self.over

    monkeypatch.setattr(loading.Loading, "cancel", cancel)
    with two_workers(Asking(), wrap) as cluster:
        tokens = prompt(200)
        cache(cluster, tokens)
        worker = cluster.workers["second"]
        request = again(cluster, tokens)
        # The round in which it is begun, and no further.
        cluster.until(lambda: bool(worker.mover._loading))
        assert pools[0].reached.wait(PATIENCE)
        assert not pools[0].gate.is_set() and worker.batcher.running == 1
        if end == "abort":
            cluster.abort(request)
        else:
            worker.mover.lost = "the daemon does not keep up"
            cluster.run(request)
            assert request.ids == oracle(tokens, 8) and request.cached == 0
            assert worker.mover.pool is None
            cluster.attach("second")
        assert pools[0].gate.is_set()
        other = again(cluster, prompt(200, 1))
        cluster.run(other)
        assert other.ids == oracle(prompt(200, 1), 8)
        cluster.settle()


def test_a_request_that_cannot_be_computed_leaves_no_load_behind() -> None:
    class Broken(Asking):
        def execute(self, slices: list[Slice]) -> list[int]:
            raise ArithmeticError("it fails alone as well")

    def fail(_: int) -> None:
        raise ArithmeticError("a layer failed")

    with two_workers(Broken(fail)) as cluster:
        cache(cluster, prompt(200))
        request = again(cluster, prompt(200))
        cluster.run(request)
        assert request.failed is not None
        cluster.settle()


def test_a_load_that_waits_for_another_is_cancelled_at_once() -> None:
    gate = threading.Event()
    loaded: list[int] = []

    class Gated:
        def load(self, slots: Any, pages: Any, layers: range | None = None) -> int:
            assert gate.wait(PATIENCE), "nobody let it go on"
            loaded.extend(pages)
            return len(slots)

    copier: Any = Gated()
    loader = loading.Loader(copier, backend().namespace.kv)
    first, second = (loader.begin([copier] * 2, pages) for pages in ([0, 1], [2, 3]))
    second.cancel()
    assert second.over and not second.whole and not first.over
    with pytest.raises(loading.Unreadable):
        second.wait(0)
    second.cancel()
    gate.set()
    first.join()
    assert first.whole and set(loaded) == {0, 1}
    loader.close()


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_load_that_raises_is_one_request_s_alone(layerwise: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its prompt is computed, and nothing is said to be rotten."""
    fails: list[int] = []

    class Failing(Held):
        def load(self, *arguments: Any) -> bool:
            if fails:
                fails.pop()
                raise MemoryError("no memory for scratch")
            return self._pool.load(*arguments)

    with two_workers(Asking(layerwise=layerwise), Failing) as cluster:
        cache(cluster, prompt(200))
        other = again(cluster, prompt(40, 1))
        cluster.until(lambda: len(other.tokens) > 0)
        fails.append(1)
        request = again(cluster, prompt(200))
        cluster.run(request, other)
        assert not fails and request.ids == oracle(prompt(200), 8) and other.ids == oracle(prompt(40, 1), 8)
        assert request.cached == 0 and cluster.workers["second"].mover.counters["checksum_failures"] == 0
        assert "its reused prefix could not be loaded" in caplog.text and "MemoryError: no memory" in caplog.text
        once_more = cluster.submit(prompt(200), "first", "first")
        cluster.run(once_more)
        assert once_more.cached == 192, "all of it is in the pool"
        cluster.settle()


def test_what_a_load_raises_is_told_to_the_step_that_waits_for_it() -> None:
    class Raising:
        def load(self, slots: Any, pages: Any, layers: range | None = None) -> int:
            if layers is not None and layers.start == 0:
                return len(slots)
            raise MemoryError("no memory for scratch")

    copier: Any = Raising()
    loader = loading.Loader(copier, backend().namespace.kv)
    begun = loader.begin([copier] * 2, [0, 1], 5)
    begun.wait(0)
    with pytest.raises(loading.Unreadable, match="could not be loaded from block 5 on") as raised:
        begun.wait(1)
    assert isinstance(raised.value.__cause__, MemoryError)
    with pytest.raises(MemoryError):
        begun.join()
    loader.close()
