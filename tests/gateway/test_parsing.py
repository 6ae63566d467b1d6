"""Goal: reasoning, content and calls of tools are told apart as the models of each family write them, in whatever
pieces the text comes, and wherever it is cut.

Method: answers as the families' templates and documents show them, cut at every character, and into random pieces;
random calls are written and read again.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.chat.parsing import AnswerParser, CallPiece, Content, Delta, Reasoning, ReasoningCount
from pyengine.chat.tools import DIALECTS, Dialect
from pyengine.chat.tools.hermes import HERMES
from pyengine.chat.tools.llama3 import LLAMA3
from pyengine.chat.tools.mistral import MISTRAL
from pyengine.text import Tokenizer

NAMES = ("weather", "add", "größe")
Parsed = tuple[str, str, list[tuple[str, str]], str]


def parse(
    dialect: Dialect | None, pieces: list[str], end: str = "stop", reasons: bool = False, thinking: bool = False
) -> Parsed:
    """Reasoning, content, calls (name, arguments) and the reason, of an answer that comes in these pieces."""
    digits = itertools.count()
    parser = AnswerParser(dialect, NAMES, digits=lambda: f"{next(digits):016x}", reasons=reasons, thinking=thinking)
    deltas: list[Delta] = [delta for piece in pieces for delta in parser.push(piece)]
    last, finish = parser.finish(end)
    text = {Content: "", Reasoning: ""}
    calls: list[list[str]] = []
    for delta in deltas + last:
        match delta:
            case Content(more) | Reasoning(more):
                assert more, "nothing is told of nothing"
                text[type(delta)] += more
            case CallPiece(call=index, id=id, name=name, arguments=arguments):
                if name is not None:
                    assert index == len(calls) and id
                    assert dialect is not MISTRAL or (len(id) == 9 and id.isalnum())
                    calls.append([name, ""])
                assert index == len(calls) - 1
                calls[index][1] += arguments
    return text[Reasoning], text[Content], [(name, arguments) for name, arguments in calls], finish


W = '{"city": "Zürich"}'
ODD = '{"text": "a \\"}{\\" </tool_call> [TOOL_CALLS] 👍 \\\\", "n": [1, {"x": null}]}'
#: dialect, what the model writes, content, calls.
CASES: dict[str, tuple[Dialect, str, str, list[tuple[str, str]]]] = {
    "plain": (HERMES, "Just text, 1 < 2 <b>.\n", "Just text, 1 < 2 <b>.\n", []),
    "hermes": (
        HERMES, f'<tool_call>\n{{"name": "weather", "arguments": {W}}}\n</tool_call>', "", [("weather", W)]
    ),
    "text before": (
        HERMES, f'I look.\n\n<tool_call>{{"name":"weather","arguments":{W}}}</tool_call>\n', "I look.", [("weather", W)]
    ),
    "parallel": (
        HERMES,
        f'<tool_call>\n{{"name": "weather", "arguments": {W}}}\n</tool_call>\n<tool_call>\n'
        f'{{"arguments": {ODD}, "name": "add"}}\n</tool_call>',
        "",
        [("weather", W), ("add", ODD)],
    ),
    "a bracket too many": (
        HERMES, f'<tool_call>{{"name": "add", "arguments": {W}}}}}</tool_call>', "", [("add", W)]
    ),
    "a bracket too few": (HERMES, f'<tool_call>{{"name": "add", "arguments": {W}\n</tool_call>', "", [("add", W)]),
    "never closed": (
        HERMES,
        f'<tool_call>{{"name": "add", "arguments": {W}}}<tool_call>{{"name": "add", "arguments": {ODD}}}',
        "",
        [("add", W), ("add", ODD)],
    ),
    "arguments in a string": (
        HERMES, f'<tool_call>{{"name": "add", "arguments": {json.dumps(ODD)}}}</tool_call>', "", [("add", ODD)]
    ),
    "no arguments": (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    "no call": (HERMES, "a <tool_call>add(1)</tool_call>!", "a <tool_call>add(1)</tool_call>!", []),
    "no name": (HERMES, '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    "llama": (LLAMA3, f'{{"name": "weather", "parameters": {W}}}', "", [("weather", W)]),
    "llama, tagged": (LLAMA3, f'<|python_tag|>{{"name": "weather", "parameters": {W}}}\n', "", [("weather", W)]),
    "llama, parallel": (
        LLAMA3,
        f'{{"name": "weather", "parameters": {W}}}; {{"type": "function", "name": "add", "parameters": {ODD}}}',
        "",
        [("weather", W), ("add", ODD)],
    ),
    "llama, JSON": (LLAMA3, '\n{"name": "Bob", "parameters": {}} :)', '\n{"name": "Bob", "parameters": {}} :)', []),
    "llama, text": (LLAMA3, " Hello {}", " Hello {}", []),
    "llama, Python": (LLAMA3, "<|python_tag|>print(1)", "print(1)", []),
    "mistral": (MISTRAL, f'[TOOL_CALLS] [{{"name": "weather", "arguments": {W}}}]', "", [("weather", W)]),
    "mistral, parallel": (
        MISTRAL,
        f'Now.[TOOL_CALLS][{{"name": "weather", "arguments": {W}}}, {{"name": "add", "arguments": {ODD}}}]',
        "Now.",
        [("weather", W), ("add", ODD)],
    ),
    "mistral 11": (
        MISTRAL, f"[TOOL_CALLS]weather[ARGS]{W}[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{ODD}", "",
        [("weather", W), ("add", ODD)],
    ),
    "mistral, text": (MISTRAL, "A [list] [TOOL", "A [list] [TOOL", []),
    "mistral, no call": (MISTRAL, "[TOOL_CALLS] [3]", "[TOOL_CALLS] [3]", []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_models_write(name: str) -> None:
    """Whole, one character at a time, and in two pieces cut anywhere."""
    dialect, text, content, calls = CASES[name]
    expected = ("", content, calls, "tool_calls" if calls else "stop")
    assert parse(dialect, [text]) == expected
    assert parse(dialect, list(text)) == expected
    for cut in range(len(text)):
        assert parse(dialect, [text[:cut], text[cut:]]) == expected


@pytest.mark.parametrize("name", CASES)
def test_cut_by_length_nothing_is_invented(name: str) -> None:
    """At every character: what has been told is a beginning of the whole, and the reason is still the length."""
    dialect, text, _, calls = CASES[name]
    for cut in range(len(text)):
        _, said, called, finish = parse(dialect, [text[:cut]], "length")
        assert finish == "length"
        assert len(called) <= len(calls)
        for (name_, arguments), (whole, all_) in zip(called, calls, strict=False):
            assert name_ == whole
            # Arguments in a string are told when it is whole.
            assert all_.startswith(arguments)
        if not called:
            # What may have become a call is text if it has not: it was written, and belongs to somebody.
            assert said.removeprefix("<|python_tag|>") == text[:cut].removeprefix("<|python_tag|>")


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(CASES)), st.data())
def test_any_pieces_say_the_same(name: str, data: st.DataObject) -> None:
    """Of answers that follow each other, too, with reasoning before, and cut anywhere."""
    dialect, text, _, _ = CASES[name]
    text = data.draw(st.sampled_from(["", "<think>", "<think>\nI ", "\n <think>x</think>\n\n"])) + text
    text = text[: data.draw(st.integers(0, len(text)))] + data.draw(st.sampled_from(["", text, "</think>", "<", "{"]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    reasons, thinking = data.draw(st.booleans()), data.draw(st.booleans())
    assert parse(dialect, pieces, "stop", reasons, thinking) == parse(dialect, [text], "stop", reasons, thinking)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def written(dialect: Dialect, calls: list[tuple[str, Any]], indent: int | None, ascii_: bool) -> str:
    def dumps(value: Any) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ascii_)

    if dialect is HERMES:
        return "\n".join(f"<tool_call>\n{dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)
    if dialect is LLAMA3:
        return "; ".join(dumps({"name": n, "parameters": a}) for n, a in calls)
    return "[TOOL_CALLS]" + dumps([{"name": n, "arguments": a} for n, a in calls])


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(DIALECTS),
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=4), JSON, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_what_is_written_is_read(
    dialect: Dialect, calls: list[tuple[str, Any]], indent: int | None, ascii_: bool
) -> None:
    text = written(dialect, calls, indent, ascii_)
    _, content, found, finish = parse(dialect, list(text))
    assert (content, finish) == ("", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


@pytest.mark.parametrize("dialect", [HERMES, LLAMA3, MISTRAL], ids=["hermes", "llama3", "mistral"])
def test_a_name_that_is_nested_for_ever_is_none(dialect: Dialect) -> None:
    """A model may write brackets until its answer is full."""
    text = written(dialect, [("add", {})], None, False).replace('"add"', "[" * 200_000 + "]" * 200_000)
    assert parse(dialect, [text])[1:] == (text, [], "stop")


THOUGHTS: dict[str, tuple[str, bool, str, str]] = {
    "thinks": ("<think>\nHm, 1 < 2.\n</think>\n\nYes.\n", False, "Hm, 1 < 2.", "Yes.\n"),
    "goes on thinking": ("\nHm.\n</think>\nYes.", True, "Hm.", "Yes."),
    "marks it again": ("<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
    "does not": (" Yes <think>.", False, "", " Yes <think>."),
    "thinks of nothing": ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
    "never ends": ("<think>Hm </thin", False, "Hm </thin", ""),
    "never begins": ("  <thi", False, "", "  <thi"),
    "never answers": ("Hm", True, "Hm", ""),
    "twice": ("<think>a</think> b <think>c</think>", False, "a", "b <think>c</think>"),
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning_is_told_apart(name: str) -> None:
    text, thinking, reasoning, content = THOUGHTS[name]
    for cut in range(len(text) + 1):
        pieces = [text[:cut], text[cut:]]
        assert parse(None, pieces, reasons=True, thinking=thinking) == (reasoning, content, [], "stop")
    assert parse(None, [text])[1] == text, "who cannot reason is not looked at"
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    if content == "Yes.":
        expected = (reasoning, content, [("add", "{}")], "tool_calls")
        assert parse(HERMES, list(text + call), reasons=True, thinking=thinking) == expected


@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning_tokens_are_counted_one_by_one(name: str) -> None:
    """A byte is a token here: so many as stand before the answer, marks included, however they come."""
    text, thinking, _, _ = THOUGHTS[name]
    ids = list(text.encode())
    reasons = thinking or text.lstrip().startswith("<think>")
    end = text.find("</think>")
    expected = 0 if not reasons else len(ids) if end < 0 else end + len("</think>")
    for cut in range(0, len(ids) + 1, 3):
        count = ReasoningCount(Tokenizer.load("bytes"), {}, thinking)
        count.push(ids[:cut])
        count.push(ids[cut:])
        assert count.tokens == expected
