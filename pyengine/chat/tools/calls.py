"""A call as models write it, a JSON object with a name and arguments, read as it comes.

No text is read twice and none is thrown away: where what comes is no call, what was read is there to be shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from typing import NamedTuple, TypeAlias


class Text(NamedTuple):
    """Of the answer itself."""

    text: str


class Begin(NamedTuple):
    """A call of the function of this name."""

    name: str


class Arguments(NamedTuple):
    """More of the call's arguments, JSON as the model writes it."""

    text: str


Event: TypeAlias = Text | Begin | Arguments

SPACE = " \t\r\n"


class Value:
    """Finds the end of a JSON value. Knows strings and brackets, no more: what is between is the model's affair."""

    def __init__(self) -> None:
        self._depth = 0
        self._string = self._escaped = self._begun = False
        self.ended = False

    def push(self, text: str, at: int = 0) -> int:
        """Reads from `at` on; returns where the value ends, or the end of the text. What ends a number is behind it."""
        while at < len(text):
            character = text[at]
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._string = False
                    self.ended = not self._depth
            elif character == '"':
                self._string = self._begun = True
            elif character in "{[":
                self._depth += 1
                self._begun = True
            elif character in "}]":
                if not self._depth:
                    self.ended = True
                    return at
                self._depth -= 1
                self.ended = not self._depth
            elif not self._depth and self._begun and (character in SPACE or character == ","):
                self.ended = True
                return at
            elif character not in SPACE:
                self._begun = True
            at += 1
            if self.ended:
                return at
        return at


class Call:
    """Reads one object: {"name": ..., "arguments": {...}}, its keys in any order, "parameters" for arguments.

    known: names that make it a call; None: any does. Until it is known to be one nothing is told, and `read` has all of
    it. Arguments that are a string are what the string says.
    """

    def __init__(self, known: Container[str] | None = None) -> None:
        self._known = known
        self._state: Callable[[str, int], int] = self._open
        self._value = Value()
        self._key = self._piece = self._early = ""
        self._name: str | None = None
        self._events: list[Event] = []
        self._has_arguments = False
        self.read = ""
        #: It is a call; it is over; it is none and never will be.
        self.begun = self.ended = self.failed = False

    def push(self, text: str, at: int = 0) -> tuple[list[Event], int]:
        """Reads from `at` on: what is new, and where it stopped, which is before the end if it has ended or failed."""
        first = at
        while at < len(text) and not (self.ended or self.failed):
            at = self._state(text, at)
        if not self.begun:
            self.read += text[first:at]
        events, self._events = self._events, []
        return events, at

    # Each state reads from a place on, and returns the next.

    def _open(self, text: str, at: int) -> int:
        return self._expect(text, at, "{", self._before_key)

    def _before_key(self, text: str, at: int) -> int:
        character = text[at]
        if character == '"':
            self._piece, self._value = "", Value()
            self._state = self._in_key
            return at
        if character == "}":
            self._end()
        elif character not in SPACE and character != ",":
            self._fail()
        return at + (not self.failed)

    def _in_key(self, text: str, at: int) -> int:
        end = self._value.push(text, at)
        self._piece += text[at:end]
        if self._value.ended:
            self._key = _string(self._piece)
            self._state = self._colon
        return end

    def _colon(self, text: str, at: int) -> int:
        return self._expect(text, at, ":", self._before_value)

    def _before_value(self, text: str, at: int) -> int:
        if text[at] in SPACE:
            return at + 1
        self._piece, self._value = "", Value()
        self._state = self._in_value
        if self._key in ("arguments", "parameters") and not self._has_arguments:
            self._has_arguments = True
            self._state = self._in_string if text[at] == '"' else self._in_arguments
            self._begin()
        return at

    def _in_value(self, text: str, at: int) -> int:
        end = self._value.push(text, at)
        self._piece += text[at:end]
        if self._value.ended:
            if self._key == "name" and self._name is None:
                self._name = _string(self._piece)
                if self._known is not None and self._name not in self._known:
                    self._fail()
                self._begin()
            self._state = self._before_key
        return end

    def _in_arguments(self, text: str, at: int) -> int:
        end = self._value.push(text, at)
        self._tell(text[at:end])
        if self._value.ended:
            self._state = self._before_key
        return end

    def _in_string(self, text: str, at: int) -> int:
        end = self._value.push(text, at)
        self._piece += text[at:end]
        if self._value.ended:
            self._tell(_string(self._piece))
            self._state = self._before_key
        return end

    def _expect(self, text: str, at: int, character: str, then: Callable[[str, int], int]) -> int:
        if text[at] == character:
            self._state = then
        elif text[at] not in SPACE:
            self._fail()
        return at + (not self.failed)

    def _begin(self) -> None:
        """It is a call once it has a name and arguments."""
        if self.begun or self.failed or not self._name or not self._has_arguments:
            return
        self.begun = True
        self._events.append(Begin(self._name))
        early, self._early = self._early, ""
        self._tell(early)

    def _tell(self, arguments: str) -> None:
        if not self.begun:
            self._early += arguments
        elif arguments:
            self._events.append(Arguments(arguments))

    def _end(self) -> None:
        if not self._has_arguments and self._name:
            # A function without parameters is called without, too.
            self._has_arguments = True
            self._early = "{}"
            self._begin()
        self.ended = self.begun
        self.failed = not self.begun

    def _fail(self) -> None:
        """What has been told stays told; without a name and arguments it was none."""
        self.failed = True


def _string(piece: str) -> str:
    try:
        value = json.loads(piece, strict=False)
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""
