"""Goal: fits find the true costs from few samples, follow a change, and stay sane without samples.

Method: samples are made from known coefficients, with noise from a seeded generator.
"""

from __future__ import annotations

import numpy as np
import pytest

from pyengine.scheduler.cost import PRIOR, StepCost, StepWork
from pyengine.scheduler.messages import CostFit

TRUE = np.array([2e-3, 4e-4, 2e-8, 1e-3, 5e-7])


def features(work: StepWork) -> list[float]:
    return [1.0, *map(float, work)]


def samples(count: int, costs: np.ndarray, noise: float = 0.02, seed: int = 1) -> list[tuple[StepWork, float]]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        tokens = int(rng.integers(0, 512))
        sequences = int(rng.integers(0 if tokens else 1, 16))
        context = tokens * int(rng.integers(0, 2000))
        history = sequences * int(rng.integers(1, 2000))
        work = StepWork(tokens, context, sequences, history)
        seconds = float(np.dot(features(work), costs)) * float(1 + noise * rng.standard_normal())
        made.append((work, seconds))
    return made


def test_predictions_come_within_a_few_percent() -> None:
    cost = StepCost()
    assert not cost.measured
    for sample in samples(60, TRUE):
        cost.observe(*sample)
    assert cost.measured
    assert cost.error < 0.1
    for work, seconds in samples(50, TRUE, noise=0.0, seed=2):
        assert cost.seconds(work) == pytest.approx(seconds, rel=0.1)


def test_a_machine_that_slows_down_is_followed() -> None:
    cost = StepCost()
    for sample in [*samples(300, TRUE), *samples(600, 3 * TRUE, seed=3)]:
        cost.observe(*sample)
    errors = [abs(cost.seconds(work) / seconds - 1) for work, seconds in samples(50, 3 * TRUE, noise=0.0, seed=2)]
    assert np.mean(errors) < 0.15


def test_features_never_seen_keep_their_prior_and_nothing_is_negative() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.observe(StepWork(0, 0, 1, 100), 0.004)
    assert cost.coefficients[1:3] == pytest.approx(PRIOR[1:3])
    for _ in range(2000):
        cost.observe(StepWork(0, 0, 1, 100), 0.004)
    assert (cost.coefficients >= 0).all()
    assert np.dot([1, 0, 0, 1, 100], cost.coefficients) == pytest.approx(0.004, rel=0.02)


def test_samples_without_work_or_time_are_ignored() -> None:
    cost = StepCost()
    cost.observe(StepWork(0, 0, 0, 0), 1.0)
    cost.observe(StepWork(5, 10, 0, 0), 0.0)
    assert cost.samples == 0


def test_a_fit_crosses_a_socket_and_one_that_cannot_be_is_refused() -> None:
    cost = StepCost()
    for sample in samples(60, TRUE):
        cost.observe(*sample)
    fit = cost.fit()
    assert fit is cost.fit(), "made anew although nothing was observed"
    assert fit.coefficients == tuple(cost.coefficients)
    assert (fit.samples, fit.error, fit.measured) == (60, cost.error, True)
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="negative or no number"):
            CostFit(coefficients=(0.0, 0.0, wrong, 0.0, 0.0))
