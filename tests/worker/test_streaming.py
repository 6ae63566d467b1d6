"""Goal: KV that leaves layer by layer, while its step computes, is the same as KV that leaves after it, and no failure
on the way leaves anything behind or lets a wrong token out.

Method: a cluster in one process (harness.py) over the fake backend, whose next token is a hash of all KV bytes, with
blocks so large that chunks are streamed; `fake_tokens` is the oracle. What is asked of the pool is recorded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyengine import _native, kv_mover, streaming
from pyengine.backend import Pending, Readable, Slice, Written
from pyengine.backends import load_backend
from pyengine.backends.fake import FakeBackend, fake_tokens
from pyengine.kv_mover import Pool
from pyengine.scheduler.types import SamplingParams
from tests.model.checkpoints import write_tiny
from tests.worker.harness import PATIENCE, Cluster, Request

#: 128 KiB a block, so that 16 blocks of a chunk are two parts.
LAYERS, KV_HEADS, HEAD_DIM = 4, 4, 64
STRIPS = LAYERS * 2 * KV_HEADS
CHUNK = 256
TWO_WAYS = ["tcp", "arena"]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(f"{length}/{seed}")
    return [generator.randrange(256) for _ in range(length)]


def oracle(tokens: list[int], count: int = 4) -> list[int]:
    return fake_tokens(tokens, count, layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def backend() -> FakeBackend:
    return FakeBackend(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)


class Recorded:
    """A pool that keeps what is pushed: (block, strips)."""

    def __init__(self, pool: _native.PoolClient) -> None:
        self._pool = pool
        self.pushes: list[tuple[int, tuple[int, int] | None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def push(self, *arguments: Any, **named: Any) -> None:
        self.pushes += [(index, named.get("strips")) for index in arguments[2]]
        self._pool.push(*arguments, **named)


class Model(FakeBackend):
    """Calls `at` within a step when a layer is there, and keeps how many layers steps have told of."""

    def __init__(self, at: Callable[[int], None] | None = None, layerwise: bool = True) -> None:
        super().__init__(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
        self.layerwise = layerwise
        self.at = at
        self.told = 0

    def submit(self, slices: list[Slice], written: Written | None = None, readable: Readable | None = None) -> Pending:
        def tell(layer: int) -> None:
            assert written is not None
            written(layer)
            self.told += 1
            if self.at is not None:
                self.at(layer)

        return super().submit(slices, None if written is None else tell, readable)


def cluster_of(way: str, prefill: Model, wrap: Callable[[_native.PoolClient], Pool] | None = None) -> Cluster:
    cluster = Cluster()
    nodes = ("a", "b") if way == "tcp" else ("a",)
    for node in nodes:
        cluster.add_node(node, 256, backend())
    cluster.add_worker("prefill", "a", prefill, pages=256, max_tokens=CHUNK, wrap=wrap)
    cluster.add_worker("decode", nodes[-1], backend(), pages=256, max_tokens=CHUNK)
    return cluster


def ask(cluster: Cluster, tokens: list[int], count: int = 4) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return cluster.submit(tokens, "prefill", "decode", sampling=sampling)


@pytest.mark.parametrize("way", TWO_WAYS)
def test_layers_leave_while_the_step_computes(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of each block's strips do, in order; chunks too small for that, and what else there is, leave whole."""
    # However busy the machine is: slots for so much are waited for longer than for an answer about little.
    monkeypatch.setattr(kv_mover, "ANSWER", 0.0)
    monkeypatch.setattr(kv_mover, "COPY_RATE", 1.0)
    pools: list[Recorded] = []

    def wrap(pool: _native.PoolClient) -> Recorded:
        pools.append(Recorded(pool))
        return pools[-1]

    model = Model()
    with cluster_of(way, model, wrap) as cluster:
        # Two chunks of 16 blocks, and one of two blocks and a partial one.
        tokens = prompt(2 * CHUNK + 40)
        request = ask(cluster, tokens)
        cluster.run(request)
        assert request.ids == oracle(tokens)
        assert model.told == 2 * LAYERS
        if way == "tcp":
            parts: dict[int, list[tuple[int, int] | None]] = {}
            for block, strips in pools[0].pushes:
                parts.setdefault(block, []).append(strips)
            assert parts == {
                block: [(0, STRIPS // 2), (STRIPS // 2, STRIPS)] if block < 32 else [None] for block in range(35)
            }
        else:
            assert [block for block, _ in pools[0].pushes] == list(range(35)), "each is committed, once"
        # What prefill computed is cached at its node as well.
        cluster.settle()
        again = cluster.submit(tokens, "prefill", "prefill")
        cluster.run(again)
        assert again.cached == 2 * CHUNK + 32 and again.ids[:4] == oracle(tokens)
        cluster.settle()


@pytest.mark.parametrize("way", TWO_WAYS)
def test_layerwise_is_blockwise(way: str) -> None:
    """Prompts that end in every kind of chunk, several at once: the same tokens and the same counts of blocks."""
    lengths = [CHUNK, CHUNK - 1, CHUNK + 1, 2 * CHUNK + 15, 3 * CHUNK - 16, 700, 20]
    stories = []
    for layerwise in (True, False):
        model = Model(layerwise=layerwise)
        with cluster_of(way, model) as cluster:
            requests = [ask(cluster, prompt(length)) for length in lengths]
            cluster.run(*requests)
            cluster.settle()
            for request, length in zip(requests, lengths, strict=True):
                assert request.ids == oracle(prompt(length)), length
            assert bool(model.told) == layerwise
            counters = [worker.mover.counters for worker in cluster.workers.values()]
            stories.append(([request.ids for request in requests], counters))
    assert stories[0] == stories[1]


@pytest.mark.parametrize("way", TWO_WAYS)
def test_layerwise_is_blockwise_in_torch(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a real model, whose next tokens depend on all KV: not one strip is copied before it is computed."""
    pytest.importorskip("torch", reason="needs the torch extra")
    monkeypatch.setattr(streaming, "PART_BYTES", 1 << 10)
    monkeypatch.setattr(kv_mover, "ANSWER", PATIENCE)
    folder = write_tiny(tmp_path / "tiny")
    prompts = [prompt(length, length) for length in (64, 100, 33, 200)]
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    stories = []
    for layerwise in (True, False):
        first, second = (load_backend("torch", str(folder), cache=tmp_path, threads=1) for _ in range(2))
        first.layerwise = layerwise
        with Cluster() as cluster:
            nodes = ("a", "b") if way == "tcp" else ("a",)
            for node in nodes:
                cluster.add_node(node, 256, second)
            pools: list[Recorded] = []

            def wrap(pool: _native.PoolClient, pools: list[Recorded] = pools) -> Recorded:
                pools.append(Recorded(pool))
                return pools[-1]

            worker = cluster.add_worker("prefill", "a", first, pages=256, max_tokens=64, wrap=wrap)
            cluster.add_worker("decode", nodes[-1], second, pages=256, max_tokens=64)
            requests = [cluster.submit(each, "prefill", "decode", sampling=sampling) for each in prompts]
            cluster.run(*requests)
            cluster.settle()
            if way == "tcp":
                assert any(strips is not None for _, strips in pools[0].pushes) == layerwise
            stories.append(([request.ids for request in requests], worker.mover.counters))
    assert stories[0] == stories[1]


@pytest.mark.parametrize("way", TWO_WAYS)
def test_a_step_that_fails_between_layers_is_computed_again(way: str) -> None:
    """Nobody knows what KV it has made. In this arena it is stored once more; strips that are at another node already
    cannot be called back: there the attempt ends, and the gateway begins another.
    """
    failures = [1]

    def fail(layer: int) -> None:
        if layer == 2 and failures:
            failures.pop()
            raise ArithmeticError("a layer failed")

    with cluster_of(way, Model(fail)) as cluster:
        tokens = prompt(CHUNK + 30)
        request = ask(cluster, tokens)
        cluster.run(request)
        assert not failures
        if way == "tcp":
            assert request.failed is not None and request.failed.kind == "retry"
            cluster.settle()
            request = ask(cluster, tokens)
            cluster.run(request)
        assert request.ids == oracle(tokens)
        cluster.settle()


def test_a_link_that_is_lost_while_a_step_streams_leaves_no_copy_behind() -> None:
    """The daemon is too far behind for one request of the mover: the round goes on, the thread must be waited for."""

    class Behind(Recorded):
        lost = False

        def end(self, tag: _native.Tag) -> None:
            streamer = cluster.workers["prefill"].mover.streamer
            if streamer.streaming and not self.lost:
                self.lost = True
                raise _native.RetryError("the daemon does not keep up with this client's requests")
            self._pool.end(tag)

    pools: list[Behind] = []

    def wrap(pool: _native.PoolClient) -> Behind:
        pools.append(Behind(pool))
        return pools[-1]

    cluster = cluster_of("arena", Model(), wrap)
    with cluster:
        reused = prompt(200)
        first = cluster.submit(reused, "decode", "decode")
        cluster.run(first)
        cluster.settle()
        worker = cluster.workers["prefill"]
        requests = [ask(cluster, prompt(4 * CHUNK, 1))]
        cluster.until(lambda: worker.counters["prefill"] > 0)
        # What it reuses is loaded, and let go of, behind a step that streams.
        requests.append(ask(cluster, reused))
        cluster.until(lambda: worker.mover.pool is None)
        assert pools[0].lost and not worker.mover.streamer.streaming
        cluster.attach("prefill")
        cluster.until(lambda: all(request.over for request in requests))
        for seed in range(2, 4):
            request = ask(cluster, prompt(2 * CHUNK, seed))
            cluster.run(request)
            assert request.ids == oracle(prompt(2 * CHUNK, seed))
        assert not cluster.workers["prefill"].mover.streamer.streaming


def test_who_is_preempted_is_told_before_a_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """To begin a step may take the pool's events, and those of who has no pages any more must find that known."""
    with Cluster() as cluster:
        cluster.add_node("a", 256, backend())
        worker = cluster.add_worker("both", "a", backend(), pages=12, max_tokens=CHUNK)
        told: list[str] = []

        def note(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*arguments: Any) -> Any:
                told.append(name)
                return real(*arguments)

            return noted

        for name in ("pump", "resume", "stream"):
            monkeypatch.setattr(worker.mover, name, note(name, getattr(worker.mover, name)))
        sampling = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        requests = [cluster.submit(prompt(30, seed), "both", "both", sampling=sampling) for seed in range(3)]
        cluster.run(*requests)
        rounds = " ".join(told).split("pump")
        assert any("resume" in each and "stream" in each for each in rounds), "it must happen"
        assert not any("stream resume" in each for each in rounds)


@pytest.mark.parametrize("way", TWO_WAYS)
def test_a_request_that_fails_between_layers_leaves_nothing(way: str) -> None:
    """Its strips that have arrived are worth nothing without the rest: no block of it can be found anywhere."""

    class Broken(Model):
        def execute(self, slices: list[Slice]) -> list[int]:
            raise ArithmeticError("it fails alone as well")

    def fail(layer: int) -> None:
        if layer == 2:
            raise ArithmeticError("a layer failed")

    with cluster_of(way, Broken(fail)) as cluster:
        request = ask(cluster, prompt(CHUNK))
        cluster.run(request)
        assert request.failed is not None
        cluster.settle()
        for node in cluster.daemons:
            assert cluster.counter(node, "pyengine_pool_blocks", tier="dram", state="cached") == 0


@pytest.mark.parametrize("way", TWO_WAYS)
def test_a_daemon_that_dies_between_layers_fails_the_request(way: str) -> None:
    dead: list[str] = []
    cluster = cluster_of(way, Model(lambda layer: kill() if layer == 1 else None))

    def kill() -> None:
        if not dead:
            dead.append("a")
            cluster.daemons["a"].stop()

    with cluster:
        request = ask(cluster, prompt(2 * CHUNK))
        cluster.run(request)
        assert dead and request.failed is not None and request.failed.kind == "retry"


@pytest.mark.parametrize("way", TWO_WAYS)
def test_an_abort_between_streamed_chunks_leaves_nothing(way: str) -> None:
    with cluster_of(way, Model()) as cluster:
        request = ask(cluster, prompt(3 * CHUNK))
        cluster.until(lambda: cluster.workers["prefill"].counters["prefill"] > 0)
        cluster.abort(request)
        cluster.settle()
        other = ask(cluster, prompt(2 * CHUNK, seed=1))
        cluster.run(other)
        assert other.ids == oracle(prompt(2 * CHUNK, seed=1))
        cluster.settle()


def test_a_daemon_that_is_gone_again_when_it_is_attached_to_ends_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a copier of several processes finds it: it asks for what they share."""
    cluster = Cluster()
    with cluster:
        cluster.add_node("a", 64, backend())
        worker = cluster.add_worker("both", "a", backend(), pages=64, max_tokens=CHUNK)

        def gone(_: object) -> None:
            raise _native.RetryError("the daemon is gone")

        monkeypatch.setattr(worker.mover.copier, "connect", gone)
        cluster.replace_daemon("a", 64)
        cluster.until(lambda: worker.mover.pool is None)
        request = cluster.submit(prompt(30), "both", "both")
        cluster.run(request)
        assert request.ids[:4] == oracle(prompt(30))
