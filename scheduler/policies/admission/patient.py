"""Early rejection that waits: who could have its first token in time, but finds decode full, is asked to come again.

As `at-arrival`, but decode is judged with all who are to join the batch. Batches change within seconds, and an
objective for the first token is often many: a request that decode has no room for now is told "later" for half of that
time, and its gateway asks anew every second. Each time both parts are judged as they are then; a lull is filled, and
nobody was sent away for a moment's crowd. Who has waited for so long is refused, as all are whose prompt would be late.

It judges the present on purpose. A forecast that is asked again and again is believed when it is wrong: with
`predictive` in its place a quarter of all requests were let in and then missed their gap (docs/goodput.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .base import Case, Refusal, refuse_tbt, refuse_ttft

#: Of a refusal for now only.
LATER = "later"


@dataclass(frozen=True, slots=True)
class Patient:
    """share: of the time that the first token may take, for which room in decode is waited for. margin: predicted gaps
    are multiplied by it: who is always let in when there is just room for one more finds batches that are always full.
    """

    share: float = 0.5
    margin: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"share must be between 0 and 1, not {self.share:g}")
        if self.margin <= 0.0:
            raise ValueError(f"margin must be above 0, not {self.margin:g}")

    def __call__(self, case: Case) -> Refusal | None:
        if case.free:
            return None
        slo = case.ask.slo
        late = refuse_ttft(case, case.waited + case.ttft)
        full = refuse_tbt(case, self.margin * case.tbt, slo.tbt)
        if late is None and full is not None and slo.ttft is not None and case.waited < self.share * slo.ttft:
            return replace(full, kind=LATER)
        return late or full
