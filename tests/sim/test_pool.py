"""Goal: a modelled pool takes, commits, evicts and tells as the production pool does. Method: a naive pool of lists
beside it, over random operations; which block goes is the policy's choice (tested in Rust), that it may is checked."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine._native import EVICTION_POLICIES, BugError, GiveUpError
from pyengine.scheduler.changes import Change, unpack
from pyengine.scheduler.sim.chains import ROOT, Chains
from pyengine.scheduler.sim.compute import StepTime
from pyengine.scheduler.sim.pool import DRAM, SSD, NodePool
from pyengine.scheduler.sim.spec import NodeSpec

COSTS = StepTime.load("llama3-70b-a800")
CHAINS = Chains()


def pool_of(dram: int, ssd: int = 0, evict: str = "lru") -> NodePool:
    return NodePool(NodeSpec(dram_tokens=dram * 512, ssd_tokens=ssd * 512 + 511, evict=evict), 512, COSTS)


def keys(*ids: int) -> list[bytes]:
    return CHAINS.keys(ids)


def join(*ids: int) -> bytes:
    return b"".join(keys(*ids))


def test_one_request() -> None:
    pool = pool_of(6)
    assert (pool.count, pool.digest, pool.available) == (0, bytes(16), 5)
    assert pool.find(join(1, 2, 3)) == b""
    assert pool.take(7, join(1, 2, 3), 2)
    assert pool.available == 0 and not pool.take(8, join(9))
    assert pool.find(join(1, 2, 3)) == b"" and pool.changes() == b"", "reserved is not readable"
    one, two, three = keys(1, 2, 3)
    pool.commit(7, one + two)
    assert list(unpack(pool.changes())) == [Change(False, DRAM, one, ROOT, 0), Change(False, DRAM, two, one, 1)]
    assert pool.changes() == b""
    assert pool.find(join(1, 2, 3)) == bytes([DRAM, DRAM])
    assert pool.release(7) and not pool.release(7)
    assert pool.find(join(1, 2, 3)) == bytes([DRAM, DRAM]), "what was not committed is lost"
    assert pool.count == 2 and pool.digest == bytes(a ^ b for a, b in zip(one, two, strict=True))
    assert pool.available == 5
    assert pool.take(9, join(1, 2), position=0) and pool.take(10, three, position=2, parent=two)
    pool.commit(10, three)
    assert list(unpack(pool.changes())) == [Change(False, DRAM, three, two, 2)]
    pool.check()


def test_evicted_blocks_are_on_the_ssd() -> None:
    pool = pool_of(4, 2)
    for tag, ids in enumerate(((1, 2, 3), (4, 5, 6))):
        assert pool.take(tag, join(*ids))
        pool.commit(tag, join(*ids))
        pool.release(tag)
    assert pool.evictions == 2
    # The tail of the first made room, in the order in which it went.
    assert pool.find(join(1, 2, 3)) == bytes([DRAM, SSD, SSD])
    assert pool.take(2, join(1, 2, 3)), "what is on the SSD needs a slot in DRAM"
    pool.commit(2, join(1, 2, 3))
    assert pool.find(join(1, 2, 3)) == bytes([DRAM] * 3)
    pool.check()


def test_what_is_dropped_stays_on_the_ssd_and_so_does_all_there_when_the_node_restarts() -> None:
    pool = pool_of(4, 2)
    for tag, ids in enumerate(((1, 2, 3), (4, 5, 6), (1, 2, 3))):
        assert pool.take(tag, join(*ids))
        pool.commit(tag, join(*ids))
        pool.release(tag)
    assert pool.find(join(1, 2, 3)) == bytes([DRAM] * 3)
    # The SSD has what made room last.
    on_ssd = [change.key for change in unpack(pool.changes()) if change.tier == SSD and not change.removed][-2:]
    assert pool.drop(join(1, 2, 3)) == 3 and pool.drop(join(1, 2, 3)) == 0
    assert pool.find(b"".join(on_ssd)) == bytes([SSD, SSD]), "what was dropped went nowhere"
    assert pool.take(9, join(7, 8)) and pool.changes()
    pool.restart()
    assert pool.find(b"".join(on_ssd)) == bytes([SSD, SSD]) and pool.find(join(7)) == b""
    told = list(unpack(pool.changes()))
    assert [change.key for change in told] == on_ssd and all(change.tier == SSD for change in told)
    assert (pool.count, pool.available) == (2, 3) and not pool.release(9)
    pool.check()


def test_bad_calls() -> None:
    pool = pool_of(4)
    with pytest.raises(GiveUpError, match="can never be taken together: the pool has 4 slots"):
        pool.take(1, join(1, 2, 3), 1)
    assert pool.take(1, join(1, 2))
    for tag, blocks in ((1, join(5)), (2, join(5) * 2)):
        with pytest.raises(BugError, match="has taken something already, or a key is there twice"):
            pool.take(tag, blocks)
    with pytest.raises(BugError, match="has not taken"):
        pool.commit(1, join(1, 9))
    with pytest.raises(BugError, match="has not taken"):
        pool.commit(3, join(1))
    with pytest.raises(BugError, match="16-byte keys"):
        pool.find(b"123")
    with pytest.raises(BugError, match="others use this pool"):
        pool.model.access(b"")
    pool.check()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (NodeSpec(evict="lfru"), "no eviction policy 'lfru'.*did you mean 'l"),
        (NodeSpec(dram_tokens=512), r"dram_tokens 512, .*impossible"),
        (NodeSpec(dram_tokens=-512), "are no sizes"),
        (NodeSpec(ssd_tokens=2**60), "are no sizes"),
    ],
)
def test_bad_specs(spec: NodeSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NodePool(spec, 512, COSTS)


# -- beside a naive pool -----------------------------------------------------------------------------------------------


@dataclass
class Taken:
    """pinned: published ones. reserved: not committed. doubles: committed, while another one's was published."""

    pinned: list[bytes]
    reserved: list[bytes]
    private: int
    doubles: int = 0


