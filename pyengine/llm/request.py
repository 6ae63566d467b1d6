"""One answer on its way: tokens come in on the engine's thread, text comes out on the caller's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pyengine.chat.parsing import AnswerParser, CallPiece, Content, Reasoning, ReasoningCount
from pyengine.scheduler.messages import PrefillReport, PromptTold, Tokens
from pyengine.scheduler.types import FinishReason, Logprobs, SamplingParams
from pyengine.text import NOTHING, Detokenizer, Tokenizer


class ToolCall(msgspec.Struct, frozen=True):
    """A tool that the model wants called. arguments: parsed; None if they are no JSON object, as in an answer that was
    cut by its length: then `text` is what there is of them.
    """

    id: str
    name: str
    arguments: dict[str, Any] | None
    text: str

    def message(self) -> dict[str, Any]:
        """As the assistant's message that is put back into the conversation has it in `tool_calls`."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.text}}


class Completion(msgspec.Struct, frozen=True):
    """What one prompt led to. finish_reason: "stop" (end token or stop string), "length" or "tool_calls".

    text: without reasoning and calls, which stand apart. token_ids: of all of it.
    cached_tokens: prompt tokens whose KV was reused. cached_by_tier: where that was found ("device", "dram", "ssd").
    reasoning_tokens: how many of `token_ids` are reasoning, its marks included.
    logprobs: one for each token, if `SamplingParams.logprobs` asked for them. prompt_logprobs: one for each token of
    the prompt but its first, if `SamplingParams.prompt_logprobs` did.
    output: the answer as the type that was asked for (`output=`), else None.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int]
    logprobs: list[Logprobs] | None = None
    reasoning: str = ""
    reasoning_tokens: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    output: Any = None
    prompt_logprobs: list[Logprobs] | None = None


class Piece(msgspec.Struct, frozen=True):
    """What is new of an answer. Text is final when it comes: no half character, nothing of a stop string.

    token_ids: the tokens that came, which need not have led to text yet. finish_reason: with the last piece only.
    calls: more of calls of tools: which one, from 0; its id and name with its first piece; more of the arguments' JSON.
    """

    text: str
    token_ids: list[int]
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None


class Request:
    """Its tokens are taken on the engine's thread; all else may be read by another when `ended`.

    on_news: called there whenever a piece has come if `streamed`, and when it has ended.
    """

    def __init__(
        self,
        ids: list[int],
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        on_news: Callable[[], None],
        *,
        streamed: bool = False,
        parser: AnswerParser | None = None,
        count: ReasoningCount | None = None,
        keep: Mapping[int, str] = NOTHING,
    ) -> None:
        self.ids = ids
        self.sampling = sampling
        #: Given by the engine, from 1.
        self.number = 0
        self.report: PrefillReport | None = None
        self.error: Exception | None = None
        self.pieces: deque[Piece] = deque()
        self.ended = self.cancelled = False
        self._on_news = on_news
        self._streamed = streamed
        self._text = Detokenizer(tokenizer, sampling.stop, sampling.min_tokens, keep)
        self._parser = parser
        self._count = count
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] | None = None if sampling.logprobs is None else []
        self._prompt_logprobs: list[Logprobs] | None = None if sampling.prompt_logprobs is None else []
        self._finish = ""
        self._said: list[str] = []
        self._thought: list[str] = []
        self._calls: list[CallPiece] = []

    def take(self, message: Tokens) -> bool:
        """Adds tokens; True if a stop string ends the request before the worker knows."""
        if self.ended:
            return False
        self._tokens += message.tokens
        if self._count is not None:
            self._count.push(message.tokens)
        told = list(message.logprobs or ()) if self._logprobs is not None else None
        if self._logprobs is not None:
            self._logprobs += told or ()
        text, finish = self._text.push(list(message.tokens)), message.finish
        if self._text.stopped:
            finish = FinishReason.STOP
        elif finish is not None:
            text += self._text.finish()
        piece = self._read(text, list(message.tokens), told, finish)
        if self._streamed:
            self.pieces.append(piece)
        if finish is not None:
            # Last of all: who sees it finds everything there.
            self._finish, self.ended = piece.finish_reason or "", True
        if self._streamed or self.ended:
            self._on_news()
        return finish is not None and message.finish is None

    def tell(self, message: PromptTold) -> None:
        """Of the prompt. What was computed twice is told twice, and taken once."""
        if self._prompt_logprobs is not None:
            have = len(self._prompt_logprobs)
            fresh = message.logprobs[have - (message.first - 1) :]
            self._prompt_logprobs += fresh[: len(self.ids) - 1 - have]

    def fail(self, error: Exception) -> None:
        """There will be no more of it."""
        if not self.ended:
            self.error, self.ended = error, True
            self._on_news()

    def completion(self) -> Completion:
        """The whole answer. Raises what it has failed with."""
        if self.error is not None:
            raise self.error
        cached, tiers = (self.report.cached, self.report.tiers) if self.report else (0, {})
        return Completion(
            text="".join(self._said),
            token_ids=self._tokens,
            finish_reason=self._finish,
            prompt_tokens=len(self.ids),
            cached_tokens=cached,
            cached_by_tier=tiers,
            logprobs=self._logprobs,
            reasoning="".join(self._thought),
            reasoning_tokens=self._count.tokens if self._count is not None else 0,
            tool_calls=_whole(self._calls),
            prompt_logprobs=self._prompt_logprobs,
        )

    def _read(self, text: str, ids: list[int], told: list[Logprobs] | None, finish: FinishReason | None) -> Piece:
        reason = None if finish is None else finish.value
        if self._parser is None:
            self._said.append(text)
            return Piece(text, ids, logprobs=told, finish_reason=reason)
        deltas = self._parser.push(text)
        if reason is not None:
            more, reason = self._parser.finish(reason)
            deltas += more
        said = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        thought = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
        calls = tuple(delta for delta in deltas if isinstance(delta, CallPiece))
        self._said.append(said)
        self._thought.append(thought)
        self._calls += calls
        return Piece(said, ids, thought, calls, told, reason)


def _whole(pieces: list[CallPiece]) -> tuple[ToolCall, ...]:
    calls = []
    for number in range(pieces[-1].call + 1 if pieces else 0):
        own = [piece for piece in pieces if piece.call == number]
        text = "".join(piece.arguments for piece in own)
        try:
            arguments = msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            arguments = None
        calls.append(ToolCall(own[0].id or "", own[0].name or "", arguments, text))
    return tuple(calls)
