"""Which node holds which block: the conductor's replica of what all pools have published.

Each daemon is the authority on its own blocks; this index is fed by its numbered events. A stale entry costs a miss
and a recompute, never a wrong answer. One tier (DRAM) is announced today.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .types import KEY_BYTES


@dataclass(frozen=True, slots=True)
class Match:
    """nodes: leading blocks that each node holds, nodes with none left out. best: leading blocks that somebody holds.

    best may exceed every single node's run: no one node needs to hold all of them.
    """

    nodes: dict[str, int]
    best: int


@dataclass(slots=True)
class _Block:
    holders: int
    parent: bytes
    position: int


class PrefixIndex:
    """Block keys to holders. Nodes are bits of an integer, so a prefix is matched for all nodes at once."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, _Block] = {}
        self._bit: dict[str, int] = {}
        self._keys: dict[str, set[bytes]] = {}
        self._xor: dict[str, int] = {}

    def count(self, node: str) -> int:
        """Blocks this node holds."""
        return len(self._keys.get(node, ()))

    def digest(self, node: str) -> bytes:
        """XOR of the node's keys: equal to its daemon's, or the replica has drifted."""
        return self._xor.get(node, 0).to_bytes(KEY_BYTES, "little")

    def holds(self, node: str, key: bytes) -> bool:
        return key in self._keys.get(node, ())

    def holders(self, key: bytes) -> list[str]:
        """Nodes that hold the block, in the order in which they were first heard of."""
        block = self._blocks.get(key)
        return self._names(block.holders) if block else []

    def add(self, node: str, key: bytes, parent: bytes, position: int) -> None:
        """The node has published a block. Idempotent."""
        keys = self._keys.setdefault(node, set())
        if key in keys:
            return
        bit = self._bit.get(node)
        if bit is None:
            used = set(self._bit.values())
            bit = self._bit[node] = next(i for i in range(len(used) + 1) if i not in used)
        keys.add(key)
        self._xor[node] = self._xor.get(node, 0) ^ int.from_bytes(key, "little")
        block = self._blocks.get(key)
        if block is None:
            self._blocks[key] = _Block(1 << bit, parent, position)
        else:
            block.holders |= 1 << bit

    def remove(self, node: str, key: bytes) -> None:
        """The node no longer holds the block. Idempotent."""
        keys = self._keys.get(node)
        if keys is None or key not in keys:
            return
        keys.remove(key)
        self._xor[node] ^= int.from_bytes(key, "little")
        block = self._blocks[key]
        block.holders &= ~(1 << self._bit[node])
        if not block.holders:
            del self._blocks[key]

    def clear(self, node: str) -> None:
        """Forgets the node and all it holds."""
        for key in list(self._keys.get(node, ())):
            self.remove(node, key)
        self._keys.pop(node, None)
        self._xor.pop(node, None)
        self._bit.pop(node, None)

    def replace(self, node: str, blocks: Iterable[tuple[bytes, bytes, int]]) -> None:
        """A dump: the node holds exactly these (key, parent, position)."""
        self.clear(node)
        for key, parent, position in blocks:
            self.add(node, key, parent, position)

    def match(self, keys: Sequence[bytes]) -> Match:
        """How much of this prefix each node holds. Costs O(blocks matched), whatever the number of nodes."""
        matched: dict[str, int] = {}
        alive = -1
        best = 0
        for index, key in enumerate(keys):
            block = self._blocks.get(key)
            if block is None:
                break
            best = index + 1
            still = block.holders if alive == -1 else alive & block.holders
            if alive not in (-1, still):
                for name in self._names(alive & ~still):
                    matched[name] = index
            alive = still
        if alive > 0:
            for name in self._names(alive):
                matched[name] = best
        return Match(matched, best)

    def runs(self, keys: Sequence[bytes], first: int, avoid: str) -> list[tuple[str, int, int]]:
        """Who but `avoid` supplies the blocks from `first` on: (node, first, last), each as long a run as there is.

        Ends where nobody else holds the next block.
        """
        runs: list[tuple[str, int, int]] = []
        others = ~self._mask(avoid)
        while True:
            holders, last = others, first
            for key in keys[first:]:
                block = self._blocks.get(key)
                still = holders & block.holders if block else 0
                if not still:
                    break
                holders, last = still, last + 1
            if last == first:
                return runs
            runs.append((self._names(holders)[0], first, last))
            first = last

    def _mask(self, node: str) -> int:
        bit = self._bit.get(node)
        return 0 if bit is None else 1 << bit

    def _names(self, mask: int) -> list[str]:
        return [node for node, bit in self._bit.items() if mask >> bit & 1]

    def check(self) -> None:
        """Raises AssertionError if the two directions of the index disagree."""
        assert len(set(self._bit.values())) == len(self._bit), "two nodes share a bit"
        for node, keys in self._keys.items():
            xor = 0
            for key in keys:
                assert self._blocks[key].holders >> self._bit[node] & 1, "a node's key does not name it"
                xor ^= int.from_bytes(key, "little")
            assert xor == self._xor.get(node, 0), "the XOR of a node's keys is wrong"
        for key, block in self._blocks.items():
            assert block.holders, "a block is held by nobody"
            parent = self._blocks.get(block.parent)
            assert parent is None or parent.position == block.position - 1, "a block does not follow its parent"
            for node in self._names(block.holders):
                assert key in self._keys[node], "a holder does not know its key"
            assert block.holders < 1 << (max(self._bit.values(), default=-1) + 1), "a holder is unknown"