@dataclass
class Naive:
    slots: int
    ssd_slots: int
    #: By key: as the change said that stored it.
    dram: dict[bytes, Change] = field(default_factory=dict)
    ssd: dict[bytes, Change] = field(default_factory=dict)
    tags: dict[int, Taken] = field(default_factory=dict)

    @property
    def free(self) -> int:
        held = sum(len(tag.reserved) + tag.private + tag.doubles for tag in self.tags.values())
        return self.slots - len(self.dram) - held

    def idle(self, key: bytes) -> bool:
        return all(key not in tag.pinned for tag in self.tags.values())

    def may_go(self, key: bytes) -> bool:
        """A leaf; or, if there is none, a block all of whose children are in use."""

        def children(of: bytes) -> list[bytes]:
            return [other for other, change in self.dram.items() if change.parent == of]

        leaf = any(self.idle(other) and not children(other) for other in self.dram)
        return self.idle(key) and (not children(key) if leaf else not any(map(self.idle, children(key))))

    def evict(self, key: bytes) -> list[Change]:
        """And what it tells."""
        assert self.may_go(key), "this block may not go"
        told = []
        if self.ssd_slots and key not in self.ssd:
            if len(self.ssd) == self.ssd_slots:
                oldest = next(iter(self.ssd))
                del self.ssd[oldest]
                told.append(Change(True, SSD, oldest))
            self.ssd[key] = replace(self.dram[key], tier=SSD)
            told.append(self.ssd[key])
        del self.dram[key]
        return [*told, Change(True, DRAM, key)]

    def digest(self) -> tuple[int, bytes]:
        all_keys = [*self.dram, *(key[1:] + key[:1] for key in self.ssd)]
        xor = reduce(lambda sum, key: sum ^ int.from_bytes(key), all_keys, 0)
        return len(all_keys), xor.to_bytes(16)


