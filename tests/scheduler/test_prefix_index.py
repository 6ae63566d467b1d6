"""Goal: the index says what was announced, for all nodes at once. Method: random operations against a dict of sets."""

from __future__ import annotations

from functools import reduce

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pyengine.scheduler.prefix_index import PrefixIndex

KEYS = [bytes([i]) * 16 for i in range(1, 7)]
NODES = ["a", "b", "c"]
keys = st.sampled_from(KEYS)
nodes = st.sampled_from(NODES)
prefixes = st.permutations(KEYS).flatmap(lambda all: st.integers(0, len(all)).map(lambda n: all[:n]))


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[str, set[bytes]] = {node: set() for node in NODES}

    @rule(node=nodes, key=keys)
    def add(self, node: str, key: bytes) -> None:
        self.index.add(node, key, bytes(16), 0)
        self.held[node].add(key)

    @rule(node=nodes, key=keys)
    def remove(self, node: str, key: bytes) -> None:
        self.index.remove(node, key)
        self.held[node].discard(key)

    @rule(node=nodes)
    def clear(self, node: str) -> None:
        self.index.clear(node)
        self.held[node].clear()

    @rule(node=nodes, dump=st.sets(keys))
    def replace(self, node: str, dump: set[bytes]) -> None:
        self.index.replace(node, [(key, bytes(16), 0) for key in sorted(dump)])
        self.held[node] = set(dump)

    def leading(self, prefix: list[bytes], held: set[bytes]) -> int:
        return next((i for i, key in enumerate(prefix) if key not in held), len(prefix))

    @rule(prefix=prefixes)
    def match(self, prefix: list[bytes]) -> None:
        match = self.index.match(prefix)
        expected = {node: self.leading(prefix, held) for node, held in self.held.items()}
        assert match.nodes == {node: count for node, count in expected.items() if count}
        assert match.best == self.leading(prefix, set().union(*self.held.values()))

    @rule(prefix=prefixes, avoid=nodes, first=st.integers(0, 3))
    def runs(self, prefix: list[bytes], avoid: str, first: int) -> None:
        at = first
        for node, start, end in self.index.runs(prefix, first, avoid):
            assert start == at < end
            assert node != avoid
            others = [self.leading(prefix[start:], held) for name, held in self.held.items() if name != avoid]
            assert end - start == self.leading(prefix[start:], self.held[node]) == max(others)
            at = end
        if at < len(prefix):
            assert all(prefix[at] not in held for name, held in self.held.items() if name != avoid)

    @invariant()
    def adds_up(self) -> None:
        self.index.check()
        for node, held in self.held.items():
            assert self.index.count(node) == len(held)
            xor = reduce(lambda total, key: total ^ int.from_bytes(key, "big"), held, 0)
            assert self.index.digest(node) == xor.to_bytes(16, "big")
        for key in KEYS:
            assert set(self.index.holders(key)) == {node for node, held in self.held.items() if key in held}


IndexMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestIndex = IndexMachine.TestCase
