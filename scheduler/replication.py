"""Copies of hot prefixes: blocks hit often and held by few nodes are copied to one more, before anybody waits for them.

Algorithm 1 replicates what requests happen to fetch. A prefix whose every request goes to its one holder is never
fetched, and its holder is a single point of load and of loss; this sees to a second copy, and to more the hotter it is.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .cluster import View
from .prefix_index import Index

#: Hits within about HALF_LIFE seconds that justify one more copy.
HOT = 4.0
HALF_LIFE = 60.0
#: Keys whose heat is remembered; the coldest are forgotten first.
MAX_KEYS = 65_536
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


class Replicator:
    """Heat of blocks, and the copies under way."""

    def __init__(self, index: Index, first: int = 0) -> None:
        self._index = index
        self._heat: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        self._orders: dict[int, _Order] = {}
        self._next = first

    def hit(self, keys: Sequence[bytes], now: float) -> int:
        """A request reuses these leading blocks. Returns how many of them are hot."""
        hot, cooling = 0, True
        for i, key in enumerate(keys):
            heat = self._warm(key, now) + 1.0
            self._heat[key] = (heat, now)
            self._heat.move_to_end(key)
            cooling &= heat >= HOT
            if cooling:
                hot = i + 1
        while len(self._heat) > MAX_KEYS:
            self._heat.popitem(last=False)
        return hot

    def propose(self, view: View, keys: Sequence[bytes], now: float) -> Copy | None:
        """One more copy of these hot leading blocks, to the least loaded prefill node that lacks them."""
        self._orders = {n: order for n, order in self._orders.items() if now - order.at <= ORDER_PATIENCE}
        if not keys or len(self._orders) >= MAX_ORDERS:
            return None
        rows = np.flatnonzero(view.prefills & view.takes)
        nodes = {view.nodes[view.node[row]] for row in rows}
        holders = nodes & set(self._index.holders(keys[-1]))
        wanted = 1 + int(self._warm(keys[-1], now) / HOT)
        busy = {order.copy.to for order in self._orders.values()}
        if len(holders) >= wanted or not nodes - holders - busy:
            return None
        able = [row for row in rows if view.nodes[view.node[row]] not in holders | busy]
        to = view.nodes[view.node[min(able, key=lambda row: (view.queue_seconds[row], row))]]
        first = next(i for i, key in enumerate(keys) if not self._index.holds(to, key))
        runs = self._index.runs(b"".join(keys[: first + MAX_BLOCKS]), first, {to})
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
        """Of all blocks whose reuse is remembered."""
        return {key: self._warm(key, now) for key in self._heat}

    def done(self, order: int, now: float) -> tuple[Copy, float] | None:
        """The order was carried out: what it was, and how long it took."""
        entry = self._orders.pop(order, None)
        return (entry.copy, now - entry.at) if entry else None

    def lost(self, node: str) -> None:
        """The node is gone, and with it the orders it was given."""
        self._orders = {n: order for n, order in self._orders.items() if order.copy.to != node}

    def _warm(self, key: bytes, now: float) -> float:
        heat, at = self._heat.get(key, (0.0, now))
        return heat * math.exp2((at - now) / HALF_LIFE)
