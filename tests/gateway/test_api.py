"""Goal: each field of the API does what it says, for the client that people have.
Method: the `openai` package against a real HTTP server; conductor and workers are scripted (cluster.py), so a field's
way ends in the `Work` that a worker got, or in an answer that is known to the letter.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from pyengine.chat import conversation
from pyengine.chat.errors import Unservable
from pyengine.chat.structured import form_of
from pyengine.cli import installed_version
from pyengine.gateway import exchange as gateway_exchange
from pyengine.gateway import openai as gateway_openai
from pyengine.gateway.errors import ApiError
from pyengine.gateway.listener import STALL, listen
from pyengine.gateway.protocol import Line
from pyengine.gateway.spelling import spell
from pyengine.scheduler.messages import PrefillReport, Tokens, Work
from pyengine.scheduler.types import FinishReason, Logprobs, Role
from pyengine.text import _ByteTokenizer, _compile_template
from tests.gateway.cluster import ANSWER, Cluster, FakeWorker, cluster, failing, silent
from tests.gateway.test_gateway import APART, CHAT, PATIENCE, events, folder, http, post, read_stream

__all__ = ["folder", "http"]

MESSAGES: Any = CHAT["messages"]


@asynccontextmanager
async def served(folder: Path, *roles: Role) -> AsyncIterator[tuple[Cluster, openai.AsyncOpenAI]]:
    async with cluster(folder, *roles) as at:
        client = openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="none", max_retries=0)
        try:
            yield at, client
        finally:
            await client.close()


def says(text: str | bytes, *, each: bool = True, told: int | None = None) -> Any:
    """A script for role both: the bytes of `text`, one message each or all in one; logprobs name their place."""
    data = text.encode() if isinstance(text, str) else text

    def script(worker: FakeWorker, identity: bytes, work: Work) -> None:
        report = PrefillReport(request=work.request, attempt=work.attempt, cached=0, computed=len(work.token_ids) // 4)
        worker.send(identity, report)
        parts = [data[at : at + 1] for at in range(len(data))] if each else [data]
        first = 0
        for part in parts:
            last = first + len(part) == len(data)
            made = None
            if work.sampling.logprobs is not None:
                made = tuple(logprob(token, first + at, work.sampling.logprobs) for at, token in enumerate(part))
            message = Tokens(
                request=work.request,
                attempt=work.attempt,
                first=first,
                tokens=tuple(part),
                finish=FinishReason.STOP if last else None,
                logprobs=made,
            )
            worker.send(identity, message)
            first += len(part)

    return script


def logprob(token: int, at: int, top: int) -> Logprobs:
    """-at/8 for the chosen one; below it the bytes behind it."""
    return Logprobs(-at / 8, 1, tuple(((token + other) % 256, -at / 8 - other) for other in range(top)))


FIELDS: dict[str, tuple[Any, str, Any]] = {
    "temperature": (0.25, "temperature", 0.25),
    "top_p": (0.5, "top_p", 0.5),
    "seed": (11, "seed", 11),
    "presence_penalty": (0.5, "presence_penalty", 0.5),
    "frequency_penalty": (-1.5, "frequency_penalty", -1.5),
    "logit_bias": ({"5": 3, "7": -100}, "logit_bias", ((5, 3.0), (7, -100.0))),
    "max_tokens": (3, "max_tokens", 3),
}
EXTRA: dict[str, tuple[Any, str, Any]] = {
    "top_k": (7, "top_k", 7),
    "min_p": (0.125, "min_p", 0.125),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "min_tokens": (2, "min_tokens", 2),
    "ignore_eos": (True, "ignore_eos", True),
    "stop_token_ids": ([9, 8], "stop_token_ids", (9, 8)),
}


@pytest.mark.parametrize("chat", [False, True])
async def test_sampling_fields_reach_the_worker(folder: Path, chat: bool) -> None:
    async with served(folder, Role.BOTH) as (at, client):
        for fields, where in ((FIELDS, "own"), (EXTRA, "extra")):
            for name, (value, field, expected) in fields.items():
                sent: Any = {name: value} if where == "own" else {"extra_body": {name: value}}
                if name != "max_tokens":
                    sent["max_tokens"] = 4
                if chat:
                    await client.chat.completions.create(model="fake", messages=MESSAGES, **sent)
                else:
                    await client.completions.create(model="fake", prompt="once", **sent)
                got = at.workers["both-0"].work[-1].sampling
                assert getattr(got, field) == expected, name


async def test_routing_fields_reach_the_conductor(folder: Path) -> None:
    async with served(folder, Role.BOTH) as (at, client):
        extra = {"priority": -4, "cache_salt": "mine", "timeout": 50.0}
        await client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            max_completion_tokens=5,
            user="me",
            extra_body=extra | {"service_tier": "batch"},
        )
        (route,) = at.conductor.routes
        assert (route.priority, route.tenant, route.max_tokens, route.slo.deadline) == (4, "mine", 5, 50.0)


@pytest.mark.parametrize("chat", [False, True])
async def test_n_answers_share_the_prompt_s_usage(folder: Path, http: aiohttp.ClientSession, chat: bool) -> None:
    """Each answer has a seed of its own, in order; streaming mixes them, losing nothing; the prompt is billed once."""
    async with served(folder, *APART) as (at, client):
        ask: Any = {"model": "fake", "n": 3, "seed": 2**63 - 2, "max_tokens": 6, "temperature": 1}
        usages = []
        if chat:
            whole: Any = await client.chat.completions.create(messages=MESSAGES, **ask)
            texts = [(choice.index, choice.message.content) for choice in whole.choices]
        else:
            whole = await client.completions.create(prompt="What is the capital of France", **ask)
            texts = [(choice.index, choice.text) for choice in whole.choices]
        assert texts == [(index, ANSWER[:6]) for index in range(3)]
        seeds = [work.sampling.seed for work in at.workers["prefill-0"].work]
        assert seeds == [2**63 - 2, 2**63 - 1, 0]
        prompt = len(at.workers["prefill-0"].work[0].token_ids) // 4
        usages.append(whole.usage)
        parts = ["", "", ""]
        ask |= {"stream": True, "stream_options": {"include_usage": True}}
        stream: Any
        if chat:
            stream = await client.chat.completions.create(messages=MESSAGES, **ask)
        else:
            stream = await client.completions.create(prompt="What is the capital of France", **ask)
        async for event in stream:
            for choice in event.choices:
                parts[choice.index] += (choice.delta.content or "") if chat else choice.text
            if event.usage:
                usages.append(event.usage)
        assert parts == [ANSWER[:6]] * 3
        assert usages[0] == usages[1]
        assert (usages[0].prompt_tokens, usages[0].completion_tokens) == (prompt, 18)
        assert usages[0].prompt_tokens_details.cached_tokens == prompt // 16 * 16
        async with http.get(f"{at.url}/metrics") as response:
            assert f'vllm:prompt_tokens_total{{model_name="fake"}} {2 * prompt}' in await response.text()


async def test_prompts_times_n_come_in_the_api_s_order(folder: Path) -> None:
    async with served(folder, Role.BOTH) as (at, client):
        await client.completions.create(model="fake", prompt=["a", "bb"], n=2, seed=5, max_tokens=1)
        works = sorted(at.workers["both-0"].work, key=lambda work: len(work.token_ids))
        assert [(len(work.token_ids) // 4, work.sampling.seed) for work in works] == [(1, 5), (1, 6), (2, 5), (2, 6)]
        with pytest.raises(openai.BadRequestError, match="at most 256 at once"):
            await client.completions.create(model="fake", prompt=["a"] * 3, n=100)


@pytest.mark.parametrize("prompt", ["Once 🙂", [79, 110, 99, 101]])
async def test_echo(folder: Path, prompt: Any) -> None:
    async with served(folder, Role.BOTH) as (_, client):
        shown = prompt if isinstance(prompt, str) else bytes(prompt).decode()
        ask: Any = {"model": "fake", "prompt": prompt, "echo": True, "max_tokens": 4, "n": 2}
        whole = await client.completions.create(**ask)
        assert [choice.text for choice in whole.choices] == [shown + ANSWER[:4]] * 2
        texts = ["", ""]
        async for event in await client.completions.create(**ask, stream=True):
            texts[event.choices[0].index] += event.choices[0].text
        assert texts == [shown + ANSWER[:4]] * 2


async def test_logprobs_of_chat(folder: Path) -> None:
    """Text, bytes and likeliest tokens of each, whole and streamed alike; half a character has a name of its own."""
    async with served(folder, Role.BOTH) as (at, client):
        at.workers["both-0"].script = says("aé")
        ask: Any = {"model": "fake", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
        whole = await client.chat.completions.create(**ask)
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        content = logprobs.content or []
        assert [(one.token, one.bytes, one.logprob) for one in content] == [
            ("a", [0x61], 0.0),
            ("bytes:\\xc3", [0xC3], -0.125),
            ("bytes:\\xa9", [0xA9], -0.25),
        ]
        assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("a", 0.0), ("b", -1.0)]
        streamed: list[Any] = []
        async for event in await client.chat.completions.create(**ask, stream=True):
            if event.choices[0].logprobs:
                streamed += event.choices[0].logprobs.content or []
        assert [one.model_dump() for one in streamed] == [one.model_dump() for one in content]
        none = await client.chat.completions.create(model="fake", messages=MESSAGES)
        assert none.choices[0].logprobs is None


async def test_logprobs_of_completions(folder: Path) -> None:
    """Offsets are characters of the text; the chosen token is told also when it is none of the likeliest."""
    async with served(folder, Role.BOTH) as (at, client):
        at.workers["both-0"].script = says("aéb", each=False)
        ask: Any = {"model": "fake", "prompt": "x", "logprobs": 0}
        whole = await client.completions.create(**ask)
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
        assert logprobs.text_offset == [0, 1, 1, 2]
        assert logprobs.token_logprobs == [0.0, -0.125, -0.25, -0.375]
        assert logprobs.top_logprobs == [{"a": 0.0}, {"bytes:\\xc3": -0.125}, {"bytes:\\xa9": -0.25}, {"b": -0.375}]
        at.workers["both-0"].script = says("aéb")
        offsets: list[int] = []
        async for event in await client.completions.create(**ask, stream=True):
            if event.choices[0].logprobs:
                offsets += event.choices[0].logprobs.text_offset or []
        assert offsets == [0, 1, 1, 2]


async def test_logprobs_that_are_no_json_numbers(folder: Path, http: aiohttp.ClientSession) -> None:
    """A token that shaping alone made possible has probability 0; a worker that told nothing is no failure."""

    def never(worker: FakeWorker, identity: bytes, work: Work) -> None:
        told = (Logprobs(-math.inf, 9, ((65, -math.inf),)),)
        made: Any = {"request": work.request, "attempt": work.attempt}
        worker.send(identity, Tokens(**made, first=0, tokens=(65,), logprobs=told))
        worker.send(identity, Tokens(**made, first=1, tokens=(66,), finish=FinishReason.STOP))

    async with cluster(folder, Role.BOTH) as at:
        at.workers["both-0"].script = never
        status, body = await post(http, at, "/v1/completions", {"model": "fake", "prompt": "x", "logprobs": 1})
        assert status == 200
        assert body["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0, -9999.0]


async def test_continuous_usage(folder: Path) -> None:
    """vLLM's: each event has the usage so far, and the last one is the whole's."""
    async with served(folder, *APART) as (_, client):
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        counts = []
        async for event in await client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=5, stream=True, stream_options=options
        ):
            assert event.usage is not None
            counts.append(event.usage.completion_tokens)
        assert counts == sorted(counts)
        assert counts[-1] == 5


async def test_token_ids_of_prompt_and_answer(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, Role.BOTH) as at:
        ask = {"model": "fake", "prompt": [1, 2], "max_tokens": 3, "return_token_ids": True}
        _, body = await post(http, at, "/v1/completions", ask)
        assert body["choices"][0]["token_ids"] == list(ANSWER[:3].encode())
        assert body["choices"][0]["prompt_token_ids"] == [1, 2]
        async with http.post(f"{at.url}/v1/completions", json={**ask, "stream": True}) as response:
            choices = [event["choices"][0] async for event in events(response)]
        assert choices[0]["prompt_token_ids"] == [1, 2]
        assert sum("prompt_token_ids" in choice for choice in choices) == 1
        assert [token for choice in choices for token in choice["token_ids"]] == list(ANSWER[:3].encode())
        _, body = await post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": 3, "return_token_ids": True})
        assert bytes(body["prompt_token_ids"]).decode() == "user: What is the capital of France?\nassistant:"


async def test_stop_strings_and_characters_across_tokens(folder: Path) -> None:
    """Every token is one byte: a stop string is never seen in part, a character never lost or halved."""
    text = "日本🙂 and STOP then"
    async with served(folder, Role.BOTH) as (at, client):
        at.workers["both-0"].script = says(text)
        for stream in (False, True):
            for stop, expected in ((["STOP"], "日本🙂 and "), (["xSTOP"], text), (["🙂 a", "nd"], "日本")):
                ask: Any = {"model": "fake", "prompt": "x", "max_tokens": 99, "stop": stop, "stream": stream}
                answer: Any = await client.completions.create(**ask)
                pieces = [event.choices[0].text async for event in answer] if stream else [answer.choices[0].text]
                assert "".join(pieces) == expected
                assert not any("\ufffd" in piece for piece in pieces)


# -- what is not understood --------------------------------------------------------------------------------------------


async def test_unknown_fields(folder: Path, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture) -> None:
    body = {**CHAT, "max_tokens": 1, "flavour": "sweet", "ünknown": 1, "stream_options": {"x": 1}}
    async with cluster(folder, Role.BOTH) as at:
        url = f"{at.url}/v1/chat/completions"
        for _ in range(2):
            async with http.post(url, json=body) as response:
                assert response.status == 200
                assert response.headers["X-Ignored-Fields"] == "flavour, %C3%BCnknown, stream_options.x"
        assert sum("'flavour'" in record.message for record in caplog.records) == 1
        async with http.post(url, json=body, headers={"Prefer": "respond-async, handling=strict"}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"], error["code"]) == (400, "flavour", "unknown_parameter")
        async with http.post(url, json={**CHAT, "max_tokens": 1}, headers={"Prefer": "handling=strict"}) as response:
            assert (response.status, response.headers["Preference-Applied"]) == (200, "handling=strict")
            assert "X-Ignored-Fields" not in response.headers


BAD_JSON: list[tuple[bytes, str]] = [
    (b'{"prompt": "a", "prompt": "b"}', "'prompt' is there twice"),
    (b'{"prompt": "a", "stream_options": {"x": 1, "x": 1}}', "'x' is there twice"),
    (b'{"prompt": "a", "temperature": NaN}', "NaN"),
    (b'{"prompt": "a", "temperature": -Infinity}', "Infinity"),
    (b'{"prompt": "a", "seed": %s}' % (b"1" * 5000), "thousands of digits"),
    (b'{"prompt": "\xff"}', "not UTF-8: byte 12"),
    ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
    (b'{"prompt": "\\ud83d"}', "surrogate"),
    (b'{"prompt": %s}' % (b"[" * 50_000), "nested too deeply"),
    (b'{"prompt": %s1%s}' % (b'{"a":' * 500, b"}" * 500), "prompt: expected"),
    (b"", "not valid JSON"),
    (b"[]", "must be a JSON object"),
    (b'\xef\xbb\xbf{"prompt": "a"}', "BOM"),
]


@pytest.mark.parametrize(("body", "says"), BAD_JSON, ids=range(len(BAD_JSON)))
async def test_bodies_that_are_no_plain_json(folder: Path, http: aiohttp.ClientSession, body: bytes, says: str) -> None:
    async with cluster(folder, Role.BOTH) as at:
        status, answer = await post(http, at, "/v1/completions", body)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert says in answer["error"]["message"], answer


async def test_a_prompt_of_ten_megabytes_holds_nobody_up(folder: Path, http: aiohttp.ClientSession) -> None:
    """Parsed and tokenized beside the loop, then refused by its length; what asks meanwhile is answered."""
    async with cluster(folder, Role.BOTH) as at:
        at.workers["both-0"].script = silent
        body = b'{"model": "fake", "prompt": "%b"}' % ("äb " * 2_600_000).encode()
        long = asyncio.ensure_future(post(http, at, "/v1/completions", body))
        answered = 0
        while not long.done():
            async with http.get(f"{at.url}/load") as response:
                answered += response.status == 200
        status, answer = await long
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answered > 1
        status, answer = await post(http, at, "/v1/completions", b" " * (at.config.max_body_bytes + 1))
        assert status == 413
        assert at.service.active == 0


LONG = "ab cd " * 2000


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": LONG, "content": "x"}]},
        {"messages": [{"role": "user", "name": LONG, "content": "x"}]},
        {"messages": [{"role": "assistant", "reasoning_content": LONG, "content": "x"}]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"a": LONG})}}],
                }
            ]
        },
        {"messages": CHAT["messages"], "chat_template_kwargs": {"a": LONG}},
        {"messages": CHAT["messages"], "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]},
        {
            "messages": CHAT["messages"],
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"description": LONG}}},
        },
    ],
    ids=["role", "name", "reasoning", "calls", "options", "tools", "schema"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_whatever_is_long_in_a_conversation_is_no_work_of_the_loop(
    folder: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]
) -> None:
    threads: list[tuple[str, bool]] = []

    def watched(name: str, work: Any) -> Any:
        def watch(*arguments: Any, **named: Any) -> Any:
            threads.append((name, threading.current_thread() is threading.main_thread()))
            return work(*arguments, **named)

        return watch

    monkeypatch.setattr(conversation, "templated", watched("templated", conversation.templated))
    monkeypatch.setattr(_ByteTokenizer, "chat", watched("chat", _ByteTokenizer.chat))
    monkeypatch.setattr("pyengine.gateway.app.form_of", watched("form", form_of))
    async with cluster(folder, Role.BOTH) as at:
        monkeypatch.setattr(FakeWorker, "info", property(lambda self: long_context(self)))
        at.conductor.announce()
        while at.service.models["fake"].max_positions < 1 << 20:
            await asyncio.sleep(0)
        await post(http, at, path, {"model": "fake", "max_tokens": 1, **fields})
    assert [name for name, _ in threads] == ["templated", "chat", "form"][: 3 if path != "/tokenize" else 2]
    assert not any(on_loop for _, on_loop in threads)


async def test_long_lists_of_ids_are_no_work_of_the_loop(
    folder: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: set[tuple[str, bool]] = set()

    def spelled(*arguments: Any) -> Any:
        on_loop.add(("spell", threading.current_thread() is threading.main_thread()))
        return spell(*arguments)

    decode = _ByteTokenizer.decode

    def decoded(own: Any, ids: Any) -> str:
        if len(ids) > 5000:
            on_loop.add(("decode", threading.current_thread() is threading.main_thread()))
        return decode(own, ids)

    monkeypatch.setattr("pyengine.gateway.app.spell", spelled)
    monkeypatch.setattr(_ByteTokenizer, "decode", decoded)
    async with cluster(folder, Role.BOTH) as at:
        _, answer = await post(http, at, "/tokenize", {"prompt": "a" * 6000, "return_token_strs": True})
        assert answer["token_strs"] == ["a"] * 6000
        await post(http, at, "/v1/completions", {"prompt": [65] * 6000, "echo": True})
    assert on_loop == {("spell", False), ("decode", False)}


@pytest.mark.parametrize("where", ["response_format", "structured_outputs", "tools"])
def test_a_schema_that_no_worker_takes_is_never_written_out(where: str) -> None:
    """As nobody else runs while it is: only so much of it is as may be."""
    schema: dict[str, Any] = {"enum": [[] for _ in range(90_000)]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    fields: dict[str, dict[str, Any]] = {
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        "structured_outputs": {"structured_outputs": {"json": schema}},
        "tools": {"tools": [tool], "tool_choice": "required"},
    }
    body = json.dumps({"messages": CHAT["messages"], **fields[where]}).encode()
    tokenizer = _ByteTokenizer()
    tokenizer.template = "tools <tool_call>"
    with pytest.raises((ApiError, Unservable)) as error:
        form_of(gateway_openai.parse_chat(body)[0].wanted, tokenizer, [65])
    assert isinstance(error.value, ApiError | Unservable)
    assert error.value.param == where
    assert "characters; send a shorter one" in str(error.value)


async def test_tokenizing_is_bounded(
    folder: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(folder, Role.BOTH) as at:
        at.service.threads._size, at.service.threads._pieces = 64 << 20, 1
        status, answer = await post(http, at, "/v1/completions", {"model": "fake", "prompt": "a" * 5000})
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_a_template_that_raises_says_what(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, Role.BOTH) as at:
        options: Any = {"chat_template_kwargs": {"messages": []}}
        status, answer = await post(http, at, "/v1/chat/completions", {**CHAT, **options})
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "gets messages from this server" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ messages[0].content.nothing.more }}", "nothing"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
async def test_a_model_s_template_that_raises_is_the_request_s_error(
    folder: Path, http: aiohttp.ClientSession, template: str, says: str
) -> None:
    """It is code on a client's data: whatever it raises, that request is refused, and the next one served."""
    async with cluster(folder, Role.BOTH) as at:
        tokenizer = await at.service.tokenizer("bytes")
        good, tokenizer._template = tokenizer._template, _compile_template(template)  # type: ignore[attr-defined]
        for path in ("/v1/chat/completions", "/tokenize"):
            status, answer = await post(http, at, path, CHAT)
            assert (status, answer["error"]["param"]) == (400, "messages"), answer
            assert says in answer["error"]["message"]
        assert not at.conductor.routes and at.service.active == 0
        tokenizer._template = good  # type: ignore[attr-defined]
        assert (await post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": 2}))[0] == 200


# -- ids, times, the other endpoints -----------------------------------------------------------------------------------


async def test_request_ids(folder: Path, http: aiohttp.ClientSession) -> None:
    """Taken or made, echoed on every answer, errors and unknown paths too; what is none is refused."""
    async with cluster(folder, Role.BOTH) as at:
        for path, body in (("/v1/completions", {"prompt": "x", "max_tokens": 1}), ("/v1/completions", {}), ("/no", {})):
            for stream in (False, True):
                url, data = at.url + path, {"model": "fake", **body, "stream": stream}
                async with http.post(url, json=data, headers={"X-Request-Id": "my-1"}) as response:
                    assert response.headers.getall("X-Request-Id") == ["my-1"]
                    text = await response.text()
                    assert response.status != 200 or '"cmpl-my-1"' in text
                async with http.post(url, json=data) as response:
                    assert len(response.headers["X-Request-Id"]) == 24
        async with http.get(f"{at.url}/metrics", headers={"X-Request-Id": "m"}) as response:
            assert response.headers["X-Request-Id"] == "m"
        for bad in ("", "a b", "x" * 129, "ü"):
            async with http.get(f"{at.url}/version", headers={"X-Request-Id": bad}) as response:
                assert response.status == 400, bad
                assert (await response.json())["error"]["param"] == "X-Request-Id"


async def test_where_the_first_token_s_time_went(folder: Path, http: aiohttp.ClientSession) -> None:
    """On request: the parts are the prefill worker's and the gateway's own, and sum up to the whole."""

    def reports(worker: FakeWorker, identity: bytes, work: Work) -> None:
        made: Any = {"request": work.request, "attempt": work.attempt}
        worker.send(
            identity,
            PrefillReport(**made, cached=0, computed=9, queued=1e-5, loading=2e-5, computing=3e-5),
            Tokens(**made, first=0, tokens=(65,)),
        )

    async with cluster(folder, *APART) as at:
        at.workers["prefill-0"].script = reports
        names = ["tokenize", "schedule", "queue", "load", "prefill", "return", "held", "ttft", "handoff"]
        url, body = f"{at.url}/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": 3}
        async with http.post(url, json=body, headers={"Prefer": "server-timing"}) as response:
            parts = dict(part.split(";dur=") for part in response.headers["Server-Timing"].split(", "))
        assert list(parts) == names
        spent = {name: float(value) for name, value in parts.items()}
        assert (spent["queue"], spent["load"], spent["prefill"]) == (0.01, 0.02, 0.03)
        assert spent["ttft"] == pytest.approx(sum(spent[name] for name in names[:7]), abs=0.04)
        async with http.post(url, json=body | {"stream": True}, headers={"Prefer": "server-timing"}) as response:
            begun = response.headers["Server-Timing"]
            comments = [line async for line in response.content if line.startswith(b":")]
        assert "ttft;dur=" in begun
        assert len(comments) == 1
        assert b"handoff;dur=" in comments[0]
        async with http.post(url, json=body) as response:
            assert "Server-Timing" not in response.headers


