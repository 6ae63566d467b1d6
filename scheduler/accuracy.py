"""How right the conductor's predictions have been, and by what those of each worker are to be corrected.

A prediction of the first token has a part that rests on the worker's own fit and queue, which is corrected, and a part
that does not (what is moved before). The factor is measured over predicted seconds, both summed with forgetting: long
waits count, milliseconds of noise do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

#: Each request lowers the weight of all before it: about 20 are remembered.
FORGETTING = 0.95
#: Seconds that count as predicted rightly beside those measured: a few requests of milliseconds change little.
PRIOR_SECONDS = 0.2
#: A model that is wrong by more is not to be corrected but to be mended.
MOST = 3.0
#: Shorter times than this (seconds) are noise: errors are relative to it at least.
SHORTEST = 0.01
#: Workers remembered; beyond, the oldest is forgotten.
MAX_WORKERS = 4096


class Prediction(msgspec.Struct, frozen=True):
    """Of one attempt. moved: seconds that rest on links only; worked: on the worker's fit, times `correction`."""

    worker: str
    moved: float
    worked: float
    correction: float
    tbt: float

    @property
    def ttft(self) -> float:
        return self.moved + self.worked


@dataclass(slots=True)
class Error:
    """Running means over some hundred requests. error: of the relative errors' sizes; bias: of the errors, positive if
    more was predicted than came.
    """

    count: int = 0
    error: float = 0.0
    bias: float = 0.0

    def add(self, predicted: float, measured: float) -> None:
        off = (predicted - measured) / max(measured, SHORTEST)
        self.count += 1
        weight = max(1 / self.count, 0.01)
        self.error += weight * (abs(off) - self.error)
        self.bias += weight * (off - self.bias)


class Accuracy:
    """Errors of the whole cluster, factors by worker."""

    def __init__(self) -> None:
        self.ttft = Error()
        self.tbt = Error()
        self._sums: dict[str, tuple[float, float]] = {}

    def observe(self, prediction: Prediction, ttft: float, tbt: float) -> float | None:
        """What came of it, in seconds since it was made; negative: it did not come to that. Returns the worker's new
        factor, if anything is learnt.
        """
        if tbt >= 0 and prediction.tbt > 0:
            self.tbt.add(prediction.tbt, tbt)
        if ttft < 0:
            return None
        self.ttft.add(prediction.ttft, ttft)
        measured, predicted = self._sums.pop(prediction.worker, (0.0, 0.0))
        measured = FORGETTING * measured + max(ttft - prediction.moved, 0.0)
        predicted = FORGETTING * predicted + prediction.worked / prediction.correction
        self._sums[prediction.worker] = measured, predicted
        while len(self._sums) > MAX_WORKERS:
            del self._sums[next(iter(self._sums))]
        return min(max((measured + PRIOR_SECONDS) / (predicted + PRIOR_SECONDS), 1 / MOST), MOST)

    def forget(self, worker: str) -> None:
        """The worker is gone: another may come under its name."""
        self._sums.pop(worker, None)

    def counters(self) -> dict[str, float]:
        """By Prometheus sample name."""
        return {
            f"pyengine_conductor_{what}_{kind}": value
            for what, error in (("ttft", self.ttft), ("tbt", self.tbt))
            if error.count
            for kind, value in (("error", error.error), ("bias", error.bias))
        }
