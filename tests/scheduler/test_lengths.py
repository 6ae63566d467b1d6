"""Goal: predicted lengths are what the life table of earlier answers says, and are never impossible.
Method: a table written out token by token, sums over all lengths; random histories.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler import lengths
from pyengine.scheduler.lengths import BINS, EDGES, FORGETTING, PRIOR_TOKENS, SHRINK, LengthPredictor

Answer = tuple[int, bool]


def spread(answers: list[tuple[float, int, bool]]) -> tuple[list[float], list[float]]:
    """Weights of answers that ended, and that were cut, by bin."""
    ended, cut = [0.0] * BINS, [0.0] * BINS
    for weight, length, whole in answers:
        for at in range(BINS):
            if EDGES[at] < length <= EDGES[at + 1]:
                (ended if whole else cut)[at] += weight
    return ended, cut


def longer_than(ended: list[float], cut: list[float], most: int) -> list[float]:
    """Share of answers longer than 0, 1, ... most tokens: the life table, a token at a time."""
    shares, left = [1.0], 1.0
    for at in range(BINS):
        first, last = int(EDGES[at]), int(EDGES[at + 1])
        risk = sum(ended[at:]) + sum(cut[at:]) - cut[at] / 2
        after = left * (1.0 - min(ended[at] / risk, 1.0)) if risk > 0 else left
        shares += [left + (after - left) * step / (last - first) for step in range(1, last - first + 1)]
        left = after
        if last > most:
            break
    return shares


def expected(shares: list[float], generated: int, most: int) -> float:
    if shares[generated] <= 1e-9:
        return min(2.0 * generated, most)
    more = sum(shares[length] for length in range(generated, most)) / shares[generated]
    return min(max(generated + more, generated + 1.0), float(most))


answers = st.lists(st.tuples(st.integers(1, 300), st.booleans()), max_size=30)


@settings(max_examples=60, deadline=None)
@given(answers, st.integers(1, 400), st.integers(0, 400))
def test_predictions_are_those_of_a_life_table(history: list[Answer], most: int, generated: int) -> None:
    """Of the two levels all have: the kind's answers, shrunk to all, which are shrunk to the prior."""
    generated = min(generated, most)
    predictor = LengthPredictor()
    for length, whole in history:
        predictor.learn("", 100, most, length, whole, 1.0)
    row = predictor.first("", 100, most)[0]
    for table in (predictor._all, *predictor._tables.values()):
        table.made_of = (-2, -STALE_ALWAYS)
        predictor._refresh(table)
    weights = [FORGETTING ** (len(history) - 1 - at) for at in range(len(history))]
    mine = [(weight, *answer) for weight, answer in zip(weights, history, strict=True)]
    root = [*mine, (1.0, PRIOR_TOKENS, True)]
    scale = SHRINK / sum(weight for weight, _, _ in root)
    ended, cut = spread([*mine, *((scale * weight, length, whole) for weight, length, whole in root)])
    shares = longer_than(ended, cut, most)
    assert predictor.expected_one(row, most, generated) == pytest.approx(expected(shares, generated, most), rel=1e-6)


STALE_ALWAYS = 10**9


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(1, 5000), st.integers(1, 3000), st.booleans())),
    st.integers(1, 10**6),
    st.integers(0, 10**6),
)
def test_never_above_max_tokens_and_never_over_before_it(
    history: list[tuple[str, int, int, bool]], most: int, generated: int
) -> None:
    predictor = LengthPredictor()
    for tenant, prompt, length, whole in history:
        predictor.learn(tenant, prompt, max(length, most), length, whole, 5.0)
    predictor.check()
    for tenant in ("", "a", "new"):
        row, first = predictor.first(tenant, 77, most)
        assert 1.0 <= first <= most
        done = min(generated, most)
        predicted = predictor.expected_one(row, most, done)
        assert min(done + 1, most) <= predicted <= most


@settings(max_examples=40, deadline=None)
@given(answers, st.lists(st.integers(0, 300), max_size=20), st.integers(1, 400))
def test_answers_under_way_count_as_if_they_were_cut_now(history: list[Answer], growing: list[int], most: int) -> None:
    """Which they are no more when they are told anew."""
    told, cut = LengthPredictor(), LengthPredictor()
    for predictor in (told, cut):
        for length, whole in history:
            predictor.learn("", 100, most, length, whole, 1.0)
    row = told.first("", 100, most)[0]
    told.under_way(np.array([row] * 2), np.array([5.5, 100.0]))
    told.under_way(np.full(len(growing), row), np.array(growing, dtype=float))
    for length in filter(None, growing):
        at = next(at for at in range(BINS) if EDGES[at] < length <= EDGES[at + 1])
        for table in _tables(cut):
            table.cut[at] += 1.0
    for predictor in (told, cut):
        for table in _tables(predictor):
            table.made_of = (-2, -STALE_ALWAYS)
            predictor._refresh(table)
    assert told.expected_one(row, most) == pytest.approx(cut.expected_one(cut.first("", 100, most)[0], most), rel=1e-9)
    told.check()


