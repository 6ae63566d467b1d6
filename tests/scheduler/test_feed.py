"""Goal: whatever is lost on the way, the index equals the daemon's pool again after a heartbeat and the dump it causes.

Method: a simulated pool publishes, and its reports are dropped, split and mixed with dumps at random.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.events import BlockStored, DaemonHello
from pyengine.scheduler.feed import DUMP_PATIENCE, Feed
from pyengine.scheduler.prefix_index import PrefixIndex
from pyengine.scheduler.types import Medium, Node

from .world import Pool

NODE = Node("node", "address", 1)
KEYS = [bytes([i]) * 16 for i in range(1, 8)]


def start(pool: Pool) -> Feed:
    feed = Feed(PrefixIndex())
    feed.on_hello(DaemonHello(pool.node, pool.sequence), 0.0)
    return feed


def held(feed: Feed) -> set[tuple[bytes, Medium]]:
    ssd = {KEYS[i] for run in feed.index.only_on_ssd(KEYS, "node") for i in range(run.first, run.last)}
    dram = {KEYS[i] for i, key in enumerate(KEYS) if feed.index.holds("node", key)} - ssd
    return {(key, Medium.SSD) for key in ssd} | {(key, Medium.DRAM) for key in dram}


def best(pool: Pool) -> set[tuple[bytes, Medium]]:
    """Where the pool has each block, in DRAM if it has it there, too."""
    return {
        (key, medium) for key, medium in pool.blocks if medium is Medium.DRAM or (key, Medium.DRAM) not in pool.blocks
    }


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_index_converges(data: st.DataObject) -> None:
    pool = Pool(NODE)
    feed = start(pool)
    parts: list[object] = []
    wanted = False
    for step in range(data.draw(st.integers(1, 40))):
        now = float(step)
        match data.draw(st.sampled_from(["change", "change", "lost change", "part", "lost part", "heartbeat"])):
            case "change" | "lost change" as kind:
                key = data.draw(st.sampled_from(KEYS))
                medium = data.draw(st.sampled_from(list(Medium)))
                there = (key, medium) in pool.blocks
                report = pool.remove(key, medium) if there else pool.store(key, bytes(16), 0, medium)
                if kind == "change":
                    wanted |= feed.on_event(report, now)
            case "part" | "lost part" as kind:
                if not parts and wanted:
                    parts, wanted = list(pool.dump(data.draw(st.integers(1, 3)))), False
                if parts:
                    part = parts.pop(0)
                    if kind == "part":
                        feed.on_dump(part, now)  # type: ignore[arg-type]
            case "heartbeat":
                wanted |= feed.on_heartbeat(pool.heartbeat(), now)
        feed.index.check()
    end = 1000.0
    for _ in range(3):
        end += 2 * DUMP_PATIENCE
        for part in parts:
            feed.on_dump(part, end)  # type: ignore[arg-type]
        parts = []
        if feed.on_heartbeat(pool.heartbeat(), end):
            parts = list(pool.dump(2))
    assert not feed.on_heartbeat(pool.heartbeat(), end)
    assert held(feed) == best(pool)


def test_events_during_a_dump_are_applied_to_it() -> None:
    pool = Pool(NODE)
    for key in KEYS[:4]:
        pool.store(key, bytes(16), 0)
    feed = start(pool)
    assert feed.dumps["hello"] == 1
    first, second = pool.dump(2)
    feed.on_dump(first, 0.0)
    assert not feed.on_event(pool.remove(KEYS[3]), 0.0), "in the second part"
    assert not feed.on_event(pool.store(KEYS[5], bytes(16), 0), 0.0)
    feed.on_dump(second, 0.0)
    assert held(feed) == best(pool)
    assert not feed.on_event(pool.store(KEYS[6], bytes(16), 0), 0.0)
    assert not feed.on_heartbeat(pool.heartbeat(), 0.0)


def test_a_dump_with_a_hole_is_ordered_again_after_a_pause() -> None:
    pool = Pool(NODE)
    for key in KEYS[:6]:
        pool.store(key, bytes(16), 0)
    for lost in range(3):
        feed = start(pool)
        for number, part in enumerate(pool.dump(3)):
            if number != lost:
                feed.on_dump(part, 1.0)
        assert held(feed) == set(), "a dump with a hole is no dump"
        assert not feed.on_heartbeat(pool.heartbeat(), DUMP_PATIENCE)
        assert feed.on_heartbeat(pool.heartbeat(), 1.5 + DUMP_PATIENCE)
        # One that takes long, but goes on, is waited for.
        for number, part in enumerate(pool.dump(3), 2):
            feed.on_dump(part, number * DUMP_PATIENCE)
            assert not feed.on_heartbeat(pool.heartbeat(), number * DUMP_PATIENCE + 1.0)
        assert held(feed) == best(pool)
        assert feed.dumps == {"hello": 1, "gap": 0, "drift": 0, "late": 1}


def test_gap_and_drift_each_order_one_dump() -> None:
    pool = Pool(NODE)
    feed = start(pool)
    pool.store(KEYS[0], bytes(16), 0)
    assert feed.on_event(pool.store(KEYS[1], bytes(16), 0), 0.0), "an event was lost"
    assert not feed.on_event(pool.store(KEYS[2], bytes(16), 0), 0.0), "the dump is on its way"
    for part in pool.dump():
        feed.on_dump(part, 0.0)
    feed.index.remove("node", KEYS[0])
    assert feed.on_heartbeat(pool.heartbeat(), 0.0)
    assert not feed.on_heartbeat(pool.heartbeat(), 1.0)
    assert feed.on_heartbeat(pool.heartbeat(), 1.0 + DUMP_PATIENCE), "it never came"
    assert feed.dumps == {"hello": 0, "gap": 1, "drift": 1, "late": 1}


def test_reports_of_an_earlier_life_change_nothing() -> None:
    pool = Pool(NODE)
    feed = start(pool)
    feed.on_hello(DaemonHello(Node("node", "address", 2), 0), 0.0)
    assert not feed.on_event(BlockStored(NODE, 0, KEYS[0], bytes(16), 0), 0.0)
    assert held(feed) == set()
