"""Goal: an index says what was announced, for all nodes and media. Method: random operations on each implementation
against sets; both get the same operations and must give the same answers, to the order of their lists.
"""

from __future__ import annotations

import random
from functools import reduce
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pyengine.scheduler.changes import CHANGE_BYTES, Change, pack, unpack
from pyengine.scheduler.native_index import NativeIndex
from pyengine.scheduler.prefix_index import DEVICE, DRAM, MAX_HOLDERS, NO_SLOT, SSD, TIER, Index, PrefixIndex, Run
from pyengine.scheduler.types import TIERS, Medium

INDEXES = [PrefixIndex, NativeIndex]
#: Of different bytes: the digest rotates those on SSD.
KEYS = [bytes(range(i, 16 * i + i, i))[:16] for i in range(1, 7)]
#: More than an entry of the fast one keeps in place, and more than one word of bits.
NODES = [f"node-{i}" for i in range(70)]
Block = tuple[bytes, int]
Answer = TypeVar("Answer")

keys = st.sampled_from(KEYS)
tiers = st.sampled_from(range(len(TIERS)))
blocks = st.tuples(keys, tiers)
nodes = st.sampled_from(NODES[:3]) | st.sampled_from(NODES)
prefixes = st.permutations(KEYS).flatmap(lambda all: st.integers(0, len(all)).map(lambda n: all[:n]))
some_nodes = st.sets(nodes, max_size=4)


def added(key: bytes, tier: int) -> Change:
    """Where a block stands follows from its key, as in earnest."""
    position = KEYS.index(key)
    return Change(False, tier, key, KEYS[position - 1] if position else bytes(16), position)


def removed(key: bytes, tier: int) -> Change:
    return Change(True, tier, key)


changes = st.lists(st.builds(added, keys, tiers) | st.builds(removed, keys, tiers), max_size=8)


def folded(held: set[Block], changes: list[Change]) -> set[Block]:
    held = set(held)
    for change in changes:
        (held.discard if change.removed else held.add)((change.key, change.tier))
    return held


