"""Goal: a node that dials in with two million blocks holds up nobody: plans are made between any two parts of its dump,
from what was known before, and what happens meanwhile is neither lost nor counted twice.
Method: a conductor with the fast index; a route after each part. No time is measured (`bench/index.py` does that).
"""

from __future__ import annotations

from bench.index import packed_chains
from pyengine.scheduler.changes import CHANGE_BYTES, Change, pack
from pyengine.scheduler.events import BlockDump, BlocksChanged, DaemonHello, OrderDump
from pyengine.scheduler.native_index import NativeIndex
from pyengine.scheduler.prefix_index import DRAM
from pyengine.scheduler.types import KEY_BYTES, Node, Role

from .world import BLOCK, World, chain, worker

BLOCKS = 2_000_000
LENGTH = 64
#: Blocks in a part: sixteen times as many as a daemon sends at once.
PART = 16_384


def test_serving_goes_on_during_a_dump_of_two_million_blocks() -> None:
    world = World(worker("p", Role.PREFILL, "old"), worker("d", Role.DECODE, "large"), index=NativeIndex())
    conductor, node = world.conductor, world.pools["large"].node
    known = chain(1, 2, 3)
    world.store("old", known)
    keys, changes = packed_chains(BLOCKS, LENGTH, 5)
    first = [keys[at : at + KEY_BYTES] for at in range(0, LENGTH * KEY_BYTES, KEY_BYTES)]
    assert OrderDump("large") in conductor.on(DaemonHello(node, BLOCKS), world.now)
    stranger = BlocksChanged(Node("large", node.address, node.incarnation + 1), 0, changes[:CHANGE_BYTES])
    step = PART * CHANGE_BYTES
    parts = range(0, len(changes), step)
    later = chain(*range(len(parts)))
    for number, at in enumerate(parts):
        dump = BlockDump(node, BLOCKS, number, changes[at : at + step], at + step >= len(changes))
        assert conductor.on(dump, world.now) == []
        # Blocks come and are told meanwhile, once more after that, and by another life of the node.
        parent = later[number - 1] if number else bytes(KEY_BYTES)
        told = BlocksChanged(node, BLOCKS + number, pack([Change(False, DRAM, later[number], parent, number)]))
        for report in (told, told, stranger):
            assert conductor.on(report, world.now) == []
        world.now += 0.01
        route = world.asked(first, LENGTH * BLOCK + 1)
        plan = conductor.router.plan("gateway", route, world.now).plan
        conductor.router.end("gateway", route.request)
        whole = number == len(parts) - 1
        assert plan.cached_blocks == (LENGTH if whole else 0), "what a part brings counts when the dump is whole"
        assert conductor.index.count("large") == (BLOCKS + len(parts) if whole else 0)
    assert world.planned_alone(known).cached_blocks == len(known), "others are as they were"
    assert world.planned_alone(later).cached_blocks == len(later)
    assert conductor.counters()['pyengine_conductor_odd_events_total{what="daemon"}'] == len(parts)
