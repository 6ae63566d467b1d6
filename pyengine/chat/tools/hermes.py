"""Hermes, Qwen and those who learned from them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, several in a
row, text before. Source: NousResearch's Hermes function calling format, and Qwen2.5's and Qwen3's chat templates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyengine.chat.tools.calls import Call, Event, Text
from pyengine.chat.tools.dialect import Dialect, Marked, Tool, bodies, repeated

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    def __init__(self, names: frozenset[str]) -> None:
        self._before = Marked(OPEN)
        self._call: Call | None = None
        #: Behind a call, where its end mark should come; None elsewhere.
        self._behind: str | None = None
        self._called = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._call is not None:
                text = self._in_call(self._call, text, events)
            elif self._behind is not None:
                text = self._behind_call(self._behind + text)
            else:
                said, rest = self._before.push(text)
                if said:
                    events.append(Text(said))
                if rest is None:
                    break
                self._call, text = Call(), rest
        return events

    def _in_call(self, call: Call, text: str, events: list[Event]) -> str:
        new, at = call.push(text)
        events += new
        if call.failed and not call.begun:
            # No call at all: it is shown as it was written, and calls are looked for behind it.
            events.append(Text(self._before.space + OPEN + call.read))
            self._call = None
        elif call.ended or call.failed:
            self._call, self._behind, self._called = None, "", True
        return text[at:]

    def _behind_call(self, text: str) -> str:
        """Skips to the end mark: what stands before it is a bracket too many. Some write none, and begin again."""
        close, again = text.find(CLOSE), text.find(OPEN)
        if close >= 0 and not 0 <= again < close:
            self._behind = None
            return text[close + len(CLOSE) :]
        if again >= 0:
            self._behind = None
            return text[again:]
        self._behind = text
        return ""

    def finish(self) -> list[Event]:
        if self._call is not None:
            held = "" if self._call.begun else self._before.space + OPEN + self._call.read
        elif self._behind is not None:
            held = "" if CLOSE.startswith(self._behind.strip(" \n}")) else self._behind
        else:
            held = self._before.finish()
            held = "" if self._called and not held.strip() else held
        return [Text(held)] if held else []


def rules(tools: Sequence[Tool], most: int, marker: Callable[[str], str]) -> str:
    call = f'{marker(OPEN)} "\\n" body "\\n" {marker(CLOSE)}'
    return f"calls: {repeated('call', LINE, most)}\ncall: {call}\n" + bodies(tools, "arguments")


LINE = '"\\n"'

HERMES = Dialect(
    name="hermes",
    markers=(OPEN, CLOSE),
    # Some write XML between the same marks.
    speaks=lambda template: OPEN in template and "<function=" not in template and "<arg_key>" not in template,
    parser=HermesParser,
    rules=rules,
)
