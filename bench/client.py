"""A streaming client that keeps the time of everything it receives, and every error as a value."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import aiohttp


@dataclasses.dataclass
class Reply:
    """What has come of one request so far; times are `time.perf_counter` seconds.

    due: when the request was meant to be sent. sent: when it was. events: when each piece of text arrived, which is
    one token each, unless tokens came together. ended: when the answer or error was complete (0: not yet).
    tokens, prompt, cached, tiers: as the server counts them in `usage`; tiers: where cached tokens were found.
    error: why there is no whole answer; None: there is.
    """

    due: float
    sent: float = 0.0
    events: list[float] = dataclasses.field(default_factory=list)
    text: list[str] = dataclasses.field(default_factory=list)
    ended: float = 0.0
    finish: str | None = None
    tokens: int = 0
    prompt: int = 0
    cached: int = 0
    tiers: dict[str, int] = dataclasses.field(default_factory=dict)
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds from when the request was due: a client that is late to send must not hide a slow server."""
        return self.events[0] - self.due

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces of text."""
        return [later - earlier for earlier, later in itertools.pairwise(self.events)]


def completion(model: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    """Body of a greedy, streamed /v1/completions request that runs to `max_tokens` tokens."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


def session(timeout: float) -> aiohttp.ClientSession:
    """A client without a limit on connections (an open loop must not wait for its own pool).

    timeout: seconds from sending to the end of the answer.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=timeout)
    )


async def stream(client: aiohttp.ClientSession, base: str, body: bytes, reply: Reply) -> None:
    """Sends one request and fills `reply` as the answer comes. Errors become `reply.error`; cancelling disconnects."""
    headers = {"Content-Type": "application/json"}
    reply.sent = time.perf_counter()
    try:
        async with client.post(f"{base}/v1/completions", data=body, headers=headers) as response:
            if response.status != 200:
                reply.error = f"http {response.status}: {_message(await response.read())}"
                return
            reply.error = "the stream broke off"
            async for line in response.content:
                if line.startswith(b"data: ") and _take(reply, line[6:].strip()):
                    return
    except TimeoutError:
        reply.error = "client timeout"
    except aiohttp.ClientError as error:
        reply.error = f"{type(error).__name__}: {error}"
    finally:
        reply.ended = time.perf_counter()


def _take(reply: Reply, data: bytes) -> bool:
    """One event; True after the last."""
    if data == b"[DONE]":
        if reply.finish is not None:
            reply.error = None
        return True
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        reply.error = f"stream: {event['error'].get('message')}"
        return True
    for choice in event.get("choices", ()):
        if choice["text"]:
            reply.events.append(time.perf_counter())
            reply.text.append(choice["text"])
        reply.finish = choice["finish_reason"] or reply.finish
    if usage := event.get("usage"):
        reply.tokens = usage["completion_tokens"]
        reply.prompt = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        reply.cached = details.get("cached_tokens", 0)
        reply.tiers = details.get("cached_tokens_by_tier", {})
    return False


def _message(body: bytes) -> str:
    """The text of an error in the API's own format, else the body's beginning."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
