"""Goal: cold replicas go where room is short, all but two of them, and nothing that is in use or unique.

Method: a conductor with four nodes, hits and hours; then random ones against a rule that looks at every copy.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.changes import Change, pack
from pyengine.scheduler.cluster import Daemon
from pyengine.scheduler.dropping import COLD_AFTER, KEEP, LOOKS, Dropper
from pyengine.scheduler.events import FromGateway, OrderForget, OrderReplicate
from pyengine.scheduler.messages import GatewayAlive
from pyengine.scheduler.prefix_index import PrefixIndex
from pyengine.scheduler.replication import HALF_LIFE, Replicator
from pyengine.scheduler.types import Node, Role

from .world import BLOCK, World, chain, worker

NODES = [f"node-{i}" for i in range(4)]


def world() -> World:
    return World(*(worker(f"both-{i}", Role.BOTH, node) for i, node in enumerate(NODES)))


def orders(made: World, seconds: float) -> dict[str, bytes]:
    return {a.node: a.keys for a in made.wait(seconds) if isinstance(a, OrderForget)}


def fill(made: World, node: str, free: int) -> None:
    """The node tells that so many of its slots are free."""
    pool = made.pools[node]
    pool.slots = len(pool.blocks) + free
    made.on(pool.heartbeat())


def test_a_cold_replica_goes_where_room_is_short() -> None:
    made = world()
    keys = chain(*range(20))
    for node in NODES:
        made.store(node, keys)
        fill(made, node, 0)
    fill(made, "node-1", 1000)
    fill(made, "node-2", 1)
    made.planned_alone(keys)
    assert not orders(made, COLD_AFTER - 1)
    found = orders(made, 2)
    # node-1 has room and node-2 a little: these keep it.
    assert found == {"node-0": b"".join(keys), "node-3": b"".join(keys)}
    assert made.conductor.counters()["pyengine_conductor_dropped_blocks_total"] == 40
    for node in found:
        for key in keys:
            made.on(made.pools[node].remove(key))
    assert not orders(made, 5 * COLD_AFTER)


def test_what_is_used_or_rare_or_no_burden_stays() -> None:
    made = world()
    warm, rare, roomy = (chain(first, *range(15)) for first in (1, 2, 3))
    for node in NODES:
        made.store(node, warm)
    for node in NODES[:KEEP]:
        made.store(node, rare)
    for node in NODES:
        fill(made, node, 0)
    for _ in range(5):
        made.planned_alone(warm)
        made.planned_alone(rare)
        assert not orders(made, COLD_AFTER / 2)
    made = world()
    for node in NODES:
        made.store(node, roomy)
        fill(made, node, 1000)
    made.planned_alone(roomy)
    assert not orders(made, 3 * COLD_AFTER)


def test_a_replica_that_was_ordered_is_dropped_when_it_has_cooled() -> None:
    """The whole life of a hot prefix: copied while it is hot, forgotten when it is not."""
    made = world()
    keys = chain(*range(16))
    made.store("node-0", keys)
    copied = set()
    for _ in range(60):
        made.now += 0.1
        for action in made.route(keys):
            if isinstance(action, OrderReplicate):
                copied.add(action.node)
                made.store(action.node, keys)
        made.end(made.requests - 1)
        made.on(FromGateway("gateway", GatewayAlive(gateway="gateway")))
        for name in made.workers:
            made.alive(name)
    assert len(copied) == 3
    for node in NODES:
        fill(made, node, 0)
    assert len(orders(made, COLD_AFTER + 10)) == len(NODES) - KEEP


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_no_order_leaves_fewer_than_are_kept(seed: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex()
    replicator = Replicator(index)
    dropper = Dropper(index, replicator)
    free = {node: rng.choice([0, 5, 50]) for node in NODES}
    daemons = {node: Daemon(Node(node, "", 1), rng.random() < 0.9) for node in NODES}
    for node, daemon in daemons.items():
        for state, count in (("free", free[node]), ("cached", 100)):
            daemon.counters[f'pyengine_pool_blocks{{node="{node}",tier="dram",state="{state}"}}'] = count
    chains = [chain(i, *range(15)) for i in range(5)]
    held: dict[str, set[bytes]] = {node: set() for node in NODES}
    hit: dict[bytes, float] = {}
    now = 0.0
    for _ in range(100):
        now += rng.random() * 20
        keys = rng.choice(chains)
        if rng.random() < 0.4:
            node = rng.choice(NODES)
            index.apply(
                node, pack(Change(False, 1, key, keys[i - 1] if i else bytes(16), i) for i, key in enumerate(keys))
            )
            held[node].update(keys)
        elif rng.random() < 0.3:
            replicator.hit(b"".join(keys), BLOCK, now)
            hit.update(dict.fromkeys(keys, now))
        for order in dropper.tick(daemons, now):
            assert daemons[order.node].takes
            assert free[order.node] < 10
            for i in range(0, len(order.keys), 16):
                key = order.keys[i : i + 16]
                assert now - hit[key] >= COLD_AFTER
                held[order.node].discard(key)
                index.apply(order.node, pack([Change(True, 1, key)]))
                assert sum(key in held[node] for node in NODES if daemons[node].takes) >= KEEP


def test_heat_halves_and_is_shared_by_all_blocks_before() -> None:
    replicator = Replicator(PrefixIndex())
    keys = b"".join(chain(*range(40)))
    assert replicator.hit(keys, BLOCK, 0.0) == 0
    for _ in range(3):
        hot = replicator.hit(keys[: 20 * 16], BLOCK, 0.0)
    assert hot == 16, "block 20 is the end of three of them only"
    assert replicator.hit(keys, BLOCK, 0.0) == 16
    heat = replicator.heat(HALF_LIFE)
    assert sorted(heat.values()) == [1.0, 1.0, 1.5, 2.5]
    assert replicator.remembered(keys[15 * 16 : 256], 0.0) == (5.0, 0.0, keys[:256])
    assert replicator.remembered(keys[39 * 16 :], 0.0) == (2.0, 0.0, keys[32 * 16 :])


def test_only_so_many_are_looked_at_in_one_tick() -> None:
    index = PrefixIndex()
    replicator = Replicator(index)
    dropper = Dropper(index, replicator)
    daemons = {
        node: Daemon(Node(node, "", 1), True, {f'pyengine_pool_blocks{{node="{node}",tier="dram",state="cached"}}': 9})
        for node in NODES
    }
    for i in range(LOOKS + 50):
        (key,) = chain(i)
        for node in NODES:
            index.apply(node, pack([Change(False, 1, key)]))
        replicator.hit(key, BLOCK, 0.0)
    assert not dropper.tick(daemons, 0.0)
    assert sum(len(order.keys) for order in dropper.tick(daemons, COLD_AFTER)) == 2 * LOOKS * 16
    assert sum(len(order.keys) for order in dropper.tick(daemons, COLD_AFTER)) == 2 * 50 * 16
