"""Goal: what one worker says is what another computed, byte for byte, and nothing is ever left behind.

Method: real daemons and worker loops in one process (harness.py) over the fake backend, whose next token is a hash of
all KV bytes it reads, so that lost, late or mixed-up KV changes the answer; `fake_tokens` is the oracle.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from pyengine import _native
from pyengine.backend import U8
from pyengine.backends.fake import FakeBackend, fake_tokens
from pyengine.kv_mover import Pool
from pyengine.scheduler.types import FinishReason, SamplingParams, Source, cacheable_blocks
from tests.worker.harness import Cluster, Request

BLOCK = 16
COMMON = [(7 * i) % 251 for i in range(200)]


def backend() -> FakeBackend:
    return FakeBackend()


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(f"{length}/{seed}")
    return [generator.randrange(256) for _ in range(length)]


def two_nodes(
    slots: int = 128, pages: int = 256, transport: str = "tcp", **wraps: Callable[[_native.PoolClient], Pool]
) -> Cluster:
    cluster = Cluster(transport)
    for node, worker in (("a", "prefill"), ("b", "decode")):
        cluster.add_node(node, slots, backend())
        cluster.add_worker(worker, node, backend(), pages=pages, wrap=wraps.get(worker))
    return cluster


def one_node(slots: int = 128) -> Cluster:
    cluster = Cluster()
    cluster.add_node("a", slots, backend())
    cluster.add_worker("prefill", "a", backend())
    cluster.add_worker("decode", "a", backend())
    return cluster


LENGTHS = (1, 15, 16, 17, 63, 64, 65, 300)


@pytest.mark.parametrize("way", ["tcp", "shm", "arena"])
@pytest.mark.parametrize("length", LENGTHS)
def test_apart_equals_oracle(way: str, length: int) -> None:
    with one_node() if way == "arena" else two_nodes(transport=way) as cluster:
        request = cluster.submit(prompt(length), "prefill", "decode")
        cluster.run(request)
        assert request.failed is None
        assert request.ids == fake_tokens(prompt(length), 8)
        decode = cluster.workers["decode"].counters
        assert (decode["recomputed"], decode["prefill"], decode["decode"]) == (0, 0, 7)
        cluster.settle()
        blocks = -(-length // BLOCK)
        if way != "arena":
            assert cluster.counter("a", "pyengine_transfer_blocks_total", transport=way, direction="out") == blocks
            assert cluster.counter("b", "pyengine_transfer_blocks_total", transport=way, direction="in") == blocks
        else:
            assert cluster.counter("a", "pyengine_transfer_blocks_total", transport="arena", direction="in") == blocks
            assert cluster.counter("a", "pyengine_transfer_bytes_total") == 0


@pytest.mark.parametrize("length", LENGTHS)
def test_both_equals_oracle(length: int) -> None:
    with one_node() as cluster:
        request = cluster.submit(prompt(length), "decode", "decode")
        cluster.run(request)
        assert request.ids == fake_tokens(prompt(length), 8)
        cluster.settle()
        assert cluster.counter("a", "pyengine_transfer_blocks_total") == 0


def test_many_at_once_through_small_pools() -> None:
    """Many requests, few decode slots, few prefill pages: everybody waits for somebody, and all get through."""
    with two_nodes(slots=12, pages=12) as cluster:
        requests = [cluster.submit(prompt(40 + i, i), "prefill", "decode") for i in range(40)]
        cluster.run(*requests)
        for i, request in enumerate(requests):
            assert request.ids == fake_tokens(prompt(40 + i, i), 8), request.failed
        cluster.settle()


def test_nodes_that_prefill_for_each_other_do_not_deadlock() -> None:
    """Each node decodes what the other prefills, and either pool could be filled by waiting grants alone."""
    with Cluster() as cluster:
        for node in "ab":
            cluster.add_node(node, 10, backend())
            cluster.add_worker(f"prefill-{node}", node, backend())
            cluster.add_worker(f"decode-{node}", node, backend())
        requests = [
            cluster.submit(prompt(60 + i % 5, i), f"prefill-{p}", f"decode-{d}")
            for i, (p, d) in enumerate(itertools.islice(itertools.cycle([("a", "b"), ("b", "a")]), 24))
        ]
        cluster.run(*requests)
        for i, request in enumerate(requests):
            assert request.ids == fake_tokens(prompt(60 + i % 5, i), 8), request.failed
        cluster.settle()


def test_block_is_committed_before_the_last_chunk() -> None:
    """Streaming: with chunks of 64 tokens the decode node holds blocks while prefill has still to compute."""
    with two_nodes() as cluster:
        request = cluster.submit(prompt(300), "prefill", "decode")
        prefill = cluster.workers["prefill"]
        cluster.until(lambda: prefill.counters["prefill"] == 64)
        # From here on prefill only talks to its pool and computes nothing.
        while cluster.counter("b", "pyengine_pool_blocks", state="pinned") < 64 // BLOCK:
            prefill.mover.pump()
        assert prefill.counters["prefill"] == 64
        assert not request.tokens
        cluster.run(request)
        assert request.ids == fake_tokens(prompt(300), 8)


@pytest.mark.parametrize("make", [two_nodes, one_node], ids=["tcp", "arena"])
def test_second_turn_reuses_what_was_decoded(make: Callable[[], Cluster]) -> None:
    first = prompt(50)
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with make() as cluster:
        request = cluster.submit(first, "prefill", "decode", sampling=sampling)
        cluster.run(request)
        cluster.settle()
        turn = first + request.ids[:-1] + prompt(30, 1)
        sources = cluster.source(cluster.node_of["decode"], cacheable_blocks(len(turn), BLOCK))
        again = cluster.submit(turn, "prefill", "decode", sources=sources)
        cluster.run(again)
        assert again.ids == fake_tokens(turn, 8)
        # Block 5 is the first that the two turns do not share (50 + 39 tokens have KV).
        assert again.cached == BLOCK * min((50 + 39) // BLOCK, cacheable_blocks(len(turn), BLOCK))
        cluster.settle()


def test_prompt_on_another_node_fetches_the_prefix() -> None:
    """The very same prompt goes to a node that never saw it: only the last token's block is computed."""
    with two_nodes() as cluster:
        cluster.add_node("c", 64, backend())
        cluster.add_worker("other", "c", backend())
        for length in (64, 65, 80):
            first = cluster.submit(prompt(length), "prefill", "decode")
            cluster.run(first)
            again = cluster.submit(prompt(length), "other", "decode", sources=cluster.source("a", length // BLOCK))
            cluster.run(again)
            assert again.ids == first.ids == fake_tokens(prompt(length), 8)
            assert again.cached == BLOCK * cacheable_blocks(length, BLOCK)
        cluster.settle()


def test_source_that_lost_its_blocks_costs_a_recompute() -> None:
    with two_nodes() as cluster:
        request = cluster.submit(prompt(100), "prefill", "decode", sources=cluster.source("b", 6))
        cluster.run(request)
        assert request.ids == fake_tokens(prompt(100), 8)
        assert request.cached == 0
        cluster.settle()


def test_blocks_that_were_here_when_the_plan_was_made_cost_a_recompute() -> None:
    """Nobody is named for them, as they were in this node's DRAM; now they are nowhere."""
    with two_nodes() as cluster:
        sources = (Source(cluster.node("b"), 3, 6),)
        request = cluster.submit(prompt(100), "prefill", "decode", sources=sources, changes={"cached_blocks": 6})
        cluster.run(request)
        assert request.ids == fake_tokens(prompt(100), 8)
        assert request.cached == 0
        cluster.settle()


def test_two_nodes_push_one_block_at_once() -> None:
    """Same prompt, two prefill nodes, one decode node: both requests succeed, the pool keeps each block once."""
    with two_nodes() as cluster:
        cluster.add_node("c", 64, backend())
        cluster.add_worker("other", "c", backend())
        requests = [cluster.submit(prompt(100), name, "decode") for name in ("prefill", "other")]
        cluster.run(*requests)
        for request in requests:
            assert request.ids == fake_tokens(prompt(100), 8)
        cluster.settle()
        cached = cluster.counter("b", "pyengine_pool_blocks", state="cached")
        assert cached == 100 // BLOCK


class DropsOneStrip:
    """A pool that loses the second strip of each block on the way, checksums and all."""

    def __init__(self, pool: _native.PoolClient) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> object:
        return getattr(self._pool, name)

    def store(
        self, slot: int, generation: int, source: U8, first_strip: int = 0, run: int = 1, stride: int = 1
    ) -> None:
        lossy = source.copy()
        lossy[1] = 0
        self._pool.store(slot, generation, lossy, first_strip)


def test_a_lost_strip_changes_the_answer() -> None:
    """Proof that the oracle tests above can fail: a twin that drops one strip makes the answer wrong."""
    with two_nodes(prefill=DropsOneStrip) as cluster:  # type: ignore[arg-type]
        request = cluster.submit(prompt(100), "prefill", "decode")
        cluster.run(request)
        assert request.ids != fake_tokens(prompt(100), 8)


def flip_arena(offset: int, length: int) -> None:
    """Inverts bytes in every arena of this process, behind everybody's back."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if "pyengine-arena" in target:
            with open(f"/proc/self/fd/{entry}", "r+b", buffering=0) as arena:
                arena.seek(offset)
                data = arena.read(length)
                arena.seek(offset)
                arena.write(bytes(byte ^ 0xFF for byte in data))
            return
    pytest.fail("no arena found")


def test_flipped_bytes_in_the_arena_are_recomputed() -> None:
    """A pooled block rots: the next reader finds out, computes it anew, and the answer stays right."""
    with one_node() as cluster:
        first = cluster.submit(prompt(100), "decode", "decode")
        cluster.run(first)
        cluster.settle()
        flip_arena(4096, 4096 * 64)
        # The prefill worker has no device pages of this prompt: it must read the pool.
        again = cluster.submit(prompt(100), "prefill", "prefill")
        cluster.run(again)
        assert again.ids == first.ids
        assert again.cached is not None
        assert again.cached < BLOCK * cacheable_blocks(100, BLOCK)
        assert cluster.counter("a", "pyengine_checksum_failures_total", where="arena") == 1
        cluster.settle()


class FlippingProxy:
    """Forwards TCP to a target and inverts one byte of the client's stream after `after` bytes, once."""

    def __init__(self, target: str, after: int) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._after = after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.flipped = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            threading.Thread(target=self._forward, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, False), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, may_flip: bool) -> None:
        passed = 0
        try:
            while data := source.recv(1 << 16):
                if may_flip and not self.flipped.is_set() and passed + len(data) > self._after:
                    # A stream that carries this much is a data lane.
                    flipped = bytearray(data)
                    flipped[self._after - passed] ^= 0xFF
                    data = bytes(flipped)
                    self.flipped.set()
                passed += len(data)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            sink.close()

    def close(self) -> None:
        self._listener.close()


def test_flipped_byte_on_the_wire_is_detected() -> None:
    with two_nodes() as cluster:
        # Handshake, header and checksums take less, a body is 8 KiB: this is a byte of the first block.
        proxy = FlippingProxy(cluster.daemons["b"].address.address, after=6000)
        cluster.address_of["b"] = proxy.address
        request = cluster.submit(prompt(300), "prefill", "decode")
        cluster.run(request)
        assert proxy.flipped.is_set()
        assert request.ids == fake_tokens(prompt(300), 8)
        failures = [cluster.counter(node, "pyengine_checksum_failures_total", where="wire") for node in "ab"]
        assert sum(failures) == 1
        cluster.settle()
        proxy.close()


def test_larger_than_the_decode_pool_is_refused_at_once() -> None:
    with two_nodes(slots=4) as cluster:
        request = cluster.submit(prompt(100), "prefill", "decode")
        cluster.run(request)
        assert request.failed is not None
        assert request.failed.kind == "too_large"
        assert "dram-bytes" in request.failed.reason
        cluster.settle()


def test_prefill_whose_grant_never_comes_gives_up_at_its_deadline() -> None:
    with two_nodes() as cluster:
        request = cluster.submit(prompt(100), "prefill", "decode", parts=("prefill",), deadline=0.2)
        cluster.run(request)
        assert request.failed is not None
        assert request.failed.kind == "retry"
        cluster.settle()


def test_daemon_death_lets_running_requests_finish() -> None:
    """Decoding goes on from pages, uncached; what waits for KV fails for retry; a fresh daemon is taken."""
    with two_nodes() as cluster:
        sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        running = cluster.submit(prompt(50), "prefill", "decode", sampling=sampling)
        cluster.until(lambda: len(running.tokens) > 5)
        waiting = cluster.submit(prompt(60), "prefill", "decode", parts=("decode",))
        cluster.daemons["b"].stop()
        cluster.run(running, waiting)
        assert running.ids == fake_tokens(prompt(50), 60)
        assert waiting.failed is not None
        assert waiting.failed.kind == "retry"


def test_random_aborts_leave_nothing(tmp_path: object) -> None:
    """200 requests aborted at a random moment: queued, before the grant, mid-prefill, mid-transfer, mid-decode."""
    generator = random.Random(7)
    with two_nodes(slots=48, pages=48) as cluster:
        requests: list[Request] = []
        for _ in range(200):
            requests.append(cluster.submit(COMMON[: generator.randrange(1, 200)], "prefill", "decode"))
            for _ in range(generator.randrange(4)):
                cluster.step()
            if generator.random() < 0.9:
                victim = generator.choice(requests)
                cluster.abort(victim)
        for request in requests:
            cluster.abort(request)
        cluster.settle()
        survivor = cluster.submit(prompt(70), "prefill", "decode")
        cluster.run(survivor)
        assert survivor.ids == fake_tokens(prompt(70), 8)
        cluster.settle()


def test_preemption_recomputes_and_says_so() -> None:
    """Few pages: sequences are preempted, resume from the pool or by recompute, and answer right."""
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        worker = cluster.add_worker("both", "a", backend(), pages=8)
        requests = cluster.together(
            "both", lambda: [cluster.submit(prompt(40, i), "both", "both", sampling=sampling) for i in range(4)]
        )
        cluster.run(*requests)
        for i, request in enumerate(requests):
            assert request.ids == fake_tokens(prompt(40, i), 40)
        assert worker.counters["preempted"] > 0
        cluster.settle()


@pytest.mark.parametrize("apart", [False, True])
def test_an_answer_that_fills_the_kv_space_ends_with_length(apart: bool) -> None:
    """8 pages hold 128 positions: the answer stops when the next token would need another, right up to there."""
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with two_nodes(pages=8) as cluster:
        request = cluster.submit(prompt(100), "prefill" if apart else "decode", "decode", sampling=sampling)
        cluster.run(request)
        assert request.finish is FinishReason.LENGTH
        # The last token's own KV is never computed, so it needs no place.
        assert request.ids == fake_tokens(prompt(100), 128 - 100 + 1)
        cluster.settle()


def test_seeded_sampling_does_not_depend_on_batch_or_worker() -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=12, ignore_eos=True)
    with two_nodes() as cluster:
        alone = cluster.submit(prompt(40), "prefill", "decode", sampling=sampling)
        cluster.run(alone)
        batch = [cluster.submit(prompt(40), "decode", "decode", sampling=sampling) for _ in range(3)]
        cluster.run(*batch)
        assert {tuple(request.ids) for request in (alone, *batch)} == {tuple(alone.ids)}


