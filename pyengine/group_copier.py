"""The copier of a replica in several processes: each copies its heads between its pages and the node's arena itself.

No block passes through the leader. A rank that shares its heads with another (more ranks than KV heads) reads them as
that one does, and leaves the writing to it. What the leader reports as stored is stored by all, and a block that is not
intact for one rank is bad for all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from collections.abc import Sequence as Run
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from pyengine._native import SharedSlots
from pyengine.backend import WorkerBroken
from pyengine.copier import Copied, Copier, Heads, Pages, Slot, Slots
from pyengine.ranks import (
    Answer,
    Connect,
    CopyOut,
    Disconnect,
    Load,
    Message,
    Ranks,
    SlotName,
    Store,
    StoreCopied,
    uninterrupted,
)
from pyengine.scheduler.types import KvSpec


@runtime_checkable
class Shareable(Protocol):
    """A link to the pool that other processes can share, see `_native.PoolClient.share`."""

    def share(self) -> tuple[list[int], int, int]: ...


class GroupCopier(Copier):
    """The leader's: does its own part while the others do theirs. All may raise WorkerBroken, beside Copier's."""

    def __init__(self, pages: Pages, spec: KvSpec, heads: Heads, ranks: Ranks) -> None:
        super().__init__(pages, spec, heads)
        self._ranks = ranks

    def connect(self, slots: Slots) -> None:
        assert isinstance(slots, Shareable), "a link that cannot be shared serves one process only"
        descriptors, arena_bytes, count = slots.share()
        with self._beside(Connect(arena_bytes, count), descriptors):
            super().connect(slots)

    def disconnect(self) -> None:
        super().disconnect()
        try:
            with self._beside(Disconnect()):
                pass
        except WorkerBroken:
            # One may be writing still, and is of no use any more.
            self._ranks.close()

    def store(self, pages: Run[int], tokens: Run[int], slots: Run[Slot], layers: range | None = None) -> None:
        assert layers is None, "its backend tells of no layers"
        with self._beside(Store(list(pages), list(tokens), _names(slots))):
            super().store(pages, tokens, slots)

    def copy_out(self, pages: Run[int], tokens: Run[int]) -> Copied:
        with uninterrupted():
            self._ranks.tell(CopyOut(self._next + 1, list(pages), list(tokens)))
            return super().copy_out(pages, tokens)

    def store_copied(self, copied: Copied, rows: Run[int], slots: Run[Slot]) -> None:
        with self._beside(StoreCopied(copied.number, list(rows), _names(slots))):
            super().store_copied(copied, rows, slots)

    def load(self, slots: Run[Slot], pages: Run[int], layers: range | None = None) -> int:
        assert layers is None, "its backend asks for no layers"
        with self._beside(Load(_names(slots), list(pages))) as others:
            own = super().load(slots, pages)
        return min(own, *others)

    @contextmanager
    def _beside(self, message: Message, descriptors: Run[int] = ()) -> Iterator[list[int]]:
        """The ranks do this while the block is run; at its end, whatever that is, they have done it and their answers
        are in the list. descriptors: to go beside the message, and closed.
        """
        answers: list[int] = []
        with uninterrupted():
            try:
                self._ranks.tell(message, descriptors)
            finally:
                # One that was kept would keep from the daemon that all have let go.
                for descriptor in descriptors:
                    os.close(descriptor)
            try:
                yield answers
            finally:
                answers += self._ranks.hear()


class RankCopier:
    """The other side: does what GroupCopier tells."""

    def __init__(self, pages: Pages, spec: KvSpec, heads: Heads) -> None:
        self._copier = Copier(pages, spec, heads)
        self._spec = spec
        self._slots: SharedSlots | None = None
        self._copied: dict[int, Copied] = {}

    def on(self, message: Message, descriptors: list[int]) -> Answer | None:
        """Does it, and returns the answer if one is awaited. descriptors: that came with the message."""
        match message:
            case Connect(arena_bytes, slots):
                self._slots = SharedSlots(descriptors, arena_bytes, slots, self._spec.strips, self._spec.strip_bytes)
                self._copier.connect(self._slots)
            case Disconnect():
                self._copier.disconnect()
                self._copied.clear()
                if self._slots is not None:
                    self._slots.close()
                    self._slots = None
            case Store(pages, tokens, slots):
                self._copier.store(pages, tokens, slots)
            case CopyOut(number, pages, tokens):
                self._copied[number] = self._copier.copy_out(pages, tokens)
                return None
            case StoreCopied(number, rows, slots):
                self._copier.store_copied(self._copied.pop(number), rows, slots)
            case Load(slots, pages):
                return Answer(self._copier.load(slots, pages))
            case _:
                raise TypeError(f"not for a copier: {message}")
        return Answer()


def _names(slots: Run[Slot]) -> list[SlotName]:
    return [SlotName(slot.slot, slot.generation) for slot in slots]