async def test_tokenize_and_back(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, Role.BOTH) as at:
        _, one = await post(http, at, "/tokenize", {"model": "fake", "prompt": "é", "return_token_strs": True})
        strings = ["bytes:\\xc3", "bytes:\\xa9"]
        assert one == {"count": 2, "max_model_len": 1024, "tokens": [0xC3, 0xA9], "token_strs": strings}
        _, chat = await post(http, at, "/tokenize", {"model": "fake", "messages": CHAT["messages"]})
        _, back = await post(http, at, "/detokenize", {"model": "fake", "tokens": chat["tokens"]})
        assert back == {"prompt": "user: What is the capital of France?\nassistant:"}
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt"),
            ("/detokenize", {"tokens": [258]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {}, "tokens"),
        ):
            status, answer = await post(http, at, path, {"model": "fake", **body})
            assert (status, answer["error"]["param"]) == (400, param), (path, body)


async def test_models_version_load(folder: Path, http: aiohttp.ClientSession) -> None:
    async with served(folder, Role.BOTH) as (at, client):
        assert (await client.models.retrieve("fake")).id == "fake"
        with pytest.raises(openai.NotFoundError, match="'other/one'"):
            await client.models.retrieve("other/one")
        async with http.get(f"{at.url}/version") as response:
            assert await response.json() == {"version": installed_version()}
        at.workers["both-0"].script = silent
        asking = asyncio.ensure_future(post(http, at, "/v1/chat/completions", CHAT))
        await asyncio.wait_for(at.workers["both-0"].arrived.wait(), PATIENCE)
        async with http.get(f"{at.url}/load") as response:
            assert await response.json() == {"server_load": 1}
        asking.cancel()
        await asyncio.wait_for(at.workers["both-0"].aborted.wait(), PATIENCE)


