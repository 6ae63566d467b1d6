"""Goal: pages are never lost, shared by mistake, or evicted while held. Method: random operations and a naive model."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pyengine.scheduler.blocks import BlockPool
from pyengine.scheduler.changes import unpack

PAGES = 6


class PoolMachine(RuleBasedStateMachine):
    """The model: holders as lists of pages, and what key each page carries as a plain dict."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(PAGES, 4)
        self.holders: list[list[int]] = []
        self.key_of: dict[int, bytes] = {}

    def held(self) -> set[int]:
        return {page for holder in self.holders for page in holder}

    @rule(count=st.integers(0, PAGES + 1))
    def allocate(self, count: int) -> None:
        room = PAGES - len(self.held())
        pages = self.pool.allocate(count)
        assert (pages is None) == (count > room)
        if pages is not None:
            assert not set(pages) & self.held()
            for page in pages:
                self.key_of.pop(page, None)
            self.holders.append(pages)

    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        private = sorted(page for page in self.held() if page not in self.key_of)
        if not private:
            return
        page = data.draw(st.sampled_from(private))
        assert self.pool.publish(page, key) == (key not in self.key_of.values())
        if key not in self.key_of.values():
            self.key_of[page] = key

    @rule(keys=st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), unique=True))
    def match(self, keys: list[bytes]) -> None:
        page_of = {key: page for page, key in self.key_of.items()}
        expected = []
        for key in keys:
            if key not in page_of:
                break
            expected.append(page_of[key])
        assert self.pool.match(keys) == expected
        self.holders.append(expected)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.holders:
            self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @invariant()
    def adds_up(self) -> None:
        self.pool.check()
        assert self.pool.referenced == len(self.held())
        assert self.pool.cached == len(self.key_of)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(3, 4)
    pages = pool.allocate(3)
    assert pages is not None
    for page, key in zip(pages, [b"0", b"1", b"2"], strict=True):
        pool.publish(page, key)
    pool.release(pages)
    assert pool.allocate(1) == [pages[2]]
    assert pool.match([b"0", b"1", b"2"]) == pages[:2]


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(2, 4)
    (old,) = pool.allocate(1) or []
    (new,) = pool.allocate(1) or []
    pool.publish(old, b"old")
    pool.publish(new, b"new")
    pool.release([old])
    pool.release([new])
    pool.release(pool.match([b"old"]))
    assert pool.allocate(1) == [new]


def test_misuse_is_refused() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(ValueError, match="released more often"):
        pool.release([0])
    with pytest.raises(ValueError, match="does not hold"):
        pool.publish(0, b"a")
    with pytest.raises(ValueError, match="at least one page"):
        BlockPool(0, 4)


def test_an_index_that_follows_the_changes_equals_the_pool() -> None:
    """Random publications and evictions; the index takes what changed now and then, or all anew."""
    random = Random(7)
    pool, index = BlockPool(5, 4), set[bytes]()
    keys = [number.to_bytes(16, "little") for number in range(12)]
    told = 0
    for _ in range(2000):
        pages = pool.allocate(random.randint(1, 3)) or []
        for position, page in enumerate(pages):
            pool.publish(page, random.choice(keys), keys[3], position)
        pool.release(pages)
        if random.random() < 0.3:
            packed = pool.take_changes()
            for change in unpack(packed):
                told += 1
                assert change.tier == 0
                assert change.removed == (change.key in index), "told what was known"
                if change.removed:
                    index.remove(change.key)
                else:
                    index.add(change.key)
                    assert (change.parent, change.position < 3) == (keys[3], True)
            assert index == {key for key in keys if pool.count([key])}
            assert not pool.changed
        elif random.random() < 0.02:
            index = {change.key for change in unpack(pool.take_all())}
            assert not pool.changed
        pool.check()
    assert told > 500


def test_what_came_and_went_between_two_reports_is_not_told() -> None:
    pool = BlockPool(1, 4)
    for key in (b"a" * 16, b"b" * 16):
        (page,) = pool.allocate(1) or []
        pool.publish(page, key)
        pool.release([page])
    assert [(change.key, change.removed) for change in unpack(pool.take_changes())] == [(b"b" * 16, False)]
    for key in (b"a" * 16, b"b" * 16):
        (page,) = pool.allocate(1) or []
        pool.publish(page, key)
        pool.release([page])
    assert pool.take_changes() == b""
