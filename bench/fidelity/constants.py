"""What a live cluster's processes spend beside computing, measured by single requests on it while it is idle.

Four numbers, once for all runs of a cluster, each from the one figure that it moves, in this order:

    step_overhead   gaps between tokens, less the model's step and what the worker's loop says it spends beside it
    message_delay   time to the first token, by the number of messages that the simulator counts for it
    handoff_delay   time from the first token to the second: the hand-off, as far as it is the same for all prompts
    handoff_rate    what longer prompts add to that, by their bytes

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
    """Seconds, and bytes per second (None: as fast as can be), see the module."""

    step_overhead: float = 0.0
    message_delay: float = 0.0
    handoff_delay: float = 0.0
    handoff_rate: float | None = None

    def put(self, spec: ClusterSpec) -> ClusterSpec:
        replace = msgspec.structs.replace
        return replace(
            spec,
            workers=tuple(
                replace(worker, step_overhead=worker.step_overhead + self.step_overhead) for worker in spec.workers
            ),
            message_delay=self.message_delay,
            handoff_delay=self.handoff_delay,
            handoff_rate=self.handoff_rate,
        )

    @property
    def text(self) -> str:
        rate = "-" if self.handoff_rate is None else f"{self.handoff_rate / 1e6:.0f} MB/s"
        delays = {name: getattr(self, name) for name in ("step_overhead", "message_delay", "handoff_delay")}
        return ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in delays.items()) + f", handoff_rate {rate}"


def fit(live: Records, kv_bytes: int, simulate: Callable[[Constants], Records]) -> Constants:
    """The constants with which the simulation of the same requests is as long as they were; none is below 0.

    kv_bytes: of one token. Prompts of one length tell no rate. Raises ValueError if first tokens were held for the
    second.
    """
    if not (live.second_gap > 0.0).any():
        raise ValueError(
            "first tokens were held for the second: single requests tell of hand-offs if nothing is promised"
        )
    found = Constants()
    # The first ones open connections and sessions.
    first = len(live.ttft) // 4
    for name, figure in (("step_overhead", _later_gap), ("message_delay", _first)):
        base = figure(simulate(found))
        moved = figure(simulate(msgspec.structs.replace(found, **{name: STEP}))) - base
        slope = float(np.nanmedian(moved)) / STEP
        assert slope > 0.0, f"{name} moves nothing"
        excess = float(np.nanmedian((figure(live) - base)[first:])) / slope
        found = msgspec.structs.replace(found, **{name: max(excess, 0.0)})
    sizes = live.prompt_tokens[first:] * kv_bytes
    gaps = (live.second_gap - simulate(found).second_gap)[first:]
    short, long = (float(np.nanmedian(gaps[sizes == size])) for size in (sizes.min(), sizes.max()))
    if long <= short:
        return msgspec.structs.replace(found, handoff_delay=max(float(np.nanmedian(gaps)), 0.0))
    rate = float(sizes.max() - sizes.min()) / (long - short)
    return msgspec.structs.replace(found, handoff_delay=max(short - float(sizes.min()) / rate, 0.0), handoff_rate=rate)


def _first(records: Records) -> F64:
    return records.ttft


def _later_gap(records: Records) -> F64:
    """Mean gap of each request but for its first, which has the hand-off in it."""
    gaps = records.output_tokens - 1
    later: F64 = (records.tbt_mean * gaps - records.second_gap) / (gaps - 1)
    return later
