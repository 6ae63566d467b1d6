"""Goal: each policy picks what its description says. Method: random views against slow, obvious loops over workers."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler import policies
from pyengine.scheduler.cluster import View
from pyengine.scheduler.policies import POLICIES, UnknownName, find_admission, find_policy
from pyengine.scheduler.policies.base import Ask
from pyengine.scheduler.policies.kvcache_centric import KvCacheCentric
from pyengine.scheduler.types import Role, Slo

from .world import BLOCK, SPEC, worker


@st.composite
def situations(draw: st.DrawFn) -> tuple[View, Ask]:
    """A view of a few workers with random loads, and a request with random prefixes; a pair can always be made."""
    roles = draw(st.lists(st.sampled_from(list(Role)), min_size=1, max_size=5))
    if not any(role.decodes for role in roles):
        roles.append(Role.DECODE)
    if not any(role.prefills for role in roles):
        roles.append(Role.PREFILL)
    count = len(roles)
    infos = tuple(worker(f"w{i}", role, f"n{i}") for i, role in enumerate(roles))

    def floats(low: float, high: float) -> np.ndarray:
        return np.array(draw(st.lists(st.floats(low, high), min_size=count, max_size=count)))

    def ints(low: int, high: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)))

    blocks = draw(st.integers(0, 40))
    prefix = ints(0, blocks)
    best = draw(st.integers(int(prefix.max()), blocks))
    prefills = np.array([role.prefills for role in roles])
    view = View(
        workers=infos,
        nodes=tuple(info.node.node for info in infos),
        block_tokens=BLOCK,
        block_bytes=SPEC.block_bytes,
        both=np.array([role is Role.BOTH for role in roles]),
        prefills=prefills,
        decodes=np.array([role.decodes for role in roles]),
        node=np.arange(count),
        takes=np.ones(count, dtype=bool),
        queue_seconds=floats(0, 5),
        running=ints(0, 9),
        free_pages=ints(0, 99),
        pages=np.full(count, 128),
        pool_slots=np.full(count, 128),
        max_positions=np.full(count, 4096),
        max_tokens_per_step=ints(1, 512),
        tbt=floats(0.001, 0.5),
        step_seconds=floats(0, 0.1),
        token_seconds=floats(1e-4, 1e-2),
        context_seconds=floats(0, 1e-5),
        measured=np.ones(count, dtype=bool),
        turn=draw(st.integers(0, 20)),
        queued_requests=ints(0, 9),
        queued_tokens=ints(0, 9999),
        running_context=ints(0, 9999),
        max_sequences=np.full(count, 32),
        sequence_seconds=floats(0, 0.1),
        history_seconds=floats(0, 1e-5),
        base_seconds=floats(0, 0.1),
        error=floats(0, 1),
        correction=np.ones(count),
        inlines=np.zeros(count, dtype=bool),
    )
    tokens = blocks * BLOCK + draw(st.integers(1, BLOCK))
    return view, Ask(tokens, prefix, best, floats(0, 3), floats(0, 3), Slo(), ints(0, blocks), ints(0, blocks), 16.0)


def algorithm_1(view: View, ask: Ask, threshold: float) -> list[float]:
    """TTFT of each prefill instance as in the paper, one at a time; infinite for those that do not prefill."""
    answers = []
    for i, prefills in enumerate(view.prefills):
        own = int(ask.prefix[i])
        longer = ask.best / own > threshold if own else ask.best > 0
        prefix = ask.best if longer else own
        transfer = float(ask.transfer_seconds[i]) if longer else 0.0
        rest = ask.prompt_tokens - prefix * BLOCK
        compute = math.ceil(rest / int(view.max_tokens_per_step[i])) * float(view.step_seconds[i])
        compute += rest * float(view.token_seconds[i])
        # Token j of the rest attends to all before it and to itself.
        compute += sum(prefix * BLOCK + j + 1 for j in range(rest)) * float(view.context_seconds[i])
        load = float(ask.load_seconds[i])
        answers.append(load + transfer + float(view.queue_seconds[i]) + compute if prefills else math.inf)
    return answers


@settings(max_examples=200, deadline=None)
@given(situations(), st.sampled_from([1.0, 1.5, 3.0]))
def test_kvcache_centric_is_algorithm_1(situation: tuple[View, Ask], threshold: float) -> None:
    view, ask = situation
    choice = KvCacheCentric(threshold)(view, ask, random.Random(0))
    seconds = algorithm_1(view, ask, threshold)
    assert seconds[choice.prefill] == pytest.approx(min(seconds))
    own = int(ask.prefix[choice.prefill])
    assert choice.fetch == (ask.best / own > threshold if own else ask.best > 0)
    if view.workers[choice.prefill].role is not Role.BOTH:

        def load(i: int) -> tuple[bool, float]:
            return view.free_pages[i] * BLOCK <= ask.prompt_tokens, float(view.tbt[i])

        assert load(choice.decode) == min(load(i) for i in range(len(view.workers)) if view.decodes[i])


@settings(max_examples=100, deadline=None)
@given(situations())
def test_least_loaded_takes_the_shortest_queue_and_the_fewest_sequences(situation: tuple[View, Ask]) -> None:
    view, ask = situation
    choice = find_policy("least-loaded")(view, ask, random.Random(0))

    def queue(i: int) -> float:
        both = view.workers[i].role is Role.BOTH
        return float(view.queue_seconds[i]) + (float(view.running[i] * view.tbt[i]) if both else 0.0)

    assert queue(choice.prefill) == min(queue(i) for i in range(len(view.workers)) if view.prefills[i])
    if view.workers[choice.prefill].role is not Role.BOTH:
        running = [int(view.running[i]) for i in range(len(view.workers)) if view.decodes[i]]
        assert int(view.running[choice.decode]) == min(running)


@settings(max_examples=100, deadline=None)
@given(situations(), st.sampled_from(sorted(POLICIES)))
def test_every_policy_pairs_by_role_and_repeats_itself(situation: tuple[View, Ask], name: str) -> None:
    view, ask = situation
    choice = find_policy(name)(view, ask, random.Random(3))
    assert view.prefills[choice.prefill]
    assert view.decodes[choice.decode]
    assert (view.workers[choice.prefill].role is Role.BOTH) == (choice.prefill == choice.decode)
    assert find_policy(name)(view, ask, random.Random(3)) == choice


@settings(max_examples=50, deadline=None)
@given(situations())
def test_round_robin_visits_everybody_once_a_round(situation: tuple[View, Ask]) -> None:
    view, ask = situation
    policy = find_policy("round-robin")
    count = int(view.prefills.sum())
    visited = [policy(replace(view, turn=turn), ask, random.Random(0)).prefill for turn in range(count)]
    assert sorted(visited) == np.flatnonzero(view.prefills).tolist()


def test_unknown_names_list_the_known_and_suggest_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"known are random.*did you mean 'round-robin'"):
        find_policy("roundrobin")
    with pytest.raises(UnknownName, match="did you mean 'at-arrival'"):
        find_admission("arrival")


def test_policies_of_other_packages_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("mine", f"{__name__}:KvCacheCentric", policies.GROUP)
    monkeypatch.setattr(policies, "entry_points", lambda group: [entry] if group == policies.GROUP else [])
    assert isinstance(find_policy("mine"), KvCacheCentric)
