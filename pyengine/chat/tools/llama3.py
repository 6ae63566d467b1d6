"""Llama 3: an answer that is {"name": ..., "parameters": {...}} from its first character on, <|python_tag|> before it
or not, several with semicolons between. Source: Llama 3.1's to 3.3's chat templates and Meta's prompt format.

What begins like JSON need not be a call: it is one with the name of a tool and arguments, else it is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyengine.chat.tools.calls import SPACE, Call, Event, Text
from pyengine.chat.tools.dialect import Dialect, Tool, bodies, repeated

TAG = "<|python_tag|>"


class Llama3Parser:
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._call: Call | None = None
        #: What is not known to be text or a call yet; whether it is text to the end; whether a call has come.
        self._held = ""
        self._plain = self._called = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text and not self._plain:
            if self._call is None:
                text = self._between(text, events)
                continue
            new, at = self._call.push(text)
            events += new
            text = text[at:]
            if self._call.failed and not self._call.begun:
                text = self._held + self._call.read + text
                self._held, self._call, self._plain = "", None, True
            elif self._call.ended or self._call.failed:
                self._held, self._call, self._called = "", None, True
        if text:
            events.append(Text(text))
        return events

    def _between(self, text: str, events: list[Event]) -> str:
        """Before a call. Space, tags and what separates calls is no text, unless text follows."""
        text, self._held = self._held + text, ""
        at, end = 0, len(text)
        while at < end:
            if text[at] in SPACE or (self._called and text[at] in ";,"):
                at += 1
            elif text.startswith(TAG, at):
                at += len(TAG)
            else:
                break
        if at == end or TAG.startswith(text[at:]):
            self._held = text
            return ""
        if text[at] == "{":
            self._held, self._call = text[:at], Call(self._names)
            return text[at:]
        self._plain = True
        return text.replace(TAG, "", 1) if text[:at].find(TAG) >= 0 else text

    def finish(self) -> list[Event]:
        held = self._held
        if self._call is not None:
            held = "" if self._call.begun else held + self._call.read
        elif self._called:
            held = ""
        return [Text(held)] if held else []


def rules(tools: Sequence[Tool], most: int, marker: Callable[[str], str]) -> str:
    return f"calls: {repeated('body', SEPARATOR, most)}\n" + bodies(tools, "parameters")


SEPARATOR = '"; "'

LLAMA3 = Dialect(
    name="llama3",
    markers=(TAG,),
    speaks=lambda template: TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template),
    parser=Llama3Parser,
    rules=rules,
)
