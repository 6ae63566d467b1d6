"""Which holder has which block, and on which medium: the conductor's replica of what all pools have published.

Each daemon is the authority on its own blocks; this index is fed by its numbered events. A stale entry costs a miss
and a recompute, never a wrong answer. A block counts once for each medium that has it. A second index of the same kind
knows the device pages of workers: its holders are workers, called nodes here as well.

`Index` is the contract. `PrefixIndex` is its plain twin, which tests believe; `_native.PrefixIndex` is the fast one,
which serves (`native_index.py`). Both answer alike, to the order of their lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .changes import Change, pack, unpack
from .types import KEY_BYTES, TIERS, Medium

Ints = npt.NDArray[np.int64]

#: Of a holder that the index does not know: the row behind the last one, which is zero in every Match.
NO_SLOT = -1
#: Holders that one index knows at once.
MAX_HOLDERS = 4095


class Match(Protocol):
    """How much of one prefix each holder has: arrays [S + 1] over slots, the last row (of NO_SLOT) zero.

    best: leading blocks that somebody holds; it may exceed every holder's run, as no one needs to hold all of them.
    held: leading blocks that each holder has on any medium. ssd: how many of these only its SSD has.
    """

    @property
    def best(self) -> int: ...
    @property
    def held(self) -> Ints: ...
    @property
    def ssd(self) -> Ints: ...


class Run(NamedTuple):
    """Blocks `first` to `last` (exclusive) of a prefix that `node` holds on `medium`."""

    node: str
    first: int
    last: int
    medium: Medium


class Index(Protocol):
    """Block keys to holders.

    keys: 16 bytes per block, in the order of the prefix. changes: packed (`changes.py`). A node is known from the first
    word about it (`apply`, `clear`, `replace`, `begin`) until `forget`. Lists of nodes are in the order of slots.
    Raises ValueError for bytes that are no whole keys or changes, and for more than MAX_HOLDERS nodes; then nothing has
    been changed.
    """

    @property
    def epoch(self) -> int:
        """Another number whenever a node has got or lost its slot: what was worked out from slots is void."""

    def slot(self, node: str) -> int:
        """The node's row in every Match, as long as it is known; NO_SLOT if it is not."""

    def slots(self, nodes: Sequence[str]) -> Ints:
        """The slot of each."""

    def name(self, slot: int) -> str:
        """The node that has this slot; "" if none has."""

    def count(self, node: str) -> int:
        """Blocks this node holds, once for each medium."""

    def digest(self, node: str) -> bytes:
        """XOR of the node's keys, those on SSD rotated by a byte: equal to its daemon's, or the replica has drifted."""

    def holds(self, node: str, key: bytes) -> bool:
        """On any medium."""

    def holders(self, key: bytes) -> list[str]:
        """Nodes that hold the block on any medium."""

    def apply(self, node: str, changes: bytes) -> None:
        """What has come to the node and gone from it, in this order. Each change is idempotent."""

    def clear(self, node: str) -> None:
        """The node holds nothing; what was staged for it is dropped."""

    def forget(self, node: str) -> None:
        """The node is not known any more."""

    def replace(self, node: str, changes: bytes) -> None:
        """The node holds what these changes leave, and nothing else: begin, stage and adopt."""

    def begin(self, node: str) -> None:
        """A dump of all the node's blocks begins. What an earlier one has staged is dropped."""

    def stage(self, node: str, changes: bytes) -> None:
        """A part of the dump, or a later change, that counts once all is adopted."""

    def adopt(self, node: str) -> None:
        """The node holds what was staged since `begin`, and nothing else."""

    def dump(self, node: str) -> bytes:
        """All the node's blocks as changes: by position, key and medium. `replace` takes them."""

    def match(self, keys: bytes) -> Match:
        """How much of this prefix each node holds, all nodes at once."""

    def runs(self, keys: bytes, first: int, avoid: Iterable[str]) -> list[Run]:
        """Who but those to avoid supplies the blocks from `first` on from DRAM or SSD, each as long a run as there is.

        A block that anybody has in DRAM is not read from an SSD. Ends where nobody else holds the next block.
        """

    def shared(self, keys: bytes, run: Run, avoid: Iterable[str]) -> dict[str, int]:
        """Who else, but those to avoid, holds the run's blocks on its medium from the first on, and up to which."""

    def only_at(self, node: str, others: Iterable[str]) -> Callable[[bytes], tuple[bytes, int] | None]:
        """Tells of a block that this node holds, and nobody else but the others: its parent and its position."""

    def only_on_ssd(self, keys: bytes, node: str) -> list[Run]:
        """Runs of these blocks that the node's SSD has, and neither its DRAM nor its devices."""

    def check(self) -> None:
        """Raises AssertionError if the index contradicts itself. Slow: it reads everything."""


