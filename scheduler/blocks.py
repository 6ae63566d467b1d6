"""Device pages: who references them, and which full ones can be reused by a later prompt.

A page is one of three things, and `check()` says so:

    free      no reference, no key            on the free list
    cached    no reference, a key             in LRU order; reusable by `match`, evictable by `allocate`
    held      one reference or more           with a key once its block is full (`publish`), else private

Only bookkeeping over page numbers lives here; the bytes are the backend's. What gets a key and what loses it is noted,
so that whoever keeps an index of this pool learns of it (`take_changes`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from .changes import RECORD
from .types import KEY_BYTES, TIERS

NO_PARENT = bytes(KEY_BYTES)
DEVICE = TIERS.index("device")


class BlockPool:
    """`pages` device pages of `block_tokens` tokens each. Every operation costs O(pages it names)."""

    def __init__(self, pages: int, block_tokens: int) -> None:
        if pages < 1:
            raise ValueError(f"a pool needs at least one page, not {pages}")
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
        self.pages = pages
        self.block_tokens = block_tokens
        self._free = list(range(pages - 1, -1, -1))
        self._references = [0] * pages
        self._key: list[bytes | None] = [None] * pages
        self._page_of: dict[bytes, int] = {}
        # Least recently released first. A released sequence is entered tail first, so that the tail of a prefix is
        # evicted before its head: a head without its tail is still a hit, a tail without its head never is.
        self._unreferenced: OrderedDict[int, None] = OrderedDict()
        # Per page with a key, what a change says of it: parent and position.
        self._origin: list[tuple[bytes, int]] = [(NO_PARENT, 0)] * pages
        # Keys whose presence is another than at the last `take_changes`, and whether they are here now. A key comes and
        # goes in turns, so what was noted twice is as it was; at most all keys of then and all of now are in it.
        self._changed: dict[bytes, bool] = {}

    @property
    def free(self) -> int:
        """Pages that `allocate` could hand out now: free ones and cached ones that nobody references."""
        return len(self._free) + len(self._unreferenced)

    @property
    def cached(self) -> int:
        """Pages that carry a key and can be matched."""
        return len(self._page_of)

    @property
    def referenced(self) -> int:
        """Pages that somebody holds; 0 when no sequence is alive."""
        return self.pages - self.free

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` private pages with one reference each, or None (and nothing) if there are not so many."""
        if count > self.free:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._unreferenced.popitem(last=False)
                self._forget(page)
            self._references[page] = 1
            taken.append(page)
        return taken

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Takes a reference on the longest leading run of `keys` that is cached; returns its pages in order."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            if self._references[page] == 0:
                del self._unreferenced[page]
            self._references[page] += 1
            pages.append(page)
        return pages

    def count(self, keys: Iterable[bytes]) -> int:
        """Length of the longest leading run of `keys` that is cached."""
        count = 0
        for key in keys:
            if key not in self._page_of:
                break
            count += 1
        return count

    def release(self, pages: Sequence[int]) -> None:
        """Gives back one reference on each; `pages` in prefix order. Raises ValueError for a page nobody holds."""
        for page in reversed(pages):
            if self._references[page] < 1:
                raise ValueError(f"page {page} was released more often than taken")
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._key[page] is None:
                    self._free.append(page)
                else:
                    self._unreferenced[page] = None

    def publish(self, page: int, key: bytes, parent: bytes = NO_PARENT, position: int = 0) -> bool:
        """The held page is full and will not be written again: from now on `key` matches it.

        parent, position: the key before it in its prefix, and its index there.
        False: another page has that key already, this one stays private (its holder goes on reading it).
        """
        if self._references[page] < 1:
            raise ValueError(f"page {page} was published by somebody who does not hold it")
        if self._page_of.setdefault(key, page) != page:
            return False
        if self._key[page] not in (None, key):
            raise ValueError(f"page {page} was published under two keys")
        if self._key[page] is None:
            self._key[page] = key
            self._origin[page] = (parent, position)
            self._note(key, True)
        return True

    def take_changes(self) -> bytes:
        """Which keys came and went since the last call, packed (`changes.py`). Nothing of what came and went again."""
        changed, self._changed = self._changed, {}
        return b"".join(self._record(key, here) for key, here in changed.items())

    def take_all(self) -> bytes:
        """All keys that are here, packed; `take_changes` goes on from this."""
        self._changed.clear()
        return b"".join(self._record(key, True) for key in self._page_of)

    @property
    def changed(self) -> bool:
        """Whether `take_changes` has something to tell."""
        return bool(self._changed)

    def _note(self, key: bytes, here: bool) -> None:
        if self._changed.pop(key, None) is None:
            self._changed[key] = here

    def _record(self, key: bytes, here: bool) -> bytes:
        parent, position = self._origin[self._page_of[key]] if here else (NO_PARENT, 0)
        return RECORD.pack(not here, DEVICE, 0, position, key, parent)

    def _forget(self, page: int) -> None:
        key = self._key[page]
        if key is not None:
            del self._page_of[key]
            self._key[page] = None
            self._note(key, False)

    def check(self) -> None:
        """Raises AssertionError if the pages do not add up."""
        assert all(count >= 0 for count in self._references), "negative reference count"
        free, unreferenced = set(self._free), set(self._unreferenced)
        held = {page for page, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "a page is twice on the free list"
        parts = Counter([*free, *unreferenced, *held])
        assert len(parts) == self.pages, f"{self.pages - len(parts)} pages are lost"
        assert max(parts.values()) == 1, "a page is free, cached or held at once"
        assert all(self._key[page] is None for page in free), "a free page has a key"
        assert all(self._key[page] is not None for page in unreferenced), "a cached page has no key"
        keyed = {key: page for page, key in enumerate(self._key) if key is not None}
        assert keyed == self._page_of, "the map from keys to pages is wrong"
        assert all(here == (key in keyed) for key, here in self._changed.items()), "a change tells what is not so"
