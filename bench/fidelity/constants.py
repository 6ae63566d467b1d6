"""What a live cluster's processes spend beside computing, measured by single requests on it while it is idle.

Three numbers, once for all runs of a cluster, each from the one figure that it moves, in this order:

    step_overhead   gaps between tokens, less the model's step
    message_delay   time to the first token, by the number of messages that the simulator counts for it
    handoff_delay   time from the first token to the second: the hand-off

How much each moves its figure is not counted by hand: the same requests are simulated with a millisecond more.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from pyengine.scheduler.sim.report import F64, Records
from pyengine.scheduler.sim.spec import ClusterSpec

#: By how much a number is raised to see what it moves.
STEP = 1e-3


class Constants(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds each, see the module."""

    step_overhead: float = 0.0
    message_delay: float = 0.0
    handoff_delay: float = 0.0

    def put(self, spec: ClusterSpec) -> ClusterSpec:
        replace = msgspec.structs.replace
        return replace(
            spec,
            workers=tuple(replace(worker, step_overhead=self.step_overhead) for worker in spec.workers),
            message_delay=self.message_delay,
            handoff_delay=self.handoff_delay,
        )


def fit(live: Records, simulate: Callable[[Constants], Records]) -> Constants:
    """The constants with which the simulation of the same requests has the live medians; none is below 0."""
    found = Constants()
    for name, figure in (("step_overhead", _later_gap), ("message_delay", _first), ("handoff_delay", _second_gap)):
        base = figure(simulate(found))
        slope = (figure(simulate(msgspec.structs.replace(found, **{name: STEP}))) - base) / STEP
        assert slope > 0.0, f"{name} moves nothing"
        found = msgspec.structs.replace(found, **{name: max((figure(live) - base) / slope, 0.0)})
    return found


def _first(records: Records) -> float:
    return _median(records.ttft)


def _second_gap(records: Records) -> float:
    return _median(records.second_gap)


def _later_gap(records: Records) -> float:
    """Mean gap of a request but for its first, which has the hand-off in it."""
    gaps = records.output_tokens - 1
    return _median((records.tbt_mean * gaps - records.second_gap) / (gaps - 1))


def _median(values: F64) -> float:
    return float(np.nanmedian(values))