DEVICE, DRAM, SSD = range(len(TIERS))
TIER = {Medium.DRAM: DRAM, Medium.SSD: SSD}


class Found(NamedTuple):
    """The twin's Match."""

    best: int
    held: Ints
    ssd: Ints


@dataclass(slots=True)
class _Block:
    """on: the slots that hold it, as bits, by tier."""

    parent: bytes
    position: int
    on: list[int] = field(default_factory=lambda: [0] * len(TIERS))

    @property
    def holders(self) -> int:
        return self.on[DEVICE] | self.on[DRAM] | self.on[SSD]

    @property
    def only_ssd(self) -> int:
        return self.on[SSD] & ~(self.on[DEVICE] | self.on[DRAM])


@dataclass(slots=True)
class _Holder:
    """What one node holds. staged: what a dump under way has brought, as the changes that came."""

    slot: int
    tiers: list[set[bytes]] = field(default_factory=lambda: [set() for _ in TIERS])
    xor: int = 0
    staged: list[Change] | None = None


class PrefixIndex:
    """The plain twin. Slots are bits of an integer, so a prefix is matched for all nodes at once."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, _Block] = {}
        self._nodes: dict[str, _Holder] = {}
        #: Names by slot; "" where one is free.
        self._name: list[str] = []
        self.epoch = 0

    def slot(self, node: str) -> int:
        holder = self._nodes.get(node)
        return holder.slot if holder else NO_SLOT

    def slots(self, nodes: Sequence[str]) -> Ints:
        return np.array([self.slot(node) for node in nodes], dtype=np.int64)

    def name(self, slot: int) -> str:
        return self._name[slot] if 0 <= slot < len(self._name) else ""

    def count(self, node: str) -> int:
        holder = self._nodes.get(node)
        return sum(map(len, holder.tiers)) if holder else 0

    def digest(self, node: str) -> bytes:
        holder = self._nodes.get(node)
        return (holder.xor if holder else 0).to_bytes(KEY_BYTES, "little")

    def holds(self, node: str, key: bytes) -> bool:
        holder = self._nodes.get(node)
        return holder is not None and any(key in keys for keys in holder.tiers)

    def holders(self, key: bytes) -> list[str]:
        block = self._blocks.get(key)
        return self._names(block.holders) if block else []

    def apply(self, node: str, changes: bytes) -> None:
        unpacked = list(unpack(changes))
        self._apply(self._known(node), unpacked)

    def clear(self, node: str) -> None:
        holder = self._known(node)
        holder.staged = None
        self._empty(holder)

    def forget(self, node: str) -> None:
        holder = self._nodes.get(node)
        if holder is not None:
            self._empty(holder)
            self._name[holder.slot] = ""
            del self._nodes[node]
            self.epoch += 1

    def replace(self, node: str, changes: bytes) -> None:
        unpacked = list(unpack(changes))
        self.begin(node)
        self._known(node).staged = unpacked
        self.adopt(node)

    def begin(self, node: str) -> None:
        self._known(node).staged = []

    def stage(self, node: str, changes: bytes) -> None:
        unpacked = list(unpack(changes))
        self._staged(node).extend(unpacked)

    def adopt(self, node: str) -> None:
        staged = self._staged(node)
        holder = self._nodes[node]
        holder.staged = None
        self._empty(holder)
        self._apply(holder, staged)

    def dump(self, node: str) -> bytes:
        holder = self._nodes.get(node)
        if holder is None:
            return b""
        changes = [
            Change(False, tier, key, self._blocks[key].parent, self._blocks[key].position)
            for tier, keys in enumerate(holder.tiers)
            for key in keys
        ]
        return pack(sorted(changes, key=lambda change: (change.position, change.key, change.tier)))

    def match(self, keys: bytes) -> Found:
        """Costs O(blocks matched), whatever the number of nodes."""
        held = np.zeros(len(self._name) + 1, dtype=np.int64)
        ssd = np.zeros(len(self._name) + 1, dtype=np.int64)
        # Counters of all slots at once: bit n of planes[k] is bit k of slot n's count.
        planes: list[int] = []
        alive = -1
        best = 0
        for index, key in enumerate(_split(keys)):
            block = self._blocks.get(key)
            if block is None:
                break
            best = index + 1
            still = block.holders if alive == -1 else alive & block.holders
            if alive not in (-1, still):
                held[list(_bits(alive & ~still))] = index
            alive = still
            carry = alive & block.only_ssd
            for k in range(len(planes)):
                if not carry:
                    break
                planes[k], carry = planes[k] ^ carry, planes[k] & carry
            if carry:
                planes.append(carry)
        if alive > 0:
            held[list(_bits(alive))] = best
        for k, plane in enumerate(planes):
            ssd[list(_bits(plane))] += 1 << k
        return Found(best, held, ssd)

    def runs(self, keys: bytes, first: int, avoid: Iterable[str]) -> list[Run]:
        others = ~self._mask(avoid)
        blocks = [self._blocks.get(key) for key in _split(keys)]
        runs: list[Run] = []
        while True:
            block = blocks[first] if first < len(blocks) else None
            if block is None or not (block.on[DRAM] | block.on[SSD]) & others:
                return runs
            medium = Medium.DRAM if block.on[DRAM] & others else Medium.SSD
            holders, last = others, first
            for block in blocks[first:]:
                still = holders & block.on[TIER[medium]] if block else 0
                if block is None or not still or (medium is Medium.SSD and block.on[DRAM] & others):
                    break
                holders, last = still, last + 1
            runs.append(Run(self._names(holders)[0], first, last, medium))
            first = last

    def shared(self, keys: bytes, run: Run, avoid: Iterable[str]) -> dict[str, int]:
        alive = ~self._mask({run.node, *avoid})
        tier = TIER[run.medium]
        ends: dict[int, int] = {}
        for index, key in enumerate(_split(keys)[run.first : run.last], run.first):
            block = self._blocks.get(key)
            still = alive & block.on[tier] if block else 0
            if index > run.first:
                ends.update((slot, index) for slot in _bits(alive & ~still))
            alive = still
        if alive > 0:
            ends.update((slot, run.last) for slot in _bits(alive))
        return {self._name[slot]: ends[slot] for slot in sorted(ends)}

    def only_at(self, node: str, others: Iterable[str]) -> Callable[[bytes], tuple[bytes, int] | None]:
        here = self._mask({node})
        known = here | self._mask(others)

        def place(key: bytes) -> tuple[bytes, int] | None:
            block = self._blocks.get(key)
            if block is None or not block.holders & here or block.holders & ~known:
                return None
            return block.parent, block.position

        return place

    def only_on_ssd(self, keys: bytes, node: str) -> list[Run]:
        runs: list[Run] = []
        here = self._mask({node})
        for index, key in enumerate(_split(keys)):
            block = self._blocks.get(key)
            if block is None or not block.only_ssd & here:
                continue
            if runs and runs[-1].last == index:
                runs[-1] = runs[-1]._replace(last=index + 1)
            else:
                runs.append(Run(node, index, index + 1, Medium.SSD))
        return runs

    def _known(self, node: str) -> _Holder:
        holder = self._nodes.get(node)
        if holder is None:
            if "" not in self._name:
                if len(self._name) >= MAX_HOLDERS:
                    raise ValueError(f"the index knows {MAX_HOLDERS} nodes: forget those that are gone")
                self._name.append("")
            holder = self._nodes[node] = _Holder(self._name.index(""))
            self._name[holder.slot] = node
            self.epoch += 1
        return holder

    def _staged(self, node: str) -> list[Change]:
        holder = self._nodes.get(node)
        if holder is None or holder.staged is None:
            raise ValueError(f"no dump of {node!r} has begun")
        return holder.staged

    def _apply(self, holder: _Holder, changes: Iterable[Change]) -> None:
        for change in changes:
            if change.removed:
                self._remove(holder, change.key, change.tier)
            else:
                self._add(holder, change)

    def _add(self, holder: _Holder, change: Change) -> None:
        keys = holder.tiers[change.tier]
        if change.key in keys:
            return
        keys.add(change.key)
        holder.xor ^= _digest(change.key, change.tier)
        block = self._blocks.get(change.key)
        if block is None:
            block = self._blocks[change.key] = _Block(change.parent, change.position)
        block.on[change.tier] |= 1 << holder.slot

    def _remove(self, holder: _Holder, key: bytes, tier: int) -> None:
        if key not in holder.tiers[tier]:
            return
        holder.tiers[tier].remove(key)
        holder.xor ^= _digest(key, tier)
        block = self._blocks[key]
        block.on[tier] ^= 1 << holder.slot
        if not block.holders:
            del self._blocks[key]

    def _empty(self, holder: _Holder) -> None:
        for tier, keys in enumerate(holder.tiers):
            for key in list(keys):
                self._remove(holder, key, tier)

    def _mask(self, nodes: Iterable[str]) -> int:
        return sum(1 << self._nodes[node].slot for node in set(nodes) if node in self._nodes)

    def _names(self, mask: int) -> list[str]:
        return [self._name[slot] for slot in _bits(mask)]

    def check(self) -> None:
        named = {name: slot for slot, name in enumerate(self._name) if name}
        assert named == {node: holder.slot for node, holder in self._nodes.items()}, "a slot has another's name"
        for holder in self._nodes.values():
            xor = 0
            for tier, keys in enumerate(holder.tiers):
                for key in keys:
                    assert self._blocks[key].on[tier] >> holder.slot & 1, "a node's key does not name it"
                    xor ^= _digest(key, tier)
            assert xor == holder.xor, "the XOR of a node's keys is wrong"
        for key, block in self._blocks.items():
            assert block.holders, "a block is held by nobody"
            parent = self._blocks.get(block.parent)
            assert parent is None or parent.position == block.position - 1, "a block does not follow its parent"
            for tier, mask in enumerate(block.on):
                for slot in _bits(mask):
                    assert self._name[slot], "a holder is unknown"
                    assert key in self._nodes[self._name[slot]].tiers[tier], "a holder does not know its key"


def _split(keys: bytes) -> list[bytes]:
    if len(keys) % KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes are no whole number of {KEY_BYTES}-byte keys")
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]


def _bits(mask: int) -> Iterator[int]:
    """Places of the bits that are set. Of a mask of all but some (a negative one) there are no ends."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _digest(key: bytes, tier: int) -> int:
    """A block's part in the digest: messages.rs of the engine has the rule. On a device it is rotated by two bytes."""
    by = {DRAM: 0, SSD: 1, DEVICE: 2}[tier]
    return int.from_bytes(key[by:] + key[:by], "little")
