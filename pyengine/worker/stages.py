"""How long a prompt waited, loaded and was computed at this worker, and what a hand-off took until its first step: what
is told of a request's first token, and of its second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from pyengine.scheduler.messages import Handoff
from pyengine.scheduler.sequence import Load, Planned, SequenceId


class Spans(NamedTuple):
    """Seconds: until the first block was loaded or computed, until all were loaded, until all were computed."""

    queued: float
    loading: float
    computing: float


class Stages:
    """Prompts that are not complete yet. Seconds by time.monotonic."""

    def __init__(self) -> None:
        self._waiting: dict[SequenceId, tuple[float, float]] = {}
        self._computing: dict[SequenceId, tuple[float, float, float]] = {}

    def __contains__(self, identity: SequenceId) -> bool:
        return identity in self._computing

    def accepted(self, identity: SequenceId, now: float) -> None:
        self._waiting[identity] = (now, 0.0)

    def begun(self, loads: Iterable[Load], slices: Iterable[Planned]) -> None:
        """A step begins with these."""
        if not self._waiting:
            return
        now = time.monotonic()
        for load in loads:
            accepted, loading = self._waiting.get(load.id, (0.0, 0.0))
            if accepted and not loading:
                self._waiting[load.id] = (accepted, now)
        for each in slices:
            if (times := self._waiting.pop(each.id, None)) is not None:
                self._computing[each.id] = (*times, now)

    def complete(self, identity: SequenceId) -> Spans:
        """The prompt has been computed."""
        accepted, loading, computing = self._computing.pop(identity, (0.0, 0.0, 0.0))
        if not accepted:
            return Spans(0.0, 0.0, 0.0)
        loading = loading or computing
        return Spans(loading - accepted, computing - loading, time.monotonic() - computing)

    def handed(self, identity: SequenceId, came: float, whole: float) -> Handoff | None:
        """The first token behind a hand-off is there. came, whole: see `KvMover.handed`. None: it was told before."""
        times = self._computing.pop(identity, None)
        if times is None or not whole:
            return None
        accepted, _, computing = times
        return Handoff(
            waited=max(came - accepted, 0.0),
            arriving=whole - came,
            loading=max(computing - whole, 0.0),
            computing=time.monotonic() - computing,
        )

    def forget(self, identity: SequenceId) -> None:
        self._waiting.pop(identity, None)
        self._computing.pop(identity, None)
