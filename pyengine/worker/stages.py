"""How long a prompt waited, loaded and was computed at this worker: what the client is told of its first token."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

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

    def forget(self, identity: SequenceId) -> None:
        self._waiting.pop(identity, None)
        self._computing.pop(identity, None)
