"""What a model family's way to call tools consists of. A dialect is a file with one `Dialect`, a row in DIALECTS."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pyengine.chat.tools.calls import Event


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call. parameters: JSON text of the schema of its arguments, as grammars take it."""

    name: str
    parameters: str


class Parser(Protocol):
    """Finds calls in an answer, piece by piece. However it is cut, the events say the same."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """The answer has ended, maybe in the middle of a call: what was held back."""
        ...


class Dialect(msgspec.Struct, frozen=True):
    """name: for messages. markers: what begins calls, as the model's vocabulary may have them as special tokens.

    speaks: whether a chat template is of this dialect. parser: for one answer, given the names of the tools.
    rules: Lark rules of an answer that is `calls`, given the tools, how many calls at most, and how a marker is spelled
    as Lark. call_id: what names a call, of 16 random hexadecimal digits.
    """

    name: str
    markers: tuple[str, ...]
    speaks: Callable[[str], bool]
    parser: Callable[[frozenset[str]], Parser]
    rules: Callable[[Sequence[Tool], int, Callable[[str], str]], str]
    call_id: Callable[[str], str] = "call_{}".format


def repeated(call: str, between: str, most: int) -> str:
    """Lark for one to `most` calls."""
    return call if most == 1 else f"{call} ({between} {call}){{0,{most - 1}}}"


def bodies(tools: Sequence[Tool], arguments: str) -> str:
    """Lark rules: `body`, the object that calls any of the tools. arguments: the name of their key."""
    rules = "body: " + " | ".join(f"body{at}" for at in range(len(tools))) + "\n"
    for at, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments}": '
        rules += f'body{at}: {json.dumps(head)} %json {tool.parameters} "}}"\n'
    return rules


class Marked:
    """Text in front of a marker, which may come in pieces. Space before a marker is no text, but `space`."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""
        self.space = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is certain, and what comes behind the marker, None as long as that has not come."""
        text = self._held + text
        at = text.find(self._marker)
        if at >= 0:
            self._held = ""
            said = text[:at].rstrip()
            self.space = text[len(said) : at]
            return said, text[at + len(self._marker) :]
        end = len(text) - _begun(text, self._marker)
        end = len(text[:end].rstrip())
        self._held = text[end:]
        return text[:end], None

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _begun(text: str, marker: str) -> int:
    """Length of the longest end of `text` with which `marker` begins."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
