"""What the OpenAI HTTP API answers, as bytes: whole, or in server-sent events. No I/O."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from pyengine.chat.parsing import AnswerParser, CallPiece, Content, Delta, Reasoning, ReasoningCount
from pyengine.gateway.errors import ApiError
from pyengine.gateway.spelling import Scored, Teller, behind
from pyengine.scheduler.types import Logprobs

Endpoint = Literal["chat", "completion"]

DONE = b"data: [DONE]\n\n"


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one HTTP request, over all its choices. cached: of the prompt, as the prefill worker counted them.

    tiers: where it found them (see PrefillReport); our extension of OpenAI's API. reasoning: of the completion; None:
    nobody looked for any.
    """

    prompt: int
    completion: int
    cached: int
    tiers: dict[str, int] = {}
    reasoning: int | None = None

    def json(self) -> dict[str, Any]:
        details: dict[str, Any] = {"cached_tokens": self.cached}
        if self.tiers:
            details["cached_tokens_by_tier"] = self.tiers
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": details,
        }
        if self.reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return usage


class Piece(NamedTuple):
    """What is new of one choice: text, the tokens it came of, and the finish reason with the last piece.

    told: what the model thought of each of `ids`, if that was asked for.
    """

    choice: int
    text: str
    ids: list[int]
    finish: str | None
    told: list[Logprobs] | None = None


class Told(NamedTuple):
    """What an answer carries beside its text. usage: in the stream as well, at its end; running: with every event.

    token_ids: choices carry the ids of their tokens and prompts (vLLM's extension `return_token_ids`).
    prompts: the ids of each choice's prompt. echoes: text that each choice begins with. tellers: one for each choice,
    if logprobs were asked for. parsers: one for each choice, if its text is more than content; counts: one for each, if
    the model reasons.
    """

    usage: bool = False
    running: bool = False
    token_ids: bool = False
    prompts: Sequence[list[int]] = ()
    echoes: Sequence[str] = ()
    tellers: Sequence[Teller] = ()
    parsers: Sequence[AnswerParser] = ()
    counts: Sequence[ReasoningCount] = ()
    scored: Scored | None = None


TEXT_ONLY = Told()


