"""Goal: what a client of the gateway sees, whatever conductor and workers do.
Method: a real HTTP server and real ZeroMQ sockets; the test plays conductor and workers (cluster.py).
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from pyengine.gateway import links as gateway_links
from pyengine.gateway.app import create_app
from pyengine.scheduler.messages import Route, Tokens, Work
from pyengine.scheduler.types import FinishReason, Rejection, Role, Slo, tenant_number
from tests.gateway.cluster import (
    ANSWER,
    Cluster,
    FakeWorker,
    answer_token,
    cluster,
    failing,
    silent,
    tokens,
    whole_answer,
)

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
APART = (Role.PREFILL, Role.DECODE)
#: Seconds, generous: an event that takes longer never comes.
PATIENCE = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: the name of a unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="pyg") as name:
        yield Path(name)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def post(http: aiohttp.ClientSession, at: Cluster, path: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(at.url + path, data=data) as response:
        return response.status, json.loads(await response.read())


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """Parsed server-sent events up to the end mark."""
    async for line in response.content:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)


async def read_stream(
    http: aiohttp.ClientSession, at: Cluster, body: dict[str, Any]
) -> tuple[str, str | None, list[Any]]:
    async with http.post(f"{at.url}/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status == 200
        all_events = [event async for event in events(response)]
    choices = [event["choices"][0] for event in all_events if event.get("choices")]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    finish = choices[-1]["finish_reason"] if choices else None
    return text, finish, all_events


async def test_whole_answer_and_usage(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, *APART) as at:
        status, body = await post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": len(ANSWER)})
        assert status == 200
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"] == {"role": "assistant", "content": ANSWER}
        assert body["choices"][0]["finish_reason"] == "length"
        prompt = len("user: What is the capital of France?\nassistant:")
        assert body["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": len(ANSWER),
            "total_tokens": prompt + len(ANSWER),
            "prompt_tokens_details": {
                "cached_tokens": prompt // 16 * 16,
                "cached_tokens_by_tier": {"ssd": prompt // 16 * 16},
            },
        }
        (route,) = at.conductor.routes
        assert len(route.keys) == 16 * ((prompt - 1) // 16)
        prefill, decode = at.workers["prefill-0"].work[0], at.workers["decode-0"].work[0]
        assert (prefill.part, decode.part) == ("prefill", "decode")
        assert prefill.sampling.seed is not None
        assert prefill.sampling == decode.sampling
        await asyncio.wait_for(at.conductor.ended_one.wait(), PATIENCE)


async def test_a_salt_is_a_tenant_with_keys_of_its_own(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, Role.BOTH) as at:
        for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}):
            await read_stream(http, at, {**CHAT, "max_tokens": 2, **salt})
        keys = [(route.tenant, route.keys) for route in at.conductor.routes]
        assert [tenant for tenant, _ in keys] == ["", "a", "b", "a"]
        assert len(set(keys)) == len({key for _, key in keys}) == 3
        assert [work.tenant for work in at.workers["both-0"].work] == [tenant_number(name) for name, _ in keys]


async def test_role_both_gets_one_work(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, Role.BOTH) as at:
        text, finish, _ = await read_stream(http, at, {**CHAT, "max_tokens": 12})
        assert (text, finish) == (ANSWER[:12], "length")
        assert [work.part for work in at.workers["both-0"].work] == ["both"]


async def test_stream_events(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, *APART) as at:
        options = {"max_tokens": 9, "stream_options": {"include_usage": True}}
        text, finish, got = await read_stream(http, at, {**CHAT, **options})
        assert (text, finish) == (ANSWER[:9], "length")
        assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert {event["object"] for event in got} == {"chat.completion.chunk"}
        assert len({event["id"] for event in got}) == 1
        assert got[-1]["choices"] == []
        assert got[-1]["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("asked", [False, True])
async def test_who_asks_for_token_ids_has_each_at_once(folder: Path, http: aiohttp.ClientSession, asked: bool) -> None:
    """Goal: half a character is no text yet, but a token; whoever measures gaps must not see two as one.
    Method: the worker holds the second half back until the client has the first; without ids, one event says both.
    """
    half, other = "é".encode()
    sent: list[tuple[FakeWorker, bytes, Work]] = []

    def halves(worker: FakeWorker, identity: bytes, work: Work) -> None:
        sent.append((worker, identity, work))
        worker.send(identity, Tokens(request=work.request, attempt=work.attempt, first=0, tokens=(half,)))

    async with cluster(folder, Role.BOTH) as at:
        at.workers["both-0"].script = halves
        body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 2, "stream": True, "return_token_ids": asked}
        async with asyncio.timeout(PATIENCE):
            request = asyncio.ensure_future(http.post(f"{at.url}/v1/completions", json=body))
            await at.workers["both-0"].arrived.wait()
            if asked:
                response = await request
                first = await anext(events(response))
                assert (first["choices"][0]["text"], first["choices"][0]["token_ids"]) == ("", [half])
            worker, identity, work = sent[0]
            rest = Tokens(
                request=work.request, attempt=work.attempt, first=1, tokens=(other,), finish=FinishReason.LENGTH
            )
            worker.send(identity, rest)
            response = await request
            got = [event["choices"][0] async for event in events(response)]
        assert "".join(choice["text"] for choice in got) == "é"
        assert [choice.get("token_ids") for choice in got] == ([[other]] if asked else [None])


async def test_tokens_out_of_order_and_twice(folder: Path, http: aiohttp.ClientSession) -> None:
    def muddled(worker: FakeWorker, identity: bytes, work: Work) -> None:
        worker.send(identity, tokens(work, 3, 5, FinishReason.LENGTH), tokens(work, 1, 3), tokens(work, 1, 2))

    async with cluster(folder, *APART) as at:
        at.workers["decode-0"].script = muddled
        text, finish, _ = await read_stream(http, at, {**CHAT, "max_tokens": 8})
        assert (text, finish) == (ANSWER[:8], "length")


async def test_worker_lost_mid_stream_goes_on_elsewhere(folder: Path, http: aiohttp.ClientSession) -> None:
    """The client gets the whole right answer, no token twice, and the survivor is told to stop."""

    def half(worker: FakeWorker, identity: bytes, work: Work) -> None:
        worker.send(identity, tokens(work, 1, 9))

    async with cluster(folder, Role.PREFILL, Role.DECODE, Role.DECODE) as at:
        at.workers["decode-0"].script = half
        async with http.post(
            f"{at.url}/v1/chat/completions", json={**CHAT, "max_tokens": len(ANSWER), "stream": True}
        ) as response:
            text = ""
            async for event in events(response):
                text += event["choices"][0]["delta"].get("content", "")
                if len(text) == 10 and "decode-0" in at.workers:
                    at.kill("decode-0")
        assert text == ANSWER
        first, second = at.workers["prefill-0"].work
        assert (first.attempt, second.attempt) == (0, 1)
        assert second.generated == 10
        assert second.token_ids == first.token_ids + b"".join(bytes([answer_token(i), 0, 0, 0]) for i in range(10))
        assert second.sampling == first.sampling
        assert [abort.attempt for abort in at.workers["prefill-0"].aborts] == [0]
        assert at.conductor.routes[1].exclude == ("decode-0",)


async def test_stale_tokens_are_dropped(folder: Path, http: aiohttp.ClientSession) -> None:
    def fails_once(worker: FakeWorker, identity: bytes, work: Work) -> None:
        if work.attempt == 0:
            failing("need_prefill")(worker, identity, work)
            return
        wrong = Tokens(request=work.request, attempt=0, first=1, tokens=(120, 120), finish=FinishReason.LENGTH)
        worker.send(identity, wrong)
        whole_answer(worker, identity, work)

    async with cluster(folder, *APART) as at:
        at.workers["decode-0"].script = fails_once
        text, _, _ = await read_stream(http, at, {**CHAT, "max_tokens": 7})
        assert text == ANSWER[:7]


async def test_only_worker_lost_is_a_typed_error(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, *APART, patience=0.5) as at:
        at.workers["prefill-0"].script = silent
        request = asyncio.create_task(post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": 5}))
        await at.workers["prefill-0"].arrived.wait()
        at.kill("prefill-0")
        status, body = await request
        assert status == 503
        assert body["error"]["type"] == "server_error"
        await asyncio.wait_for(at.workers["decode-0"].aborted.wait(), PATIENCE)
        assert [abort.attempt for abort in at.workers["decode-0"].aborts] == [0]


async def test_dead_worker_the_conductor_still_believes_in(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, *APART, patience=0.5) as at:
        at.workers["decode-0"].script = silent
        request = asyncio.create_task(post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": 5}))
        await at.workers["decode-0"].arrived.wait()
        at.kill("decode-0", known=False)
        status, _ = await request
        assert status == 503


async def test_silent_worker_is_dead(
    folder: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that hangs keeps its connection; the gateway goes on without it, and with it once it is back."""
    monkeypatch.setattr(gateway_links, "DEAD_AFTER", 0.5)
    monkeypatch.setattr(gateway_links, "HEARTBEAT_EVERY", 0.1)
    async with cluster(folder, Role.PREFILL, Role.DECODE, Role.DECODE) as at:
        hanging = at.workers["decode-0"]
        hanging.script = silent
        request = asyncio.create_task(post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": 5}))
        await hanging.arrived.wait()
        hanging.hung = True
        status, body = await request
        assert (status, body["choices"][0]["message"]["content"]) == (200, ANSWER[:5])
        assert len(at.workers["decode-1"].work) == 1
        hanging.hung = False
        hanging.script = whole_answer
        status, _ = await post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": 5})
        assert status == 200


async def test_worker_comes_back_as_another_incarnation(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, *APART) as at:
        at.workers["decode-0"].script = silent
        request = asyncio.create_task(post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": 5}))
        await at.workers["decode-0"].arrived.wait()
        at.kill("decode-0")
        at.add("decode-0", Role.DECODE, incarnation=2)
        at.conductor.announce()
        status, body = await request
        assert status == 200
        assert body["choices"][0]["message"]["content"] == ANSWER[:5]
        assert {work.decode_incarnation for work in at.workers["decode-0"].work} == {2}


@pytest.mark.parametrize("stream", [False, True])
async def test_client_gone_aborts_at_once(folder: Path, http: aiohttp.ClientSession, stream: bool) -> None:
    def one_and_wait(worker: FakeWorker, identity: bytes, work: Work) -> None:
        worker.send(identity, tokens(work, work.generated, 1))

    async with cluster(folder, *APART) as at:
        at.workers["prefill-0"].script = one_and_wait
        at.workers["decode-0"].script = silent
        body = {**CHAT, "max_tokens": 50, "stream": stream}
        if stream:
            response = await http.post(f"{at.url}/v1/chat/completions", json=body)
            await response.content.readline()
            response.close()
        else:
            request = asyncio.create_task(http.post(f"{at.url}/v1/chat/completions", json=body))
            await at.workers["decode-0"].arrived.wait()
            request.cancel()
        for worker in at.workers.values():
            await asyncio.wait_for(worker.aborted.wait(), PATIENCE)
        await asyncio.wait_for(at.conductor.ended_one.wait(), PATIENCE)
        assert at.service.active == 0


async def test_stop_string_ends_the_request_and_is_not_shown(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, *APART) as at:
        stop = {"max_tokens": len(ANSWER), "stop": [" of Fr", "never"]}
        text, finish, _ = await read_stream(http, at, {**CHAT, **stop})
        assert (text, finish) == ("The capital", "stop")
        status, body = await post(http, at, "/v1/chat/completions", {**CHAT, **stop})
        assert status == 200
        assert body["choices"][0] | {"index": 0} == {
            "index": 0,
            "message": {"role": "assistant", "content": "The capital"},
            "logprobs": None,
            "finish_reason": "stop",
        }
        assert body["usage"]["completion_tokens"] == len("The capital of Fr")


async def test_failures_by_kind(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, *APART, patience=0.3) as at:
        for kind, expected in (("too_large", 400), ("bug", 500), ("retry", 503)):
            at.workers["prefill-0"].script = failing(kind)
            at.workers["decode-0"].script = silent
            status, body = await post(http, at, "/v1/chat/completions", CHAT)
            assert status == expected, body
            assert f"scripted {kind}" in body["error"]["message"]


async def test_rejections(folder: Path, http: aiohttp.ClientSession) -> None:
    def busy(route: Route) -> Rejection:
        return Rejection(request=route.request, attempt=route.attempt, reason="predicted TTFT 9 s", retry_after=7.2)

    def too_large(route: Route) -> Rejection:
        return Rejection(request=route.request, attempt=route.attempt, reason="larger than the pool")

    async with cluster(folder, *APART) as at:
        at.conductor.reject = busy
        async with http.post(f"{at.url}/v1/chat/completions", json=CHAT) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "8"
        at.conductor.reject = too_large
        status, body = await post(http, at, "/v1/chat/completions", CHAT)
        assert status == 400
        assert body["error"]["message"] == "larger than the pool"


async def test_terms_of_a_request(folder: Path, http: aiohttp.ClientSession) -> None:
    """timeout, priority and class reach conductor and workers; vLLM's lower priority is our higher."""
    async with cluster(folder, *APART) as at:
        await post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": 2})
        body = {**CHAT, "max_tokens": 2, "timeout": 40, "priority": -2, "service_tier": "batch"}
        await post(http, at, "/v1/chat/completions", body)
        await post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": 2, "timeout": 900, "service_tier": "batch"})
        slos = [route.slo for route in at.conductor.routes]
        assert slos == [Slo(ttft=7.0), Slo(deadline=40.0), Slo(deadline=600.0)]
        assert [route.priority for route in at.conductor.routes] == [0, 2, 0]
        assert all(0.0 <= route.waited < PATIENCE for route in at.conductor.routes)
        for worker in at.workers.values():
            assert [(work.slo, work.priority) for work in worker.work] == list(zip(slos, (0, 2, 0), strict=True))
            assert worker.work[1].deadline <= 40.0
        ended = at.conductor.ended[0]
        assert (ended.generated, ended.finished, ended.ttft > 0.0) == (2, True, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_ends_the_work_everywhere(folder: Path, http: aiohttp.ClientSession, stream: bool) -> None:
    """Before the first token: 504. Behind it, in a stream: an error event. Both workers are told to stop."""
    async with cluster(folder, *APART) as at:
        if not stream:
            at.workers["prefill-0"].script = silent
        at.workers["decode-0"].script = silent
        body = {**CHAT, "timeout": 0.2, "stream": stream}
        async with http.post(f"{at.url}/v1/chat/completions", json=body) as response:
            assert response.status == (200 if stream else 504)
            error = [event async for event in events(response)][-1] if stream else json.loads(await response.read())
        assert error["error"]["code"] == "timeout"
        assert "deadline" in error["error"]["message"]
        for worker in at.workers.values():
            await asyncio.wait_for(worker.aborted.wait(), PATIENCE)
        await asyncio.wait_for(at.conductor.ended_one.wait(), PATIENCE)
        assert not at.conductor.ended[0].finished
        assert at.service.active == 0


@pytest.mark.parametrize(("kind", "code"), [("slo_ttft", "slo_ttft"), ("share", "share"), ("", "rate_limit_exceeded")])
async def test_a_refusal_names_what_refused(folder: Path, http: aiohttp.ClientSession, kind: str, code: str) -> None:
    def refuse(route: Route) -> Rejection:
        return Rejection(request=route.request, attempt=route.attempt, reason="no", retry_after=0.01, kind=kind)

    async with cluster(folder, *APART) as at:
        at.conductor.reject = refuse
        async with http.post(f"{at.url}/v1/chat/completions", json=CHAT) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            error = json.loads(await response.read())["error"]
        assert error == {"message": "no", "type": "rate_limit_error", "param": None, "code": code}


async def test_conductor_away_and_back(folder: Path, http: aiohttp.ClientSession) -> None:
    """Running requests go on without it; new ones wait for it, or get 503."""
    async with cluster(folder, *APART, patience=1.0) as at:
        decode = at.workers["decode-0"]
        decode.script = silent
        running = asyncio.create_task(post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": 6}))
        await decode.arrived.wait()
        at.conductor.close()
        (identity,) = decode.peers
        decode.send(identity, tokens(decode.work[0], 1, 5, FinishReason.LENGTH))
        status, _ = await running
        assert status == 200
        status, body = await post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": 6})
        assert status == 503
        assert "conductor" in body["error"]["message"]
        decode.script = whole_answer
        at.service.config = msgspec.structs.replace(at.service.config, patience=PATIENCE)
        waiting = asyncio.create_task(post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": 6}))
        await asyncio.sleep(0)
        at.restart_conductor()
        status, body = await waiting
        assert status == 200
        assert body["choices"][0]["message"]["content"] == ANSWER[:6]


async def test_nobody_is_there_yet(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, patience=0.3) as at:
        status, body = await post(http, at, "/v1/chat/completions", CHAT)
        assert (status, body["error"]["message"]) == (503, "no worker is ready yet")
        async with http.get(f"{at.url}/health") as response:
            assert response.status == 503


async def test_bad_input(folder: Path, http: aiohttp.ClientSession) -> None:
    """Every answer names the field and says what to do; nothing reaches the conductor."""
    long = {"role": "user", "content": "x" * 2000}
    cases: list[tuple[str, Any, int, str | None, str]] = [
        ("chat", b"{", 400, None, "JSON"),
        ("chat", b"[]", 400, None, "object"),
        ("chat", {"model": "fake"}, 400, "messages", "required"),
        ("chat", {**CHAT, "messages": []}, 400, "messages", "at least 1 entries"),
        ("chat", {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "text"),
        ("chat", {**CHAT, "model": "nope"}, 404, "model", "fake"),
        ("chat", {**CHAT, "max_tokens": -1}, 400, "max_tokens", "at least 1"),
        ("chat", {**CHAT, "max_tokens": "many"}, 400, "max_tokens", "int"),
        ("chat", {**CHAT, "temperature": -1}, 400, "temperature", "at least 0"),
        ("chat", {**CHAT, "n": 129}, 400, "n", "at most 128"),
        ("chat", {**CHAT, "timeout": 0}, 400, "timeout", "above 0"),
        ("chat", {**CHAT, "timeout": -1.5}, 400, "timeout", "above 0"),
        ("chat", {**CHAT, "timeout": 1e6}, 400, "timeout", "at most 86400"),
        ("chat", {**CHAT, "timeout": "soon"}, 400, "timeout", "float"),
        ("chat", {**CHAT, "priority": 5000}, 400, "priority", "at most 1000"),
        ("chat", {**CHAT, "priority": 0.5}, 400, "priority", "int"),
        ("chat", {**CHAT, "service_tier": "gold"}, 400, "service_tier", "auto, default, batch"),
        ("chat", {**CHAT, "tools": [{"type": "function"}]}, 400, "tools", "not supported"),
        ("chat", {**CHAT, "messages": [long]}, 400, "messages", "1024"),
        ("completion", {"model": "fake"}, 400, "prompt", "required"),
        ("completion", {"model": "fake", "prompt": []}, 400, "prompt", "empty"),
        ("completion", {"model": "fake", "prompt": [1, "a"]}, 400, "prompt", "expected"),
        ("completion", {"model": "fake", "prompt": [1, 9999]}, 400, "prompt", "9999"),
        ("completion", {"model": "fake", "prompt": [1] * 200_000}, 400, "prompt", "1024"),  # parsed off the loop
        ("completion", {"model": "fake", "prompt": ""}, 400, "prompt", "empty"),
    ]
    paths = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
    async with cluster(folder, *APART) as at:
        for endpoint, body, expected, param, says in cases:
            status, answer = await post(http, at, paths[endpoint], body)
            assert (status, answer["error"]["param"]) == (expected, param), (body, answer)
            assert says in answer["error"]["message"], answer
            assert answer["error"]["type"] == "invalid_request_error"
        assert at.conductor.routes == []
        async with http.get(f"{at.url}/nothing") as response:
            assert response.status == 404
            assert "/v1/models" in json.loads(await response.read())["error"]["message"]


async def test_a_bug_is_an_error_of_the_api(
    folder: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(path: str) -> Any:
        raise ValueError(f"{path} cannot be read")

    async with cluster(folder, *APART) as at:
        monkeypatch.setattr(at.service, "tokenizer", broken)
        status, body = await post(http, at, "/v1/chat/completions", CHAT)
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert at.service.active == 0


async def test_a_client_gone_while_it_sends_is_no_bug(folder: Path) -> None:
    """The application itself, fed half a body and a disconnect: nothing is raised, nothing is begun."""
    sent: list[Any] = []
    received = [{"type": "http.request", "body": b'{"model":', "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return received.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async with cluster(folder, *APART) as at:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await create_app(at.service)(scope, receive, send)
        assert sent[0]["status"] == 499
        assert at.service.active == 0


async def test_completions_many_prompts(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, *APART) as at:
        body = {"model": "fake", "prompt": ["one", "two and more"], "max_tokens": 4, "temperature": 0, "seed": 5}
        status, answer = await post(http, at, "/v1/completions", body)
        assert status == 200
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "The "), (1, "The ")]
        assert answer["usage"]["completion_tokens"] == 8
        status, answer = await post(http, at, "/v1/completions", {**body, "prompt": [104, 105]})
        assert (status, answer["usage"]["prompt_tokens"]) == (200, 2)
        async with http.post(f"{at.url}/v1/completions", json={**body, "stream": True}) as response:
            texts = {0: "", 1: ""}
            async for event in events(response):
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
        assert texts == {0: "The ", 1: "The "}


async def test_models_health_metrics(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, *APART) as at:
        await post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": 3})
        async with http.get(f"{at.url}/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["fake"]
        async with http.get(f"{at.url}/health") as response:
            assert (response.status, (await response.json())["status"]) == (200, "ok")
        async with http.get(f"{at.url}/metrics") as response:
            text = await response.text()
        assert 'pyengine_pool_blocks{node="node-0"} 3' in text
        assert 'vllm:generation_tokens_total{model_name="fake"} 3' in text
        assert 'vllm:time_to_first_token_seconds_count{model_name="fake"} 1' in text
        assert 'pyengine_first_token_held_seconds_count{model_name="fake"} 1' in text
        assert 'vllm:request_success_total{model_name="fake",finished_reason="length"} 1' in text


async def test_openai_client(folder: Path) -> None:
    """The `openai` package: sync and async, whole and streaming, stop, errors."""
    messages: Any = CHAT["messages"]

    def sync(url: str) -> tuple[str | None, str, str | None]:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        whole = client.chat.completions.create(model="fake", messages=messages, max_tokens=11)
        stream = client.chat.completions.create(model="fake", messages=messages, max_tokens=11, stream=True)
        text = "".join(event.choices[0].delta.content or "" for event in stream)
        stopped = client.completions.create(model="fake", prompt="hello", max_tokens=31, stop="France")
        assert [model.id for model in client.models.list()] == ["fake"]
        with pytest.raises(openai.NotFoundError, match="fake"):
            client.chat.completions.create(model="other", messages=messages)
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.chat.completions.create(model="fake", messages=messages, max_tokens=-3)
        return whole.choices[0].message.content, text, stopped.choices[0].text

    async with cluster(folder, *APART) as at:
        assert await asyncio.to_thread(sync, at.url) == ("The capital", "The capital", "The capital of ")
        client = openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="none", max_retries=0)
        whole = await client.chat.completions.create(model="fake", messages=messages, max_tokens=11)
        assert whole.choices[0].message.content == "The capital"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 32
        text = ""
        async for event in await client.chat.completions.create(
            model="fake", messages=messages, max_tokens=31, stream=True, stop=["Paris"]
        ):
            text += event.choices[0].delta.content or ""
        assert text == "The capital of France is "
        await client.close()
