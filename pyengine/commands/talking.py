"""One answer of a chat, streamed: what `pyengine chat` sends, and what it makes of what comes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pyengine.scheduler.backends.http import Address, ask, get

Message = dict[str, str]


class Refused(Exception):
    """The gateway answered, and not with text; one sentence that says what to do. status: of HTTP."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class Answer(msgspec.Struct):
    """What has come so far. sent, first, last: on the monotonic clock, of the request and of its pieces; 0: not yet.
    tokens, prompt, cached: as the gateway counts them, at the end. thought: what it says to itself, which is no part of
    the answer.
    """

    sent: float = 0.0
    text: str = ""
    thought: str = ""
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    prompt: int = 0
    cached: int = 0
    finish: str | None = None
    error: str | None = None

    def line(self) -> str:
        """Its figures, for people."""
        if not self.first:
            return "no text came"
        parts = [f"first after {self.first - self.sent:.2f} s"]
        if self.tokens > 1 and self.last > self.first:
            parts.insert(0, f"{(self.tokens - 1) / (self.last - self.first):.1f} tokens/s")
        if self.tokens:
            parts.insert(0, f"{self.tokens} tokens")
            parts.append(f"prompt {self.prompt} tokens" + (f", {self.cached} of them cached" if self.cached else ""))
        if self.finish == "length":
            parts.append("cut off: no more tokens were allowed (--max-tokens)")
        return ", ".join(parts)


async def models(address: Address) -> list[str]:
    """Names of what is served. Raises OSError, Refused."""
    status, body = await get(address, "/v1/models")
    if status != 200:
        raise Refused(_sentence(status, body, {}), status)
    try:
        return [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        raise Refused(f"{address.url}/v1/models is no list of models: is this a gateway?", status) from None


async def say(
    address: Address,
    model: str,
    messages: Sequence[Message],
    options: dict[str, Any],
    answer: Answer,
    on_piece: Callable[[], None],
) -> None:
    """Sends the conversation and fills `answer` as it comes; on_piece is called after each piece.

    Raises OSError if it breaks off, Refused. Cancelling closes the connection, and the gateway stops the work.
    """
    body = {"model": model, "messages": list(messages), "stream": True, "stream_options": {"include_usage": True}}
    rest = bytearray()
    refused = bytearray()

    def take(status: int, data: bytes) -> None:
        if status != 200:
            refused.extend(data[: 4096 - len(refused)])
            return
        rest.extend(data)
        *lines, tail = rest.split(b"\n")
        rest[:] = tail
        for line in lines:
            if line.startswith(b"data: ") and line[6:].strip() != b"[DONE]":
                _event(answer, json.loads(line[6:]))
                on_piece()

    answer.sent = time.monotonic()
    status, headers = await ask(address, "POST", "/v1/chat/completions", json.dumps(body | options).encode(), take)
    if status != 200:
        raise Refused(_sentence(status, bytes(refused), headers), status)
    if answer.error is not None:
        raise Refused(answer.error, status)


def _event(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = str((event["error"] or {}).get("message") or "the gateway gave up on it; ask again")
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        thought, text = delta.get("reasoning_content") or "", delta.get("content") or ""
        if thought or text:
            answer.last = time.monotonic()
            answer.first = answer.first or answer.last
        answer.thought += thought
        answer.text += text
        answer.finish = choice.get("finish_reason") or answer.finish
    if usage := event.get("usage"):
        answer.tokens, answer.prompt = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
        answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def _sentence(status: int, body: bytes, headers: dict[str, str]) -> str:
    """What the gateway says, and what to do."""
    try:
        said = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = body[:200].decode(errors="replace").strip()
    remedies = {401: "set PYENGINE_API_KEY to a key it knows", 403: "PYENGINE_API_KEY needs a key for completions"}
    remedy = remedies.get(status, "")
    if status in (429, 503):
        wait = headers.get("retry-after")
        remedy = f"ask again in {wait} s" if wait else "ask again in a moment"
    return "; ".join(part for part in (f"the gateway answers {status}: {said}", remedy) if part)
