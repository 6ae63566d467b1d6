"""Goal: fits find the true costs from few samples, follow a change, and stay sane without samples.

Method: samples are made from known coefficients, with noise from a seeded generator.
"""

from __future__ import annotations

import numpy as np
import pytest

from pyengine.scheduler.calibration import calibrate, probes
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


@pytest.mark.parametrize("slower", [0.1, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("mix", [1, 2, 3, 4])
def test_what_accurate_samples_say_is_within_five_percent_however_slow_the_machine_is(slower: float, mix: int) -> None:
    """Costs of a machine whose parts are to each other as the prior's only to a factor of three or so; its start-up run
    is the oracle. And after as many independent samples as there are coefficients, the mean of them is.
    """
    costs = slower * PRIOR * np.exp(np.random.default_rng(mix).standard_normal(5))

    def true(work: StepWork) -> float:
        return float(np.dot(features(work), costs))

    steps = list(probes(512, 16))
    cost = StepCost()
    calibrate(cost, steps, lambda probe: true(probe.work), limit=float("inf"))
    assert cost.samples == len(steps)
    for probe in steps:
        assert cost.seconds(probe.work) == pytest.approx(true(probe.work), rel=0.05)
    few = StepCost()
    works = [StepWork(1, 1, 0, 0), StepWork(512, 131_328, 0, 0), StepWork(64, 6_400_000, 0, 0)]
    works += [StepWork(0, 0, 16, 320), StepWork(0, 0, 16, 80_000)]
    for work in works:
        few.observe(work, true(work))
    assert np.mean([abs(few.seconds(work) / true(work) - 1) for work in works]) < 0.05


def test_features_never_seen_keep_their_prior_and_nothing_is_free() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.observe(StepWork(0, 0, 1, 100), 0.004)
    # As fast as the machine is with what it has shown.
    assert cost.coefficients[1:3] == pytest.approx(PRIOR[1:3] * 0.004 / (PRIOR @ [1, 0, 0, 1, 100]))
    for _ in range(2000):
        cost.observe(StepWork(0, 0, 1, 100), 0.004)
    assert (cost.coefficients > 0).all()
    assert np.dot([1, 0, 0, 1, 100], cost.coefficients) == pytest.approx(0.004, rel=0.02)
    # A machine whose steps all take equally long, whatever they compute.
    even = StepCost()
    calibrate(even, probes(512, 16), lambda probe: 0.02, limit=float("inf"))
    assert (even.coefficients > 0).all()
    for probe in probes(512, 16):
        assert even.seconds(probe.work) == pytest.approx(0.02, rel=0.01)


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
