"""Goal: links share their bandwidth max-min fair, and every time is right. Method: closed forms, and an oracle in exact
fractions that fills rates from the beginning after every change, over random transfers."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.sim.links import Links

DELAY = 1e-3


def finish_all(links: Links, until: float = sys.float_info.max) -> list[tuple[int, float]]:
    """Ids and times of all completions up to then, as an event loop sees them."""
    seen = []
    while (at := links.next()) <= until:
        done = links.advance(at)
        assert done, "next named a time at which nothing was completed"
        seen += [(id, at) for id in done]
    return seen


def test_one_transfer_has_the_whole_link() -> None:
    links = Links(100.0, DELAY)
    assert links.next() == math.inf and links.advance(1.0) == []
    assert links.start(2.0, "a", "b", 500) == 0
    assert links.next() == 7.0 + DELAY
    assert links.advance(4.0) == [] and links.touching("a") == links.touching("b") == [0]
    assert links.advance(7.0) == [], "the last byte is still on its way"
    assert links.touching("a") == []
    assert links.advance(7.0 + DELAY) == [0]
    assert links.next() == math.inf


def test_nothing_takes_the_delay() -> None:
    links = Links(100.0, DELAY)
    links.start(3.0, "a", "b", 0)
    assert finish_all(links) == [(0, 3.0 + DELAY)]


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("outwards", [True, False])
def test_equal_transfers_share_alike(count: int, outwards: bool) -> None:
    links = Links(100.0, DELAY)
    for other in range(count):
        links.start(0.0, *(("hub", f"n{other}") if outwards else (f"n{other}", "hub")), 1000)
    seen = finish_all(links)
    assert [id for id, _ in seen] == list(range(count))
    assert [at for _, at in seen] == pytest.approx([count * 10.0 + DELAY] * count)


def test_different_sizes_from_one_sender() -> None:
    """Sorted by size, each ends when all before it and its share of the rest are through."""
    sizes = [100, 200, 400, 800]
    links = Links(100.0, DELAY)
    for index, size in enumerate(sizes):
        links.start(0.0, "a", f"n{index}", size)
    expected, at, before = [], 0.0, 0
    for index, size in enumerate(sizes):
        at += (size - before) * (len(sizes) - index) / 100.0
        before = size
        expected.append(at + DELAY)
    assert [time for _, time in finish_all(links)] == pytest.approx(expected)


def test_a_late_joiner() -> None:
    """1000 bytes alone for 4 s, then shared: 600 left at half the rate end at 16 s; the other's 200 left at 18 s."""
    links = Links(100.0, 0.0)
    links.start(0.0, "a", "b", 1000)
    links.start(4.0, "a", "c", 800)
    assert finish_all(links) == [(0, 16.0), (1, 18.0)]


def test_who_is_held_up_elsewhere_leaves_the_rest() -> None:
    """Three into c are held to a third each; what is left of a's way out goes to b."""
    links = Links(90.0, 0.0)
    for source in ("a", "x", "y"):
        links.start(0.0, source, "c", 300)
    links.start(0.0, "a", "b", 600)
    links.check()
    assert links.rates() == {0: 30.0, 1: 30.0, 2: 30.0, 3: 60.0}
    assert finish_all(links) == [(0, 10.0), (1, 10.0), (2, 10.0), (3, 10.0)]


def test_the_fabric_limits_all() -> None:
    links = Links(100.0, 0.0, fabric_rate=150.0)
    links.start(0.0, "a", "b", 750)
    links.start(0.0, "c", "d", 750)
    assert links.rates() == {0: 75.0, 1: 75.0}
    links.check()
    assert finish_all(links) == [(0, 10.0), (1, 10.0)]


def test_cancelled_ones_make_room() -> None:
    links = Links(100.0, DELAY)
    links.start(0.0, "a", "b", 1000)
    links.start(0.0, "a", "c", 1000)
    assert links.touching("a") == [0, 1] and links.touching("c") == [1]
    assert links.cancel(2.0, 1)
    assert not links.cancel(2.0, 1) and not links.cancel(2.0, 7)
    assert links.next() == 11.0 + DELAY
    links.start(2.0, "x", "y", 100)
    assert links.advance(3.0) == []
    assert links.cancel(3.0, 2), "it is sent, but has not arrived"
    assert finish_all(links) == [(0, 11.0 + DELAY)]


