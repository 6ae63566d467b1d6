"""What an answer consists of: reasoning, content and calls of tools, told apart as the text comes.

However the text is cut into pieces, what `push` and `finish` give says the same: a stream and a whole answer differ in
nothing but time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

from pyengine.chat.tools.calls import Arguments, Begin, Event, Text
from pyengine.chat.tools.dialect import Dialect, Marked, Parser
from pyengine.text import Detokenizer, Tokenizer

THINK, THOUGHT = "<think>", "</think>"


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallPiece(NamedTuple):
    """Of this answer's call number `call`, from 0. id, name: with its first piece only. arguments: more of the JSON."""

    call: int
    id: str | None
    name: str | None
    arguments: str


Delta: TypeAlias = Content | Reasoning | CallPiece


class AnswerParser:
    """Of one choice.

    Args:
        dialect: in which the model calls tools; None: it has none, and whatever it writes is content.
        names: of the tools.
        reasons: the model may think, between <think> and </think>, before it answers.
        thinking: it begins thinking: the prompt has ended in <think>.
        digits: 16 random hexadecimal digits, for ids of calls.
    """

    def __init__(
        self,
        dialect: Dialect | None = None,
        names: Iterable[str] = (),
        *,
        reasons: bool = False,
        thinking: bool = False,
        digits: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self._dialect = dialect
        self._parser: Parser | None = dialect.parser(frozenset(names)) if dialect is not None else None
        self._thinks = Thinking(thinking) if reasons else None
        self._digits = digits
        self._calls = 0

    @property
    def called(self) -> bool:
        """A tool has been called."""
        return self._calls > 0

    def push(self, text: str) -> list[Delta]:
        """More of the answer's text."""
        deltas: list[Delta] = []
        if self._thinks is not None:
            thought, text = self._thinks.push(text)
            if thought:
                deltas.append(Reasoning(thought))
        return deltas + self._answer(text)

    def finish(self, reason: str) -> tuple[list[Delta], str]:
        """The answer has ended, as it is known from the tokens ("stop", "length"): what was held back, and the reason
        as it is told. Call once.
        """
        deltas: list[Delta] = []
        if self._thinks is not None:
            thought, text = self._thinks.finish()
            if thought:
                deltas.append(Reasoning(thought))
            deltas += self._answer(text)
        if self._parser is not None:
            deltas += self._told(self._parser.finish())
        return deltas, "tool_calls" if self._calls and reason == "stop" else reason

    def _answer(self, text: str) -> list[Delta]:
        if not text:
            return []
        return [Content(text)] if self._parser is None else self._told(self._parser.push(text))

    def _told(self, events: list[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            match event:
                case Text(text):
                    deltas += [Content(text)] if text else []
                case Begin(name):
                    assert self._dialect is not None
                    deltas.append(CallPiece(self._calls, self._dialect.call_id(self._digits()), name, ""))
                    self._calls += 1
                case Arguments(text):
                    deltas.append(CallPiece(self._calls - 1, None, None, text))
        return deltas


class Thinking:
    """Parts an answer where its reasoning ends. Space around reasoning belongs to nobody."""

    def __init__(self, thinking: bool) -> None:
        """thinking: the answer begins with reasoning; else it does if its first word is <think>."""
        self._end = Marked(THOUGHT)
        self._promised = thinking
        #: Of the beginning, as long as it may be a mark.
        self._held: str | None = ""
        self._thought_begun = self._answer_begun = False
        #: Reasoning has begun; what comes is no reasoning any more, or never was.
        self.begun = thinking
        self.over = False

    def push(self, text: str) -> tuple[str, str]:
        """What is certain: of the reasoning, of the answer."""
        if self.over:
            return "", self._answer(text)
        if self._held is not None:
            text = self._held + text
            start = text.lstrip()
            if THINK.startswith(start):
                self._held = text
                # The whole mark is one, whatever comes.
                if start != THINK:
                    return "", ""
            self._held = None
            if start.startswith(THINK):
                # Some write it although the prompt had it.
                self.begun = True
                text = start[len(THINK) :]
            elif not self._promised:
                self.over = self._answer_begun = True
                return "", text
        if not self._thought_begun:
            text = text.lstrip()
            self._thought_begun = bool(text)
        thought, rest = self._end.push(text)
        if rest is None:
            return thought, ""
        self.over = True
        return thought, self._answer(rest)

    def _answer(self, text: str) -> str:
        """Without the space that parts it from the reasoning."""
        if not self._answer_begun:
            text = text.lstrip()
            self._answer_begun = bool(text)
        return text

    def finish(self) -> tuple[str, str]:
        """What was held back."""
        if self.over:
            return "", ""
        held = self._held or ""
        return (held + self._end.finish(), "") if self.begun else ("", held)


class ReasoningCount:
    """Counts the tokens of reasoning, its marks included, one by one: so it is not about how they came."""

    def __init__(self, tokenizer: Tokenizer, keep: Mapping[int, str], thinking: bool) -> None:
        self._text = Detokenizer(tokenizer, keep=keep)
        self._thinking = Thinking(thinking)
        self._count = 0

    @property
    def tokens(self) -> int:
        return self._count if self._thinking.begun else 0

    def push(self, ids: Iterable[int]) -> None:
        for token in ids:
            if self._thinking.over:
                return
            self._count += 1
            self._thinking.push(self._text.push([token]))
