"""Copies of hot prefixes: blocks hit often and held by few nodes are copied to one more, before anybody waits for them.

Algorithm 1 replicates what requests happen to fetch. A prefix whose every request goes to its one holder is never
fetched, and its holder is a single point of load and of loss; this sees to a second copy, and to more the hotter it is,
as far as a copy is cheaper than to compute the prefix once more. `dropping.py` does the reverse.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np

from .cluster import View
from .inflight import marks
from .link_cost import LinkCost
from .overlap import Overlap
from .prefix_index import Index
from .types import KEY_BYTES

#: Hits within about HALF_LIFE seconds that justify one more copy.
HOT = 4.0
HALF_LIFE = 60.0
#: Keys whose heat is remembered; the coldest are forgotten first.
MAX_KEYS = 65_536
#: Of these, how many that were hit last are looked at for the hottest: what is hot was hit a moment ago.
LOOKED_AT = 4096
#: Blocks per order, and orders under way at once in the cluster: replication is background work.
MAX_BLOCKS = 512
MAX_ORDERS = 4
#: An order unanswered for so long is given up (seconds).
ORDER_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks `first` to `last` (exclusive) of the prefix are to be copied from node `source` to node `to`."""

    order: int
    source: str
    to: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _Order:
    copy: Copy
    at: float


@dataclass(slots=True)
class _Heat:
    """Hits of a block, each worth half after HALF_LIFE. stretch: the keys from the one kept before it up to it. blocks:
    of the prefix that ends with it. before: the one that is kept before it, b"" if it is the first.
    """

    heat: float
    at: float
    stretch: bytes
    blocks: int
    before: bytes

    def warm(self, now: float) -> float:
        return self.heat * math.exp2((self.at - now) / HALF_LIFE)


class Replicator:
    """Heat of prefixes, and the copies under way.

    Who reuses a block reuses all before it: heat is kept for some blocks of each prefix only (`marks`), and holds for
    those between.
    """

    def __init__(self, index: Index, first: int = 0) -> None:
        self._index = index
        self._heat: OrderedDict[bytes, _Heat] = OrderedDict()
        self._orders: dict[int, _Order] = {}
        self._next = first
        #: Keys as they were first hit, for whoever looks after the cold ones.
        self.fresh: deque[bytes] = deque(maxlen=MAX_KEYS)

    def hit(self, keys: bytes, block_tokens: int, now: float) -> int:
        """A request reuses these leading blocks. Returns how many of them are hot."""
        hot, cooling, before = 0, True, 0
        for n in marks(len(keys) // KEY_BYTES, block_tokens):
            key = keys[(n - 1) * KEY_BYTES : n * KEY_BYTES]
            known = self._heat.get(key)
            if known is None:
                stretch = keys[before * KEY_BYTES : n * KEY_BYTES]
                last = keys[(before - 1) * KEY_BYTES : before * KEY_BYTES] if before else b""
                known = self._heat[key] = _Heat(0.0, now, stretch, n, last)
                self.fresh.append(key)
            known.heat, known.at = known.warm(now) + 1.0, now
            self._heat.move_to_end(key)
            cooling &= known.heat >= HOT
            if cooling:
                hot = n
            before = n
        while len(self._heat) > MAX_KEYS:
            self._heat.popitem(last=False)
        return hot

    def propose(self, view: View, overlap: Overlap, hot: int, links: LinkCost, now: float) -> Copy | None:
        """One more copy of the `hot` leading blocks, to the prefill node with the shortest queue that lacks them."""
        if self._orders:
            self._orders = {n: order for n, order in self._orders.items() if now - order.at <= ORDER_PATIENCE}
        if not hot or len(self._orders) >= MAX_ORDERS:
            return None
        able = view.prefills & view.takes
        prefills = np.zeros(len(view.nodes), dtype=bool)
        prefills[view.node[able]] = True
        holds = overlap.held >= hot
        copies = int((holds & prefills).sum())
        key = overlap.keys[(hot - 1) * KEY_BYTES : hot * KEY_BYTES]
        known = self._heat.get(key)
        wanted = 1 + int((known.warm(now) if known else 0.0) / HOT)
        if copies >= wanted:
            return None
        lacking = prefills & ~holds
        for order in self._orders.values():
            if order.copy.to in view.nodes:
                lacking[view.nodes.index(order.copy.to)] = False
        rows = np.flatnonzero(able & lacking[view.node])
        if not len(rows):
            return None
        row = int(rows[np.argmin(view.queue_seconds[rows])])
        place = int(view.node[row])
        to, first = view.nodes[place], int(overlap.held[place])
        # What a copy spares each request is to move the prefix, or to compute it, whatever is less; it costs moving it.
        moved = (hot - first) * view.block_bytes / links.rate(overlap.source, to)
        tokens, had = hot * view.block_tokens, np.full(len(view.workers), first * view.block_tokens)
        computed = float(view.prefill_seconds(tokens, had)[row])
        if copies and copies >= 1 + int((wanted - 1) * min(computed / moved, 1.0)):
            return None
        runs = self._index.runs(overlap.keys[: min(hot, first + MAX_BLOCKS) * KEY_BYTES], first, {to})
        if not runs:
            return None
        copy = Copy(self.number(), runs[0].node, to, runs[0].first, runs[0].last)
        self._orders[copy.order] = _Order(copy, now)
        return copy

    def number(self) -> int:
        """Of the next order that any daemon is given."""
        self._next += 1
        return self._next - 1

    def heat(self, now: float) -> dict[bytes, float]:
        """Of the blocks whose reuse is remembered."""
        return {key: heat.warm(now) for key, heat in self._heat.items()}

    def hottest(self, most: int, now: float) -> list[tuple[bytes, int, float, float]]:
        """Of the prefixes that were hit last (LOOKED_AT): key of the last block, blocks, heat, and when it was hit.

        A prefix of a prefix is told only if it is reused by others as well: more than twice as often.
        """
        latest = list(itertools.islice(reversed(self._heat.items()), LOOKED_AT))
        warm = {key: known.warm(now) for key, known in latest}
        covered = {known.before for key, known in latest if 2.0 * warm[key] >= warm.get(known.before, 0.0)}
        found = [(key, known) for key, known in latest if key not in covered]
        found = heapq.nsmallest(most, found, key=lambda each: (-warm[each[0]], -each[1].blocks, each[0]))
        return [(key, known.blocks, warm[key], known.at) for key, known in found]

    def remembered(self, key: bytes, now: float) -> tuple[float, float, bytes] | None:
        """Heat of a block, when it was last hit, and the keys for which that holds; None: it is forgotten."""
        known = self._heat.get(key)
        return (known.warm(now), known.at, known.stretch) if known is not None else None

    def done(self, order: int, now: float) -> tuple[Copy, float] | None:
        """The order was carried out: what it was, and how long it took."""
        entry = self._orders.pop(order, None)
        return (entry.copy, now - entry.at) if entry else None

    def lost(self, node: str) -> None:
        """The node is gone, and with it the orders it was given."""
        self._orders = {n: order for n, order in self._orders.items() if order.copy.to != node}
