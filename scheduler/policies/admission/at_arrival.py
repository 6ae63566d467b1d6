"""Mooncake's early rejection: both parts are judged when a request arrives, as they are then.

    load of the prefill worker = predicted longest time to first token there / the objective
    load of the decode worker  = predicted longest gap between tokens there / the objective        refused if either > 1

Who still waits for its prefill decodes nothing yet, so it is not counted there.
In a queue that is first come, first served the newcomer's time to first token is the longest. The batch it is to join
will be another one when its prompt is computed: under overload that makes both loads swing in opposite phase, which
`predictive` is against.
"""

from __future__ import annotations

from dataclasses import dataclass

from .base import Case, Refusal, present_gap, refuse_tbt, refuse_ttft


@dataclass(frozen=True, slots=True)
class AtArrival:
    def __call__(self, case: Case) -> Refusal | None:
        if case.free:
            return None
        return refuse_ttft(case, case.waited + case.ttft) or refuse_tbt(case, present_gap(case), case.ask.slo.tbt)
