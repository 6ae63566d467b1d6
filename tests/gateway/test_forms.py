"""Goal: structured output, tools and reasoning as a client of the HTTP API sees them, streamed and not.

Method: a real HTTP server (cluster.py) and the `openai` package; a worker that says what the test tells it to, or that
draws at random from what the request's grammar allows.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import numpy as np
import openai
import pytest

from pyengine.backends.fake import EOS, VOCAB
from pyengine.gateway import service as gateway_service
from pyengine.grammar import Grammars
from pyengine.scheduler.messages import PrefillReport, Tokens, Work
from pyengine.scheduler.types import FinishReason, Role
from pyengine.text import _ByteTokenizer
from tests.gateway.cluster import Cluster, FakeWorker, cluster
from tests.gateway.test_structured import ADD, PARAMETERS, TOOLS

USER: Any = [{"role": "user", "content": "What?"}]
BYTES = Grammars("bytes", VOCAB, frozenset({EOS}))
Script = Callable[[FakeWorker, bytes, Work], None]


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: the name of a unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="pyg") as name:
        yield Path(name)


@pytest.fixture
async def at(folder: Path) -> AsyncIterator[Cluster]:
    async with cluster(folder, Role.BOTH) as made:
        yield made


def client(at: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="none", max_retries=0)


def says(at: Cluster, answer: Callable[[Work], list[int]], width: int = 1) -> None:
    """The worker's script: these tokens, so many in a message, or as many as the request allows."""

    def script(worker: FakeWorker, identity: bytes, work: Work) -> None:
        ids = answer(work)
        most = work.sampling.max_tokens
        end = FinishReason.STOP if len(ids) <= most else FinishReason.LENGTH
        ids = ids[:most]
        head: Any = {"request": work.request, "attempt": work.attempt}
        messages: list[Any] = [PrefillReport(**head, cached=0, computed=len(work.token_ids) // 4)]
        for first in range(0, len(ids), width):
            part = tuple(ids[first : first + width])
            messages.append(Tokens(**head, first=first, tokens=part, finish=end if first + width >= len(ids) else None))
        worker.send(identity, *messages)

    at.workers["both-0"].script = script


def text(answer: str) -> Callable[[Work], list[int]]:
    return lambda _: [*answer.encode(), EOS]


def at_random(work: Work) -> list[int]:
    """What a model without a mind would say: anything that the grammar allows."""
    assert work.sampling.grammar is not None
    random = np.random.default_rng(work.sampling.seed)
    matcher = BYTES.matcher(work.sampling.grammar)
    ids: list[int] = []
    while not ids or ids[-1] != EOS:
        BYTES.fill([matcher])
        assert matcher.mask is not None and matcher.flaw is None
        may = np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")).tolist()
        ids.append(EOS if EOS in may else int(random.choice(may)))
        matcher.accept(ids[-1:])
    return ids


async def both(at: Cluster, **fields: Any) -> tuple[Any, Any, Any]:
    """The message, the finish reason and the usage; as a stream they are the same."""
    async with client(at) as one:
        fields = {"model": "fake", "messages": USER, "seed": 5, "max_tokens": 900, **fields}
        whole = await one.chat.completions.create(**fields)
        said: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
        finish, usage = None, None
        stream = await one.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
        async for event in stream:
            usage = event.usage or usage
            for choice in event.choices:
                assert finish is None, "nothing comes behind the end"
                finish = choice.finish_reason
                said["content"] += choice.delta.content or ""
                said["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
                for call in choice.delta.tool_calls or []:
                    if call.id is not None:
                        assert call.index == len(said["calls"])
                        said["calls"].append([call.function.name, ""])
                    said["calls"][call.index][1] += call.function.arguments or ""
        message = whole.choices[0].message
        calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
        assert len({call.id for call in message.tool_calls or []}) == len(calls)
        assert (message.content or "") == said["content"]
        assert (getattr(message, "reasoning_content", None) or "") == said["reasoning_content"]
        assert calls == said["calls"]
        assert whole.choices[0].finish_reason == finish
        assert whole.usage == usage
        return message, finish, usage


async def test_json_of_a_schema(at: Cluster) -> None:
    says(at, at_random)
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": ADD, "strict": True}}
    message, finish, _ = await both(at, response_format=form)
    assert jsonschema_rs.is_valid(ADD, json.loads(message.content))
    assert finish == "stop"
    async with client(at) as one:
        chosen = await one.completions.create(
            model="fake", prompt="x", max_tokens=50, extra_body={"structured_outputs": {"choice": ["ja", "nein"]}}
        )
    assert chosen.choices[0].text in ("ja", "nein")


async def test_a_call_that_must_be(at: Cluster) -> None:
    says(at, at_random, width=7)
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        message, finish, _ = await both(at, tools=TOOLS, tool_choice=choice)
        assert (finish, message.content) == ("tool_calls", None)
        for call in message.tool_calls:
            assert jsonschema_rs.is_valid(PARAMETERS[call.function.name], json.loads(call.function.arguments))


CALLS = (
    "I look.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Zürich {👍}"}}\n</tool_call>\n<tool_call>\n'
    '{"name": "now", "arguments": {}}\n</tool_call>'
)


@pytest.mark.parametrize("width", [1, 5, 1000])
async def test_calls_that_may_be(at: Cluster, width: int) -> None:
    says(at, text(CALLS), width)
    message, finish, usage = await both(at, tools=TOOLS)
    assert message.content == "I look."
    assert [call.function.name for call in message.tool_calls] == ["weather", "now"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Zürich {👍}"}
    assert (finish, usage.completion_tokens) == ("tool_calls", len(CALLS.encode()) + 1)
    # Who has no tools, or wants none called, is told what was said.
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message, finish, _ = await both(at, **fields)
        assert (message.content, message.tool_calls, finish) == (CALLS, None, "stop")


async def test_arguments_that_are_cut(at: Cluster) -> None:
    says(at, text(CALLS))
    cut = CALLS.index("rich")
    message, finish, _ = await both(at, tools=TOOLS, max_tokens=len(CALLS[:cut].encode()))
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments, finish) == ("weather", '{"city": "Zü', "length")


async def test_a_conversation_with_calls_goes_on(at: Cluster) -> None:
    says(at, text(CALLS))
    tools = [TOOLS[2]]  # what the scripted model holds is short
    message, _, _ = await both(at, tools=tools, max_tokens=200)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls]
    says(at, text("7 °C at noon."))
    messages = [*USER, message.to_dict(), *results]
    message, finish, _ = await both(at, tools=tools, messages=messages, max_tokens=50)
    assert (message.content, finish) == ("7 °C at noon.", "stop")
    prompt = np.frombuffer(at.workers["both-0"].work[-1].token_ids, "<u4").astype(np.uint8).tobytes().decode()
    assert '{"name": "weather", "arguments": {"city": "Zürich {👍}"}}' in prompt
    assert prompt.count("<tool_response>\n7\n</tool_response>") == 2


