"""Requests of a trace: what comes, when, and which blocks its prompt shares with others; and what may be done to it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise


@dataclass(frozen=True, slots=True)
class Request:
    """arrival: seconds from the trace's start. blocks: 16-byte keys of the prompt's full blocks, equal prefix: equal
    keys. output_tokens: length of the answer, 1 or more (a simulator knows it, no scheduler does).
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[bytes, ...]
    tenant: str = ""
    priority: int = 0


class TraceError(ValueError):
    """A trace that cannot be used; the text names file, line and what to do."""


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival, read anew by each walk over it: a file may be larger than memory.

    name: of the file or generator. changes: what was done to what is there, in order, for reports. Every method gives
    another trace, with its change named. block_tokens: of the keys.
    """

    name: str
    block_tokens: int
    open: Callable[[], Iterable[Request]]
    changes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.open())

    @property
    def description(self) -> str:
        """In a line: what this is, and what was done to it."""
        return f"{self.name} ({', '.join(self.changes) if self.changes else 'as it is'})"

    def _changed(self, change: str, make: Callable[[Iterator[Request]], Iterator[Request]]) -> Trace:
        before = self.open
        return replace(self, open=lambda: make(iter(before())), changes=(*self.changes, change))

    def speed(self, factor: float) -> Trace:
        """All gaps between arrivals are divided by it."""
        _positive("the speed of a trace", factor)
        return self._changed(f"{factor:g} x speed", lambda rows: (_at(row, row.arrival / factor) for row in rows))

    def rate(self, per_second: float) -> Trace:
        """Speeds it up or slows it down to so many requests per second on average. Reads all of it first."""
        _positive("the rate of a trace", per_second)
        count, last = 0, 0.0
        for row in self:
            count, last = count + 1, row.arrival
        if last <= 0.0:
            raise TraceError(f"{self.name} has no rate: its {count} requests all come at once")
        factor = per_second / ((count - 1) / last)
        return self._changed(
            f"{factor:.4g} x speed: {per_second:g} requests/s",
            lambda rows: (_at(row, row.arrival / factor) for row in rows),
        )

    def jitter(self, seed: int, grid: float | None = None) -> Trace:
        """Requests that the trace has at one time come at random times, uniform until the trace's next time.

        Traces are published with times on a grid, and all requests of some seconds would come at once. grid: at most so
        many seconds (None: the median of the gaps among the first thousand times). Order is kept.
        """
        if grid is None:
            times = sorted({row.arrival for row in islice(self, 1000)})
            gaps = sorted(after - before for before, after in pairwise(times))
            grid = gaps[len(gaps) // 2] if gaps else 0.0
        elif not 0.0 <= grid < math.inf:
            raise TraceError(f"the grid of a trace must be 0 seconds or more, not {grid}")
        return self._changed(
            f"jittered within {grid:.4g} s, seed {seed}", lambda rows: _jittered(rows, random.Random(seed), grid)
        )

    def limit(self, requests: int) -> Trace:
        """The first so many."""
        if requests < 1:
            raise TraceError(f"a trace is limited to 1 request or more, not {requests}")
        return self._changed(f"first {requests} requests", lambda rows: islice(rows, requests))

    def duration(self, seconds: float) -> Trace:
        """Those that arrive before this many seconds."""
        _positive("the duration of a trace", seconds)
        return self._changed(f"first {seconds:g} s", lambda rows: _until(rows, seconds))

    def halves(self) -> tuple[Trace, Trace]:
        """By number of requests; the second starts at 0 as well. Reads all of it first."""
        count = sum(1 for _ in self)
        if count < 2:
            raise TraceError(f"{self.name} has {count} requests: there are no halves")
        half = count // 2
        return (
            self._changed(f"first half: {half} requests", lambda rows: islice(rows, half)),
            self._changed(f"second half: {count - half} requests", lambda rows: _rebased(islice(rows, half, None))),
        )

    def cached(self) -> Trace:
        """The same, read once and kept in memory."""
        rows = tuple(self)
        return replace(self, open=lambda: rows)


def _positive(what: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise TraceError(f"{what} must be above 0 and finite, not {value}")


def _at(row: Request, arrival: float) -> Request:
    return Request(arrival, row.prompt_tokens, row.output_tokens, row.blocks, row.tenant, row.priority)


def _until(rows: Iterator[Request], seconds: float) -> Iterator[Request]:
    for row in rows:
        if row.arrival >= seconds:
            return
        yield row


def _rebased(rows: Iterator[Request]) -> Iterator[Request]:
    start = None
    for row in rows:
        start = row.arrival if start is None else start
        yield _at(row, row.arrival - start)


def _jittered(rows: Iterator[Request], draw: random.Random, grid: float) -> Iterator[Request]:
    group: list[Request] = []
    for row in rows:
        if group and row.arrival != group[0].arrival:
            yield from _spread(group, draw, min(row.arrival - group[0].arrival, grid))
            group = []
        group.append(row)
    if group:
        yield from _spread(group, draw, grid)


def _spread(group: list[Request], draw: random.Random, width: float) -> Iterator[Request]:
    offsets = sorted(draw.random() * width for _ in group)
    return (_at(row, row.arrival + offset) for row, offset in zip(group, offsets, strict=True))
