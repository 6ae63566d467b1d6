"""Goal: each policy picks what its description says, is pure, and survives whatever a view holds.

Method: random views against slow, obvious loops over workers (`policy_oracles.py`); laws that hold for all policies.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.cluster import View
from pyengine.scheduler.policies import POLICIES, Choice, Policy, decide, find_policy
from pyengine.scheduler.policies.base import Ask, lowest
from pyengine.scheduler.types import Role, Slo

from .policy_oracles import ORACLES, Expected, kvcache_centric, least_harm
from .situations import columns, emptied, filled, situations, taken
from .world import worker

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem

Item = TypeVar("Item")

EVERY = pytest.mark.parametrize("name", POLICIES)
#: Their choice depends on the order of rows by design.
BY_ORDER = {"random", "round-robin"}


class Lots(random.Random):
    """Draws lot number `lot` of every tie: with 0 to W - 1 all outcomes are seen."""

    lot = 0

    def choice(self, seq: SupportsLenAndGetItem[Item]) -> Item:
        return seq[self.lot % len(seq)]


def outcomes(policy: Policy, view: View, ask: Ask) -> list[Choice]:
    """What it chooses, however its ties fall."""
    rng = Lots()
    found = []
    for rng.lot in range(len(view.workers)):
        found.append(policy(view, ask, rng))
    return found


def assert_expected(choices: list[Choice], expected: Expected) -> None:
    for choice in choices:
        assert choice.prefill in expected.prefill
        assert choice.decode in expected.decode(choice.prefill)
        assert choice.fetch == expected.fetch(choice.prefill)


@EVERY
@settings(max_examples=60, deadline=None)
@given(situation=situations())
def test_it_chooses_what_its_formula_says(name: str, situation: tuple[View, Ask]) -> None:
    view, ask = situation
    assert_expected(outcomes(find_policy(name), view, ask), ORACLES[name](view, ask))


@settings(max_examples=60, deadline=None)
@given(situations(), st.sampled_from([1.0, 1.5, 3.0]))
def test_kvcache_centric_is_algorithm_1_at_any_threshold(situation: tuple[View, Ask], threshold: float) -> None:
    view, ask = situation
    policy = find_policy(f"kvcache-centric:threshold={threshold}")
    assert_expected(outcomes(policy, view, ask), kvcache_centric(view, ask, threshold))


@settings(max_examples=60, deadline=None)
@given(situations(), st.sampled_from([(0.0, 0.1, 0.0), (1.0, 0.5, 1.0), (1e4, 0.01, 0.2)]))
def test_least_harm_follows_its_settings(situation: tuple[View, Ask], knobs: tuple[float, float, float]) -> None:
    view, ask = situation
    worth, doubt, reuse = knobs
    policy = find_policy(f"least-harm:worth={worth},doubt={doubt},reuse={reuse}")
    assert_expected(outcomes(policy, view, ask), least_harm(view, ask, worth, doubt, reuse))


@EVERY
@settings(max_examples=40, deadline=None)
@given(situation=situations(), seed=st.integers(0, 99))
def test_it_is_a_pure_function_of_view_ask_and_lots(name: str, situation: tuple[View, Ask], seed: int) -> None:
    """`decide` refuses rows that are masked out or are no pair. Nothing it was given is written to."""
    view, ask = situation
    for array in columns(view, ask).values():
        array.flags.writeable = False
    before = {column: array.copy() for column, array in columns(view, ask).items()}
    choice = decide(name, find_policy(name), view, ask, random.Random(seed))
    again = find_policy(name)(view, ask, random.Random(seed))
    assert (choice.prefill, choice.decode, choice.fetch) == (again.prefill, again.decode, again.fetch)
    assert all(np.array_equal(before[column], array) for column, array in columns(view, ask).items())
    assert all(len(np.atleast_1d(term)) in (1, len(view.workers)) for term in choice.terms.values())


@pytest.mark.parametrize("name", sorted(set(POLICIES) - BY_ORDER))
@settings(max_examples=40, deadline=None)
@given(situation=situations(), seed=st.randoms(use_true_random=False))
def test_the_order_of_workers_does_not_matter(name: str, situation: tuple[View, Ask], seed: random.Random) -> None:
    view, ask = situation
    order = np.array(seed.sample(range(len(view.workers)), len(view.workers)))
    here = outcomes(find_policy(name), view, ask)
    there = outcomes(find_policy(name), *taken(view, ask, order))
    prefills = {choice.prefill for choice in here}
    assert prefills == {int(order[choice.prefill]) for choice in there}
    if len(prefills) == 1:
        assert {choice.decode for choice in here} == {int(order[choice.decode]) for choice in there}


@EVERY
@settings(max_examples=25, deadline=None)
@given(situation=situations(), value=st.sampled_from([0.0, 1e300, float("inf")]))
@pytest.mark.filterwarnings("ignore:invalid value|overflow:RuntimeWarning")
def test_it_survives_any_column(name: str, situation: tuple[View, Ask], value: float) -> None:
    view, ask = filled(*situation, value)
    decide(name, find_policy(name), view, ask, random.Random(0))
    view, ask = emptied(view, ask)
    decide(name, find_policy(name), view, ask, random.Random(0))


@EVERY
@settings(max_examples=5, deadline=None)
@given(situation=situations())
def test_it_serves_one_worker_and_a_thousand(name: str, situation: tuple[View, Ask]) -> None:
    view, ask = situation
    many = np.random.default_rng(0).integers(0, len(view.workers), 1000)
    many[: len(view.workers)] = np.arange(len(view.workers))
    decide(name, find_policy(name), *taken(view, ask, many), random.Random(0))
    alone, ask = taken(view, ask, np.array([int(np.flatnonzero(view.prefills)[0])]))
    one = np.ones(1, dtype=bool)
    alone = replace(
        alone, workers=(worker("w", Role.BOTH, "n"),), both=one, prefills=one, decodes=one, inlines=np.zeros_like(one)
    )
    choice = decide(name, find_policy(name), alone, ask, random.Random(0))
    assert (choice.prefill, choice.decode) == (0, 0)


@settings(max_examples=30, deadline=None)
@given(situations())
def test_round_robin_visits_everybody_once_a_round(situation: tuple[View, Ask]) -> None:
    view, ask = situation
    policy = find_policy("round-robin")
    count = int(view.prefills.sum())
    visited = [policy(replace(view, turn=turn), ask, random.Random(0)).prefill for turn in range(count)]
    assert sorted(visited) == np.flatnonzero(view.prefills).tolist()


def test_nan_is_worse_than_any_number_and_ties_are_drawn() -> None:
    scores = np.array([np.nan, 5.0, np.inf, 5.0])
    everybody = np.ones(4, dtype=bool)
    assert {lowest(scores, everybody, random.Random(seed)) for seed in range(20)} == {1, 3}
    assert lowest(scores, np.array([True, False, True, False]), random.Random(0)) == 2
    assert {lowest(np.full(3, np.nan), everybody[:3], random.Random(seed)) for seed in range(20)} == {0, 1, 2}


@settings(max_examples=40, deadline=None)
@given(situations(), st.sampled_from([0.05, 1.0, 20.0]))
def test_dynamos_temperature_draws_by_cost(situation: tuple[View, Ask], temperature: float) -> None:
    """Softmax over costs scaled to [0, 1]: compared with its weights, by the shares of many draws."""
    view, ask = situation
    policy = find_policy(f"dynamo:temperature={temperature}")
    terms = policy(view, ask, random.Random(0)).terms
    cost = terms["compute"] + view.both * terms["keep"]
    rows = np.flatnonzero(view.prefills)
    span = cost[rows].max() - cost[rows].min()
    # Equal costs go to the smallest cache.
    smallest = view.cached_blocks[rows] == view.cached_blocks[rows].min()
    weights = np.exp(-cost[rows] / span / temperature) if span else smallest.astype(float)
    rng = random.Random(1)
    drawn = np.array([policy(view, ask, rng).prefill for _ in range(400)])
    shares = np.array([(drawn == row).mean() for row in rows])
    # Five standard deviations of a share of 400 draws are at most 0.125.
    assert np.abs(shares - weights / weights.sum()).max() < 0.13


def test_a_batch_past_its_objective_takes_what_would_break_another() -> None:
    """The claim of `least_harm.py`: one at 130 ms has lost already, one at 99 ms would lose all of its own."""
    view, ask = decoders(gaps=[0.099, 0.130], running=[19, 27])
    assert find_policy("least-harm")(view, ask, random.Random(0)).decode == 2
    assert find_policy("kvcache-centric")(view, ask, random.Random(0)).decode == 1
    view, ask = decoders(gaps=[0.080, 0.130], running=[14, 27])
    assert find_policy("least-harm")(view, ask, random.Random(0)).decode == 1


def decoders(gaps: list[float], running: list[int]) -> tuple[View, Ask]:
    """One idle prefill worker and two decode workers; gaps between tokens are to be at most 100 ms."""
    view, ask = BARE
    return replace(view, tbt=np.array([0.0, *gaps]), running=np.array([0, *running])), ask


def bare() -> tuple[View, Ask]:
    infos = (
        worker("p", Role.PREFILL, "n0"), worker("d0", Role.DECODE, "n1"), worker("d1", Role.DECODE, "n2")
    )  # fmt: skip
    floats, ints, no = np.zeros(3), np.zeros(3, dtype=np.int64), np.zeros(3, dtype=bool)
    view = View(
        workers=infos, nodes=("n0", "n1", "n2"), block_tokens=512, block_bytes=1, both=no,
        prefills=np.array([True, False, False]), decodes=np.array([False, True, True]), node=np.arange(3), takes=~no,
        queue_seconds=floats, running=ints, free_pages=ints + 2600, pages=ints + 2600, pool_slots=ints + 5860,
        max_positions=ints + 131_072, max_tokens_per_step=ints + 8192, tbt=floats, step_seconds=floats + 0.03,
        token_seconds=floats + 1e-4, context_seconds=floats + 1e-9, measured=~no, turn=0, queued_requests=ints,
        queued_tokens=ints, running_context=ints, max_sequences=ints + 256, sequence_seconds=floats + 3.5e-3,
        history_seconds=floats + 3.47e-8, error=floats, inlines=no, cached_blocks=ints, recent_prompt=ints,
        recent_computed=ints, recent_output=ints, base_seconds=floats, correction=floats + 1,
    )  # fmt: skip
    return view, Ask(12_000, ints, 0, floats, floats, Slo(ttft=30.0, tbt=0.1), ints, ints, 343.0)


BARE = bare()


def test_even_batches_are_of_as_many_sequences() -> None:
    """`even` looks at how many decode somewhere, and not at how long a step takes there."""
    view, ask = decoders(gaps=[0.090, 0.060], running=[10, 14])
    assert find_policy("least-harm:even=true")(view, ask, random.Random(0)).decode == 1
    assert find_policy("least-harm")(view, ask, random.Random(0)).decode == 2