async def test_usage_is_exact_after_a_retry(folder: Path, http: aiohttp.ClientSession) -> None:
    """What an attempt that failed had sent is counted once, and the prompt's reuse is the first prefill's."""

    def fails_once(worker: FakeWorker, identity: bytes, work: Work) -> None:
        if work.attempt == 0:
            failing("retry")(worker, identity, work)
        else:
            says("xyz", each=False)(worker, identity, work)

    async with cluster(folder, Role.BOTH, Role.BOTH) as at:
        for worker in at.workers.values():
            worker.script = fails_once
        asked = {**CHAT, "max_tokens": 3, "stream_options": {"include_usage": True}}
        _, whole = await post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": 3})
        _, _, streamed = await read_stream(http, at, asked)
        assert whole["usage"] == streamed[-1]["usage"]
        assert whole["usage"]["completion_tokens"] == 3
        assert len(at.conductor.routes) == 4


# -- clients that misbehave --------------------------------------------------------------------------------------------


async def test_a_reader_that_stops_is_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer outgrows what socket buffers hold; the client takes nothing, and its request ends with a reason."""
    monkeypatch.setattr(gateway_exchange, "STALL", 0.2)
    async with cluster(folder, Role.BOTH) as at:
        sent: list[int] = []

        def talks(worker: FakeWorker, identity: bytes, work: Work) -> None:
            made: Any = {"request": work.request, "attempt": work.attempt}

            def more() -> None:
                if worker.aborts or worker.socket.closed:
                    return
                first = sum(sent)
                if first >= 900_000:  # more than any buffer takes, and no end
                    return
                sent.append(5000)
                worker.send(identity, Tokens(**made, first=first, tokens=(65,) * 5000))
                asyncio.get_running_loop().call_later(0.001, more)

            more()

        at.workers["both-0"].script = talks
        monkeypatch.setattr(FakeWorker, "info", property(lambda self: long_context(self)))
        at.conductor.announce()
        while at.service.models["fake"].max_positions < 1 << 20:
            await asyncio.sleep(0)
        body = json.dumps({"prompt": "x", "max_tokens": 1_000_000, "stream": True, "return_token_ids": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(at.url.rpartition(":")[2])))
        client.sendall(head.encode() + body)
        await asyncio.wait_for(at.workers["both-0"].aborted.wait(), PATIENCE)
        assert at.service.active == 0
        assert b'finished_reason="slow_reader"} 1' in at.service.metrics_text()
        client.close()


@pytest.mark.parametrize("leaves", [False, True])
async def test_what_a_slow_reader_is_owed_waits_as_ids(
    folder: Path, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is made for a client that takes nothing; it gets all of it once it does, in order, and when it leaves
    instead its request ends at once.
    """
    total, step = 900_000, 5000
    async with cluster(folder, Role.BOTH) as at:
        full = asyncio.Event()
        when_open = Line.when_open

        def watched(line: Line, call: Any) -> None:
            full.set()
            when_open(line, call)

        monkeypatch.setattr(Line, "when_open", watched)

        def talks(worker: FakeWorker, identity: bytes, work: Work) -> None:
            made: Any = {"request": work.request, "attempt": work.attempt}

            def more(first: int) -> None:
                if worker.aborts or worker.socket.closed or first == total:
                    return
                worker.send(identity, Tokens(**made, first=first, tokens=tuple(65 + at % 26 for at in range(step))))
                asyncio.get_running_loop().call_soon(more, first + step)

            more(0)

        at.workers["both-0"].script = talks
        monkeypatch.setattr(FakeWorker, "info", property(lambda self: long_context(self)))
        at.conductor.announce()
        while at.service.models["fake"].max_positions < 1 << 20:
            await asyncio.sleep(0)
        body = json.dumps({"prompt": "x", "max_tokens": total, "stream": True, "return_token_ids": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(at.url.rpartition(":")[2])))
        client.sendall(head.encode() + body)
        await asyncio.wait_for(full.wait(), PATIENCE)
        if leaves:
            client.close()
            await asyncio.wait_for(at.workers["both-0"].aborted.wait(), PATIENCE)
            assert at.service.active == 0
            return
        client.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=client)
        received = b""
        while b"data: [DONE]" not in received[-64:]:
            piece = await asyncio.wait_for(reader.read(1 << 20), PATIENCE)
            assert piece, "the answer is cut"
            received += piece
        writer.close()
        lines = _dechunked(received.partition(b"\r\n\r\n")[2]).split(b"\n\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        ids = [token for event in events for token in event["choices"][0]["token_ids"]]
        assert ids == [65 + at % step % 26 for at in range(total)]
        assert "".join(event["choices"][0]["text"] for event in events) == bytes(ids).decode()
        assert events[-1]["choices"][0]["finish_reason"] == "length"


def _dechunked(body: bytes) -> bytes:
    whole, at = b"", 0
    while size := int(body[at : (end := body.index(b"\r\n", at))], 16):
        whole += body[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
    return whole


original_info: Any = FakeWorker.info


def long_context(worker: FakeWorker) -> Any:
    return msgspec.structs.replace(original_info.fget(worker), max_positions=1 << 20)


def test_the_kernel_drops_a_client_that_takes_nothing() -> None:
    """What is left in buffers when a stalled stream is dropped would keep its connection for ever."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        with accepted:
            limit = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert limit == 1000 * STALL
        assert client.fileno() > 0


async def test_a_thousand_idle_connections(folder: Path, http: aiohttp.ClientSession) -> None:
    async with cluster(folder, Role.BOTH) as at:
        port = int(at.url.rpartition(":")[2])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(1000)]
        status, _ = await post(http, at, "/v1/chat/completions", {**CHAT, "max_tokens": 2})
        assert status == 200
        for _, writer in held:
            writer.close()
