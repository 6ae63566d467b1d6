"""Goal: sampling draws from the distribution it promises, and nothing but (seed, position) decides the draw.

Method: many seeds or positions against a naive float64 distribution; exact cases at the limits.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.kernels import reference
from pyengine.sampling import draws, uniforms
from pyengine.scheduler.types import SamplingParams


def sample(logits: np.ndarray[tuple[int], np.dtype[np.float32]], params: SamplingParams, position: int) -> int:
    return int(reference.sample(logits[None], draws([params], [position]))[0])


def naive(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float = 0.0) -> list[float]:
    """The promised distribution, spelled out."""
    peak = max(logits)
    weights = [np.exp((value - peak) / temperature) for value in logits]
    ranked = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    ranked = [token for token in ranked if weights[token] >= min_p * max(weights)]
    if top_k:
        ranked = ranked[:top_k]
    total = sum(weights[token] for token in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        kept.append(token)
        mass += weights[token] / total
        if mass >= top_p:
            break
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


LOGITS = [2.0, -1.0, 0.5, 2.0, 3.1, -4.0, 0.0, 1.3]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 3, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (1.5, 5, 0.9, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 0.01, 0.0),
        (1.0, 0, 1.0, 0.1),
        (2.0, 4, 0.9, 0.25),
        (1.0, 0, 1.0, 1.0),
    ],
)
def test_frequencies_match_the_naive_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    count = 4000
    logits = np.array(LOGITS, dtype=np.float32)
    params = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        for seed in range(count)
    ]
    tokens = reference.sample(np.tile(logits, (count, 1)), draws(params, [17] * count))
    counts = np.bincount(tokens, minlength=len(LOGITS))
    expected = np.array(naive(LOGITS, temperature, top_k, top_p, min_p))
    assert not counts[expected == 0].any()
    # five standard deviations of a binomial share; the draws are fixed, so this cannot flicker
    assert (np.abs(counts / count - expected) <= 5 * np.sqrt(expected * (1 - expected) / count) + 1e-9).all()


def test_greedy_takes_the_highest() -> None:
    logits = np.array(LOGITS, dtype=np.float32)
    assert sample(logits, SamplingParams(temperature=0.0, seed=1), 5) == 4


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=50),
    st.floats(0.05, 5),
    st.integers(0, 60),
    st.floats(0.01, 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**31),
)
def test_a_draw_is_allowed_and_repeats(
    logits: list[float], temperature: float, top_k: int, top_p: float, seed: int, position: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    values = np.array(logits, dtype=np.float32)
    token = sample(values, params, position)
    assert sample(values, params, position) == token
    better = int((values > values[token]).sum())
    assert top_k == 0 or better < top_k
    assert naive(values.tolist(), temperature, top_k, min(1.0, top_p + 1e-9))[token] > 0 or better == 0


def test_a_rounding_error_does_not_change_the_token() -> None:
    """Two tokens that are as good as equal change ranks: their intervals stay where they are."""
    logits = np.array([3.0, 0.0, 3.0, -1.0], dtype=np.float32)
    other = logits.copy()
    other[2] = np.nextafter(other[2], np.float32(4))
    for seed in range(50):
        params = SamplingParams(temperature=1.0, top_k=3, top_p=0.999, seed=seed)
        assert sample(logits, params, 3) == sample(other, params, 3)


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31)), min_size=1, max_size=20))
def test_the_random_numbers_are_those_of_philox(asked: list[tuple[int, int]]) -> None:
    expected = [np.random.Generator(np.random.Philox(key=seed, counter=at << 64)).random() for seed, at in asked]
    assert uniforms([seed for seed, _ in asked], [at for _, at in asked]).tolist() == expected


def test_the_random_numbers_are_uniform_and_apart() -> None:
    numbers = np.array([uniforms([seed] * 100, range(100)) for seed in range(40)])
    assert len(np.unique(numbers)) == numbers.size
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert abs(numbers.mean() - 0.5) < 0.02
    assert abs(numbers.var() - 1 / 12) < 0.01
