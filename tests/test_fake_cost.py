"""Goal: a fake backend that keeps time by a cost model takes what the simulator would say, and refuses nonsense.

Method: on a clock that only sleeping and looking at it moves; no real time decides anything.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pyengine.backend import Slice
from pyengine.backends import fake as module
from pyengine.backends.fake import FakeBackend, fake_tokens
from pyengine.scheduler.sim.compute import StepTime
from pyengine.scheduler.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NAME = "llama3-70b-a800"


class Clock:
    """Each look costs 10 us, a sleep ends 60 us late."""

    def __init__(self) -> None:
        self.now = 5.0
        self.slept = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-5
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds + 6e-5


def slice_of(start: int, count: int, page: int) -> Slice:
    return Slice(
        tokens=np.arange(start, start + count, dtype=np.uint32),
        start=start,
        pages=np.arange(page, page + 4, dtype=np.int32),
        sampling=GREEDY,
    )


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_a_step_takes_what_the_simulator_says(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.perf_counter, sleep=clock.sleep))
    backend = FakeBackend.load(f"fake:cost={NAME},time_scale={scale}")
    backend.allocate(12)
    model = StepTime.load(NAME)
    for slices, expected in (
        ([slice_of(0, 40, 0), slice_of(0, 1, 4)], model.seconds([(0, 40), (0, 1)], 0, 0)),
        ([slice_of(40, 20, 0), slice_of(1, 1, 4)], model.seconds([(40, 20)], 1, 2)),
        ([slice_of(60, 1, 0), slice_of(2, 1, 4)], model.seconds([], 2, 61 + 3)),
    ):
        began = clock.now
        backend.execute(slices)
        assert clock.now - began == pytest.approx(scale * expected, abs=2e-4)
    assert clock.slept > 0, "it is waited for asleep"


def test_its_answers_are_those_of_any_fake(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.perf_counter, sleep=clock.sleep))
    backend = FakeBackend.load(f"fake:cost={NAME},layers=1,kv_heads=1,head_dim=2")
    backend.allocate(4)
    prompt = list(range(40))
    (token,) = backend.execute([slice_of(0, 40, 0)])
    assert [token] == fake_tokens(prompt, 1, layers=1, kv_heads=1, head_dim=2)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("cost=llama3-70b-a801", "did you mean"),
        ("cost=/nowhere/model.toml", "cannot read"),
        ("cost=llama3-70b-a800,time_scale=0", "time_scale"),
        ("time_scale=nan", "time_scale"),
        ("time_scale=fast", "name=number"),
    ],
)
def test_what_it_cannot_keep_time_by_is_refused(settings: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        FakeBackend.load(f"fake:{settings}")
