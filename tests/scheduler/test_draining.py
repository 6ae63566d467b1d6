"""Goal: a node that drains gets nothing new, what only it has and somebody uses is soon elsewhere, and it is told when.

Method: scripted events into the pure conductor; other nodes carry orders out as daemons do, or refuse them, by chance.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from pyengine.scheduler import draining
from pyengine.scheduler.events import (
    Action,
    DaemonGone,
    DaemonHello,
    OrderReplicate,
    Replicated,
    TellMoved,
)
from pyengine.scheduler.types import KEY_BYTES, Medium, Node, Role

from .world import World, chain, worker

#: Blocks per order: fewer than in earnest, or each test would take thousands of events.
PIECE = 4


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "PIECE", PIECE)


def cluster(nodes: int = 3, **settings: object) -> World:
    """A worker of role both on each node."""
    workers = [worker(f"both-{k}", Role.BOTH, f"node-{k}") for k in range(nodes)]
    world = World(*workers, **settings)  # type: ignore[arg-type]
    for pool in world.pools.values():
        world.on(pool.heartbeat())
    return world


def use(world: World, keys: list[bytes], times: int = 1) -> None:
    """Requests that reuse this prefix."""
    for _ in range(times):
        world.plan(keys)


def drain(world: World, node: str, on: bool = True) -> list[Action]:
    world.pools[node].draining = on
    return world.on(world.pools[node].heartbeat())


def orders(actions: list[Action]) -> list[OrderReplicate]:
    return [action for action in actions if isinstance(action, OrderReplicate)]


def told(actions: list[Action]) -> tuple[int, int] | None:
    """What the draining daemon was told last: blocks, left."""
    words = [action for action in actions if isinstance(action, TellMoved)]
    return (words[-1].blocks, words[-1].left) if words else None


def split(order: OrderReplicate) -> list[bytes]:
    return [order.keys[i : i + KEY_BYTES] for i in range(0, len(order.keys), KEY_BYTES)]


def carry_out(world: World, order: OrderReplicate, count: int | None = None) -> list[Action]:
    """The daemon has copied these blocks (the first `count` of them)."""
    keys = split(order)
    pool = world.pools[order.node]
    stored = keys[:count]
    for i, key in enumerate(stored):
        if (key, Medium.DRAM) not in pool.blocks:
            world.on(pool.store(key, keys[i - 1] if i else order.parent, order.position + i))
    return world.on(Replicated(pool.node, order.order, len(stored), len(keys) - len(stored)))


def finish(world: World, actions: list[Action]) -> tuple[int, int] | None:
    """All orders are carried out, in the order in which they were given."""
    last = told(actions)
    waiting = orders(actions)
    while waiting:
        actions = carry_out(world, waiting.pop(0))
        waiting += orders(actions)
        last = told(actions) or last
    return last


def test_a_draining_node_gets_no_new_request_while_another_can_serve() -> None:
    world = cluster(2)
    keys = chain(*range(8))
    world.store("node-0", keys)
    assert world.plan(keys).prefill.worker == "both-0", "where the prefix is"
    drain(world, "node-0")
    plan = world.plan(keys)
    assert plan.prefill.worker == "both-1"
    assert [source.node.node for source in plan.sources] == ["node-0"], "it still serves what it has"
    assert world.plan(keys, exclude=("both-1",)).prefill.worker == "both-0", "rather than nobody"
    drain(world, "node-0", on=False)
    world.wait(2.0)
    assert world.plan(keys).prefill.worker == "both-0"


def test_a_link_that_breaks_does_not_end_a_drain_and_a_restart_does() -> None:
    world = cluster(2)
    keys = chain(*range(8))
    world.store("node-0", keys)
    drain(world, "node-0")
    pool = world.pools["node-0"]
    world.on(DaemonHello(pool.node, pool.sequence))
    assert world.plan(keys).prefill.worker == "both-1", "before its next heartbeat, too"
    pool.node, pool.draining = Node("node-0", "node-0:1", 2), False
    world.workers["both-0"] = msgspec.structs.replace(world.workers["both-0"], node=pool.node)
    world.dial_in()
    (dump,) = pool.dump()
    world.on(dump)
    world.wait(2.0)
    assert world.plan(keys).prefill.worker == "both-0"


@pytest.mark.parametrize("policy", ["kvcache-centric", "least-loaded"])
def test_what_only_it_has_and_is_used_moves_hottest_first_from_the_head(policy: str) -> None:
    world = cluster(3, policy=policy)
    hot, warm, cold, shared = (chain(n, *range(9)) for n in range(4))
    for keys in (hot, warm, cold, shared):
        world.store("node-0", keys)
    world.store("node-1", shared)
    use(world, warm[:6])
    use(world, hot, 3)
    use(world, shared)
    actions = drain(world, "node-0")
    first, second = orders(actions)
    assert (split(first), first.position, first.parent) == (hot[:PIECE], 0, bytes(16))
    assert split(second) == warm[:PIECE]
    assert first.source.node == "node-0"
    assert told(actions) == (0, 16)
    actions = carry_out(world, first)
    assert told(actions) == (4, 12)
    (third,) = orders(actions)
    assert (split(third), third.position, third.parent) == (hot[4:8], 4, hot[3])
    assert finish(world, [second, third]) == (16, 0), "no more than was used"
    # Again with each heartbeat, should it have been lost.
    assert told(drain(world, "node-0")) == (16, 0)
    holders = [set(world.conductor.index.holders(key)) for key in hot]
    assert all(held - {"node-0"} for held in holders)
    assert world.conductor.counters()["pyengine_conductor_moved_blocks_total"] == 16


def test_with_nothing_hot_or_nobody_to_take_it_the_daemon_is_told_at_once() -> None:
    world = cluster(2)
    keys = chain(*range(4))
    world.store("node-0", keys)
    assert told(drain(world, "node-0")) == (0, 0), "nothing is used"
    drain(world, "node-0", on=False)
    use(world, keys)
    drain(world, "node-1")
    assert told(drain(world, "node-0")) == (0, 0), "the other one drains, too"


def test_long_prefixes_go_in_pieces_to_one_node_and_branches_stay_with_their_trunk() -> None:
    world = cluster(4)
    trunk = list(range(2 * PIECE + 10))
    whole, branch = chain(*trunk), chain(*trunk[:PIECE], 1000, 1001)
    world.store("node-0", whole)
    world.store("node-0", branch)
    use(world, whole, 3)
    use(world, branch)
    pool = world.pools["node-0"]
    assert finish(world, drain(world, "node-0")) == (len(whole) + 2, 0)
    holders = {frozenset(world.conductor.index.holders(key)) - {pool.node.node} for key in (*whole, *branch)}
    assert len(holders) == 1, "all is on one node"


def test_a_node_that_refuses_or_dies_is_replaced_and_a_hole_ends_its_chain() -> None:
    world = cluster(3)
    world.pools["node-1"].slots *= 10
    world.on(world.pools["node-1"].heartbeat())
    keys = chain(*range(3 * PIECE))
    world.store("node-0", keys)
    use(world, keys)
    (first,) = orders(drain(world, "node-0"))
    assert first.node == "node-1", "it has most room"
    actions = world.on(Replicated(world.pools[first.node].node, first.order, 0, PIECE))
    (second,) = orders(actions)
    assert second.node not in (first.node, "node-0")
    assert split(second) == split(first)
    (third,) = orders(carry_out(world, second))
    assert (third.node, third.position, third.parent) == (second.node, PIECE, keys[PIECE - 1])
    # Some of its blocks are gone meanwhile: what is behind them is worth nothing there.
    actions = carry_out(world, third, PIECE // 2)
    assert not orders(actions)
    assert told(actions) == (PIECE + PIECE // 2, 0)

    world = cluster(3)
    world.store("node-0", keys)
    use(world, keys)
    (first,) = orders(drain(world, "node-0"))
    (second,) = orders(world.on(DaemonGone(world.pools[first.node].node)))
    assert second.node not in (first.node, "node-0")
    assert finish(world, [second]) == (3 * PIECE, 0)


def test_a_drain_begins_when_all_is_known_that_the_node_holds() -> None:
    world = cluster(2)
    keys = chain(*range(4))
    world.store("node-0", keys)
    use(world, keys)
    pool = world.pools["node-0"]
    # An event was lost: a dump is under way.
    pool.store(chain(9)[0], bytes(16), 0)
    assert told(drain(world, "node-0")) == (0, 1)
    (dump,) = pool.dump()
    assert not world.on(dump)
    assert finish(world, drain(world, "node-0")) == (4, 0)


def test_a_drain_waits_for_word_of_how_much_room_others_have() -> None:
    world = World(*(worker(f"both-{k}", Role.BOTH, f"node-{k}") for k in range(2)))
    keys = chain(*range(8))
    world.store("node-0", keys)
    use(world, keys)
    assert told(drain(world, "node-0")) == (0, 1), "node-1 has not said yet how full it is"
    world.on(world.pools["node-1"].heartbeat())
    assert finish(world, drain(world, "node-0")) == (8, 0)


def test_nodes_that_stop_together_do_not_wait_for_each_other() -> None:
    world = cluster(2)
    keys = chain(*range(4))
    world.store("node-0", keys)
    use(world, keys)
    assert orders(drain(world, "node-0"))
    actions = drain(world, "node-1")
    ends = {action.node: action.left for action in actions if isinstance(action, TellMoved)}
    assert ends == {"node-0": 0, "node-1": 0}, "at once"
    assert not orders(actions)


def test_an_order_that_is_never_answered_is_given_to_another() -> None:
    world = cluster(3)
    keys = chain(*range(4))
    world.store("node-0", keys)
    use(world, keys)
    (first,) = orders(drain(world, "node-0"))
    assert not orders(drain(world, "node-0"))
    world.wait(31.0)
    (second,) = orders(drain(world, "node-0"))
    assert second.node != first.node


def test_no_more_is_moved_than_there_is_room_for() -> None:
    world = cluster(2)
    pool = world.pools["node-1"]
    pool.slots = 100
    world.store("node-1", chain(7, *range(59)))
    world.on(pool.heartbeat())
    hot, warm = chain(1, *range(49)), chain(2, *range(49))
    world.store("node-0", hot)
    world.store("node-0", warm)
    use(world, warm)
    use(world, hot, 2)
    blocks, left = finish(world, drain(world, "node-0")) or (0, 1)
    assert (blocks, left) == (40 + 30, 0), "what is empty, and half of what is cached"
    assert all("node-1" in world.conductor.index.holders(key) for key in hot)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_a_drain_ends_and_no_prefix_begins_with_a_hole(seed: int) -> None:
    """Prefixes that share heads, used by chance; nodes refuse, lose some, die. The daemon is told an end at last."""
    draw = random.Random(seed)
    world = cluster(draw.randint(2, 5))
    used: set[bytes] = set()
    for _ in range(draw.randint(1, 12)):
        path = [draw.randint(0, 1) for _ in range(draw.randint(1, 6))] + list(range(draw.randint(1, 20)))
        keys = chain(*path)
        world.store("node-0", keys)
        if draw.random() < 0.3:
            world.store("node-1", keys[: draw.randint(1, len(keys))])
        if draw.random() < 0.8:
            use(world, keys, draw.randint(1, 3))
            used.update(keys)
    kind = draw.random() < 0.5
    actions = drain(world, "node-0")
    waiting: list[OrderReplicate] = []
    for _ in range(3000):
        waiting += orders(actions)
        if (told(actions) or (0, 1))[1] == 0:
            break
        order = waiting.pop(draw.randrange(len(waiting))) if waiting else None
        if order is None:
            world.wait(31.0)
            actions = drain(world, "node-0")
        elif not world.conductor.cluster.daemons[order.node].up:
            actions = []
        elif kind or draw.random() < 0.8:
            actions = carry_out(world, order)
        elif draw.random() < 0.9:
            actions = carry_out(world, order, draw.randint(0, len(split(order)) - 1))
        else:
            actions = world.on(DaemonGone(world.pools[order.node].node))
    else:
        raise AssertionError("the drain never ended")
    index = world.conductor.index
    if kind:
        unmoved = [key for key in used if set(index.holders(key)) == {"node-0"}]
        assert not unmoved, "all that was used is elsewhere"
