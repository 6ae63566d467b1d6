"""Whether a request that could be served is served: a pure function from view and choice to a refusal, or None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from ..cluster import View
from .base import Ask, Choice

#: Shortest wait that is advised (seconds): the cluster's state is as old as a heartbeat.
SHORTEST_WAIT = 0.5


@dataclass(frozen=True, slots=True)
class Refusal:
    """reason: for the client. retry_after: predicted seconds until the objective could be met."""

    reason: str
    retry_after: float


Admission: TypeAlias = Callable[[View, Ask, Choice, float, float], Refusal | None]


def none(view: View, ask: Ask, choice: Choice, ttft: float, tbt: float) -> Refusal | None:
    """Everybody is admitted, and waits."""
    return None


def at_arrival(view: View, ask: Ask, choice: Choice, ttft: float, tbt: float) -> Refusal | None:
    """Refuses whom the predicted time to first token, or gap between tokens, would break the promise made to it.

    Predictions of a worker that was never measured refuse nobody.
    """
    slo = ask.slo
    if slo.ttft is not None and ttft > slo.ttft and view.measured[choice.prefill]:
        return Refusal(
            f"the first token is expected after {ttft:.2f} s, the objective is {slo.ttft:g} s",
            max(ttft - slo.ttft, SHORTEST_WAIT),
        )
    if slo.tbt is not None and tbt > slo.tbt and view.measured[choice.decode]:
        return Refusal(
            f"a token is expected every {tbt * 1000:.0f} ms, the objective is {slo.tbt * 1000:g} ms",
            SHORTEST_WAIT,
        )
    return None


ADMISSIONS: dict[str, Admission] = {"none": none, "at-arrival": at_arrival}