class Thinker(_ByteTokenizer):
    template = "<think>"


async def test_reasoning_is_told_apart_and_counted(at: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    loaded.set_result(Thinker())
    at.service._tokenizers["bytes"] = loaded
    says(at, text("<think>\nHm, ü?\n</think>\n\nYes.\n"), width=4)
    message, finish, usage = await both(at)
    assert (message.reasoning_content, message.content, finish) == ("Hm, ü?", "Yes.\n", "stop")
    assert usage.completion_tokens_details.reasoning_tokens == len("<think>\nHm, ü?\n</think>".encode())
    says(at, text("Yes."))
    message, _, usage = await both(at)
    assert (message.content, usage.completion_tokens_details.reasoning_tokens) == ("Yes.", 0)
    says(at, at_random)
    message, _, _ = await both(at, extra_body={"structured_outputs": {"regex": "[ab]{2}"}})
    assert message.content in ("aa", "ab", "ba", "bb")


THOUGHTS = {
    "<think>\nHm, ü?\n</think>\n\nYes.\n": "<think>\nHm, ü?\n</think>",
    "Yes.": "",
    "Hm?</think>A": "Hm?</think>",
}


@pytest.mark.parametrize("width", [1, 5, 99])
async def test_reasoning_of_completions_is_counted_and_left_in_the_text(at: Cluster, width: int) -> None:
    """Each prompt for itself: of the last one the model's reasoning has begun."""
    loaded: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    loaded.set_result(Thinker())
    at.service._tokenizers["bytes"] = loaded
    prompts = {"a": "<think>\nHm, ü?\n</think>\n\nYes.\n", "b": "Yes.", "c<think>\n": "Hm?</think>A"}

    def answer(work: Work) -> list[int]:
        prompt = np.frombuffer(work.token_ids, "<u4").astype(np.uint8).tobytes().decode()
        return [*prompts[prompt].encode(), EOS]

    says(at, answer, width)
    expected = sum(len(THOUGHTS[text].encode()) for text in prompts.values())
    asked: Any = {"model": "fake", "prompt": list(prompts), "n": 2, "max_tokens": 99, "temperature": 1}
    async with client(at) as one:
        whole = await one.completions.create(**asked)
        counted: Any = {"include_usage": True, "continuous_usage_stats": True}
        texts, counts = ["", "", "", "", "", ""], []
        async for event in await one.completions.create(**asked, stream=True, stream_options=counted):
            for choice in event.choices:
                texts[choice.index] += choice.text
            counts.append(event.usage)
    assert [choice.text for choice in whole.choices] == texts == [text for text in prompts.values() for _ in range(2)]
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == 2 * expected
    assert counts[-1] == whole.usage
    running = [usage.completion_tokens_details.reasoning_tokens for usage in counts]
    assert running == sorted(running)


async def test_several_answers_each_have_their_calls(at: Cluster) -> None:
    says(at, text(CALLS))
    async with client(at) as one:
        answer = await one.chat.completions.create(model="fake", messages=USER, tools=TOOLS, n=3, max_tokens=900)
    assert [len(choice.message.tool_calls or ()) for choice in answer.choices] == [2, 2, 2]


async def test_what_cannot_be_followed_never_leaves_the_gateway(at: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async with client(at) as one, aiohttp.ClientSession() as http:
        for fields, param in (
            ({"extra_body": {"structured_outputs": {"regex": "["}}}, "structured_outputs"),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
                "response_format",
            ),
            ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
            (
                {
                    "tools": [
                        {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
                    ],
                    "tool_choice": "required",
                },
                "tools",
            ),
        ):
            with pytest.raises(openai.BadRequestError) as error:
                await one.chat.completions.create(model="fake", messages=USER, **fields)
            assert error.value.param == param
        assert not at.conductor.routes
        # Many that take long hold up nobody else: they are sent away.
        monkeypatch.setattr(gateway_service, "GRAMMAR_PATIENCE", 0.0)
        body = {"model": "fake", "messages": USER, "structured_outputs": {"regex": "late"}}
        async with http.post(f"{at.url}/v1/chat/completions", json=body) as response:
            assert response.status == 429
            assert "Retry-After" in response.headers