#: What is told of a block that is stored, by its key.
PLACES = {
    key: Change(False, DRAM, key, before, position)
    for branches in product((0, 1), repeat=5)
    for position, (before, key) in enumerate(
        pairwise([ROOT, *keys(*(10 * depth + branch for depth, branch in enumerate(branches)))])
    )
}


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32), dram=st.integers(2, 12), ssd=st.integers(0, 6), evict=st.sampled_from(EVICTION_POLICIES)
)
def test_beside_a_naive_pool(seed: int, dram: int, ssd: int, evict: str) -> None:
    """Random prefixes of a small tree (ids are 10 * depth + branch, so that they meet and part) for up to five tags."""
    draw = random.Random(seed)
    pool, naive = pool_of(dram, ssd, evict), Naive(dram, ssd)
    for _ in range(80):
        what = draw.choice(["take", "take", "take", "commit", "commit", "release", "release", "drop", "restart"])
        wanted = keys(*(10 * depth + draw.randint(0, 1) for depth in range(draw.randint(1, 5))))
        # Who takes no head of a prefix leaves it to others, who may let it go under him.
        start = draw.choice((0, 0, draw.randrange(len(wanted))))
        parent, wanted = ([ROOT, *wanted][start], wanted[start:])
        number, private = draw.randrange(5), draw.choice((0, 0, 1, 2))
        joined = b"".join(wanted)
        expected: list[Change] = []
        tag = list(naive.tags)[number % len(naive.tags)] if naive.tags else number
        if what == "take" and number not in naive.tags:
            need = len(wanted) + private - sum(key in naive.dram for key in wanted)
            kept = sum(key in naive.dram and naive.idle(key) for key in wanted)
            idle = sum(map(naive.idle, naive.dram))
            if len(wanted) + private + 1 > dram:
                with pytest.raises(GiveUpError):
                    pool.take(number, joined, private)
                continue
            room = need + kept == 0 or need + 1 <= naive.free + idle - kept
            evictions = max(need - naive.free, 0) if room else 0
            assert pool.take(number, joined, private, position=start, parent=parent) == room
            told = list(unpack(pool.changes()))
            if room:
                present = [key for key in wanted if key in naive.dram]
                naive.tags[number] = Taken(present, [], 0)
                for change in [change for change in told if change.removed and change.tier == DRAM]:
                    expected += naive.evict(change.key)
                    evictions -= 1
                assert evictions == 0, "as many go as are needed"
                naive.tags[number] = Taken(present, [key for key in wanted if key not in present], private)
            assert told == expected
            continue
        if what == "commit" and tag in naive.tags:
            taken = naive.tags[tag]
            part = [key for key in taken.reserved if draw.random() < 0.8]
            pool.commit(tag, b"".join(part))
            for key in part:
                taken.reserved.remove(key)
                if key in naive.dram:
                    taken.doubles += 1
                else:
                    taken.pinned.append(key)
                    naive.dram[key] = PLACES[key]
                    expected.append(PLACES[key])
        elif what == "release":
            assert pool.release(tag) == (naive.tags.pop(tag, None) is not None)
        elif what == "drop":
            going = [key for key in wanted if naive.idle(key) and key in naive.dram]
            assert pool.drop(joined) == len(going)
            for key in going:
                del naive.dram[key]
                expected.append(Change(True, DRAM, key))
        elif what == "restart" and draw.random() < 0.3:
            evictions = pool.evictions
            pool.restart()
            naive.dram.clear()
            naive.tags.clear()
            # To whoever knows nothing of it, all that is there is told.
            expected += naive.ssd.values()
            assert pool.evictions == evictions
        assert list(unpack(pool.changes())) == expected
        found = pool.find(joined)
        for key, tier in zip(wanted, found, strict=False):
            assert tier == (DRAM if key in naive.dram else SSD) and (key in naive.dram or key in naive.ssd)
        if len(found) < len(wanted):
            assert wanted[len(found)] not in naive.dram and wanted[len(found)] not in naive.ssd
        assert (pool.count, pool.digest) == naive.digest()
        assert pool.model.available == naive.free + sum(map(naive.idle, naive.dram))
        pool.check()
