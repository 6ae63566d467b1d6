"""Goal: the line's head is always who the rules say, nobody starves, and no tenant is held up by another's queue.

Method: random operations beside an oracle that sorts everybody anew each time; streams without end against the bound.
"""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pyengine.scheduler import order
from pyengine.scheduler.order import OVERDUE, PATIENCE, STALE, Line, Place


class Oracle:
    """The rules, read aloud: tenants' service counts from when somebody of their priority began to wait."""

    def __init__(self) -> None:
        self.waiting: list[Place] = []
        self.served: dict[tuple[int, int], int] = {}
        self.virtual: dict[int, int] = {}
        #: When a tenant got to where it stands: who was there first is first among equals.
        self.since: dict[tuple[int, int], int] = {}
        self.events = 0
        #: Tokens that are to be computed of others before somebody overdue has its turn.
        self.owed = 0.0

    def push(self, place: Place) -> None:
        mine = place.priority, place.tenant
        if not place.resumed and not any(mine == (p.priority, p.tenant) for p in self.waiting if not p.resumed):
            self.served[mine] = max(self.served.get(mine, 0), self.virtual.get(place.priority, 0))
            self._stamp(mine)
        self.waiting.append(place)

    def pick(self, place: Place, tokens: int) -> None:
        mine = place.priority, place.tenant
        if not place.resumed:
            self.virtual[place.priority] = max(self.virtual.get(place.priority, 0), self.served[mine])
            self.served[mine] += max(tokens, 1)
            self._stamp(mine)
        self.remove(place)

    def remove(self, place: Place) -> None:
        self.waiting.remove(place)
        if not any(place.priority == p.priority for p in self.waiting if not p.resumed):
            self.virtual.pop(place.priority, None)
            self.served = {key: value for key, value in self.served.items() if key[0] != place.priority}

    def _stamp(self, mine: tuple[int, int]) -> None:
        self.events += 1
        self.since[mine] = self.events

    def computed(self, place: Place, tokens: int, now: float) -> None:
        overdue = now >= place.arrived + place.patience
        self.owed = tokens * (1 - OVERDUE) / OVERDUE if overdue else max(self.owed - tokens, 0)

    def head(self, now: float) -> Place | None:
        resumed = [place for place in self.waiting if place.resumed]
        if resumed:
            return min(resumed, key=lambda place: place.number)
        overdue = [place for place in self.waiting if now >= place.arrived + place.patience]
        oldest = min(overdue, key=lambda place: place.number, default=None)
        if oldest is not None and not self.owed:
            return oldest

        def key(place: Place) -> tuple[float, ...]:
            mine = place.priority, place.tenant
            if place.latest < now and place.latest != -math.inf:
                sorts = (1.0, 0.0)
            elif place.latest == math.inf:
                sorts = (0.0, math.inf)
            else:
                sorts = (0.0, -math.inf if place.latest == -math.inf else place.seconds)
            return (-place.priority, self.served[mine], self.since[mine], *sorts, place.number)

        first = min(self.waiting, key=key, default=None)
        if first is None or oldest is None or first.latest >= now or first.latest == -math.inf:
            return first
        return oldest


class LineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.oracle = Line(), Oracle()
        self.now = 0.0
        self.number = 0

    @rule(
        slack=st.one_of(st.integers(-5, 50), st.sampled_from([math.inf, -math.inf])),
        seconds=st.integers(0, 5),
        patience=st.integers(1, 40),
        priority=st.integers(-1, 1),
        tenant=st.integers(0, 3),
        resumed=st.integers(0, 9).map(lambda n: n == 0),
    )
    def push(self, slack: float, seconds: int, patience: int, priority: int, tenant: int, resumed: bool) -> None:
        place = Place(self.number, self.now, self.now + slack, patience, priority, tenant, resumed, seconds)
        self.number += 1
        self.line.push(place)
        self.oracle.push(place)

    @rule(tokens=st.integers(0, 30))
    def pick(self, tokens: int) -> None:
        place = self.line.head(self.now)
        if place is None:
            return
        self.line.served(place, tokens)
        self.line.remove(place.number)
        self.oracle.pick(place, tokens)
        self.line.computed(place, tokens, self.now)
        self.oracle.computed(place, tokens, self.now)
        assert place.number not in self.line

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.oracle.waiting:
            place = data.draw(st.sampled_from(self.oracle.waiting))
            self.line.remove(place.number)
            self.oracle.remove(place)

    @rule(seconds=st.sampled_from([0.5, 1, 3, 10, 30]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def as_the_rules_say(self) -> None:
        self.line.check()
        assert len(self.line) == len(self.oracle.waiting)
        assert self.line.head(self.now) == self.oracle.head(self.now)


LineMachine.TestCase.settings = settings(max_examples=70, stateful_step_count=50, deadline=None)
TestLine = LineMachine.TestCase


def drain(line: Line, now: float = 0.0, tokens: int = 100) -> list[int]:
    """Everybody's number, in the order in which they are picked at this time."""
    picked = []
    while (place := line.head(now)) is not None:
        line.served(place, tokens)
        line.remove(place.number)
        picked.append(place.number)
    return picked


def test_without_objectives_and_with_one_tenant_it_is_first_come_first_served() -> None:
    line = Line()
    for number in range(50):
        line.push(Place(number, arrived=number * 0.1, latest=number * 0.1 + PATIENCE))
    assert drain(line, now=5.0) == list(range(50))


def test_the_shortest_goes_first_and_who_cannot_be_in_time_goes_last() -> None:
    line = Line()
    for number, (latest, seconds) in enumerate([(9.0, 3.0), (3.0, 5.0), (0.5, 0.1), (6.0, 1.0), (0.1, 0.2)]):
        line.push(Place(number, latest=latest, seconds=seconds))
    assert drain(line, now=1.0) == [3, 0, 1, 2, 4]


def test_who_was_promised_nothing_is_behind_those_that_were() -> None:
    line = Line()
    line.push(Place(0))
    line.push(Place(1, latest=5.0, seconds=4.0))
    assert drain(line) == [1, 0]


@pytest.mark.parametrize("latest", [-1.0, math.inf])
def test_nobody_starves(latest: float) -> None:
    """Short ones that can be in time come without end, one as soon as the last has begun; three long ones wait."""
    line = Line()
    long = [Place(number, latest=latest, patience=60.0, seconds=20.0) for number in range(3)]
    for waiting in long:
        line.push(waiting)
    now, computed, begun = 0.0, 0, list[tuple[int, float, int]]()
    for number in range(3, 3000):
        line.push(Place(number, now, now + 30.0, 60.0, seconds=0.1))
        place = line.head(now)
        assert place is not None
        tokens = 1000 if place in long else 100
        line.served(place, tokens)
        line.remove(place.number)
        line.computed(place, tokens, now)
        computed += tokens
        if place in long:
            begun.append((place.number, now, computed))
        now += 0.1
    assert [number for number, _, _ in begun] == [0, 1, 2], "the overdue have no turn, or not as they came"
    assert begun[0][1] == pytest.approx(60.0, abs=0.2), "one is not begun as soon as it is overdue"
    for (_, _, before), (_, _, after) in itertools.pairwise(begun):
        assert 1000 / OVERDUE <= after - before <= 1000 / OVERDUE + 200, "they have more or less than their share"


def test_a_tenant_with_a_hundred_requests_does_not_hold_up_anothers_one() -> None:
    line = Line()
    for number in range(100):
        line.push(Place(number, tenant=1))
    line.push(Place(100, tenant=2))
    assert drain(line).index(100) == 1


def test_tenants_share_by_tokens_and_nobody_saves_up_rights() -> None:
    line = Line()
    for number in range(40):
        line.push(Place(number, tenant=number % 2))
    tokens = {0: 0, 1: 0}
    for _ in range(20):
        place = line.head(0.0)
        assert place is not None
        size = 300 if place.tenant else 100
        tokens[place.tenant] += size
        line.served(place, size)
        line.remove(place.number)
    assert abs(tokens[0] - tokens[1]) <= 300
    # One that comes now begins where the others are: it does not catch up on what it never asked for.
    for number in range(40, 60):
        line.push(Place(number, tenant=2))
    first = drain(line)[:9]
    assert 2 <= sum(number >= 40 for number in first) <= 5


def test_what_is_remembered_of_tenants_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "TENANTS", 8)
    line = Line()
    line.push(Place(0, priority=0, tenant=0))
    line.push(Place(1, priority=0, tenant=0))
    for number in range(2, 100):
        line.push(Place(number, tenant=number))
        place = line.head(0.0)
        assert place is not None
        line.served(place, 10)
        line.remove(place.number)
    assert len(line._classes[0]._served) <= 9


def test_those_that_wait_no_more_are_not_remembered() -> None:
    """Overload for days: somebody short always waits, and the long ones behind it come, grow late and go."""
    line = Line()
    for number in range(10_000):
        line.push(Place(2 * number, float(number), latest=number + 9.0, seconds=0.1, patience=50.0))
        line.push(Place(2 * number + 1, float(number), latest=number + 9.0, seconds=5.0, patience=50.0))
        head = line.head(float(number))
        assert head is not None
        if number >= 1:
            line.remove(2 * number - 2)
        if number >= 20:
            line.remove(2 * number - 39)
        line.check()
    assert len(line) == 21
    (tenant,) = line._classes[0]._tenants.values()
    assert max(len(heap) for heap in (tenant._timely, tenant._latest, tenant._late)) <= 2 * len(line) + STALE + 1


def test_misuse_is_refused() -> None:
    line = Line()
    line.push(Place(1))
    with pytest.raises(ValueError, match="waits already"):
        line.push(Place(1))
    with pytest.raises(KeyError):
        line.remove(2)
