"""What a decision is made of: the time of each part of it, with a clock around the part.

A part is a function or a method that a decision calls; those that are indented below it lie in it. A clock costs some
0.2 us a call, so the sum is more than the whole. cProfile would charge each call of Python's, and none of numpy's.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyengine.scheduler import conductor, estimates, routing
from pyengine.scheduler.cluster import Cluster
from pyengine.scheduler.explaining import Decisions
from pyengine.scheduler.messages import Codec
from pyengine.scheduler.outlook import Outlook
from pyengine.scheduler.overlap import Overlaps
from pyengine.scheduler.replication import Replicator
from pyengine.scheduler.routing import Router

#: What it is called in the table, whose it is, and its name there.
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("decode a frame", Codec, "decode"),
    ("encode a frame", Codec, "encode"),
    ("who could", routing, "candidates"),
    ("  the view", Cluster, "view"),
    ("what lies where", Overlaps, "find"),
    ("  what is coming", Overlaps, "_coming"),
    ("how long each would take", routing, "estimate"),
    ("  who waits for what is coming", estimates, "_await_coming"),
    ("  what is fetched", estimates, "_transfer"),
    ("the policy", routing, "decide"),
    ("the answer's length", Outlook, "length"),
    ("admission", Outlook, "judge"),
    ("what is foreseen", Outlook, "decided"),
    ("sources", Router, "_sources"),
    ("charging", Router, "_account"),
    ("  workers", Cluster, "assign"),
    ("keeping it for explain", Decisions, "planned"),
    ("heat", Replicator, "hit"),
    ("a copy proposed", Replicator, "propose"),
    ("the end of a request", Router, "ended"),
    ("  what was foreseen", Outlook, "ended"),
    ("  workers discharged", Cluster, "unassign"),
    ("what a pool publishes", conductor.Conductor, "_on_daemon"),
    ("a worker's message", conductor.Conductor, "_on_worker"),
)


@contextmanager
def clocks() -> Iterator[dict[str, list[float]]]:
    """While it lasts, each call of a part adds its seconds to the list under the part's name."""
    taken: dict[str, list[float]] = {name: [] for name, _, _ in PARTS}
    before = [(owner, attribute, getattr(owner, attribute)) for _, owner, attribute in PARTS]
    for name, owner, attribute in PARTS:
        setattr(owner, attribute, _timed(getattr(owner, attribute), taken[name]))
    try:
        yield taken
    finally:
        for owner, attribute, call in before:
            setattr(owner, attribute, call)


def _timed(call: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
    clock = time.perf_counter

    @functools.wraps(call)
    def timed(*arguments: Any, **named: Any) -> Any:
        start = clock()
        result = call(*arguments, **named)
        taken.append(clock() - start)
        return result

    return timed


def table(taken: dict[str, list[float]], decisions: int) -> Iterator[str]:
    """A line for each part that was called: how often for each decision, and the median of a call."""
    for name, seconds in taken.items():
        if seconds:
            yield f"{name:32} {len(seconds) / decisions:5.2f} x {statistics.median(seconds) * 1e6:6.1f} us"
