"""Changes of what a holder has, packed: as daemons' events, dumps and workers' pages cross sockets to the index.

One record of 40 bytes each, little-endian:

    offset  0        1      2        4          8      24
            removed  tier   (zero)   position   key    parent
            u8       u8     u16      u32        16     16 bytes

tier: 0 device, 1 dram, 2 ssd (`types.TIERS`). Of what is removed only tier and key count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from struct import Struct

import numpy as np

RECORD = Struct("<BBHI16s16s")
CHANGE_BYTES = RECORD.size


@dataclass(frozen=True, slots=True)
class Change:
    """One block came (or went: `removed`). position: its index in its prefix; parent: the key before it."""

    removed: bool
    tier: int
    key: bytes
    parent: bytes = bytes(16)
    position: int = 0


def pack(changes: Iterable[Change]) -> bytes:
    return b"".join(RECORD.pack(c.removed, c.tier, 0, c.position, c.key, c.parent) for c in changes)


def unpack(packed: bytes) -> Iterator[Change]:
    """Raises ValueError if these are not whole records of known tiers."""
    if len(packed) % CHANGE_BYTES:
        raise ValueError(f"{len(packed)} bytes are not whole changes of {CHANGE_BYTES}")
    for removed, tier, _, position, key, parent in RECORD.iter_unpack(packed):
        if removed > 1 or tier > 2:
            raise ValueError(f"a change of kind {removed} in tier {tier}: the sender is of another version")
        yield Change(bool(removed), tier, key, parent, position)


def count(packed: bytes) -> int:
    """How many there are. Raises ValueError as `unpack` does."""
    if len(packed) % CHANGE_BYTES:
        raise ValueError(f"{len(packed)} bytes are not whole changes of {CHANGE_BYTES}")
    kinds, tiers = np.frombuffer(packed, np.uint8).reshape(-1, CHANGE_BYTES)[:, :2].T
    if kinds.max(initial=0) > 1 or tiers.max(initial=0) > 2:
        raise ValueError("a change of an unknown kind or tier: the sender is of another version")
    return len(kinds)
