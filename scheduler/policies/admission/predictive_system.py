"""Mooncake's early rejection with prediction, for the system as a whole: every decode lasts t_d.

    at the time a newcomer's prefill would end: who will have joined decode, without who joined longer ago than t_d,
    shared evenly among the decode workers; the gap between tokens that follows / the objective    refused if > 1

The load of prefill is judged as at arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

from .base import Case, Refusal, refuse_tbt, refuse_ttft


@dataclass(frozen=True, slots=True)
class PredictiveSystem:
    """decode_seconds: t_d. The paper does not say to what it is set; 0: the mean predicted length of the answers under
    way, times the present gap.
    """

    decode_seconds: float = 0.0

    def __call__(self, case: Case) -> Refusal | None:
        if case.free:
            return None
        late = refuse_ttft(case, case.waited + case.ttft)
        if late is not None or case.ask.slo.tbt is None:
            return late
        view = case.view
        rows = view.decodes if not view.both[case.choice.prefill] else view.both & view.prefills
        workers = int(rows.sum())
        if not workers:
            return None
        sequences, context = case.forecast.lasting(case.now + case.ttft, self.decode_seconds or None, case.now)
        each, context = (sequences + 1) / workers, (context + case.ask.prompt_tokens) / workers
        gap = float(
            view.base_seconds[rows].mean()
            + view.sequence_seconds[rows].mean() * each
            + view.history_seconds[rows].mean() * context
        )
        return refuse_tbt(case, gap, case.ask.slo.tbt)
