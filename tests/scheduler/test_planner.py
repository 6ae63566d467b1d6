"""Goal: roles follow the load, and under steady load they come to rest.
Method: the load model against the linear programme it solves, bisected; hours of random steady load, one request at a
time, in which each switch is carried out.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.planner import (
    BOTH_WORTH,
    DWELL,
    PATIENCE,
    WINDOW,
    Member,
    Planner,
    Rate,
    Switch,
    highest_load,
)
from pyengine.scheduler.types import Role


def feasible(prefill: float, decode: float, counts: tuple[int, int, int], load: float) -> bool:
    """Whether requests can be spread so that nobody is loaded more.

    A share x of them is prefilled by workers of role both, which decode it too; of the others' tokens z is decoded by
    decode workers, the rest by those of role both.
    """
    p, d, b = counts[0], counts[1], BOTH_WORTH * counts[2]
    x = max(1.0 - load * p / prefill, 0.0) if prefill else 0.0
    z = min(1.0 - x, load * d / decode if decode else 1.0)
    return x <= 1.0 and x * prefill + (1.0 - z) * decode <= load * b * (1 + 1e-12) + 1e-12


@settings(max_examples=300, deadline=None)
@given(st.floats(0, 20), st.floats(0, 20), st.tuples(*[st.integers(0, 6)] * 3))
def test_the_highest_load_is_the_least_possible(prefill: float, decode: float, counts: tuple[int, int, int]) -> None:
    load = highest_load(prefill, decode, counts)
    if prefill + decode == 0.0:
        assert load == 0.0
    elif math.isinf(load):
        assert counts[2] == 0
        assert 0 in counts[:2]
    else:
        assert feasible(prefill, decode, counts, load * (1 + 1e-6) + 1e-9)
        assert load < 1e-6 or not feasible(prefill, decode, counts, load * (1 - 1e-4) - 1e-9)


def members(roles: dict[str, Role], fixed: frozenset[str] = frozenset()) -> list[Member]:
    return [Member(name, role, fixed=name in fixed) for name, role in roles.items()]


def load_of(prefill: float, decode: float, roles: dict[str, Role]) -> float:
    count = Counter(roles.values())
    return highest_load(prefill, decode, (count[Role.PREFILL], count[Role.DECODE], count[Role.BOTH]))


def hour(
    roles: dict[str, Role], prefill: float, decode: float, seed: int, seconds: float = 3600.0, size: float = 1.0
) -> list[tuple[float, Switch]]:
    """Steady load for so long: requests come without memory, `prefill` and `decode` workers' worth of them; each switch
    takes up to half a minute.
    """
    rng = random.Random(seed)
    planner, switches, pending = Planner(), list[tuple[float, Switch]](), list[tuple[float, Switch]]()
    now = arrival = 0.0
    rate = max(prefill, decode) / size
    while now < seconds:
        while arrival < now + 5.0:
            arrival += rng.expovariate(rate)
            work = rng.expovariate(1.0)
            planner.ask(prefill / rate * work, decode / rate * rng.expovariate(1.0), arrival)
        now += 5.0
        for _, done in [each for each in pending if each[0] <= now]:
            roles[done.worker] = done.role
        pending = [each for each in pending if each[0] > now]
        switch = planner.decide(members(roles), now)
        if switch is not None:
            assert not pending, "two switches are under way"
            assert Counter(roles.values())[roles[switch.worker]] > 1, "the last worker of a role was taken"
            after = roles | {switch.worker: switch.role}
            assert load_of(prefill, decode, after) < load_of(prefill, decode, roles), "the true load is higher"
            pending.append((now + rng.uniform(0, 30), switch))
            switches.append((now, switch))
    return switches


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 12), st.integers(1, 12), st.integers(0, 3), st.floats(0.3, 9), st.floats(0.3, 9), st.integers(0, 99)
)
def test_steady_load_lets_roles_come_to_rest(p: int, d: int, b: int, prefill: float, decode: float, seed: int) -> None:
    """Each switch lowers the load as it truly is (`hour` asserts it), so no state comes back; and there are no more of
    them than workers, once each, or twice by way of both.
    """
    roles = {f"p{i}": Role.PREFILL for i in range(p)} | {f"d{i}": Role.DECODE for i in range(d)}
    roles |= {f"b{i}": Role.BOTH for i in range(b)}
    states, now = [dict(roles)], -DWELL
    for at, switch in hour(dict(roles), prefill, decode, seed, size=0.4):
        assert at - now >= DWELL
        now = at
        states.append(states[-1] | {switch.worker: switch.role})
    counts = [tuple(sorted(Counter(role.value for role in state.values()).items())) for state in states]
    assert len(set(counts)) == len(counts), "a state came back"
    assert len(counts) <= 2 * (p + d + b)


def test_large_groups_move_too() -> None:
    """One of sixteen changes the load by a few per cent only; the goal is what counts."""
    roles = {f"p{i}": Role.PREFILL for i in range(8)} | {f"d{i}": Role.DECODE for i in range(8)}
    switches = hour(roles, 9.0, 3.0, 0, size=1.0)
    assert 2 <= len(switches) <= 4
    assert load_of(9.0, 3.0, roles) < 0.95
    assert len({switch.role for _, switch in switches}) == 1


@pytest.mark.parametrize("seed", range(3))
def test_load_of_few_large_requests_does_not_make_it_nervous(seed: int) -> None:
    """A request of 20 worker-seconds every ten seconds: the estimates are off by half, and it knows."""
    roles = {f"p{i}": Role.PREFILL for i in range(4)} | {f"d{i}": Role.DECODE for i in range(4)}
    assert len(hour(roles, 2.0, 2.0, seed, size=20.0)) <= 1


def test_it_shifts_to_where_the_load_is_and_back_when_that_has_changed() -> None:
    roles = {f"p{i}": Role.PREFILL for i in range(4)} | {f"d{i}": Role.DECODE for i in range(4)}
    planner = Planner()
    now, counts = 0.0, list[int]()
    for prefill, decode in ((4.5, 1.0), (1.0, 4.5)):
        for _ in range(6000):
            now += 0.25
            planner.ask(prefill / 4, decode / 4, now)
            switch = planner.decide(members(roles), now)
            if switch is not None:
                roles[switch.worker] = switch.role
        best = min(highest_load(prefill, decode, (a, b, 8 - a - b)) for a in range(9) for b in range(9 - a))
        assert load_of(prefill, decode, roles) < best * 1.25
        counts.append(Counter(roles.values())[Role.PREFILL])
    assert counts[0] > counts[1]


def busy_planner(prefill: float, decode: float, until: float = 4 * WINDOW) -> Planner:
    planner = Planner()
    for step in range(int(until * 20)):
        planner.ask(prefill / 20, decode / 20, step / 20)
    return planner


def test_the_last_of_a_role_and_the_pinned_stay() -> None:
    now = 4 * WINDOW
    apart = {"p": Role.PREFILL, "d": Role.DECODE}
    assert busy_planner(5.0, 0.1).decide(members(apart), now) is None
    more = apart | {"d2": Role.DECODE}
    switch = busy_planner(5.0, 0.1).decide(members(more), now)
    assert switch is not None
    assert switch.worker in ("d", "d2")
    assert busy_planner(5.0, 0.1).decide(members(more, frozenset({"d", "d2"})), now) is None
    assert busy_planner(0.1, 0.05).decide(members(more), now) is None, "nobody gains by it"
    assert Planner().decide(members(more), now) is None, "nothing is known"


def test_who_has_least_to_finish_switches() -> None:
    workers = [Member("p", Role.PREFILL), Member("a", Role.DECODE, 9.0), Member("z", Role.DECODE, 1.0)]
    switch = busy_planner(5.0, 0.1).decide(workers, 4 * WINDOW)
    assert switch is not None
    assert switch.worker == "z"
    assert "highest load" in switch.why


def test_one_switch_at_a_time_and_one_that_is_lost_is_given_up() -> None:
    roles = {"p": Role.PREFILL} | {f"d{i}": Role.DECODE for i in range(8)}
    planner = busy_planner(6.0, 0.1)
    now = 4 * WINDOW
    first = planner.decide(members(roles), now)
    assert first is not None

    def later(seconds: float) -> Switch | None:
        for step in range(int(seconds * 20)):
            planner.ask(6.0 / 20, 0.1 / 20, now + step / 20)
        return planner.decide(members(roles), now + seconds)

    assert later(2 * DWELL) is None, "it is still under way"
    roles[first.worker] = first.role
    now += 2 * DWELL
    second = later(DWELL)
    assert second is not None, "it is done"
    now += DWELL
    del roles[second.worker]
    third = later(2 * DWELL)
    assert third is not None, "the worker is gone, and its order with it"
    now += 2 * DWELL
    assert later(PATIENCE - 1) is None
    assert later(PATIENCE + 1) is not None
    assert planner.given_up == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 5)), max_size=60))
def test_rates_fade(history: list[tuple[float, float]]) -> None:
    rate, now = Rate(), 0.0
    times = list[tuple[float, float]]()
    for passed, work in history:
        now += passed
        rate.add(work, now)
        times.append((now, work))
    if not times:
        return
    span = max(WINDOW * (1 - math.exp(-(now - times[0][0]) / WINDOW)), 1.0)
    faded = sum(work * math.exp(-(now - at) / WINDOW) for at, work in times)
    assert rate.value(now) == pytest.approx(faded / span)


def test_the_standard_error_is_that_of_many_runs() -> None:
    values, errors = list[float](), list[float]()
    for seed in range(300):
        rng, rate, now = random.Random(seed), Rate(), 0.0
        while now < 6 * WINDOW:
            now += rng.expovariate(0.5)
            rate.add(rng.expovariate(1.0), now)
        values.append(rate.value(now))
        errors.append(rate.error(now))
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    assert mean == pytest.approx(0.5, rel=0.05)
    assert sum(errors) / len(errors) == pytest.approx(deviation / mean, rel=0.15)
