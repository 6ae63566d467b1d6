"""Mistral: [TOOL_CALLS] and a list of {"name": ..., "arguments": {...}}; since their eleventh tokenizer [TOOL_CALLS],
the name, [ARGS] and the arguments, for each call. Source: mistral-common's instruct tokenizers and the chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pyengine.chat.tools.calls import SPACE, Arguments, Begin, Call, Event, Text, Value
from pyengine.chat.tools.dialect import Dialect, Marked, Tool, bodies, repeated

MARK, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser:
    def __init__(self, names: frozenset[str]) -> None:
        self._before = Marked(MARK)
        self._state: Callable[[str, list[Event]], str] = self._text
        self._call = Call()
        self._value = Value()
        #: Of what may still be no call, all that was read, or the name.
        self._head = ""
        self._called = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            text = self._state(text, events)
        return events

    def _text(self, text: str, events: list[Event]) -> str:
        said, rest = self._before.push(text)
        if said:
            events.append(Text(said))
        if rest is None:
            return ""
        self._state, self._head = self._opening, self._before.space + MARK
        return rest

    def _opening(self, text: str, events: list[Event]) -> str:
        """Behind the mark: a list, or a name."""
        if text[0] in SPACE:
            self._head += text[0]
            return text[1:]
        if text[0] == "[":
            self._state = self._listed
            self._head += "["
            return text[1:]
        self._state, self._head = self._named, ""
        return text

    def _listed(self, text: str, events: list[Event]) -> str:
        """In a list, before a call."""
        if text[0] in SPACE or text[0] == ",":
            self._head += text[0]
            return text[1:]
        if text[0] == "]":
            # Behind the list there is nothing.
            self._state, self._head = self._text, ""
            return text[1:]
        self._call, self._state = Call(), self._in_call
        return text

    def _in_call(self, text: str, events: list[Event]) -> str:
        new, at = self._call.push(text)
        events += new
        if new:
            self._head = ""
        if self._call.failed and not self._call.begun:
            events.append(Text(self._head + self._call.read))
            self._state, self._head = self._text, ""
            return text[at:]
        if self._call.ended or self._call.failed:
            self._state, self._head, self._called = self._listed, "", True
        return text[at:]

    def _named(self, text: str, events: list[Event]) -> str:
        """In the name of a call, to where its arguments begin."""
        self._head += text
        at = self._head.find("{")
        if at < 0:
            return ""
        name, rest = self._head[:at], self._head[at:]
        self._head = ""
        name = re.split(r"\[(?:CALL_ID|ARGS)\]", name)[0].strip()
        if not name:
            events.append(Text(self._before.space + MARK))
            self._state = self._text
            return rest
        events.append(Begin(name))
        self._called = True
        self._value, self._state = Value(), self._arguments
        return rest

    def _arguments(self, text: str, events: list[Event]) -> str:
        end = self._value.push(text)
        if end:
            events.append(Arguments(text[:end]))
        if self._value.ended:
            self._state = self._text
        return text[end:]

    def finish(self) -> list[Event]:
        held = ""
        if self._state == self._text:
            held = self._before.finish()
            held = "" if self._called and not held.strip() else held
        elif self._state == self._named:
            held = self._before.space + MARK + self._head
        elif self._state in (self._opening, self._listed):
            held = self._head
        elif self._state == self._in_call and not self._call.begun:
            held = self._head + self._call.read
        return [Text(held)] if held else []


def rules(tools: Sequence[Tool], most: int, marker: Callable[[str], str]) -> str:
    """The list: who has learned to write names writes lists as well, and reads them."""
    return f'calls: {marker(MARK)} "[" {repeated("body", SEPARATOR, most)} "]"\n' + bodies(tools, "arguments")


SEPARATOR = '", "'

MISTRAL = Dialect(
    name="mistral",
    markers=(MARK, ARGS, ID),
    speaks=lambda template: MARK in template,
    parser=MistralParser,
    rules=rules,
    # Its template takes ids of nine letters and digits only.
    call_id=lambda digits: digits[:9],
)
