"""Mooncake's baseline for overload: the load of prefill is judged at arrival, that of decode when the prefill is done.

So a prompt may be computed for nothing. It is what early rejection is compared with, and nothing to serve by: only the
simulator asks at the end of a prefill (`Outlook.prefilled`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ...policies.admission.base import Case, Refusal, present_gap, refuse_tbt, refuse_ttft


@dataclass(frozen=True, slots=True)
class Baseline:
    def __call__(self, case: Case) -> Refusal | None:
        return None if case.free else refuse_ttft(case, case.waited + case.ttft)

    def prefilled(self, case: Case) -> Refusal | None:
        """Whether a request whose prompt has just been computed is turned away after all. Alone it harms nobody."""
        worker = case.view.workers[case.choice.decode].worker
        if not case.forecast.batch(worker, case.now, case.now).sequences:
            return None
        return refuse_tbt(case, present_gap(case), case.ask.slo.tbt)
