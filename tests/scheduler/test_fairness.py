"""Goal: shares are weighted max-min over recent work; who asks for much cannot starve who asks for little.
Method: the level by bisection; a cluster that can do one second of work per second, and tenants that ask for more.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler import fairness
from pyengine.scheduler.fairness import TOLERANCE, WINDOW, Shares


def level_by_bisection(demand: dict[str, float], used: float, weights: dict[str, float]) -> float:
    low, high = 0.0, max(demand[name] / weights.get(name, 1.0) for name in demand)
    for _ in range(200):
        middle = (low + high) / 2
        filled = sum(min(demand[name], middle * weights.get(name, 1.0)) for name in demand)
        low, high = (middle, high) if filled < used else (low, middle)
    return high


asks = st.lists(
    st.tuples(st.sampled_from(["", "a", "b", "c"]), st.floats(0.01, 10.0), st.booleans(), st.floats(0.0, 30.0)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(asks, st.dictionaries(st.sampled_from(["a", "b"]), st.floats(0.2, 5.0)))
def test_the_level_is_weighted_max_min(
    history: list[tuple[str, float, bool, float]], weights: dict[str, float]
) -> None:
    shares = Shares(weights)
    demand, use, now = dict[str, float](), dict[str, float](), 0.0
    for tenant, work, admitted, passed in history:
        now += passed
        for known in demand:
            demand[known] *= math.exp(-passed / WINDOW)
            use[known] *= math.exp(-passed / WINDOW)
        demand[tenant] = demand.get(tenant, 0.0) + work
        use[tenant] = use.get(tenant, 0.0) + work * admitted
        shares.ask(tenant, work, admitted, now)
        shares.check()
    used = sum(use.values())
    if sum(demand.values()) <= used * (1 + TOLERANCE):
        assert shares.level(now) == math.inf
        assert not any(shares.above(name, now) for name in demand)
        return
    level = shares.level(now)
    assert level == pytest.approx(level_by_bisection(demand, used, weights), rel=1e-6, abs=1e-9)
    for name in demand:
        fair = level * weights.get(name, 1.0)
        assert shares.excess(name, now) == pytest.approx(use[name] / fair if fair else 0.0, rel=1e-6)
        if shares.above(name, now):
            # If it asks for nothing and the others' demand fades with it, that is when it has its share of today.
            assert use[name] * math.exp(-shares.wait(name, now) / WINDOW) == pytest.approx(fair, rel=1e-6)
    # Not all can be above.
    assert not used or any(not shares.above(name, now) for name in demand)


def served(rates: dict[str, float], weights: dict[str, float], seconds: float = 900.0) -> dict[str, float]:
    """Share of each tenant's work that is admitted, where one second of work per second can be done.

    rates: work asked for per second, in requests of a second each. A request is refused if its tenant is above its
    share while five seconds of work are queued, or if ten are queued in front of it; who is content overtakes the
    others.
    """
    rng = random.Random(0)
    shares = Shares(weights)
    arrivals = sorted(
        (rng.uniform(0, seconds), name) for name, rate in rates.items() for _ in range(round(rate * seconds))
    )
    front, behind, last = 0.0, 0.0, 0.0
    asked, got = dict.fromkeys(rates, 0), dict.fromkeys(rates, 0)
    for now, name in arrivals:
        done = now - last
        front, behind, last = max(front - done, 0.0), max(behind - max(done - front, 0.0), 0.0), now
        first = shares.level(now) < math.inf and shares.content(name, now)
        waits = front if first else front + behind
        admitted = waits < 10.0 and not (front + behind > 5.0 and shares.above(name, now))
        shares.ask(name, 1.0, admitted, now)
        front, behind = front + (admitted and first), behind + (admitted and not first)
        if now > seconds / 3:
            asked[name] += 1
            got[name] += admitted
    return {name: got[name] / asked[name] for name in rates}


def test_a_heavy_tenant_cannot_starve_others() -> None:
    share = served({"heavy": 10.0, "light": 0.2, "other": 0.2}, {})
    assert share["light"] > 0.95
    assert share["other"] > 0.95
    # What these leave is the heavy one's.
    assert share["heavy"] * 10.0 == pytest.approx(0.6, rel=0.15)


def test_equal_tenants_get_alike_and_weights_count() -> None:
    share = served({"a": 3.0, "b": 3.0, "c": 9.0}, {})
    got = [share["a"] * 3, share["b"] * 3, share["c"] * 9]
    assert got == pytest.approx([1 / 3] * 3, rel=0.2)
    share = served({"a": 3.0, "b": 3.0}, {"a": 3.0})
    assert share["a"] / share["b"] == pytest.approx(3.0, rel=0.3)


def test_a_tenant_that_is_alone_is_never_above_its_share() -> None:
    shares = Shares()
    for second in range(100):
        shares.ask("only", 5.0, second % 7 == 0, float(second))
        assert not shares.above("only", float(second))


def test_what_was_admitted_is_corrected_and_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_TENANTS", 3)
    shares = Shares()
    for number in range(10):
        shares.ask(f"tenant {number}", 1.0, True, 0.0)
    assert len(shares._tenants) == 3
    shares.correct("tenant 9", -0.75)
    shares.correct("tenant 0", 5.0)
    shares.ask("tenant 8", 100.0, False, 0.0)
    assert shares.excess("tenant 9", 0.0) < shares.excess("tenant 7", 0.0)
    shares.correct("tenant 9", -5.0)
    shares.check()
