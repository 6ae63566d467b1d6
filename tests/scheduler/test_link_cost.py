"""Goal: rates are those measured, or the usual ones; who is busy delays what is ordered next; places are reused safely.

Method: closed forms by hand, and random operations against a dictionary of pairs.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.link_cost import FRESH, LINK_DELAY, LINK_RATE, LinkCost


def test_links_learn_their_rate_and_queue_behind_their_sender() -> None:
    links = LinkCost()
    assert links.rate("a", "b") == LINK_RATE
    for _ in range(30):
        links.observe("a", "b", 100_000_000, 1.0)
    links.observe("a", "b", 10, 1.0)
    links.observe("a", "b", 1 << 20, math.inf)
    assert links.rate("a", "b") == pytest.approx(1e8, rel=0.01)
    links.order("a", "b", 200_000_000, now=10.0)
    assert links.queue("a", 10.0) == pytest.approx(2.0, rel=0.02)
    links.order("a", "c", 200_000_000, now=11.0)
    assert links.queue("a", 11.0) == pytest.approx(3.0, rel=0.02)
    assert links.queue("a", 99.0) == 0
    links.forget("a")
    assert links.queue("a", 11.0) == 0


def test_a_receiver_is_busy_too() -> None:
    links = LinkCost()
    links.order("a", "c", int(LINK_RATE), now=5.0)
    assert links.queues("b", ("a", "c", "d"), 5.0) == pytest.approx([0.0, 1.0 + LINK_DELAY, 0.0])
    assert links.queues("a", ("c", "d"), 5.5) == pytest.approx([0.5 + LINK_DELAY, 0.5 + LINK_DELAY])


def test_what_was_never_measured_is_taken_for_the_usual() -> None:
    links = LinkCost()
    for pair in (("a", "b"), ("b", "c"), ("c", "a")):
        links.observe(*pair, 1_000_000_000, 0.1)
    links.observe("a", "a", 1_000_000_000, 0.5)
    assert links.rate("x", "y") == pytest.approx(1e10, rel=0.05)
    assert links.rate("x", "x") == pytest.approx(links.rate("a", "a")) == pytest.approx(2e9, rel=0.05)
    assert links.rates("a", ("b", "x")) == pytest.approx([1e10, 1e10], rel=0.05)


def test_copies_into_pages_cost_nothing_until_they_are_measured() -> None:
    links = LinkCost()
    assert links.device_seconds(("a", "b")).tolist() == [0.0, 0.0]
    links.observe_device("b", 1 << 30, 0.5)
    assert links.device_seconds(("a", "b")) == pytest.approx([0.0, 0.5 / (1 << 30)])


NODES = "abcdefgh"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["observe", "forget"]), st.sampled_from(NODES), st.sampled_from(NODES), st.integers(1, 9)
        ),
        max_size=60,
    )
)
def test_rates_are_those_of_a_dictionary(operations: list[tuple[str, str, str, int]]) -> None:
    links, known = LinkCost(), dict[tuple[str, str], float]()
    for what, source, to, gigabytes in operations:
        if what == "forget":
            links.forget(source)
            known = {pair: rate for pair, rate in known.items() if source not in pair}
            continue
        links.observe(source, to, gigabytes << 30, 1.0)
        rate = (gigabytes << 30) / (1.0 - LINK_DELAY)
        old = known.get((source, to), rate)
        known[source, to] = (1 - FRESH) * old + FRESH * rate
    for (source, to), rate in known.items():
        assert links.rate(source, to) == pytest.approx(rate)
        if source != to:
            assert links.rates(source, tuple(NODES))[NODES.index(to)] == pytest.approx(rate)
