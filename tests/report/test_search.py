"""Goal: the search finds the cheapest cluster. Method: made-up clusters, where both shares are monotone in the split,
against trying all of them.
"""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.commands.search import Point, Search


class World:
    """ttft is met by a share that grows with prefill nodes, tbt with decode nodes; both at once as if independent, or
    as far as possible together. whole: as many workers of role both do as well as those of one role at the best split.
    """

    def __init__(self, prefill: float, decode: float, sharp: float, together: bool, whole: float = math.inf) -> None:
        self.need, self.sharp, self.together, self.whole = (prefill, decode), sharp, together, whole
        self.runs = 0

    def __call__(self, prefill: int, decode: int, both: int) -> Point:
        self.runs += 1
        return self.of_both(both) if both else self.point(prefill, decode)

    def of_both(self, both: int) -> Point:
        share = 1 / (1 + math.exp(-self.sharp * (both - self.whole) / self.whole)) if self.whole < math.inf else 0.0
        return Point(0, 0, share, share, share, 1.0, both=both)

    def point(self, prefill: int, decode: int) -> Point:
        ttft, tbt = (
            1 / (1 + math.exp(-self.sharp * (have - need) / need))
            for have, need in zip((prefill, decode), self.need, strict=True)
        )
        return Point(prefill, decode, min(ttft, tbt) if self.together else ttft * tbt, ttft, tbt, 1.0)

    def best(self, nodes: int) -> Point:
        return max((self.point(p, nodes - p) for p in range(1, nodes)), key=lambda point: point.share)


@given(
    st.floats(0.3, 30), st.floats(0.3, 30), st.floats(1, 40), st.booleans(), st.floats(0.3, 0.99), st.integers(2, 64),
    st.floats(0.3, 100),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_it_finds_the_cheapest_as_trying_all_does(
    prefill: float, decode: float, sharp: float, together: bool, wanted: float, most: int, whole: float
) -> None:
    world = World(prefill, decode, sharp, together, whole)
    search = Search(world, wanted, most)
    found = search.run()
    enough = [nodes for nodes in range(2, most + 1) if world.best(nodes).share >= wanted]
    of_both = [nodes for nodes in range(1, most + 1) if world.of_both(nodes).share >= wanted]
    assert (found is None) == (not enough and not of_both)
    if found is not None:
        assert found.nodes == min([*enough, *of_both]) and found.share >= wanted
        assert bool(found.both) == (not enough or found.nodes < enough[0]), "equal numbers are split"
    else:
        best = max(point.share for point in search.tried.values() if not point.both)
        assert best == world.best(most).share
    assert world.runs == len(search.tried)
    # Some splits for each of at most 2 log2(64) numbers of nodes; trying all of 64 nodes takes 2,016.
    assert world.runs <= 90


def test_two_nodes_are_the_least_of_a_split() -> None:
    search = Search(World(0.1, 0.1, 40, True), 0.5, 2)
    found = search.run()
    assert found is not None and (found.prefill, found.decode) == (1, 1) and len(search.tried) == 2