def _tables(predictor: LengthPredictor) -> list[lengths._Table]:
    predictor.first("", 100, 1)
    return [predictor._all, *predictor._tables.values()]


def test_when_much_begins_at_once_the_short_answers_do_not_speak_for_all() -> None:
    """Lengths even from 1 to 1,000, all begun together: after 200 tokens a fifth has ended, at 100 on average."""
    blind, seeing = LengthPredictor(), LengthPredictor()
    for predictor in (blind, seeing):
        for length in range(1, 200):
            predictor.learn("", 100, 4096, length, True, 1.0)
    row = seeing.first("", 100, 4096)[0]
    seeing.under_way(np.full(800, row), np.full(800, 200.0))
    for predictor in (blind, seeing):
        for length in range(1, 20):
            predictor.learn("", 100, 4096, length, True, 1.0)
    assert blind.first("", 100, 4096)[1] < 200
    assert seeing.first("", 100, 4096)[1] > 350


def test_before_anything_is_known_an_answer_is_as_long_as_it_may_be() -> None:
    predictor = LengthPredictor()
    assert predictor.first("", 500, 100)[1] == 100
    # The prior's bin ends beyond it, by less than a quarter of an octave.
    assert PRIOR_TOKENS * 0.84 <= predictor.first("", 500, 100_000)[1] <= PRIOR_TOKENS


def test_it_learns_what_tenants_and_kinds_have_in_common_and_what_not() -> None:
    rng = random.Random(0)
    predictor = LengthPredictor()
    for _ in range(500):
        for tenant, mean in (("short", 30.0), ("long", 600.0)):
            length = max(1, min(round(rng.expovariate(1 / mean)), 4000))
            predictor.learn(tenant, 1000, 4096, length, True, predictor.first(tenant, 1000, 4096)[1])
    assert predictor.first("short", 1000, 4096)[1] == pytest.approx(30, rel=0.25)
    assert predictor.first("long", 1000, 4096)[1] == pytest.approx(600, rel=0.25)
    # Nobody knows this one: it is between them, as the mean of all is.
    assert predictor.first("new", 1000, 4096)[1] == pytest.approx(315, rel=0.25)
    # An exponential law remembers nothing: what is left is the mean, whatever is there.
    row = predictor.first("long", 1000, 4096)[0]
    assert predictor.expected_one(row, 4096, 500) - 500 == pytest.approx(600, rel=0.35)
    # Such a law is hard to predict, but not in the mean.
    assert 0.3 < predictor.error < 1.0
    assert abs(predictor.bias) < 0.3


def test_answers_that_were_cut_do_not_teach_that_answers_are_short() -> None:
    predictor, naive = LengthPredictor(), LengthPredictor()
    rng = random.Random(1)
    for _ in range(400):
        # A third is cut at 64 tokens by a small max_tokens, of the same kind as the others.
        length, most = rng.randint(100, 300), rng.choice([64, 500, 500])
        predictor.learn("", 10, 500, min(length, most), length <= most, 0.0)
        naive.learn("", 10, 500, min(length, most), True, 0.0)
    assert predictor.first("", 10, 500)[1] == pytest.approx(200, rel=0.1)
    assert naive.first("", 10, 500)[1] < 165


def test_it_follows_a_change() -> None:
    predictor = LengthPredictor()
    for _ in range(3000):
        predictor.learn("", 10, 5000, 1000, True, 0.0)
    for _ in range(3000):
        predictor.learn("", 10, 5000, 20, True, 0.0)
    assert predictor.first("", 10, 5000)[1] < 100


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "MAX_TABLES", 8)
    predictor = LengthPredictor()
    for number in range(100):
        predictor.learn(f"tenant {number}", 10, 100, 50, True, 50.0)
        assert predictor.first(f"tenant {number}", 10, 100)[1] <= 100
        predictor.check()
    assert len(predictor._tables) == 8


def test_many_at_once_are_as_one_by_one() -> None:
    predictor = LengthPredictor()
    rng = np.random.default_rng(0)
    for length in rng.integers(1, 2000, 300):
        predictor.learn("ab"[length % 2], int(length), 4096, int(length), True, 1.0)
    rows = np.array([predictor.first(tenant, prompt, 4096)[0] for tenant in "ab" for prompt in (10, 100, 1000)])
    done, most = rng.integers(0, 900, 6).astype(float), rng.integers(900, 4096, 6)
    together = predictor.expected(rows, done, most)
    singly = [predictor.expected_one(*each) for each in zip(rows.tolist(), most.tolist(), done.tolist(), strict=True)]
    assert together.tolist() == singly
