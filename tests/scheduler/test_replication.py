"""Goal: a hot prefix gets one more copy where that is worth it, and an unanswered order holds up none for long.
Method: whole conductors, whose daemons answer no order. What is asked for is over at once, so only heat decides.
"""

from __future__ import annotations

import pytest

from pyengine.scheduler import replication
from pyengine.scheduler.events import DaemonGone, FromGateway, OrderReplicate, SendToGateway
from pyengine.scheduler.messages import FindHot, HotPrefix, HotPrefixes, LoadSample
from pyengine.scheduler.replication import ORDER_PATIENCE
from pyengine.scheduler.types import Role

from .world import SPEC, World, chain, worker

KEYS = chain(1, 2, 3)


def three() -> World:
    """Of three nodes one holds the prefix."""
    world = World(*(worker(f"both-{i}", Role.BOTH, f"node-{i}") for i in range(3)))
    world.store("node-0", KEYS)
    return world


def ordered(world: World) -> str:
    """Where the next copy is ordered to, if any is while many ask for the prefix, each with its own end."""
    for _ in range(20):
        actions = world.route([*KEYS, *chain(1, 2, 3, 50 + world.requests)[3:]])
        world.end(world.requests - 1)
        if orders := [action for action in actions if isinstance(action, OrderReplicate)]:
            return orders[0].node
    return ""


@pytest.mark.parametrize("ended", ["node", "time"])
def test_an_order_that_is_not_answered_holds_up_no_other(ended: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy at a time: while it is under way there is no other, but not for ever, nor after its node has gone."""
    monkeypatch.setattr(replication, "MAX_ORDERS", 1)
    world = three()
    first = ordered(world)
    assert first in ("node-1", "node-2") and ordered(world) == ""
    if ended == "node":
        world.on(DaemonGone(world.pools[first].node))
        assert {first, ordered(world)} == {"node-1", "node-2"}
    else:
        world.wait(ORDER_PATIENCE + 1.0)
        assert ordered(world) != ""


@pytest.mark.parametrize(("slower", "copied"), [(0.5, True), (100.0, False)])
def test_what_is_computed_sooner_than_moved_is_not_copied(slower: float, copied: bool) -> None:
    """slower: than computing the prefix anew is moving it."""
    world = three()
    for name in world.workers:
        world.measured(name, 1e-3)
    seconds = slower * len(KEYS) * SPEC.block_tokens * 1e-3
    # One measurement of each pair; bigger than the prefix, as small ones tell nothing of a rate.
    size = 100 * len(KEYS) * SPEC.block_bytes
    for name in world.workers:
        others = [f"node-{i}" for i in range(3) if f"both-{i}" != name]
        world.alive(name, loads=tuple(LoadSample(node, size, 100 * seconds) for node in others))
    assert bool(ordered(world)) is copied


def test_the_hottest_prefixes_are_told_with_who_has_them() -> None:
    """A shared head that others reuse as well is told, one that only leads to a longer prefix is not."""
    world = three()
    longer, other = chain(*range(1, 40)), chain(1, 2, 3, 4, 90, 91, 92, 93)
    world.store("node-1", longer)
    world.store("node-2", other)
    for prefix, times in ((longer, 6), (other, 2)):
        for _ in range(times):
            world.route(prefix)
            world.end(world.requests - 1)
    found = hottest(world, 10)
    assert found == tuple(sorted(found, key=lambda one: -one.heat))
    keys = [one.key for one in found]
    for one in found:
        place = longer if one.key in longer else other
        assert place[one.blocks - 1] == one.key
        assert one.nodes == tuple(world.conductor.index.holders(one.key))
        assert one.ago >= 0.0
    reused = [key for key in longer if key in keys]
    assert len(reused) == 1, "one prefix of the longer one, and the head that both share is not twice as hot"
    assert hottest(world, 1) == found[:1] and hottest(world, 0) == () and hottest(world, -5) == ()


def test_what_cools_is_told_as_cooler() -> None:
    world = three()
    for _ in range(4):
        world.route([*KEYS, *chain(1, 2, 3, 50)[3:]])
        world.end(world.requests - 1)
    (before, *_) = hottest(world, 10)
    world.wait(replication.HALF_LIFE)
    (after, *_) = hottest(world, 10)
    assert after.key == before.key and after.heat == pytest.approx(before.heat / 2)
    assert after.ago == pytest.approx(before.ago + replication.HALF_LIFE)


def hottest(world: World, most: int) -> tuple[HotPrefix, ...]:
    (answer,) = world.on(FromGateway("gateway", FindHot(number=5, most=most)))
    assert isinstance(answer, SendToGateway) and isinstance(answer.message, HotPrefixes)
    assert answer.message.number == 5
    return answer.message.prefixes
