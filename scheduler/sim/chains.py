"""Keys of modelled blocks: 16 bytes that name a whole prefix, from whatever a trace tells its blocks apart by."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16
ROOT = bytes(KEY_BYTES)

#: Keys that are remembered: about 150 bytes each. Beyond that all are forgotten, and made again as they are needed.
CACHED = 2_000_000


class NoTrie(ValueError):
    """A block has two parents: ids do not name prefixes."""

    def __init__(self, id: int) -> None:
        super().__init__(f"block {id} follows another block than before")
        self.id = id


class Chains:
    """key = blake2b(parent's key, id): equal prefixes of ids, equal keys. Ids are below 2**64.

    trie: an id names its whole prefix, as in Mooncake's traces; one with another parent than before raises NoTrie (as
    long as it is remembered).
    """

    def __init__(self, trie: bool = False, cached: int = CACHED) -> None:
        self._keys: dict[int | tuple[bytes, int], tuple[bytes, bytes]] = {}
        self._trie = trie
        self._cached = cached

    def keys(self, ids: Sequence[int], parent: bytes = ROOT) -> list[bytes]:
        """One for each id."""
        known, trie = self._keys, self._trie
        found = []
        for id in ids:
            name = id if trie else (parent, id)
            entry = known.get(name)
            if entry is None:
                if len(known) >= self._cached:
                    known.clear()
                entry = known[name] = (parent, chain(parent, id))
            elif entry[0] != parent:
                raise NoTrie(id)
            parent = entry[1]
            found.append(parent)
        return found


def chain(parent: bytes, id: int) -> bytes:
    return blake2b(parent + id.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()
