"""Goal: the index says what was announced, for all nodes and media. Method: random operations against sets."""

from __future__ import annotations

from functools import reduce

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pyengine.scheduler.prefix_index import PrefixIndex, Run
from pyengine.scheduler.types import Medium

#: Of different bytes: the digest rotates those on SSD.
KEYS = [bytes(range(i, 16 * i + i, i))[:16] for i in range(1, 7)]
NODES = ["a", "b", "c"]
keys = st.sampled_from(KEYS)
nodes = st.sampled_from(NODES)
prefixes = st.permutations(KEYS).flatmap(lambda all: st.integers(0, len(all)).map(lambda n: all[:n]))


media = st.sampled_from(list(Medium))
Block = tuple[bytes, Medium]


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[str, set[Block]] = {node: set() for node in NODES}

    @rule(node=nodes, key=keys, medium=media)
    def add(self, node: str, key: bytes, medium: Medium) -> None:
        self.index.add(node, key, bytes(16), 0, medium)
        self.held[node].add((key, medium))

    @rule(node=nodes, key=keys, medium=media)
    def remove(self, node: str, key: bytes, medium: Medium) -> None:
        self.index.remove(node, key, medium)
        self.held[node].discard((key, medium))

    @rule(node=nodes)
    def clear(self, node: str) -> None:
        self.index.clear(node)
        self.held[node].clear()

    @rule(node=nodes, dump=st.sets(st.tuples(keys, media)))
    def replace(self, node: str, dump: set[Block]) -> None:
        self.index.replace(node, [(key, bytes(16), 0, medium) for key, medium in dump])
        self.held[node] = set(dump)

    def has(self, node: str, key: bytes, medium: Medium | None = None) -> bool:
        return any((key, each) in self.held[node] for each in ([medium] if medium else Medium))

    def leading(self, prefix: list[bytes], *names: str) -> int:
        return next((i for i, key in enumerate(prefix) if not any(self.has(n, key) for n in names)), len(prefix))

    @rule(prefix=prefixes)
    def match(self, prefix: list[bytes]) -> None:
        match = self.index.match(prefix)
        expected = {node: self.leading(prefix, node) for node in NODES}
        assert match.nodes == {node: count for node, count in expected.items() if count}
        assert match.best == self.leading(prefix, *NODES)
        ssd = {node: sum(not self.has(node, key, Medium.DRAM) for key in prefix[: expected[node]]) for node in NODES}
        assert match.ssd == {node: count for node, count in ssd.items() if count}

    @rule(prefix=prefixes, avoid=st.sets(nodes), first=st.integers(0, 3))
    def runs(self, prefix: list[bytes], avoid: set[str], first: int) -> None:
        others = [node for node in NODES if node not in avoid]

        def run(node: str, start: int, medium: Medium) -> int:
            """As long as this node has them there, and none needs an SSD that somebody has in DRAM."""
            end = start
            while end < len(prefix) and self.has(node, prefix[end], medium):
                if medium is Medium.SSD and any(self.has(other, prefix[end], Medium.DRAM) for other in others):
                    break
                end += 1
            return end

        at = first
        for node, start, end, medium in self.index.runs(prefix, first, avoid):
            assert start == at < end
            assert node in others
            assert end == run(node, start, medium) == max(run(other, start, medium) for other in others)
            at = end
        if at < len(prefix):
            assert not any(self.has(other, prefix[at]) for other in others)

    @rule(prefix=prefixes, node=nodes)
    def only_on_ssd(self, prefix: list[bytes], node: str) -> None:
        named = [i for run in self.index.only_on_ssd(prefix, node) for i in range(run.first, run.last)]
        wanted = [
            i
            for i, key in enumerate(prefix)
            if self.has(node, key, Medium.SSD) and not self.has(node, key, Medium.DRAM)
        ]
        assert named == wanted

    @invariant()
    def adds_up(self) -> None:
        self.index.check()
        for node, held in self.held.items():
            assert self.index.count(node) == len(held)
            parts = (key if medium is Medium.DRAM else key[1:] + key[:1] for key, medium in held)
            xor = reduce(lambda total, part: total ^ int.from_bytes(part, "big"), parts, 0)
            assert self.index.digest(node) == xor.to_bytes(16, "big")
        for key in KEYS:
            assert set(self.index.holders(key)) == {node for node in NODES if self.has(node, key)}
            assert all(self.index.holds(node, key) == self.has(node, key) for node in NODES)


IndexMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestIndex = IndexMachine.TestCase


def test_a_run_on_ssd_ends_where_somebody_has_the_next_block_in_dram() -> None:
    index = PrefixIndex()
    for position, key in enumerate(KEYS[:4]):
        index.add("a", key, KEYS[position - 1] if position else bytes(16), position, Medium.SSD)
    index.add("b", KEYS[2], KEYS[1], 2, Medium.DRAM)
    assert index.runs(KEYS, 0, {"c"}) == [
        Run("a", 0, 2, Medium.SSD),
        Run("b", 2, 3, Medium.DRAM),
        Run("a", 3, 4, Medium.SSD),
    ]
    assert index.match(KEYS).ssd == {"a": 4}