class IndexMachine(RuleBasedStateMachine):
    """held: what each node that is known has; staged: what it will have."""

    def __init__(self) -> None:
        super().__init__()
        self.indexes: tuple[Index, ...] = (PrefixIndex(), NativeIndex())
        self.held: dict[str, set[Block]] = {}
        self.staged: dict[str, set[Block]] = {}
        self.slots: dict[str, int] = {}

    @rule(node=nodes, changes=changes)
    def apply(self, node: str, changes: list[Change]) -> None:
        for index in self.indexes:
            index.apply(node, pack(changes))
        self.held[node] = folded(self.held.get(node, set()), changes)

    @rule(names=st.sets(st.sampled_from(NODES), min_size=5), block=blocks)
    def spread(self, names: set[str], block: Block) -> None:
        for name in sorted(names):
            self.apply(name, [added(*block)])

    @rule(names=st.sets(st.sampled_from(NODES), min_size=40), block=blocks)
    def withdraw(self, names: set[str], block: Block) -> None:
        for name in sorted(names & set(self.held)):
            self.apply(name, [removed(*block)])

    @rule(node=nodes)
    def clear(self, node: str) -> None:
        for index in self.indexes:
            index.clear(node)
        self.held[node] = set()
        self.staged.pop(node, None)

    @rule(node=nodes)
    def forget(self, node: str) -> None:
        epochs = [index.epoch for index in self.indexes]
        for index, epoch in zip(self.indexes, epochs, strict=True):
            index.forget(node)
            assert (index.epoch != epoch) == (node in self.held)
        self.held.pop(node, None)
        self.staged.pop(node, None)
        self.slots.pop(node, None)

    @rule(node=nodes, changes=changes)
    def replace(self, node: str, changes: list[Change]) -> None:
        for index in self.indexes:
            index.replace(node, pack(changes))
        self.held[node] = folded(set(), changes)
        self.staged.pop(node, None)

    @rule(node=nodes)
    def begin(self, node: str) -> None:
        for index in self.indexes:
            index.begin(node)
        self.held.setdefault(node, set())
        self.staged[node] = set()

    @precondition(lambda self: self.staged)
    @rule(data=st.data(), changes=changes)
    def stage(self, data: st.DataObject, changes: list[Change]) -> None:
        node = data.draw(st.sampled_from(sorted(self.staged)))
        for index in self.indexes:
            index.stage(node, pack(changes))
        self.staged[node] = folded(self.staged[node], changes)

    @precondition(lambda self: self.staged)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.staged)))
        for index in self.indexes:
            index.adopt(node)
        self.held[node] = self.staged.pop(node)

    @rule(node=nodes, to=nodes)
    def restore(self, node: str, to: str) -> None:
        """What one node's dump says, another node has."""
        dump = self.alike([index.dump(node) for index in self.indexes])
        listed = [(change.key, change.tier) for change in unpack(dump)]
        assert len(listed) == len(set(listed))
        assert set(listed) == self.held.get(node, set())
        assert all(change == added(change.key, change.tier) for change in unpack(dump))
        self.replace(to, list(unpack(dump)))

    @rule(node=nodes, length=st.integers(1, 100), kind=st.sampled_from([(2, 0), (0, 3), (1, 255)]))
    def malformed(self, node: str, length: int, kind: tuple[int, int]) -> None:
        good = pack([added(KEYS[0], DRAM)])
        bad = [good + bytes(length), good + bytes(kind) + good[2:]]
        for index in self.indexes:
            for packed in bad[length % CHANGE_BYTES == 0 :]:
                for refuse in (index.apply, index.replace, index.stage):
                    with pytest.raises(ValueError, match="change"):
                        refuse(node, packed)
            with pytest.raises(ValueError, match="16-byte keys"):
                index.match(bytes(length * 16 - 1))
            if node not in self.staged:
                with pytest.raises(ValueError, match="has begun"):
                    index.stage(node, good)
                with pytest.raises(ValueError, match="has begun"):
                    index.adopt(node)

    def has(self, node: str, key: bytes, tier: int | None = None) -> bool:
        held = self.held.get(node, set())
        return any((key, each) in held for each in ([tier] if tier is not None else range(len(TIERS))))

    def leading(self, prefix: list[bytes], *names: str) -> int:
        return next((i for i, key in enumerate(prefix) if not any(self.has(n, key) for n in names)), len(prefix))

    def ssd_only(self, node: str, key: bytes) -> bool:
        return self.has(node, key, SSD) and not self.has(node, key, DRAM) and not self.has(node, key, DEVICE)

    def alike(self, answers: list[Answer]) -> Answer:
        assert all(answer == answers[0] for answer in answers)
        return answers[0]

    @rule(prefix=prefixes)
    def match(self, prefix: list[bytes]) -> None:
        for index in self.indexes:
            match = index.match(b"".join(prefix))
            assert match.best == self.leading(prefix, *self.held)
            rows = index.slots(NODES)
            assert len(match.held) == len(match.ssd) > max(rows)
            expected = [self.leading(prefix, node) for node in NODES]
            assert match.held[rows].tolist() == expected
            ssd = [
                sum(self.ssd_only(node, key) for key in prefix[:count])
                for node, count in zip(NODES, expected, strict=True)
            ]
            assert match.ssd[rows].tolist() == ssd
            assert sum(match.held) == sum(expected), "a slot of nobody holds something"
            assert match.held[NO_SLOT] == match.ssd[NO_SLOT] == 0

    @rule(prefix=prefixes, avoid=some_nodes, first=st.integers(0, 3))
    def runs(self, prefix: list[bytes], avoid: set[str], first: int) -> None:
        others = [node for node in self.held if node not in avoid]

        def run(node: str, start: int, tier: int) -> int:
            """As long as this node has them there, and none needs an SSD that somebody has in DRAM."""
            end = start
            while end < len(prefix) and self.has(node, prefix[end], tier):
                if tier == SSD and any(self.has(other, prefix[end], DRAM) for other in others):
                    break
                end += 1
            return end

        at = first
        answers = [index.runs(b"".join(prefix), first, avoid) for index in self.indexes]
        self.alike(answers)
        for node, start, end, medium in answers[0]:
            assert start == at < end
            assert node in others
            ends = [run(other, start, TIER[medium]) for other in others]
            assert end == run(node, start, TIER[medium]) == max(ends)
            at = end
        if at < len(prefix):
            assert not any(self.has(other, prefix[at], tier) for other in others for tier in (DRAM, SSD))

    @rule(prefix=prefixes, node=nodes, avoid=some_nodes, first=st.integers(0, 6), medium=st.sampled_from(Medium))
    def shared(self, prefix: list[bytes], node: str, avoid: set[str], first: int, medium: Medium) -> None:
        run = Run(node, min(first, len(prefix)), len(prefix), medium)
        wanted = {}
        for name in set(self.held) - avoid - {node}:
            end = run.first
            while end < run.last and self.has(name, prefix[end], TIER[medium]):
                end += 1
            if end > run.first:
                wanted[name] = end
        answers = [index.shared(b"".join(prefix), run, avoid) for index in self.indexes]
        assert answers[0] == wanted
        self.alike([list(answer.items()) for answer in answers])

    @rule(prefix=prefixes, node=nodes)
    def only_on_ssd(self, prefix: list[bytes], node: str) -> None:
        runs = [index.only_on_ssd(b"".join(prefix), node) for index in self.indexes]
        self.alike(runs)
        named = [i for run in runs[0] for i in range(run.first, run.last)]
        assert named == [i for i, key in enumerate(prefix) if self.ssd_only(node, key)]
        assert all(run.node == node and run.medium is Medium.SSD for run in runs[0])
        assert all(run.last < later.first for run, later in zip(runs[0], runs[0][1:], strict=False))

    @rule(node=nodes, others=some_nodes)
    def only_at(self, node: str, others: set[str]) -> None:
        for index in self.indexes:
            place = index.only_at(node, others)
            for key in KEYS:
                holders = {name for name in self.held if self.has(name, key)}
                alone = node in holders and holders <= {node, *others}
                change = added(key, DRAM)
                assert place(key) == ((change.parent, change.position) if alone else None)

    @invariant()
    def adds_up(self) -> None:
        for index in self.indexes:
            index.check()
            for node in NODES:
                slot = index.slot(node)
                assert (slot == NO_SLOT) == (node not in self.held)
                if slot != NO_SLOT:
                    assert self.slots.setdefault(node, slot) == slot, "a slot has moved"
                    assert index.name(slot) == node
            for node, held in self.held.items():
                assert index.count(node) == len(held)
                by = {DRAM: 0, SSD: 1, DEVICE: 2}
                parts = (key[by[tier] :] + key[: by[tier]] for key, tier in held)
                xor = reduce(lambda total, part: total ^ int.from_bytes(part, "big"), parts, 0)
                assert index.digest(node) == xor.to_bytes(16, "big")
            for key in KEYS:
                known = {node for node in self.held if self.has(node, key)}
                assert index.holders(key) == sorted(known, key=index.slot)
                assert all(index.holds(node, key) == self.has(node, key) for node in NODES[:4])


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestIndex = IndexMachine.TestCase


