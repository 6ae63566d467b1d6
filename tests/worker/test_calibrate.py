"""Goal: a worker knows what its steps cost before its first request, at a bounded price, and leaves nothing behind.

Method: a backend whose steps take what a formula says on a clock that only it moves.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pyengine.backend import Slice
from pyengine.backends.fake import FakeBackend
from pyengine.scheduler.calibration import LIMIT
from pyengine.scheduler.cost import StepCost, StepWork, context_of
from pyengine.worker import calibrate as module
from pyengine.worker.calibrate import calibrate

COSTS = np.array([4e-3, 3e-4, 4e-8, 1e-3, 2e-6])


class Timed(FakeBackend):
    """Counts seconds instead of spending them. slower: times the formula."""

    def __init__(self, slower: float = 1.0, broken: bool = False) -> None:
        super().__init__()
        self.now = 0.0
        self.steps: list[list[Slice]] = []
        self.slower, self.broken = slower, broken

    def clock(self) -> float:
        return self.now

    def execute(self, slices: list[Slice]) -> list[int]:
        if self.broken:
            raise RuntimeError("no kernel image is available")
        self.steps.append(slices)
        work = np.array([1.0, 0, 0, 0, 0])
        for each in slices:
            count = len(each.tokens)
            decodes = count == 1 and each.start > 0
            work += (
                [0, 0, 0, 1, each.start + 1]
                if decodes
                else [0, count, context_of(each.start, each.start + count), 0, 0]
            )
        self.now += self.slower * float(work @ COSTS)
        return super().execute(slices)


def calibrated(backend: Timed, monkeypatch: pytest.MonkeyPatch, pages: int = 256) -> StepCost:
    backend.allocate(pages)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=backend.clock, perf_counter=backend.clock))
    cost = StepCost()
    calibrate(backend, cost, pages=pages, max_tokens=512, max_sequences=32)
    return cost


def test_what_was_never_measured_is_predicted_within_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = calibrated(Timed(), monkeypatch)
    assert cost.measured
    for work in (
        StepWork(100, 5050, 0, 0),
        StepWork(0, 0, 12, 1200),
        StepWork(300, 45150, 8, 400),
        StepWork(0, 0, 2, 40),
    ):
        assert cost.seconds(work) == pytest.approx(float(np.array([1.0, *work]) @ COSTS), rel=0.1)


@pytest.mark.parametrize("slower", [30.0, 1000.0])
def test_on_a_slow_machine_it_ends_after_its_limit_and_one_step(slower: float, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Timed(slower)
    cost = calibrated(backend, monkeypatch)
    first = slower * float(np.array([1.0, 1, 1, 0, 0]) @ COSTS)
    if slower == 30.0:
        assert backend.now - first <= LIMIT, "what would take too long was begun"
        assert 3 <= cost.samples < 12
    else:
        assert len(backend.steps) == 2, "one step told that there is no time for more"


@pytest.mark.parametrize("pages", [1, 5, 40])
def test_it_uses_no_page_that_is_not_there_and_none_twice(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Timed()
    calibrated(backend, monkeypatch, pages)
    for step in backend.steps:
        used = [page for each in step for page in each.pages.tolist()]
        assert len(used) == len(set(used))
        assert max(used) < pages
        for each in step:
            assert len(each.pages) * 16 >= each.start + len(each.tokens)


def test_a_backend_that_fails_is_no_reason_not_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not calibrated(Timed(broken=True), monkeypatch).measured
