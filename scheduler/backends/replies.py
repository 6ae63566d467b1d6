"""What has come of requests to a live cluster: from events of a stream to a report's records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..sim.report import DONE, DROPPED, F64, REJECTED, UNFINISHED, Records, longest_tenth
from ..sim.trace import Request

#: Of an error that is no stream: more is not read.
MAX_ERROR = 4096


@dataclass
class Reply:
    """One request. due, sent, tokens, ended: on one clock, of which start is the trace's zero.

    tokens: when each token came. due: when it was to be sent: a client that is late must not hide a slow server.
    """

    request: Request
    due: float
    start: float
    sent: float = 0.0
    tokens: list[float] = field(default_factory=list)
    ended: float = float("nan")
    outcome: int = UNFINISHED
    cached: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    _finished: bool = False
    _rest: bytes = b""

    def take(self, status: int, data: bytes, now: float) -> None:
        """Bytes of the answer's body."""
        if status != 200:
            self._rest = (self._rest + data)[:MAX_ERROR]
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line[6:].strip() != b"[DONE]":
                self._event(json.loads(line[6:]), now)

    def close(self, status: int, now: float) -> None:
        """The answer is over."""
        self.ended = now
        if status != 200:
            # 429 and 503: not taken on. 504: taken on, and its deadline passed. 400: never possible.
            self.fail(DROPPED if status == 504 else REJECTED, f"http {status}: {_message(self._rest)}")
        elif self.error is not None:
            self.outcome = DROPPED
        elif not self._finished:
            self.fail(DROPPED, "the stream broke off")
        else:
            self.outcome = DONE

    def fail(self, outcome: int, reason: str) -> None:
        self.outcome, self.error = outcome, reason

    def _event(self, event: dict[str, Any], now: float) -> None:
        if "error" in event:
            self.error = f"stream: {event['error'].get('message')}"
        for choice in event.get("choices", ()):
            # Tokens that came together came at once. A server that does not count them sends one in each event.
            ids = choice.get("token_ids")
            count = len(ids) if ids is not None else bool(choice.get("text"))
            self.tokens.extend([now] * count)
            self._finished = self._finished or choice.get("finish_reason") is not None
        if usage := event.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            self.cached = details.get("cached_tokens", 0)
            self.tiers = details.get("cached_tokens_by_tier", {})


def records(replies: Sequence[Reply]) -> Records:
    """In the order of the trace. What a client cannot see is NaN, or -1 for a worker."""
    gaps = [np.diff(reply.tokens) for reply in replies]
    count = len(replies)
    nothing = np.full(count, np.nan)
    nobody = np.full(count, -1, dtype=np.int64)
    tiers = sorted({tier for reply in replies for tier in reply.tiers})
    return Records(
        arrival=np.array([reply.due - reply.start for reply in replies], dtype=np.float64),
        prompt_tokens=np.array([reply.request.prompt_tokens for reply in replies], dtype=np.int64),
        output_tokens=np.array([reply.request.output_tokens for reply in replies], dtype=np.int64),
        outcome=np.array([reply.outcome for reply in replies], dtype=np.int64),
        ttft=np.array([reply.tokens[0] - reply.due if reply.tokens else np.nan for reply in replies]),
        second_gap=np.array([gap[0] if len(gap) else np.nan for gap in gaps]),
        tbt=np.array([longest_tenth(gap) for gap in gaps]),
        tbt_mean=np.array([gap.mean() if len(gap) else 0.0 for gap in gaps]),
        finished=np.array([reply.ended - reply.start for reply in replies]),
        prefill_seconds=nothing,
        cached=np.array([reply.cached for reply in replies], dtype=np.int64),
        tiers={tier: np.array([reply.tiers.get(tier, 0) for reply in replies], dtype=np.int64) for tier in tiers},
        prefill_worker=nobody,
        decode_worker=nobody,
        predicted_ttft=nothing,
        held=nothing,
        wasted=np.array([reply.outcome == DROPPED and bool(reply.tokens) for reply in replies], dtype=np.bool_),
    )


def running(replies: Sequence[Reply]) -> tuple[F64, F64]:
    """Requests under way, as a curve of steps."""
    changes = [(reply.sent - reply.start, 1) for reply in replies]
    changes += [(reply.ended - reply.start, -1) for reply in replies if reply.ended == reply.ended]
    changes.sort()
    at, step = np.array(changes, dtype=np.float64).reshape(-1, 2).T
    return at, np.cumsum(step)


def _message(body: bytes) -> str:
    """The text of an error in the API's own format, else the body's beginning."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
