"""Goal: whatever is lost on the way, the index equals the daemon's pool again after a heartbeat and the dump it causes.

Method: a simulated pool publishes, and its reports are dropped, split and mixed with dumps at random.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.changes import CHANGE_BYTES, Change, pack
from pyengine.scheduler.events import BlockDump, BlocksChanged, DaemonHello
from pyengine.scheduler.feed import DUMP_PATIENCE, Feed
from pyengine.scheduler.prefix_index import DRAM, PrefixIndex
from pyengine.scheduler.types import Medium, Node

from .world import Pool

NODE = Node("node", "address", 1)
KEYS = [bytes([i]) * 16 for i in range(1, 8)]


def start(pool: Pool) -> Feed:
    feed = Feed(PrefixIndex())
    feed.on_hello(DaemonHello(pool.node, pool.sequence), 0.0)
    return feed


def held(feed: Feed) -> set[tuple[bytes, Medium]]:
    ssd = {KEYS[i] for run in feed.index.only_on_ssd(b"".join(KEYS), "node") for i in range(run.first, run.last)}
    dram = {KEYS[i] for i, key in enumerate(KEYS) if feed.index.holds("node", key)} - ssd
    return {(key, Medium.SSD) for key in ssd} | {(key, Medium.DRAM) for key in dram}


def best(pool: Pool) -> set[tuple[bytes, Medium]]:
    """Where the pool has each block, in DRAM if it has it there, too."""
    return {
        (key, medium) for key, medium in pool.blocks if medium is Medium.DRAM or (key, Medium.DRAM) not in pool.blocks
    }


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_index_converges(data: st.DataObject) -> None:
    pool = Pool(NODE)
    feed = start(pool)
    parts: list[object] = []
    log: list[bytes] = []
    wanted = False
    for step in range(data.draw(st.integers(1, 40))):
        now = float(step)
        match data.draw(st.sampled_from(["change", "change", "lost change", "part", "lost part", "heartbeat"])):
            case "change" | "lost change" as kind:
                # Some batches begin with changes that an earlier one may have brought.
                first = max(len(log) - data.draw(st.integers(0, 3)), 0)
                for _ in range(data.draw(st.integers(1, 4))):
                    key = data.draw(st.sampled_from(KEYS))
                    medium = data.draw(st.sampled_from(list(Medium)))
                    there = (key, medium) in pool.blocks
                    report = pool.remove(key, medium) if there else pool.store(key, bytes(16), 0, medium)
                    log.append(report.changes)
                if kind == "change":
                    wanted |= feed.on_changes(BlocksChanged(NODE, first, b"".join(log[first:])), now)
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
    assert not feed.on_changes(pool.remove(KEYS[3]), 0.0), "in the second part"
    assert not feed.on_changes(pool.store(KEYS[5], bytes(16), 0), 0.0)
    feed.on_dump(second, 0.0)
    assert held(feed) == best(pool)
    assert not feed.on_changes(pool.store(KEYS[6], bytes(16), 0), 0.0)
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
        assert feed.dumps == {"hello": 1, "gap": 0, "drift": 0, "late": 1, "malformed": 0}


def test_gap_and_drift_each_order_one_dump() -> None:
    pool = Pool(NODE)
    feed = start(pool)
    pool.store(KEYS[0], bytes(16), 0)
    assert feed.on_changes(pool.store(KEYS[1], bytes(16), 0), 0.0), "an event was lost"
    assert not feed.on_changes(pool.store(KEYS[2], bytes(16), 0), 0.0), "the dump is on its way"
    for part in pool.dump():
        feed.on_dump(part, 0.0)
    feed.index.apply("node", pack([Change(True, DRAM, KEYS[0])]))
    assert feed.on_heartbeat(pool.heartbeat(), 0.0)
    assert not feed.on_heartbeat(pool.heartbeat(), 1.0)
    assert feed.on_heartbeat(pool.heartbeat(), 1.0 + DUMP_PATIENCE), "it never came"
    assert feed.dumps == {"hello": 0, "gap": 1, "drift": 1, "late": 1, "malformed": 0}


def test_reports_of_an_earlier_life_change_nothing() -> None:
    pool = Pool(NODE)
    feed = start(pool)
    feed.on_hello(DaemonHello(Node("node", "address", 2), 0), 0.0)
    assert not feed.on_changes(BlocksChanged(NODE, 0, pack([Change(False, DRAM, KEYS[0])])), 0.0)
    assert held(feed) == set()


def test_malformed_changes_are_refused_and_a_dump_mends_it() -> None:
    pool = Pool(NODE)
    feed = start(pool)
    good = pool.store(KEYS[0], bytes(16), 0)
    for bad in (good.changes[:-1], bytes([2]) + good.changes[1:], bytes([0, 3]) + good.changes[2:]):
        feed = start(Pool(NODE))
        assert feed.on_changes(BlocksChanged(NODE, 0, good.changes + bad), 0.0)
        assert held(feed) == set(), "nothing of a batch that is refused is applied"
        (part,) = pool.dump()
        feed.on_dump(part, 0.0)
        assert held(feed) == best(pool)
        assert feed.dumps["malformed"] == 1
        # Kept aside for a dump, they are refused at once, too.
        feed.on_hello(DaemonHello(NODE, 9), 0.0)
        first, _ = pool.dump(2)
        feed.on_dump(first, 0.0)
        assert feed.on_changes(BlocksChanged(NODE, first.sequence, bad), 0.0)
        assert feed.dumps["malformed"] == 2


def test_a_malformed_dump_is_ordered_again_only_after_a_pause() -> None:
    pool = Pool(NODE)
    pool.store(KEYS[0], bytes(16), 0)
    feed = start(pool)
    feed.on_dump(BlockDump(NODE, pool.sequence, 0, bytes(CHANGE_BYTES - 1), True), 0.0)
    assert not feed.synced("node")
    assert not feed.on_heartbeat(pool.heartbeat(), DUMP_PATIENCE)
    assert feed.on_heartbeat(pool.heartbeat(), 1.0 + DUMP_PATIENCE)


def test_what_a_node_held_counts_until_its_dump_is_whole() -> None:
    pool = Pool(NODE)
    feed = start(pool)
    feed.on_changes(pool.store(KEYS[0], bytes(16), 0), 0.0)
    pool.remove(KEYS[0])
    assert feed.on_changes(pool.store(KEYS[1], bytes(16), 0), 0.0), "one was lost"
    pool.store(KEYS[2], bytes(16), 0)
    first, second = pool.dump(2)
    feed.on_dump(first, 0.0)
    assert held(feed) == {(KEYS[0], Medium.DRAM)}
    feed.on_dump(second, 0.0)
    assert held(feed) == best(pool)


def test_more_changes_than_are_kept_aside_order_another_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyengine.scheduler.feed.MAX_LATER", 3)
    pool = Pool(NODE)
    pool.store(KEYS[0], bytes(16), 0)
    feed = start(pool)
    first, _ = pool.dump(2)
    feed.on_dump(first, 0.0)
    answers = [feed.on_changes(pool.store(key, bytes(16), 0), 0.0) for key in KEYS[1:5]]
    assert answers == [False, False, False, True]
    for part in pool.dump(2):
        feed.on_dump(part, 0.0)
    assert held(feed) == best(pool)
