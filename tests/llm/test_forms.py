"""Goal: answers have the form that was asked for, as values of a type or calls of functions; what cannot be is refused.

Method: the fake backend chooses at random among the tokens that a grammar allows, so whatever a form lets through comes
sooner or later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import msgspec
import pytest

from pyengine.llm import LLM, StructuredOutputs
from pyengine.llm.functions import described
from pyengine.scheduler.types import SamplingParams

ASK = [{"role": "user", "content": "Hi"}]
SAMPLING = SamplingParams(temperature=1.0, max_tokens=900, seed=1)


class Color(msgspec.Struct):
    name: Literal["red", "blue"]
    warm: bool


@dataclass
class Pair:
    left: Color
    right: Literal[1, 2] = 1


class Told(TypedDict):
    yes: bool


def paint(color: Literal["red", "blue"], coats: Literal[1, 2] = 1) -> None:
    """Paints the wall.

    It takes a while.

    Args:
        color: of the paint
        coats (int): how many
    """


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    state = tmp_path_factory.mktemp("state")
    with LLM("fake", backend="fake", dram_bytes=1 << 22, pages=256, state_dir=state) as made:
        yield made


@pytest.mark.parametrize("kind", [Color, Pair, Told])
def test_answers_are_values_of_a_type(llm: LLM, kind: Any) -> None:
    for seed in range(3):
        sampling = msgspec.structs.replace(SAMPLING, seed=seed)
        for answer in (llm.chat(ASK, sampling, output=kind), *llm.generate("Hi", sampling, output=kind)):
            assert answer.finish_reason == "stop"
            assert answer.output == msgspec.json.decode(answer.text, type=kind)
    with llm.stream("Hi", sampling, output=kind) as stream:
        assert stream.completion().output == answer.output


def test_a_pydantic_model_is_a_type_too(llm: LLM) -> None:
    pydantic = pytest.importorskip("pydantic", reason="an optional library")
    model = pydantic.create_model("Verdict", yes=(bool, ...))
    assert isinstance(llm.chat(ASK, SAMPLING, output=model).output, model)


def test_an_answer_that_was_cut_says_so(llm: LLM) -> None:
    with pytest.raises(ValueError, match="raise max_tokens"):
        llm.generate("Hi", msgspec.structs.replace(SAMPLING, max_tokens=3), output=Color)


def test_other_forms(llm: LLM) -> None:
    (chosen,) = llm.generate("Hi", SAMPLING, structured=StructuredOutputs(choice=["left", "right"]))
    assert chosen.text in ("left", "right")
    (matched,) = llm.generate("Hi", SAMPLING, structured=StructuredOutputs(regex="[ab]{3}c"))
    assert re.fullmatch("[ab]{3}c", matched.text)


@pytest.mark.parametrize("choice", ["required", "paint"])
def test_calls_of_functions(llm: LLM, choice: str) -> None:
    answer = llm.chat(ASK, SAMPLING, tools=[paint], tool_choice=choice)
    assert answer.finish_reason == "tool_calls"
    for call in answer.tool_calls:
        assert call.name == "paint" and call.arguments is not None
        assert call.arguments["color"] in ("red", "blue") and call.arguments.get("coats", 1) in (1, 2)
        assert call.arguments == msgspec.json.decode(call.text)
    with llm.stream_chat(ASK, SAMPLING, tools=[paint], tool_choice=choice) as stream:
        pieces = [piece for each in stream for piece in each.calls]
        whole = stream.completion().tool_calls
    assert "".join(piece.arguments for piece in pieces) == "".join(call.text for call in whole)
    assert [(call.name, call.text) for call in whole] == [(call.name, call.text) for call in answer.tool_calls]
    # And the conversation goes on with them.
    said = {"role": "assistant", "content": answer.text, "tool_calls": [call.message() for call in whole]}
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in whole]
    assert llm.chat([*ASK, said, *results], SAMPLING, tools=[paint]).prompt_tokens > answer.prompt_tokens


def test_what_a_function_says_of_itself() -> None:
    function = described(paint).function
    assert (function.name, function.description) == ("paint", "Paints the wall.")
    assert function.parameters == {
        "type": "object",
        "properties": {
            "color": {"enum": ["blue", "red"], "description": "of the paint"},
            "coats": {"enum": [1, 2], "description": "how many", "default": 1},
        },
        "required": ["color"],
        "additionalProperties": False,
    }
    assert described({"type": "function", "function": {"name": "f"}}).function.name == "f"


def _untyped(a) -> None:  # type: ignore[no-untyped-def]
    pass


def _starred(*a: int) -> None:
    pass


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"output": object()}, "cannot be read from JSON"),
        ({"output": Color, "structured": StructuredOutputs(regex="a")}, "two forms"),
        ({"structured": StructuredOutputs()}, "exactly one"),
        ({"structured": StructuredOutputs(regex="(")}, "regex|grammar"),
        ({"tools": [_untyped]}, "no type"),
        ({"tools": [_starred]}, "plain one"),
        ({"tools": [lambda: None]}, "plain name"),
        ({"tools": [{"name": "f"}]}, "description of one"),
        ({"tools": [paint, paint]}, "one name"),
        ({"tools": [paint], "tool_choice": "sing"}, "no function 'sing'"),
        ({"tools": [paint], "tool_choice": "required", "output": Color}, "no other form"),
        ({"tool_choice": "required"}, "no tools"),
    ],
)
def test_what_cannot_be_is_refused(llm: LLM, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        llm.chat(ASK, SAMPLING, **asked)


def test_messages_that_are_none_are_named(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"messages\[1\]"):
        llm.chat([*ASK, {"content": "no role"}])
    with pytest.raises(ValueError, match="empty"):
        llm.chat([])


def test_several_conversations(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    other = [{"role": "user", "content": "Ho"}]
    assert [each.text for each in llm.chat([ASK, other], greedy)] == [
        llm.chat(ASK, greedy).text,
        llm.chat(other, greedy).text,
    ]