class Answer:
    """Builds the JSON of one HTTP request's answer, whole or in events.

    endpoint: which of the two. number: the request's, which the answer's id has behind its kind.
    """

    def __init__(self, endpoint: Endpoint, model: str, number: str, told: Told = TEXT_ONLY) -> None:
        self.id = f"{'chatcmpl' if endpoint == 'chat' else 'cmpl'}-{number}"
        self._chat = endpoint == "chat"
        self._created = int(time.time())
        self._model = model
        self._told = told
        self._encoder = msgspec.json.Encoder()
        self._begun: set[int] = set()
        self._plain: dict[int, bytes] = {}
        self._plain_end = b'},"logprobs":null' if self._chat else b',"logprobs":null'
        self._plain_end += b',"finish_reason":null}]' + (b',"usage":null' if told.usage else b"") + b"}\n\n"

    def whole(self, choices: list[Piece], usage: Usage) -> bytes:
        """choices: each in one piece, in order."""
        built = []
        for piece in choices:
            self._count(piece)
            text, finish = self._echo(piece.choice) + piece.text, piece.finish
            said: dict[str, Any] = {"text": text}
            if self._chat:
                message, finish = self._message(piece)
                said = {"message": {"role": "assistant", **message}}
            if self._scores and not self._chat:
                said["prompt_logprobs"] = self._prompt_logprobs(piece.choice)
            logprobs = behind(self._echoed(piece.choice), self._logprobs(piece))
            built.append(self._choice(piece.choice, said | self._ids(piece), logprobs, finish))
        body = {**self._head("chat.completion" if self._chat else "text_completion"), "choices": built}
        if self._chat and self._told.token_ids:
            body["prompt_token_ids"] = self._told.prompts[0]
        elif self._told.token_ids:
            for at, choice in enumerate(built):
                choice["prompt_token_ids"] = self._told.prompts[at]
        if self._scores and self._chat:
            body["prompt_logprobs"] = self._prompt_logprobs(0)
        return self._encoder.encode({**body, "usage": self._counted(usage).json()})

    def opening(self, usage: Usage, choices: int) -> bytes:
        """First events: chat names the role of each choice before its first text, a completion echoes its prompt."""
        told = self._told
        events = []
        for index in range(choices):
            prompt = {"prompt_token_ids": told.prompts[index]} if told.token_ids else {}
            if self._chat:
                body: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
                events.append(self._event(self._choice(index, body, None, None), usage, prompt))
            elif told.echoes:
                body = {"text": self._echo(index)} | ({"token_ids": []} if told.token_ids else {})
                events.append(self._event(self._choice(index, body, self._echoed(index), None), usage))
        return b"".join(events)

    def delta(self, piece: Piece, usage: Usage | None = None) -> bytes:
        """Event for new text of a choice, or its end. usage: so far, if every event is to have it."""
        self._count(piece)
        if self._told.parsers:
            return self._parsed(piece, usage)
        if piece.finish is None and piece.told is None and usage is None and not self._told.token_ids:
            # The event of nearly every token: all but the text is known.
            begin = self._plain.get(piece.choice) or self._begin(piece.choice)
            return b"%b%b%b" % (begin, self._encoder.encode(piece.text), self._plain_end)
        content = {"content": piece.text} if piece.text else {}
        body: dict[str, Any] = {"delta": content} if self._chat else {"text": piece.text}
        body |= self._ids(piece)
        if self._told.token_ids and not self._chat and piece.choice not in self._begun:
            # As vLLM does: with the choice's first tokens.
            self._begun.add(piece.choice)
            body["prompt_token_ids"] = self._told.prompts[piece.choice]
        return self._event(self._choice(piece.choice, body, self._logprobs(piece), piece.finish), usage)

    def closing(self, usage: Usage) -> bytes:
        """Last events: usage, if asked for, and the end mark."""
        if not self._told.usage:
            return DONE
        event = self._encoder.encode({**self._event_head(), "choices": [], "usage": self._counted(usage).json()})
        return b"data: " + event + b"\n\n" + DONE

    @property
    def running_usage(self) -> bool:
        return self._told.running

    @staticmethod
    def failure(error: ApiError) -> bytes:
        """Events for an error after the stream has begun."""
        return b"data: " + error.body() + b"\n\n" + DONE

    # -- more than content -----------------------------------------------------------------------------------------

    def _message(self, piece: Piece) -> tuple[dict[str, Any], str | None]:
        """What the assistant has said, and why it ended."""
        if not self._told.parsers:
            return {"content": piece.text}, piece.finish
        deltas, finish = self._deltas(piece)
        content = "".join(delta.text for delta in deltas if isinstance(delta, Content))
        thought = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
        calls: list[dict[str, Any]] = []
        for delta in deltas:
            if isinstance(delta, CallPiece):
                if delta.name is not None:
                    function = {"name": delta.name, "arguments": ""}
                    calls.append({"id": delta.id, "type": "function", "function": function})
                calls[delta.call]["function"]["arguments"] += delta.arguments
        message: dict[str, Any] = {"content": content if content or not calls else None}
        if self._told.counts:
            message["reasoning_content"] = thought or None
        return message | ({"tool_calls": calls} if calls else {}), finish

    def _parsed(self, piece: Piece, usage: Usage | None) -> bytes:
        """Events of a piece: one for each thing that it says. Its tokens and its end are with the last of them."""
        deltas, finish = self._deltas(piece)
        bodies = [_delta(delta) for delta in deltas]
        if not bodies and (finish is not None or piece.told is not None or self._told.token_ids or usage is not None):
            bodies.append({})
        events = [self._event(self._choice(piece.choice, {"delta": body}, None, None), usage) for body in bodies[:-1]]
        if bodies:
            body = {"delta": bodies[-1]} | self._ids(piece)
            events.append(self._event(self._choice(piece.choice, body, self._logprobs(piece), finish), usage))
        return b"".join(events)

    def _deltas(self, piece: Piece) -> tuple[list[Delta], str | None]:
        parser, finish = self._told.parsers[piece.choice], piece.finish
        deltas = parser.push(piece.text)
        if finish is not None:
            last, finish = parser.finish(finish)
            deltas += last
        return deltas, finish

    def _count(self, piece: Piece) -> None:
        if self._told.counts:
            self._told.counts[piece.choice].push(piece.ids)

    def _counted(self, usage: Usage) -> Usage:
        """With the tokens of reasoning."""
        if not self._told.counts:
            return usage
        return msgspec.structs.replace(usage, reasoning=sum(count.tokens for count in self._told.counts))

    # -- events ----------------------------------------------------------------------------------------------------

    def _begin(self, index: int) -> bytes:
        """The event of plain text of a choice, up to the text."""
        head = self._encoder.encode(self._event_head())[:-1]
        inner = b'"delta":{"content":' if self._chat else b'"text":'
        begin = self._plain[index] = b'data: %b,"choices":[{"index":%d,%b' % (head, index, inner)
        return begin

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _event_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self._chat else "text_completion")

    def _echo(self, index: int) -> str:
        return self._told.echoes[index] if self._told.echoes else ""

    @property
    def _scores(self) -> bool:
        """What is asked for is vLLM's `prompt_logprobs`."""
        return self._told.scored is not None and self._told.scored.most is not None

    def _prompt_logprobs(self, index: int) -> list[dict[str, Any] | None]:
        assert self._told.scored is not None
        return self._told.scored.listed(self._told.prompts[index], index)

    def _echoed(self, index: int) -> dict[str, Any] | None:
        """Logprobs of the prompt that a choice begins with; None if they are not told there."""
        told = self._told
        if told.scored is None or not told.echoes or not told.tellers:
            return None
        return told.tellers[index].prompt(told.prompts[index], told.scored.of(index))

    def _ids(self, piece: Piece) -> dict[str, list[int]]:
        return {"token_ids": piece.ids} if self._told.token_ids else {}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if piece.told is None or not self._told.tellers:
            return None
        teller = self._told.tellers[piece.choice]
        return teller.chat(piece.ids, piece.told) if self._chat else teller.completion(piece.ids, piece.told)

    @staticmethod
    def _choice(
        index: int, body: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": finish}

    def _event(self, choice: dict[str, Any], usage: Usage | None, more: dict[str, Any] | None = None) -> bytes:
        event = {**self._event_head(), "choices": [choice], **(more or {})}
        if self._told.usage:
            event["usage"] = self._counted(usage).json() if usage is not None and self._told.running else None
        return b"data: " + self._encoder.encode(event) + b"\n\n"


def _delta(delta: Delta) -> dict[str, Any]:
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallPiece(call=call, id=id, name=name, arguments=arguments):
            function = {"arguments": arguments} | ({"name": name} if name is not None else {})
            first = {"id": id, "type": "function"} if name is not None else {}
            return {"tool_calls": [{"index": call, **first, "function": function}]}


def models(names: list[str], max_positions: dict[str, int]) -> bytes:
    """Body of /v1/models."""
    return msgspec.json.encode({"object": "list", "data": [_model(name, max_positions[name]) for name in names]})


def model(name: str, max_positions: int) -> bytes:
    """Body of /v1/models/NAME."""
    return msgspec.json.encode(_model(name, max_positions))


def _model(name: str, max_positions: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "pyengine", "max_model_len": max_positions}
