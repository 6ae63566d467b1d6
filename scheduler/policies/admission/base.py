"""What an admission sees, what it answers, and the checks and waits that most admissions share.

An admission is a pure function from a case to a refusal, or None. Three laws hold for all, and a property suite keeps
them: on an idle cluster nobody is refused (a late answer harms nobody there); who was admitted before is not refused;
and predictions of a worker that was never measured refuse nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ...cluster import View
from ...fairness import Shares
from ...forecast import Forecast
from ...work import decode_gap
from ..base import Ask, Choice, ttft

#: Shortest wait that is advised (seconds): the cluster's state is as old as a heartbeat.
SHORTEST_WAIT = 0.5
#: Longest one: what is predicted for later than that is guesswork, and to ask again costs little.
LONGEST_WAIT = 300.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """kind: "slo_ttft", "slo_tbt", "slo_deadline", "share", or "later": the gateway is to ask again. reason: for the
    client. retry_after: predicted seconds until the objective could be met, if nobody else came.
    """

    kind: str
    reason: str
    retry_after: float


@dataclass(slots=True, eq=False)
class Case:
    """One request that has been given its place: `choice` of the policy.

    ttft: predicted seconds from now to the first token; waited: seconds since the client asked, which its objectives
    count too. tbt: predicted gap between tokens, as things are now. forecast, shares: nobody writes to them.
    """

    now: float
    view: View
    ask: Ask
    choice: Choice
    ttft: float
    tbt: float
    forecast: Forecast
    shares: Shares
    waited: float = 0.0
    admitted: bool = False

    @property
    def idle(self) -> bool:
        """Nobody in the cluster does or waits for anything."""
        view = self.view
        rows = view.prefills | view.decodes
        return not (view.queue_seconds[rows].any() or view.running[rows].any() or view.queued_requests[rows].any())

    @property
    def free(self) -> bool:
        """Not to be judged at all."""
        return self.admitted or self.idle

    @property
    def prefill_measured(self) -> bool:
        return bool(self.view.measured[self.choice.prefill])

    @property
    def decode_measured(self) -> bool:
        return bool(self.view.measured[self.choice.decode])


Admission: TypeAlias = Callable[[Case], Refusal | None]


def present_gap(case: Case) -> float:
    """Seconds between tokens at the chosen decode worker, if this request joined those that it decodes now."""
    view, row = case.view, case.choice.decode
    batch = case.forecast.batch(view.workers[row].worker, case.now, case.now)
    return decode_gap(view, row, batch.sequences + 1, batch.context + case.ask.prompt_tokens)


def refuse_ttft(case: Case, predicted: float) -> Refusal | None:
    """Refuses if a first token `predicted` seconds after the client asked is later than promised."""
    slo = case.ask.slo
    if slo.ttft is None or predicted <= slo.ttft or not case.prefill_measured:
        return None
    reason = f"the time to first token (ttft) would be {predicted:.2f} s, the objective is {slo.ttft:g} s"
    return Refusal("slo_ttft", reason, prefill_wait(case, slo.ttft))


def refuse_tbt(case: Case, predicted: float, promised: float | None) -> Refusal | None:
    """Refuses if a token every `predicted` seconds is slower than promised, to this request or to others there."""
    if promised is None or predicted <= promised or not case.decode_measured:
        return None
    reason = f"the gap between tokens (tbt) would be {predicted * 1000:.0f} ms, the objective is {promised * 1000:g} ms"
    return Refusal("slo_tbt", reason, decode_wait(case, predicted, promised))


def refuse_deadline(case: Case, predicted: float) -> Refusal | None:
    """Refuses if a last token `predicted` seconds after the client asked is worthless."""
    deadline = case.ask.slo.deadline
    if deadline is None or predicted <= deadline or not (case.prefill_measured and case.decode_measured):
        return None
    reason = f"the whole answer would take {predicted:.2f} s, its deadline is {deadline:g} s after the request"
    wait = max(prefill_wait(case, case.ttft - (predicted - deadline)), decode_drain(case))
    return Refusal("slo_deadline", reason, wait)


def prefill_wait(case: Case, promised: float) -> float:
    """Seconds until a first token could come within `promised`: until some queue is so much shorter, or empty."""
    view, fetch = case.view, np.full(len(case.view.workers), case.choice.fetch)
    over = np.maximum(ttft(view, case.ask, fetch) - promised, 0.0)
    waits = np.minimum(over, view.queue_seconds)[view.prefills]
    return advised(float(waits.min()))


def decode_wait(case: Case, predicted: float, promised: float) -> float:
    """Seconds until so many sequences have left the chosen decode worker that its gap is the promised one."""
    view, row = case.view, case.choice.decode
    leaves, contexts = case.forecast.leaves(view.workers[row].worker, case.now + case.ttft, case.now)
    saved = np.cumsum(view.sequence_seconds[row] + view.history_seconds[row] * contexts)
    enough = np.flatnonzero(saved >= predicted - promised)
    if not len(leaves):
        return SHORTEST_WAIT
    at = float(leaves[enough[0] if len(enough) else -1])
    # Whoever comes back joins a batch only when its own prefill is over.
    return advised(at - case.ttft - case.now)


def decode_drain(case: Case) -> float:
    """Seconds until half of what the chosen worker decodes has left."""
    worker = case.view.workers[case.choice.decode].worker
    leaves, _ = case.forecast.leaves(worker, case.now + case.ttft, case.now)
    return advised(float(leaves[len(leaves) // 2]) - case.now) if len(leaves) else SHORTEST_WAIT


def advised(seconds: float) -> float:
    """A predicted wait as it is told to a client."""
    return min(max(seconds, SHORTEST_WAIT), LONGEST_WAIT)