def test_retry_continues_numbering_and_seed() -> None:
    """A second attempt gets the prompt and the tokens the gateway holds, and goes on as if nothing had happened."""
    sampling = SamplingParams(temperature=0.7, seed=5, max_tokens=20, ignore_eos=True)
    with two_nodes() as cluster:
        whole = cluster.submit(prompt(40), "prefill", "decode", sampling=sampling)
        cluster.run(whole)
        held = whole.ids[:9]
        again = cluster.submit(
            prompt(40) + held, "prefill", "decode", sampling=sampling, attempt=2, number=whole.number, generated=9
        )
        cluster.run(again)
        assert [again.tokens[i] for i in range(9, 20)] == whole.ids[9:]
        cluster.settle()


def test_pools_protocol_is_what_the_client_offers() -> None:
    names: Sequence[str] = [name for name in vars(Pool) if not name.startswith("_")]
    missing: Iterator[str] = (name for name in names if not hasattr(_native.PoolClient, name))
    assert not list(missing)


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    """Nobody's KV is in any pool yet: those that come second wait for the pages of the first."""
    with one_node() as cluster:
        prompts = [COMMON + prompt(10, i) for i in range(5)]
        requests = cluster.together("decode", lambda: [cluster.submit(ids, "decode", "decode") for ids in prompts])
        cluster.run(*requests)
        for request, ids in zip(requests, prompts, strict=True):
            assert request.ids == fake_tokens(ids, 8)
        shared = len(COMMON) // BLOCK * BLOCK
        assert cluster.workers["decode"].counters["prefill"] == 210 + 4 * (210 - shared)
        assert sorted(request.tiers.get("device", 0) for request in requests) == [0, *[shared] * 4]
        cluster.settle()


def test_who_waits_for_a_prefix_survives_whoever_computes_it() -> None:
    with one_node() as cluster:
        prompts = [COMMON + prompt(10, i) for i in range(4)]
        requests = cluster.together("decode", lambda: [cluster.submit(ids, "decode", "decode") for ids in prompts])
        for first in requests[:3]:
            cluster.step("decode")
            assert sum(not request.tokens for request in requests) > 1
            cluster.abort(first)
        cluster.run(requests[3])
        assert requests[3].ids == fake_tokens(prompts[3], 8)
        cluster.settle()