@pytest.mark.parametrize("make", INDEXES)
def test_a_run_on_ssd_ends_where_somebody_has_the_next_block_in_dram(make: type[Index]) -> None:
    index = make()
    index.apply("a", pack(added(key, SSD) for key in KEYS[:4]))
    index.apply("b", pack([added(KEYS[2], DRAM)]))
    assert index.runs(b"".join(KEYS), 0, {"c"}) == [
        Run("a", 0, 2, Medium.SSD),
        Run("b", 2, 3, Medium.DRAM),
        Run("a", 3, 4, Medium.SSD),
    ]
    match = index.match(b"".join(KEYS))
    assert match.ssd[index.slot("a")] == 4


@pytest.mark.parametrize("make", INDEXES)
def test_the_index_has_a_limit_and_forgetting_makes_room(make: type[Index]) -> None:
    index = make()
    for number in range(MAX_HOLDERS):
        index.apply(f"{number}", pack([added(KEYS[0], DRAM)]))
    with pytest.raises(ValueError, match="forget"):
        index.clear("one more")
    assert index.match(KEYS[0]).held.sum() == MAX_HOLDERS
    last = "0"
    for number in range(2 * MAX_HOLDERS):
        index.forget(last)
        last = f"new {number}"
        index.apply(last, pack([added(KEYS[0], DRAM)]))
        assert index.slot(last) == 0
    assert index.match(KEYS[0]).held.sum() == MAX_HOLDERS
    index.check()


def test_many_blocks() -> None:
    """Tables grow and shrink, entries wander, lives are swept: after thousands of changes both still agree."""
    draw = random.Random(1)
    chains = [[draw.randbytes(16) for _ in range(40)] for _ in range(60)]
    plain, fast = PrefixIndex(), NativeIndex()
    for step in range(900):
        node = f"node-{draw.randrange(20)}"
        chain = draw.choice(chains)
        some = [
            Change(draw.random() < 0.3, draw.randrange(3), key, chain[i - 1] if i else bytes(16), i)
            for i, key in enumerate(chain[: draw.randint(1, 40)])
        ]
        kind = draw.choices(["apply", "clear", "replace", "forget"], [90, 4, 4, 2])[0]
        for index in (plain, fast):
            if kind == "apply":
                index.apply(node, pack(some))
            elif kind == "clear":
                index.clear(node)
            elif kind == "replace":
                index.replace(node, pack(some))
            else:
                index.forget(node)
        if step % 30 == 0:
            fast.check()
        asked = b"".join(draw.choice(chains))
        one, other = plain.match(asked), fast.match(asked)
        assert one.best == other.best
        assert np.array_equal(one.held, other.held)
        assert np.array_equal(one.ssd, other.ssd)
        avoid = {f"node-{draw.randrange(20)}"}
        assert plain.runs(asked, 2, avoid) == fast.runs(asked, 2, avoid)
        assert plain.count(node) == fast.count(node)
        assert plain.digest(node) == fast.digest(node)
    for number in range(20):
        assert plain.dump(f"node-{number}") == fast.dump(f"node-{number}")
