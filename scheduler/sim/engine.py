"""Simulated time: what happens next, and in which order things of one moment happen.

An event is a call. Those of one moment are taken by rank first, then in the order in which they were asked for. The end
of a worker's step ranks before all else and is ordered by worker: whether many steps are computed one by one or at
once, everybody else sees the same.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeAlias

#: Ends of steps, all else, and the measuring of what is then.
STEP, EVENT, MEASURE = range(3)

Call: TypeAlias = Callable[..., None]


class Loop:
    """now: seconds since the trace's start. events: calls made so far."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, int, int, Call, tuple[Any, ...]]] = []
        self._asked = 0

    def after(self, seconds: float, call: Call, *arguments: object) -> None:
        """Calls so much later."""
        self.at(self.now + seconds, call, *arguments)

    def at(self, when: float, call: Call, *arguments: object) -> None:
        """Calls at that time; at once, behind all that was asked for now, if it has passed."""
        self._asked += 1
        heappush(self._queue, (when if when > self.now else self.now, EVENT, self._asked, 0, call, arguments))

    def step(self, when: float, worker: int, turn: int, call: Call) -> None:
        """Calls with `turn` when a step of the worker of this number ends; turns of a worker are never repeated."""
        heappush(self._queue, (when, STEP, worker, turn, call, (turn,)))

    def measure(self, when: float, call: Call) -> None:
        """Calls behind all events of that time."""
        heappush(self._queue, (when, MEASURE, 0, 0, call, ()))

    def run(self, over: Callable[[], bool]) -> None:
        """Until `over`, which is asked after every event, or nothing is left to happen."""
        queue = self._queue
        while queue and not over():
            when, _, _, _, call, arguments = heappop(queue)
            assert when >= self.now, "time goes backwards"
            self.now = when
            self.events += 1
            call(*arguments)
