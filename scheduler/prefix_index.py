"""Which node holds which block, and on which medium: the conductor's replica of what all pools have published.

Each daemon is the authority on its own blocks; this index is fed by its numbered events. A stale entry costs a miss
and a recompute, never a wrong answer. A block counts once for each medium that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .types import KEY_BYTES, Medium


@dataclass(frozen=True, slots=True)
class Match:
    """nodes: leading blocks that each node holds, nodes with none left out. best: leading blocks that somebody holds.
    ssd: how many of a node's leading blocks only its SSD has, nodes with none left out.

    best may exceed every single node's run: no one node needs to hold all of them.
    """

    nodes: dict[str, int]
    best: int
    ssd: dict[str, int] = field(default_factory=dict)


class Run(NamedTuple):
    """Blocks `first` to `last` (exclusive) of a prefix that `node` holds on `medium`."""

    node: str
    first: int
    last: int
    medium: Medium


@dataclass(slots=True)
class _Block:
    """dram, ssd: the nodes that hold it there, as bits."""

    parent: bytes
    position: int
    dram: int = 0
    ssd: int = 0

    @property
    def holders(self) -> int:
        return self.dram | self.ssd

    def on(self, medium: Medium) -> int:
        return self.dram if medium is Medium.DRAM else self.ssd


@dataclass(slots=True)
class _Holding:
    """What one node holds. bit: its place in the masks of blocks."""

    bit: int
    dram: set[bytes] = field(default_factory=set)
    ssd: set[bytes] = field(default_factory=set)
    xor: int = 0

    def on(self, medium: Medium) -> set[bytes]:
        return self.dram if medium is Medium.DRAM else self.ssd


class PrefixIndex:
    """Block keys to holders. Nodes are bits of an integer, so a prefix is matched for all nodes at once."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, _Block] = {}
        self._nodes: dict[str, _Holding] = {}
        #: Names by bit; "" where a bit is free.
        self._name: list[str] = []

    def count(self, node: str) -> int:
        """Blocks this node holds, once for each medium."""
        held = self._nodes.get(node)
        return len(held.dram) + len(held.ssd) if held else 0

    def digest(self, node: str) -> bytes:
        """XOR of the node's keys, those on SSD rotated by a byte: equal to its daemon's, or the replica has drifted."""
        held = self._nodes.get(node)
        return (held.xor if held else 0).to_bytes(KEY_BYTES, "little")

    def holds(self, node: str, key: bytes) -> bool:
        """On any medium."""
        held = self._nodes.get(node)
        return held is not None and (key in held.dram or key in held.ssd)

    def holders(self, key: bytes) -> list[str]:
        """Nodes that hold the block, in the order in which they were first heard of."""
        block = self._blocks.get(key)
        return self._names(block.holders) if block else []

    def add(self, node: str, key: bytes, parent: bytes, position: int, medium: Medium = Medium.DRAM) -> None:
        """The node has published a block. Idempotent."""
        held = self._nodes.get(node)
        if held is None:
            held = self._nodes[node] = _Holding(self._free_bit())
            self._name[held.bit] = node
        keys = held.on(medium)
        if key in keys:
            return
        keys.add(key)
        held.xor ^= _digest(key, medium)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(parent, position)
        if medium is Medium.DRAM:
            block.dram |= 1 << held.bit
        else:
            block.ssd |= 1 << held.bit

    def remove(self, node: str, key: bytes, medium: Medium = Medium.DRAM) -> None:
        """The node no longer holds the block on this medium. Idempotent."""
        held = self._nodes.get(node)
        if held is None or key not in held.on(medium):
            return
        held.on(medium).remove(key)
        held.xor ^= _digest(key, medium)
        block = self._blocks[key]
        if medium is Medium.DRAM:
            block.dram ^= 1 << held.bit
        else:
            block.ssd ^= 1 << held.bit
        if not block.holders:
            del self._blocks[key]

    def clear(self, node: str) -> None:
        """Forgets the node and all it holds."""
        held = self._nodes.get(node)
        if held is None:
            return
        for medium in Medium:
            for key in list(held.on(medium)):
                self.remove(node, key, medium)
        self._name[held.bit] = ""
        del self._nodes[node]

    def replace(self, node: str, blocks: Iterable[tuple[bytes, bytes, int, Medium]]) -> None:
        """A dump: the node holds exactly these (key, parent, position, medium)."""
        self.clear(node)
        for key, parent, position, medium in blocks:
            self.add(node, key, parent, position, medium)

    def match(self, keys: Sequence[bytes]) -> Match:
        """How much of this prefix each node holds. Costs O(blocks matched), whatever the number of nodes."""
        matched: dict[str, int] = {}
        # Counters of all nodes at once: bit n of planes[k] is bit k of node n's count.
        planes: list[int] = []
        alive = -1
        best = 0
        for index, key in enumerate(keys):
            block = self._blocks.get(key)
            if block is None:
                break
            best = index + 1
            still = block.holders if alive == -1 else alive & block.holders
            if alive not in (-1, still):
                for bit in _bits(alive & ~still):
                    matched[self._name[bit]] = index
            alive = still
            carry = alive & ~block.dram
            for k in range(len(planes)):
                if not carry:
                    break
                planes[k], carry = planes[k] ^ carry, planes[k] & carry
            if carry:
                planes.append(carry)
        if alive > 0:
            for bit in _bits(alive):
                matched[self._name[bit]] = best
        ssd: dict[str, int] = {}
        if planes:
            for name in matched:
                bit = self._nodes[name].bit
                if count := sum((plane >> bit & 1) << k for k, plane in enumerate(planes)):
                    ssd[name] = count
        return Match(matched, best, ssd)

    def runs(self, keys: Sequence[bytes], first: int, avoid: Iterable[str]) -> list[Run]:
        """Who but those to avoid supplies the blocks from `first` on, each as long a run as there is.

        A block that anybody has in DRAM is not read from an SSD. Ends where nobody else holds the next block.
        """
        others = ~sum(1 << self._nodes[node].bit for node in set(avoid) if node in self._nodes)
        runs: list[Run] = []
        while True:
            block = self._blocks.get(keys[first]) if first < len(keys) else None
            if block is None or not block.holders & others:
                return runs
            medium = Medium.DRAM if block.dram & others else Medium.SSD
            holders, last = others, first
            for key in keys[first:]:
                block = self._blocks.get(key)
                still = holders & block.on(medium) if block else 0
                if block is None or not still or (medium is Medium.SSD and block.dram & others):
                    break
                holders, last = still, last + 1
            runs.append(Run(self._names(holders)[0], first, last, medium))
            first = last

    def shared(self, keys: Sequence[bytes], run: Run, avoid: Iterable[str]) -> dict[str, int]:
        """Who else, but those to avoid, holds the run's blocks on its medium from the first on, and up to which."""
        alive = ~sum(1 << self._nodes[node].bit for node in {run.node, *avoid} if node in self._nodes)
        shared: dict[str, int] = {}
        for index in range(run.first, run.last):
            block = self._blocks.get(keys[index])
            still = alive & block.on(run.medium) if block else 0
            if index > run.first:
                shared.update((self._name[bit], index) for bit in _bits(alive & ~still))
            alive = still
            if not alive:
                return shared
        shared.update((self._name[bit], run.last) for bit in _bits(alive))
        return shared

    def only_at(self, node: str, others: Iterable[str]) -> Callable[[bytes], tuple[bytes, int] | None]:
        """Tells of a block that this node holds, and nobody else but the others: its parent and its position."""
        held = self._nodes.get(node)
        here = 1 << held.bit if held else 0
        known = here | sum(1 << self._nodes[name].bit for name in set(others) - {node} if name in self._nodes)

        def place(key: bytes) -> tuple[bytes, int] | None:
            block = self._blocks.get(key)
            if block is None or not block.holders & here or block.holders & ~known:
                return None
            return block.parent, block.position

        return place

    def only_on_ssd(self, keys: Sequence[bytes], node: str) -> list[Run]:
        """Runs of these blocks that the node's SSD has, and its DRAM has not."""
        runs: list[Run] = []
        held = self._nodes.get(node)
        if held is None or not held.ssd:
            return runs
        for index, key in enumerate(keys):
            if key not in held.ssd or key in held.dram:
                continue
            if runs and runs[-1].last == index:
                runs[-1] = runs[-1]._replace(last=index + 1)
            else:
                runs.append(Run(node, index, index + 1, Medium.SSD))
        return runs

    def _free_bit(self) -> int:
        if "" not in self._name:
            self._name.append("")
        return self._name.index("")

    def _names(self, mask: int) -> list[str]:
        return [node for node, held in self._nodes.items() if mask >> held.bit & 1]

    def check(self) -> None:
        """Raises AssertionError if the two directions of the index disagree."""
        named = {name: bit for bit, name in enumerate(self._name) if name}
        assert named == {node: held.bit for node, held in self._nodes.items()}, "a bit has another name than its node"
        for held in self._nodes.values():
            xor = 0
            for medium in Medium:
                for key in held.on(medium):
                    assert self._blocks[key].on(medium) >> held.bit & 1, "a node's key does not name it"
                    xor ^= _digest(key, medium)
            assert xor == held.xor, "the XOR of a node's keys is wrong"
        for key, block in self._blocks.items():
            assert block.holders, "a block is held by nobody"
            parent = self._blocks.get(block.parent)
            assert parent is None or parent.position == block.position - 1, "a block does not follow its parent"
            for medium in Medium:
                for node in self._names(block.on(medium)):
                    assert key in self._nodes[node].on(medium), "a holder does not know its key"
            assert all(self._name[bit] for bit in _bits(block.holders)), "a holder is unknown"


def _bits(mask: int) -> Iterator[int]:
    """Places of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _digest(key: bytes, medium: Medium) -> int:
    """A block's part in the digest: messages.rs of the engine has the rule."""
    return int.from_bytes(key if medium is Medium.DRAM else key[1:] + key[:1], "little")
