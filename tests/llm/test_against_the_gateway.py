"""Goal: an `LLM` answers as a cluster does: same model, same request, same tokens, text, calls and counts.

Method: one server of the fake backend, asked over HTTP, and an LLM of the same model. Sampled with a seed, as a seed
fixes an answer whoever computes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from bench.server import Server
from pyengine.llm import LLM, Completion, StructuredOutputs
from pyengine.scheduler.types import SamplingParams

MODEL = "fake:max_positions=1024"
MESSAGES = [{"role": "user", "content": "What is it?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["left", "right"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 20},
    {"temperature": 1.0, "max_tokens": 20, "seed": 7, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.5},
    {"temperature": 1.0, "max_tokens": 60, "seed": 8, "stop": ["a", "Q"]},
    {"temperature": 1.0, "max_tokens": 9, "seed": 9, "ignore_eos": True, "min_tokens": 3},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("served")
    with Server("--dram-bytes", "32MiB", model=MODEL, backend="fake", state_dir=state) as server:
        yield server


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    state: Path = tmp_path_factory.mktemp("state")
    with LLM(MODEL, backend="fake", dram_bytes=8 << 20, pages=128, state_dir=state) as made:
        yield made


def ask(server: Server, path: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice, and the usage."""
    answer = httpx2.post(f"{server.base}/v1/{path}", json={"model": "fake", "return_token_ids": True, **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body["choices"][0], body["usage"]


def params(settings: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{**settings, "stop": tuple(settings.get("stop", ()))})


def same(answer: Completion, choice: dict[str, Any], usage: dict[str, Any]) -> None:
    assert answer.token_ids == choice["token_ids"]
    assert answer.finish_reason == choice["finish_reason"]
    assert answer.prompt_tokens == usage["prompt_tokens"]
    assert len(answer.token_ids) == usage["completion_tokens"]


@pytest.mark.parametrize("settings", SETTINGS)
def test_completions(server: Server, llm: LLM, settings: dict[str, Any]) -> None:
    choice, usage = ask(server, "completions", prompt="Once upon a time", **settings)
    (answer,) = llm.generate("Once upon a time", params(settings))
    same(answer, choice, usage)
    assert answer.text == choice["text"]


@pytest.mark.parametrize("settings", SETTINGS)
def test_chat(server: Server, llm: LLM, settings: dict[str, Any]) -> None:
    choice, usage = ask(server, "chat/completions", messages=MESSAGES, **settings)
    answer = llm.chat(MESSAGES, params(settings))
    same(answer, choice, usage)
    assert answer.text == (choice["message"]["content"] or "")


def test_tools(server: Server, llm: LLM) -> None:
    settings = {"temperature": 1.0, "max_tokens": 600, "seed": 3}
    choice, usage = ask(server, "chat/completions", messages=MESSAGES, tools=[TOOL], tool_choice="required", **settings)
    answer = llm.chat(MESSAGES, params(settings), tools=[TOOL], tool_choice="required")
    same(answer, choice, usage)
    calls = choice["message"]["tool_calls"]
    assert [(call.name, call.text) for call in answer.tool_calls] == [
        (call["function"]["name"], call["function"]["arguments"]) for call in calls
    ]
    assert calls and all(msgspec.json.decode(call["function"]["arguments"]) for call in calls)


def test_forms(server: Server, llm: LLM) -> None:
    settings = {"temperature": 1.0, "max_tokens": 200, "seed": 4}
    for form in ({"regex": "[a-f]{4,9}"}, {"choice": ["one", "two"]}, {"json": TOOL["function"]["parameters"]}):  # type: ignore[index]
        choice, usage = ask(server, "completions", prompt="Say:", structured_outputs=form, **settings)
        (answer,) = llm.generate("Say:", params(settings), structured=StructuredOutputs(**form))
        same(answer, choice, usage)
        assert answer.text == choice["text"]
