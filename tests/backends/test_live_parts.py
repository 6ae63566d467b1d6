"""Goal: what the live backend is made of is right where a healthy cluster would not show it. Method: made-up answers,
a scripted server on the loopback, metrics as workers print them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.scheduler.backends import BackendError, Task, find_backend
from pyengine.scheduler.backends.discovery import TERMS, Facts, describe
from pyengine.scheduler.backends.http import Address, ask, get
from pyengine.scheduler.backends.prompts import COUNT, FIRST, prompt
from pyengine.scheduler.backends.replies import Reply, records, running
from pyengine.scheduler.sim.report import DONE, DROPPED, REJECTED, UNFINISHED, longest_tenth
from pyengine.scheduler.sim.spec import ClusterSpec, WorkerSpec
from pyengine.scheduler.sim.trace import Request
from pyengine.scheduler.types import Role

keys = st.lists(st.integers(0, 3), max_size=5).map(lambda some: tuple(bytes([n]) * 16 for n in some))


@given(keys, keys, st.integers(1, 40), st.integers(0, 39), st.integers(0, 39))
def test_equal_keys_are_equal_tokens_and_nothing_else_is(
    one: tuple[bytes, ...], other: tuple[bytes, ...], block: int, first: int, second: int
) -> None:
    """Blocks of one token and more; the tails of two requests differ, whatever their lengths."""
    made = [
        prompt(Request(0.0, len(blocks) * block + tail, 1, blocks), number, block)
        for number, (blocks, tail) in enumerate(((one, first), (other, second)))
    ]
    assert [len(ids) for ids in made] == [len(one) * block + first, len(other) * block + second]
    for ids in made:
        assert ((ids >= FIRST) & (ids < FIRST + COUNT)).all()
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        same = bool((made[0][i * block : (i + 1) * block] == made[1][i * block : (i + 1) * block]).all())
        assert same or a != b
        # By chance one token in 95 is equal; twenty never are.
        assert block < 20 or same == (a == b)


def test_a_salt_changes_every_block_and_a_last_block_may_be_partial() -> None:
    request = Request(0.0, 70, 1, tuple(bytes([n]) * 16 for n in range(3)))
    plain, salted = prompt(request, 0, 32), prompt(request, 0, 32, b"salt")
    assert len(plain) == 70
    assert all((plain[i : i + 32] != salted[i : i + 32]).any() for i in (0, 32, 64))


def test_what_no_block_covers_is_nobody_else_s() -> None:
    tails = [prompt(Request(0.0, 30, 1, ()), number, 16) for number in (1, 2)]
    assert (tails[0] != tails[1]).any()


def event(text: str = "", ids: list[int] | None = None, finish: str | None = None) -> bytes:
    choice = {"text": text, "finish_reason": finish, **({} if ids is None else {"token_ids": ids})}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


USAGE = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 48, "cached_tokens_by_tier": {"ssd": 48}}}}


@given(st.integers(1, 400))
def test_a_stream_cut_anywhere_is_the_same_reply(cut: int) -> None:
    stream = b"".join((event("a", [1]), event("bc", [2, 3]), event("d", [4], "length")))
    stream += b"data: " + json.dumps(USAGE).encode() + b"\n\ndata: [DONE]\n\n"
    reply = Reply(Request(1.0, 50, 4, ()), due=11.0, start=10.0)
    for i, at in enumerate(range(0, len(stream), cut)):
        reply.take(200, stream[at : at + cut], 11.5 + i)
    reply.close(200, 1000.0)
    assert reply.outcome == DONE and len(reply.tokens) == 4 and reply.error is None
    assert (reply.cached, reply.tiers) == (48, {"ssd": 48})
    made = records([reply])
    assert made.ttft[0] == pytest.approx(reply.tokens[0] - 11.0)
    # Two tokens came together: they have a gap, and it is 0.
    assert made.tbt_mean[0] == pytest.approx((reply.tokens[3] - reply.tokens[0]) / 3)
    assert made.arrival[0] == pytest.approx(1.0) and made.finished[0] == pytest.approx(990.0)


def closed(status: int, *parts: bytes) -> Reply:
    reply = Reply(Request(0.0, 5, 4, ()), due=0.0, start=0.0)
    for i, part in enumerate(parts):
        reply.take(status, part, 1.0 + i)
    reply.close(status, 9.0)
    return reply


def test_refusals_and_failures_are_told_apart() -> None:
    error = json.dumps({"error": {"message": "too much"}}).encode()
    assert (closed(429, error).outcome, closed(429, error).error) == (REJECTED, "http 429: too much")
    assert closed(503, b"<html>").error == "http 503: <html>"
    assert closed(504, error).outcome == DROPPED
    assert closed(400, error).outcome == REJECTED
    broken = closed(200, event("a", [1]))
    assert (broken.outcome, broken.error) == (DROPPED, "the stream broke off")
    failed = closed(200, event("a", [1]), b"data: " + error + b"\n\ndata: [DONE]\n\n")
    assert (failed.outcome, failed.error) == (DROPPED, "stream: too much")
    made = records([closed(429, error), broken, Reply(Request(0.0, 5, 4, ()), 0.0, 0.0)])
    assert made.outcome.tolist() == [REJECTED, DROPPED, UNFINISHED]
    assert made.wasted.tolist() == [False, True, False]
    assert np.isnan(made.ttft).tolist() == [True, False, True]


def test_a_server_that_counts_no_tokens_sends_one_in_each_event() -> None:
    assert len(closed(200, event("abc"), event("d"), event("", finish="stop")).tokens) == 2


@given(st.lists(st.floats(0, 100), max_size=45))
def test_tbt_is_the_mean_of_the_longest_tenth(gaps: list[float]) -> None:
    expected = sorted(gaps, reverse=True)[: max(-(-len(gaps) // 10), 1)]
    assert longest_tenth(np.array(gaps)) == pytest.approx(sum(expected) / len(expected) if expected else 0.0)


def test_requests_under_way_are_counted() -> None:
    replies = []
    for sent, ended in ((1.0, 5.0), (2.0, 3.0), (4.0, float("nan"))):
        reply = Reply(Request(0.0, 1, 1, ()), 0.0, 0.0, sent=sent)
        reply.ended = ended
        replies.append(reply)
    at, count = running(replies)
    assert (at.tolist(), count.tolist()) == ([1, 2, 3, 4, 5], [1, 2, 1, 2, 1])
    assert len(running([])[0]) == 0


# -- HTTP ----------------------------------------------------------------------------------------------------------


async def served(answer: bytes, path: str = "/x") -> tuple[int, bytes, bytes]:
    """Status, body, and the request as it came; the server closes after its answer."""
    seen = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        status, body = await get(Address(f"http://127.0.0.1:{port}/base/"), path)
    return status, body, bytes(seen)


async def test_chunks_are_put_together() -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    status, body, seen = await served(answer)
    assert (status, body) == (200, b"abcde") and seen.startswith(b"GET /base/x HTTP/1.1\r\nHost: 127.0.0.1:")


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\nTransfer-"],
)
async def test_an_answer_that_is_none_is_an_error(answer: bytes) -> None:
    with pytest.raises(ConnectionError):
        await served(answer)


@pytest.mark.parametrize("url", ["", "x", "ftp://h", "http://", "http://h:99999", "http://h:x", "//h"])
def test_a_url_that_is_none_is_named(url: str) -> None:
    with pytest.raises(BackendError, match="URL"):
        Address(url)


async def test_cancelling_closes_the_connection() -> None:
    """That is how the gateway hears that nobody waits any more."""
    closed_by_client = asyncio.Event()
    arrived = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived.set()
        await reader.read()
        closed_by_client.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        address = Address(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        asking = asyncio.create_task(ask(address, "GET", "/", b"", lambda status, data: None))
        await arrived.wait()
        asking.cancel()
        await asyncio.wait_for(closed_by_client.wait(), 20)


def test_a_gateway_that_answers_nonsense_is_named() -> None:
    """As a task sees it: another program listens there."""
    answers = itertools.repeat(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")

    async def scenario() -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(next(answers))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            backend = find_backend(f"live:url={url}")
            cluster = ClusterSpec(workers=(WorkerSpec(role=Role.BOTH, count=1),))
            with pytest.raises(BackendError) as caught:
                await asyncio.to_thread(backend.run, Task(requests=[], description="", cluster=cluster))
            return str(caught.value)

    assert "no list of models" in asyncio.run(scenario())


# -- discovery -----------------------------------------------------------------------------------------------------


def facts(worker: str, role: Role, **fields: object) -> Facts:
    base: dict[str, object] = {
        "worker": worker, "role": role, "node": f"node-{worker}", "model": "m", "block_tokens": 16,
        "block_bytes": 16 * 512, "layers": 2, "pages": 64, "pool_slots": 100, "max_tokens_per_step": 512,
        "max_sequences": 32,
    }  # fmt: skip
    return Facts(**{**base, **fields})  # type: ignore[arg-type]


def metrics(*workers: str, samples: int = 7, unit: float = 1e-3) -> str:
    lines = []
    for worker in workers:
        lines += [
            f'pyengine_cost_seconds{{worker="{worker}",per="{term}"}} {(i + 1) * unit}' for i, term in enumerate(TERMS)
        ]
        lines.append(f'pyengine_cost_samples_total{{worker="{worker}"}} {samples}')
    return "\n".join([*lines, 'pyengine_conductor_plans_total{policy="random"} 3', ""])


def test_workers_become_a_cluster_with_their_own_costs(tmp_path: Path) -> None:
    found = describe([facts("p", Role.PREFILL), facts("d", Role.DECODE, pages=9)], metrics("p", "d"))
    assert [(w.role, w.count, w.model, w.pages) for w in found.spec.workers] == [
        (Role.PREFILL, 1, "p", 64),
        (Role.DECODE, 1, "d", 9),
    ]
    assert (found.spec.block_tokens, found.spec.kv_bytes, found.spec.layers) == (16, 512, 2)
    assert found.spec.node.dram_tokens == 1600 and found.policy == "random"
    # One step of 3 sequences with 100 tokens in their pages: step + 3 sequences + 100 of history.
    assert found.models["d"].seconds([], 3, 100) == pytest.approx(1e-3 + 3 * 4e-3 + 100 * 5e-3)
    assert "nobody has measured" in found.assumed[0]


def test_what_a_worker_spends_beside_the_model_is_an_overhead_of_its_steps() -> None:
    beside = 'pyengine_worker_seconds_total{worker="d",of="loop"} 0.5\n'
    beside += 'pyengine_worker_steps_total{worker="d"} 200\n'
    found = describe([facts("p", Role.PREFILL), facts("d", Role.DECODE)], metrics("p", "d") + beside)
    assert [worker.step_overhead for worker in found.spec.workers] == [0.0, 0.5 / 200]


def test_costs_are_as_long_as_steps_were_on_average() -> None:
    told = "".join(
        f'pyengine_worker_seconds_total{{worker="d",of="{of}"}} {value}\n'
        for of, value in (("model", 6), ("predicted", 5))
    )
    both = [facts("p", Role.PREFILL), facts("d", Role.DECODE)]
    plain, found = describe(both, metrics("p", "d")), describe(both, metrics("p", "d") + told)
    for name, factor in (("p", 1.0), ("d", 1.2)):
        assert found.models[name].seconds([], 3, 100) == pytest.approx(factor * plain.models[name].seconds([], 3, 100))


def test_what_cannot_be_simulated_is_said() -> None:
    both = [facts("p", Role.PREFILL), facts("d", Role.DECODE)]
    with pytest.raises(BackendError, match="several models"):
        describe([both[0], facts("d", Role.DECODE, model="other")], metrics("p", "d"))
    assert describe(both, metrics("p")).unmeasured == ["d"]
    assert describe(both, metrics("p", "d", samples=0)).unmeasured == ["p", "d"]
    with pytest.raises(BackendError, match="what cannot be"):
        describe(both, metrics("p", "d", unit=-1.0))
    idle = describe([*both, facts("e", Role.DECODE)], metrics("p", "d"))
    assert not idle.unmeasured and [idle.models[name].name for name in "pde"] == ["p", "d", "d"]
    busy = describe([*both, facts("e", Role.DECODE)], metrics("p", "d", "e"))
    assert [busy.models[name].name for name in "pde"] == ["p", "d", "e"]
    assert any("costs of e: those of d" in sentence for sentence in idle.assumed)
    shared = describe([facts("p", Role.PREFILL, node="n"), facts("d", Role.DECODE, node="n")], metrics("p", "d"))
    assert any("2 workers on 1 nodes" in sentence for sentence in shared.assumed)
