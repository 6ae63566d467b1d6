"""Which requests come, and when: the options, and the trace they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from ..sim.sessions import sessions, tool_agent
from ..sim.trace import Trace
from ..sim.traces import read_trace
from .guard import InputError
from .options import at_least, positive

#: Of `generated`, requests per second and in all: what the cluster `small` just serves, for five minutes and a half.
GENERATED_RATE, GENERATED_REQUESTS = 3.0, 1_000


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Which requests come, and when.

    Parameters
    ----------
    trace
        A file (Mooncake's JSONL or Azure's CSV, also gzipped); or `generated`: 1,000 requests of chats and agents,
        three a second; or `tool-agent`: an hour like the paper's third trace, reconstructed.
    half
        first or second: only that half of the trace, by number of requests.
    limit
        Only so many requests, the first ones.
    jitter
        Requests that the trace has at one time (it may count in steps of seconds) come at random times until its next.
    speed
        How many times faster than in the trace requests come.
    sort
        Sorts the trace by time, in memory.
    """

    trace: str | None = None
    half: Literal["first", "second"] | None = None
    limit: int | None = None
    jitter: Annotated[bool, Parameter(negative=())] = False
    speed: float = 1.0
    sort: Annotated[bool, Parameter(negative=())] = False

    def made(self, block_tokens: int, seed: int, rate: float = 1.0) -> Trace:
        """rate: on top of `speed`. Raises InputError, TraceError."""
        speed = positive("--speed", self.speed) * rate
        if self.trace is None:
            raise InputError("name a trace: --trace FILE, --trace generated or --trace tool-agent")
        if self.trace == "generated":
            found = sessions(rate=GENERATED_RATE, seed=seed, block_tokens=block_tokens)
            if self.limit is None:
                found = found.limit(GENERATED_REQUESTS)
        elif self.trace == "tool-agent":
            found = tool_agent(seed, block_tokens)
        else:
            found = read_trace(self.trace, block_tokens, sort=self.sort)
        if self.half is not None:
            if self.endless:
                raise InputError(f"--half: {self.trace} with --limit has no end: leave one of them out")
            found = found.halves()[self.half == "second"]
        if self.limit is not None:
            found = found.limit(at_least("--limit", self.limit, 1))
        if self.jitter:
            found = found.jitter(seed)
        return found.speed(speed) if speed != 1.0 else found

    @property
    def endless(self) -> bool:
        """Generated, with a limit that is to be applied behind all else."""
        return self.trace == "generated" and self.limit is not None

    @property
    def seeded(self) -> bool:
        """Another seed makes another trace."""
        return self.jitter or self.trace in ("generated", "tool-agent")
