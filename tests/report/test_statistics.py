"""Goal: what is called real is real, at the rate that is promised. Method: closed forms, enumeration, simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.report.statistics import EXACT_SEEDS, LEVEL, RANDOM_FLIPS, compare, interval, seeds_needed


@given(st.lists(st.integers(-9, 9), min_size=2, max_size=7))
@settings(max_examples=60, deadline=None)
def test_one_comparison_is_the_sign_flip_test_enumerated(values: list[int]) -> None:
    """For a single row the studentised mean orders the flips as the mean itself does."""
    total = abs(sum(values))
    flips = list(itertools.product((-1, 1), repeat=len(values)))
    as_large = sum(abs(sum(s * v for s, v in zip(signs, values, strict=True))) >= total for signs in flips)
    (found,) = compare(np.array([values], dtype=float))
    assert found.p == pytest.approx(as_large / len(flips))
    assert found.mean == pytest.approx(np.mean(values)) and found.low <= found.mean + 1e-9 <= found.high + 2e-9


def test_seeds_that_all_agree_give_the_smallest_p_there_is() -> None:
    agreeing = np.array([[1.0, 2.0, 1.5, 1.2, 0.7, 1.1]])
    (found,) = compare(agreeing)
    assert found.p == pytest.approx(2 / 2**6) and found.real
    (constant,) = compare(np.full((1, 6), 3.0))
    assert constant.p == pytest.approx(2 / 2**6) and (constant.low, constant.high) == (3.0, 3.0)
    (nothing,) = compare(np.zeros((1, 6)))
    assert nothing.p == 1.0 and not nothing.real


def test_so_many_seeds_are_needed_and_no_fewer() -> None:
    def best(seeds: int) -> bool:
        return compare(np.full((1, seeds), 1.0))[0].real

    assert best(seeds_needed()) and not best(seeds_needed() - 1)


def test_more_comparisons_never_make_one_easier() -> None:
    random = np.random.default_rng(3)
    rows = random.normal(0.5, 1, size=(6, 8))
    alone = [compare(row[None])[0].p for row in rows]
    together = [found.p for found in compare(rows)]
    assert all(joint >= single for joint, single in zip(together, alone, strict=True))
    assert together != alone


def test_no_difference_is_called_real_at_most_as_often_as_promised() -> None:
    """200 families of 4 comparisons without any difference: at most LEVEL of them have a "real" one, and 3 sigmas."""
    random = np.random.default_rng(7)
    families = 200
    wrong = sum(any(found.real for found in compare(random.normal(size=(4, 8)))) for _ in range(families))
    assert wrong / families <= LEVEL + 3 * (LEVEL * (1 - LEVEL) / families) ** 0.5


def test_many_seeds_are_sampled_and_the_same_each_time() -> None:
    rows = np.random.default_rng(1).normal(0.1, 1, size=(2, EXACT_SEEDS + 3))
    assert compare(rows, seed=5) == compare(rows, seed=5)
    # The signs as they are count as one of those drawn, so p is never 0.
    (agreeing,) = compare(np.ones((1, 20)) + random_noise(20))
    assert 1 / RANDOM_FLIPS <= agreeing.p <= 4 / RANDOM_FLIPS
    # Drawn signs and all signs must tell the same: the p of 17 seeds by enumeration of a single row.
    signs = 1 - 2 * (np.arange(2**17)[:, None] >> np.arange(17) & 1)
    exact = np.mean(np.abs(signs @ rows[0]) >= abs(rows[0].sum()) - 1e-9)
    assert compare(rows[:1])[0].p == pytest.approx(exact, abs=4 * (exact * (1 - exact) / 10_000) ** 0.5)


def random_noise(count: int) -> np.ndarray:
    return np.random.default_rng(4).normal(0, 0.01, size=(1, count))


def test_an_interval_covers_the_mean_and_shrinks_with_the_spread() -> None:
    wide, narrow = interval(np.array([1.0, 5.0, 9.0])), interval(np.array([4.9, 5.0, 5.1]))
    assert wide[0] < narrow[0] < 5 < narrow[1] < wide[1]
    assert interval(np.array([2.0])) == (2.0, 2.0)
