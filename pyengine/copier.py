"""Copies blocks between a worker's device pages and slots of its node's arena.

What is copied out of pages is copied once into memory of this process (canonical strips, a partial block zeroed beyond
its tokens) and from there into the arena, which makes the checksums; the way back verifies them. `KvMover` decides what
is copied and when; nothing here knows of requests.
"""

from __future__ import annotations

from collections.abc import Sequence as Run
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from pyengine.backend import U8
from pyengine.scheduler.types import KvSpec

#: Bytes copied per call between pages and arena: they are still in the cache when they are copied on. (94 MB of
#: SmolLM2's, of which 24 at once: 17 ms out of pages and 18 back; 3 at once: 9 and 13.)
COPY_BYTES = 4 << 20


class Slot(Protocol):
    """What a copier must know of a slot: `_native.Slot` has it."""

    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...


class Heads(msgspec.Struct, frozen=True):
    """The KV heads `first` to `first + count - 1` of `of`: in each half layer of a block a run of strips.

    stores: False: another rank has the same heads, and writes them.
    """

    first: int
    count: int
    of: int
    stores: bool = True


class Pages(Protocol):
    """The part of a backend that a copier uses: of the heads that it has, if they are not all."""

    def read_pages(self, pages: list[int], out: U8, layers: range | None = None) -> None: ...
    def write_pages(self, pages: list[int], strips: U8, layers: range | None = None) -> None: ...


class Slots(Protocol):
    """The part of a link to the pool that a copier uses."""

    def store(
        self, slot: int, generation: int, source: U8, first_strip: int = 0, run: int = 1, stride: int = 1
    ) -> None: ...
    def load(
        self, slot: int, generation: int, into: U8, first_strip: int = 0, run: int = 1, stride: int = 1
    ) -> bool: ...


def layers_at_once(spec: KvSpec, blocks: int, part_bytes: int) -> int:
    """How many layers of so many blocks are a part of so many bytes at least."""
    layer_bytes = blocks * spec.block_bytes // spec.layers
    return min(max(-(-part_bytes // max(layer_bytes, 1)), 1), spec.layers)


class Copied(NamedTuple):
    """Blocks that were copied out of their pages and wait for slots. number: what their copier knows them by."""

    number: int
    blocks: int


class Copier:
    """Owned by one mover. `connect` again after a daemon's death."""

    def __init__(self, pages: Pages, spec: KvSpec, heads: Heads | None = None) -> None:
        """spec: of whole blocks. heads: those that this process has pages of; None: all."""
        self.spec = spec
        self._pages = pages
        self._heads = heads
        self._strips = spec.strips if heads is None else spec.strips // heads.of * heads.count
        #: Which strips of a block they are: first, run and stride.
        self._runs = (0, 1, 1) if heads is None else (heads.first, heads.count, heads.of)
        self._slots: Slots | None = None
        self._out: dict[int, U8] = {}
        self._next = 0

    def connect(self, slots: Slots) -> None:
        """Takes the link by which slots are written and read from now on."""
        self._slots = slots

    def disconnect(self) -> None:
        """Returns when no slot is written any more by this copier, and forgets what waits. Idempotent; to be called
        before the link is closed, since its end is the daemon's proof of just that.
        """
        self._slots = None
        self._out.clear()

    def store(self, pages: Run[int], tokens: Run[int], slots: Run[Slot], layers: range | None = None) -> None:
        """Copies blocks, or these layers of them, from pages into slots. tokens: how many of each block's positions are
        filled, the rest becomes zeros. Returns when all of it is in the arena. Raises RetryError: the daemon is gone.

        With layers it may be called on another thread, beside one that does anything else here but `disconnect`.
        """
        if not self._stores:
            return
        at_once = self._at_once(layers)
        for begin in range(0, len(pages), at_once):
            part = slice(begin, begin + at_once)
            for slot, strips in zip(slots[part], self._read(pages[part], tokens[part], layers), strict=True):
                self._store(slot, strips, layers)

    def copy_out(self, pages: Run[int], tokens: Run[int]) -> Copied:
        """Copies blocks out of their pages, which may change from now on. tokens: as for `store`."""
        self._next += 1
        self._out[self._next] = self._read(pages, tokens) if self._stores else self._scratch(0)
        return Copied(self._next, len(pages))

    def store_copied(self, copied: Copied, rows: Run[int], slots: Run[Slot]) -> None:
        """Copies some of the blocks that were copied out into slots, and forgets all of them. Raises as `store`."""
        strips = self._out.pop(copied.number)
        if not self._stores:
            return
        for row, slot in zip(rows, slots, strict=True):
            self._store(slot, strips[row])

    def load(self, slots: Run[Slot], pages: Run[int], layers: range | None = None) -> int:
        """Copies blocks, or these layers of them, from slots into pages; returns how many leading ones are there,
        intact. The pages of the others hold anything.

        With layers it may be called on another thread, as `store`.
        """
        assert self._slots is not None, "callers have a pool"
        at_once = self._at_once(layers)
        # One for all parts: each of its own would be fresh memory, and the kernel's handing it out costs like the copy.
        strips = self._scratch(min(at_once, len(slots)), layers)
        for begin in range(0, len(slots), at_once):
            part = slots[begin : begin + at_once]
            verified = 0
            while verified < len(part):
                slot = part[verified]
                if not self._slots.load(slot.slot, slot.generation, strips[verified], *self._runs_of(layers)):
                    break
                verified += 1
            if verified:
                self._pages.write_pages(list(pages[begin : begin + verified]), strips[:verified], layers)
            if verified < len(part):
                return begin + verified
        return len(slots)

    @property
    def _stores(self) -> bool:
        return self._heads is None or self._heads.stores

    def _store(self, slot: Slot, strips: U8, layers: range | None = None) -> None:
        assert self._slots is not None, "callers have a pool"
        self._slots.store(slot.slot, slot.generation, strips, *self._runs_of(layers))

    def _runs_of(self, layers: range | None) -> tuple[int, int, int]:
        """Which strips of a block's layers are this process's: first, run and stride."""
        first, run, stride = self._runs
        return first if layers is None else first + self.spec.strips_of(layers).start, run, stride

    def _read(self, pages: Run[int], tokens: Run[int], layers: range | None = None) -> U8:
        """Canonical strips of the blocks in these pages."""
        strips = self._scratch(len(pages), layers)
        self._pages.read_pages(list(pages), strips, layers)
        for row, count in enumerate(tokens):
            if count < self.spec.block_tokens:
                strips[row, :, count * self.spec.strip_bytes // self.spec.block_tokens :] = 0
        return strips

    def _at_once(self, layers: range | None = None) -> int:
        """Blocks copied per call: a power of two, as compiled backends have programs for such numbers."""
        return 1 << max(COPY_BYTES // (self._part(layers) * self.spec.strip_bytes), 1).bit_length() - 1

    def _part(self, layers: range | None) -> int:
        """Strips that this process has of a block's layers."""
        return self._strips if layers is None else self._strips * len(layers) // self.spec.layers

    def _scratch(self, blocks: int, layers: range | None = None) -> U8:
        return np.empty((blocks, self._part(layers), self.spec.strip_bytes), np.uint8)