def test_others_keep_their_floats() -> None:
    """A change that cannot reach a transfer does not touch when it ends, not even in its last bit."""
    links = Links(3.0, 0.0)
    links.start(0.1, "a", "b", 1000)
    at = links.next()
    for step in range(50):
        links.start(0.2 + step / 7, "c", "d", 100_000)
    assert links.next() == at


def test_bad_input() -> None:
    for arguments in ((0.0, 0.0), (-1.0, 0.0), (math.inf, 0.0), (math.nan, 0.0), (1.0, 0.0, 0.0)):
        with pytest.raises(ValueError, match="must be above 0 bytes per second"):
            Links(*arguments)
    with pytest.raises(ValueError, match="delay must be"):
        Links(1.0, -1.0)
    links = Links(1.0, 0.0)
    with pytest.raises(ValueError, match="0 bytes or more"):
        links.start(0.0, "a", "b", -1)
    with pytest.raises(ValueError, match="to itself"):
        links.start(0.0, "a", "a", 1)
    links.advance(5.0)
    with pytest.raises(ValueError, match="backwards"):
        links.start(4.0, "a", "b", 1)


class Oracle:
    """All rates from the beginning after every change, in fractions."""

    def __init__(self, rate: int, fabric: int | None) -> None:
        self.rate, self.fabric = Fraction(rate), fabric
        self.flows: dict[int, list[Fraction]] = {}
        self.ends: dict[int, tuple[str, ...]] = {}
        self.done: list[tuple[int, Fraction]] = []
        self.now = Fraction(0)

    def rates(self) -> dict[int, Fraction]:
        free = {end: self.rate for ends in self.ends.values() for end in ends}
        if self.fabric is not None:
            free["fabric"] = Fraction(self.fabric)
        rates: dict[int, Fraction] = {}
        while len(rates) < len(self.flows):
            sharing = {
                end: [id for id in self.flows if id not in rates and end in self.ends[id]] for end in sorted(free)
            }
            share, end = min((free[end] / len(ids), end) for end, ids in sharing.items() if ids)
            for id in sharing[end]:
                rates[id] = share
                for other in self.ends[id]:
                    free[other] -= share
        return rates

    def run(self, until: Fraction | None) -> None:
        while self.flows:
            rates = self.rates()
            ends_at = self.now + min(left[0] / rates[id] for id, left in self.flows.items())
            at = ends_at if until is None else min(ends_at, until)
            for id, left in list(self.flows.items()):
                left[0] -= rates[id] * (at - self.now)
                if left[0] == 0:
                    del self.flows[id]
                    self.done.append((id, at))
            self.now = at
            if until is not None and ends_at > until:
                break
        if until is not None:
            self.now = until


@settings(deadline=None, max_examples=150)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 40), st.sampled_from("abcd"), st.sampled_from("abcd"), st.integers(0, 400), st.booleans()
        ),
        max_size=14,
    ),
    fabric=st.none() | st.integers(5, 60),
)
def test_against_exact_fractions(rows: list[tuple[int, str, str, int, bool]], fabric: int | None) -> None:
    links, oracle = Links(20.0, 0.5, None if fabric is None else float(fabric)), Oracle(20, fabric)
    seen: list[tuple[int, float]] = []
    now, started = 0, 0
    cancelled: set[int] = set()
    for wait, source, to, size, cancel in rows:
        now += wait
        oracle.run(Fraction(now))
        seen += finish_all(links, now)
        if cancel and started:
            victim = size % started
            if links.cancel(float(now), victim):
                cancelled.add(victim)
            else:
                assert victim not in oracle.flows
            oracle.flows.pop(victim, None)
        elif source != to:
            oracle.flows[started] = [Fraction(size)]
            oracle.ends[started] = (f"out {source}", f"into {to}", *(() if fabric is None else ("fabric",)))
            assert links.start(float(now), source, to, size) == started
            started += 1
            oracle.run(Fraction(now))
        assert links.advance(float(now)) == []
        links.check()
        rates = links.rates()
        assert list(rates) == list(oracle.flows)
        for id, rate in oracle.rates().items():
            assert rates[id] == pytest.approx(float(rate), rel=1e-9)
    oracle.run(None)
    seen += finish_all(links)
    times = [at for _, at in seen]
    assert times == sorted(times)
    # What was cancelled between its last byte and its arrival is never told.
    expected = {id: float(at) + 0.5 for id, at in oracle.done if id not in cancelled}
    assert dict(seen) == pytest.approx(expected) and len(seen) == len(expected)
