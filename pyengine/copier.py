"""Copies blocks between a worker's device pages and slots of its node's arena.

What is copied out of pages is copied once into memory of this process (canonical strips, a partial block zeroed beyond
its tokens) and from there into the arena, which makes the checksums; the way back verifies them. `KvMover` decides what
is copied and when; nothing here knows of requests.
"""

from __future__ import annotations

from collections.abc import Sequence as Run
from typing import NamedTuple, Protocol

import numpy as np

from pyengine._native import Slot
from pyengine.backend import U8
from pyengine.scheduler.types import KvSpec

#: Blocks copied per call between pages and arena. It bounds the scratch buffer: 24 MiB for a small model.
COPY_BLOCKS = 32


class Pages(Protocol):
    """The part of a backend that a copier uses."""

    def read_pages(self, pages: list[int], out: U8, layers: range | None = None) -> None: ...
    def write_pages(self, pages: list[int], strips: U8) -> None: ...


class Slots(Protocol):
    """The part of a link to the pool that a copier uses."""

    def store(self, slot: int, generation: int, source: U8, first_strip: int = 0) -> None: ...
    def load(self, slot: int, generation: int, into: U8, first_strip: int = 0) -> bool: ...


class Copied(NamedTuple):
    """Blocks that were copied out of their pages and wait for slots. number: what their copier knows them by."""

    number: int
    blocks: int


class Copier:
    """Owned by one mover. `connect` again after a daemon's death."""

    def __init__(self, pages: Pages, spec: KvSpec) -> None:
        self.spec = spec
        self._pages = pages
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
        for begin in range(0, len(pages), COPY_BLOCKS):
            part = slice(begin, begin + COPY_BLOCKS)
            for slot, strips in zip(slots[part], self._read(pages[part], tokens[part], layers), strict=True):
                self._store(slot, strips, 0 if layers is None else self.spec.strips_of(layers).start)

    def copy_out(self, pages: Run[int], tokens: Run[int]) -> Copied:
        """Copies blocks out of their pages, which may change from now on. tokens: as for `store`."""
        self._next += 1
        self._out[self._next] = self._read(pages, tokens)
        return Copied(self._next, len(pages))

    def store_copied(self, copied: Copied, rows: Run[int], slots: Run[Slot]) -> None:
        """Copies some of the blocks that were copied out into slots, and forgets all of them. Raises as `store`."""
        strips = self._out.pop(copied.number)
        for row, slot in zip(rows, slots, strict=True):
            self._store(slot, strips[row])

    def load(self, slots: Run[Slot], pages: Run[int]) -> int:
        """Copies blocks from slots into pages; returns how many leading ones are there, intact. The pages of the others
        hold anything.
        """
        assert self._slots is not None, "callers have a pool"
        for begin in range(0, len(slots), COPY_BLOCKS):
            part = slots[begin : begin + COPY_BLOCKS]
            strips = self._scratch(len(part))
            verified = 0
            while verified < len(part) and self._slots.load(
                part[verified].slot, part[verified].generation, strips[verified]
            ):
                verified += 1
            if verified:
                self._pages.write_pages(list(pages[begin : begin + verified]), strips[:verified])
            if verified < len(part):
                return begin + verified
        return len(slots)

    def _store(self, slot: Slot, strips: U8, first_strip: int = 0) -> None:
        assert self._slots is not None, "callers have a pool"
        self._slots.store(slot.slot, slot.generation, strips, first_strip)

    def _read(self, pages: Run[int], tokens: Run[int], layers: range | None = None) -> U8:
        """Canonical strips of the blocks in these pages."""
        if layers is None:
            strips = self._scratch(len(pages))
            self._pages.read_pages(list(pages), strips)
        else:
            strips = np.empty((len(pages), len(self.spec.strips_of(layers)), self.spec.strip_bytes), np.uint8)
            self._pages.read_pages(list(pages), strips, layers)
        for row, count in enumerate(tokens):
            if count < self.spec.block_tokens:
                strips[row, :, count * self.spec.strip_bytes // self.spec.block_tokens :] = 0
        return strips

    def _scratch(self, blocks: int) -> U8:
        return np.empty((blocks, self.spec.strips, self.spec.strip_bytes), np.uint8)
