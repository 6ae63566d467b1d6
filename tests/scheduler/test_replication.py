"""Goal: a hot prefix gets one more copy where that is worth it, and an unanswered order holds up none for long.
Method: whole conductors, whose daemons answer no order. What is asked for is over at once, so only heat decides.
"""

from __future__ import annotations

import pytest

from pyengine.scheduler import replication
from pyengine.scheduler.events import DaemonGone, OrderReplicate
from pyengine.scheduler.messages import LoadSample
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
