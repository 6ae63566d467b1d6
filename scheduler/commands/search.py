"""The smallest cluster that meets an objective, and how it is split between prefill and decode, if it is.

A split trades one objective for the other: with more prefill workers TTFT is met more often, and TBT less. So the share
of requests that meets both is best about where both are met alike: walk towards that crossing with growing steps, halve
what is left once it is passed, and try the neighbours. Over the number of nodes the best share only grows: double, then
halve. Workers of role both have no split: they are tried with one node less than the best split needs, and only if that
suffices with fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class Point:
    """One cluster tried. share: of requests within all objectives; ttft, tbt: within one of them.

    stretch: by how much all objectives would have to be longer for the wanted share (1 or less: met); ttft_stretch,
    tbt_stretch: one of them, while the other is kept; inf: no length would do. both: workers of that role.
    """

    prefill: int
    decode: int
    share: float
    ttft: float
    tbt: float
    stretch: float
    ttft_stretch: float = math.inf
    tbt_stretch: float = math.inf
    both: int = 0

    @property
    def nodes(self) -> int:
        return self.prefill + self.decode + self.both


Try: TypeAlias = Callable[[int, int, int], Point]


@dataclass
class Search:
    """try_: runs a cluster of so many prefill workers, decode workers, and workers of both roles. wanted: the share.
    most: nodes at most, 2 or more.

    tried: every cluster that was run, in order; each once. best: the cheapest that suffices, None: none does.
    """

    try_: Try
    wanted: float
    most: int
    tried: dict[tuple[int, int, int], Point] = field(default_factory=dict)
    best: Point | None = None

    def run(self) -> Point | None:
        self._apart()
        self._whole()
        return self.best

    def _whole(self) -> None:
        """Workers of role both, where fewer nodes than those of the best split might do."""
        short, nodes = 0, self.best.nodes - 1 if self.best is not None else self.most
        point = self._at(0, 0, nodes)
        if point.share < self.wanted:
            return
        self.best = point
        while nodes - short > 1:
            middle = (nodes + short) // 2
            point = self._at(0, 0, middle)
            if point.share >= self.wanted:
                nodes, self.best = middle, point
            else:
                short = middle

    def _apart(self) -> None:
        """Prefill and decode workers."""
        nodes, short = 2, 1
        share = 0.5
        while True:
            point = self.split(nodes, share)
            share = point.prefill / nodes
            if point.share >= self.wanted:
                break
            if nodes == self.most:
                return
            short, nodes = nodes, min(2 * nodes, self.most)
        self.best = point
        # `nodes` suffices, `short` does not.
        while nodes - short > 1:
            middle = (nodes + short) // 2
            point = self.split(middle, share)
            if point.share >= self.wanted:
                nodes, share, self.best = middle, point.prefill / middle, point
            else:
                short = middle

    def split(self, nodes: int, share: float) -> Point:
        """The best split of so many nodes that the walk finds; it begins with this share for prefill."""
        at = min(max(round(share * nodes), 1), nodes - 1)
        low, high, step = 1, nodes - 1, 1
        before: bool | None = None
        turned = False
        while low <= high:
            point = self._at(at, nodes - at)
            if point.share >= self.wanted:
                return point
            more = point.ttft < point.tbt
            low, high = (at + 1, high) if more else (low, at - 1)
            turned = turned or before == (not more)
            before = more
            if turned:
                at = (low + high) // 2
            else:
                at = min(at + step, high) if more else max(at - step, low)
                step *= 2
        return self._climb(nodes)

    def _climb(self, nodes: int) -> Point:
        """From the best seen to a split that no neighbour betters: the crossing of two shares is not quite the best of
        both together.
        """
        best = max(
            (point for point in self.tried.values() if point.nodes == nodes and not point.both),
            key=lambda point: point.share,
        )
        while best.share < self.wanted:
            beside = [self._at(at, nodes - at) for at in (best.prefill - 1, best.prefill + 1) if 1 <= at < nodes]
            better = max(beside, key=lambda point: point.share, default=best)
            if better.share <= best.share:
                break
            best = better
        return best

    def _at(self, prefill: int, decode: int, both: int = 0) -> Point:
        key = (prefill, decode, both)
        if key not in self.tried:
            self.tried[key] = self.try_(*key)
        return self.tried[key]
