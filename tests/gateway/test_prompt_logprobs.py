"""Goal: clients get logprobs of their prompts in OpenAI's and in vLLM's form, whole and streamed, once, and exact after
a retry. Method: a real gateway between a scripted conductor and workers (cluster.py), which tell tokens by their place.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from pyengine.scheduler.messages import Failed, PrefillReport, PromptTold, Tokens, Work
from pyengine.scheduler.types import FinishReason, Logprobs, Role

from .cluster import Cluster, FakeWorker, cluster, whole_answer

PROMPT = "abc"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pyg") as name:
        yield Path(name)


def told(work: Work, first: int, last: int) -> PromptTold:
    """Of the tokens at `first` to `last` (exclusive): the logprob is minus the place, the likeliest are "x", "y" ..."""
    most = work.sampling.prompt_logprobs or 0
    tops = [(ord("x") + rank, -rank / 8) for rank in range(most)]
    each = tuple(Logprobs(-float(at), 7, tuple(tops)) for at in range(first, last))
    return PromptTold(request=work.request, attempt=work.attempt, first=first, logprobs=each)


def telling(worker: FakeWorker, identity: bytes, work: Work) -> None:
    """In two pieces, of which the second begins once more with the last of the first."""
    length = len(work.token_ids) // 4
    if work.part != "decode" and work.sampling.prompt_logprobs is not None and length > 1:
        worker.send(identity, told(work, 1, 2), told(work, 1, length))
    if work.sampling.logprobs is not None:
        return answering(worker, identity, work)
    whole_answer(worker, identity, work)


def answering(worker: FakeWorker, identity: bytes, work: Work) -> None:
    """As `whole_answer`, by a worker of role both, with logprobs."""
    made: Any = {"request": work.request, "attempt": work.attempt}
    count = work.sampling.max_tokens
    one = tuple(Logprobs(-0.5, 1, ((65, -0.5),)) for _ in range(count))
    tokens = Tokens(**made, first=0, tokens=(65,) * count, finish=FinishReason.LENGTH, logprobs=one)
    worker.send(identity, PrefillReport(**made, cached=0, computed=len(work.token_ids) // 4), tokens)


async def post(at: Cluster, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.post(at.url + path, json={"model": "fake", **body}) as response:
        return response.status, json.loads(await response.read())


async def test_echo_with_logprobs_is_openais(folder: Path) -> None:
    async with cluster(folder, Role.BOTH) as at:
        at.workers["both-0"].script = telling
        ask: dict[str, Any] = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 2}
        status, body = await post(at, "/v1/completions", {**ask, "n": 2})
        assert status == 200
        for choice in body["choices"]:
            assert choice["text"] == "abcAA"
            logprobs = choice["logprobs"]
            assert logprobs["tokens"] == ["a", "b", "c", "A", "A"] and logprobs["text_offset"] == [0, 1, 2, 3, 4]
            assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -0.5, -0.5]
            assert logprobs["top_logprobs"] == [
                None,
                {"x": 0.0, "b": -1.0},
                {"x": 0.0, "c": -2.0},
                {"A": -0.5},
                {"A": -0.5},
            ]
        asked = [work.sampling.prompt_logprobs for work in at.workers["both-0"].work]
        assert asked == [1, None], "the prompt is computed and told of once"
        assert body["usage"]["completion_tokens"] == 4 and "prompt_logprobs" not in body["choices"][0]

        client = openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="none")
        stream = await client.completions.create(model="fake", stream=True, **ask)
        tokens: list[str] = []
        values: list[Any] = []
        async for event in stream:
            for one in event.choices:
                if one.logprobs is not None:
                    tokens += one.logprobs.tokens or []
                    values += one.logprobs.token_logprobs or []
        assert tokens == ["a", "b", "c", "A", "A"] and values == [None, -1.0, -2.0, -0.5, -0.5]


async def test_prompt_logprobs_are_vllms(folder: Path) -> None:
    async with cluster(folder, Role.PREFILL, Role.DECODE) as at:
        for worker in at.workers.values():
            worker.script = telling
        status, body = await post(at, "/v1/completions", {"prompt": [97, 98], "prompt_logprobs": 2, "max_tokens": 2})
        assert status == 200
        x, y = {"logprob": 0.0, "rank": 1, "decoded_token": "x"}, {"logprob": -0.125, "rank": 2, "decoded_token": "y"}
        own = {"logprob": -1.0, "rank": 7, "decoded_token": "b"}
        assert body["choices"][0]["prompt_logprobs"] == [None, {"120": x, "121": y, "98": own}]
        assert [work.sampling.prompt_logprobs for worker in at.workers.values() for work in worker.work] == [2, 2]
        messages = [{"role": "user", "content": "hi"}]
        status, body = await post(at, "/v1/chat/completions", {"messages": messages, "prompt_logprobs": 0})
        assert status == 200 and len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
        assert body["prompt_logprobs"][0] is None and len(body["prompt_logprobs"][1]) == 1


async def test_each_asks_for_as_many_as_it_was_promised(folder: Path) -> None:
    async with cluster(folder, Role.BOTH) as at:
        at.workers["both-0"].script = telling
        ask = {"prompt": ["abc", "d"], "echo": True, "logprobs": 0, "prompt_logprobs": 3, "max_tokens": 1}
        status, body = await post(at, "/v1/completions", ask)
        assert status == 200 and at.workers["both-0"].work[0].sampling.prompt_logprobs == 3
        first, second = body["choices"]
        assert first["logprobs"]["top_logprobs"][:3] == [None, {"b": -1.0}, {"c": -2.0}]
        assert len(first["prompt_logprobs"][1]) == 4 and second["prompt_logprobs"] == [None]


async def test_a_prompt_can_be_scored_alone(folder: Path) -> None:
    async with cluster(folder, Role.BOTH) as at:
        at.workers["both-0"].script = telling
        ask: dict[str, Any] = {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 0}
        status, body = await post(at, "/v1/completions", ask)
        assert status == 200, body
        (choice,) = body["choices"]
        assert (status, choice["text"], choice["finish_reason"]) == (200, PROMPT, "length")
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
        assert body["usage"]["completion_tokens"] == 0 and body["usage"]["prompt_tokens"] == 3
        client = openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="none")
        text, finish = "", None
        async for event in await client.completions.create(model="fake", stream=True, **ask):
            for one in event.choices:
                text += one.text
                finish = one.finish_reason or finish
        assert (text, finish) == (PROMPT, "length")
        status, body = await post(at, "/v1/completions", {"prompt": PROMPT, "max_tokens": 0})
        assert status == 400 and body["error"]["param"] == "max_tokens"


async def test_nothing_is_reused_and_a_retry_tells_anew(folder: Path) -> None:
    """Keys of such a request are its own, of each attempt: who must tell finds nothing that another has computed."""

    def dies_halfway(worker: FakeWorker, identity: bytes, work: Work) -> None:
        failed = Failed(request=work.request, attempt=work.attempt, worker=worker.name, kind="retry", reason="scripted")
        worker.send(identity, told(work, 1, 5), failed)

    async with cluster(folder, Role.BOTH, Role.BOTH) as at:
        first, second = at.workers["both-0"], at.workers["both-1"]
        first.script, second.script = dies_halfway, telling
        ask = {"prompt": "x" * 40, "prompt_logprobs": 0, "max_tokens": 1, "cache_salt": "salt"}
        status, body = await post(at, "/v1/completions", ask)
        assert status == 200 and len(body["choices"][0]["prompt_logprobs"]) == 40
        first.script = telling
        assert (await post(at, "/v1/completions", ask))[0] == 200
        assert (await post(at, "/v1/completions", {**ask, "prompt_logprobs": None}))[0] == 200
        works = [*first.work, *second.work]
        assert len({work.root for work in works}) == len(works) == 4
        assert len({work.keys for work in works}) == 4


@pytest.mark.parametrize(
    ("field", "value", "more"),
    [
        ("prompt_logprobs", -1, {}),
        ("prompt_logprobs", 21, {}),
        ("prompt_logprobs", True, {}),
        ("prompt_logprobs", 1, {"stream": True}),
        ("max_tokens", -1, {"echo": True, "logprobs": 1}),
    ],
)
async def test_what_cannot_be_is_refused_by_name(folder: Path, field: str, value: Any, more: dict[str, Any]) -> None:
    async with cluster(folder, Role.BOTH) as at:
        status, body = await post(at, "/v1/completions", {"prompt": PROMPT, field: value, **more})
        assert status == 400 and body["error"]["param"] == field, body
