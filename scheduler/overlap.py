"""What of one prompt lies where: all that a plan reads from the indexes of pools, of device pages, and of what is
coming.

Three kinds of holders are brought to the rows of one view: nodes (DRAM and SSD), workers (their own pages), and workers
that compute the same prefix just now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .cluster import Ints, View
from .cost import F64
from .inflight import Expectations
from .link_cost import LinkCost
from .prefix_index import Index, Run
from .spreading import spread
from .types import Medium

#: Views whose slots are remembered.
MAX_VIEWS = 64
#: Columns of what is coming, if nothing is.
NOBODY: tuple[Ints, F64] = (np.zeros(0, dtype=np.int64), np.zeros(0))


# Not frozen, as little that is made for each request: to build a frozen one takes several times as long.
@dataclass(slots=True, eq=False)
class Overlap:
    """keys: of the blocks that may be reused. Columns in leading blocks of these.

    best: what somebody holds. source: the node that holds most of it, and `source_ssd` so many on its SSD only; "" if
    nobody holds anything. held, ssd: [N] over the view's nodes, any medium, and what of it only the SSD has. device:
    [W] in the worker's own pages. has: [W] there, or at its node. coming, ready: [W] what the worker will have, and at
    which time; no more than it has: none. Both of length 0: nobody will have more.
    """

    keys: bytes
    best: int
    source: str
    source_ssd: int
    held: Ints
    ssd: Ints
    device: Ints
    has: Ints
    coming: Ints
    ready: F64

    @property
    def some_coming(self) -> bool:
        return len(self.coming) > 0


class Overlaps:
    """Reads all indexes for one view at a time."""

    def __init__(self, index: Index, pages: Index, inflight: Expectations) -> None:
        self._index, self._pages, self._inflight = index, pages, inflight
        self._node_slots = _Slots(index)
        self._worker_slots = _Slots(pages)
        self._rows: dict[int, tuple[object, dict[str, int]]] = {}

    def find(self, view: View, keys: bytes, now: float) -> Overlap:
        """keys: of the blocks that may be reused."""
        match = self._index.match(keys)
        slots = self._node_slots.of(view.nodes, lambda: view.nodes)
        held, ssd = match.held[slots], match.ssd[slots]
        source, source_ssd = "", 0
        if match.best:
            # Which node it is does not depend on slots: they tell who came first.
            (most,) = (match.held == match.held[match.held.argmax()]).nonzero()
            if len(most) > 1:
                on_ssd = match.ssd[most]
                most = most[on_ssd == on_ssd[on_ssd.argmin()]]
            source_ssd = int(match.ssd[most[0]])
            source = max([self._index.name(slot) for slot in most.tolist()])
        names = self._worker_slots.of(view.workers, lambda: [info.worker for info in view.workers])
        device = self._pages.match(keys).held[names]
        has = np.maximum(held[view.node], device)
        coming, ready = self._coming(view, keys, has, now)
        return Overlap(keys, match.best, source, source_ssd, held, ssd, device, has, coming, ready)

    def _coming(self, view: View, keys: bytes, has: Ints, now: float) -> tuple[Ints, F64]:
        """[W] each, or of length 0 if nobody will have more than he has."""
        found = self._inflight.find(keys, view.block_tokens, now)
        coming, ready = NOBODY
        if found:
            rows = self._rows_of(view)
            for worker, (blocks, at) in found.items():
                row = rows.get(worker)
                # Of a worker whose daemon is gone, or is another one now, nothing will be cached.
                if row is not None and blocks > has.item(row) and view.takes.item(row):
                    if coming is NOBODY[0]:
                        coming, ready = np.zeros(len(has), dtype=np.int64), np.full(len(has), now)
                    coming[row], ready[row] = blocks, at
        return coming, ready

    def _rows_of(self, view: View) -> dict[str, int]:
        known = self._rows.get(id(view.workers))
        if known is None or known[0] is not view.workers:
            if len(self._rows) >= MAX_VIEWS:
                self._rows.clear()
            known = self._rows[id(view.workers)] = (
                view.workers,
                {info.worker: row for row, info in enumerate(view.workers)},
            )
        return known[1]

    def fetched(self, keys: bytes, first: int, to: str, block_bytes: int, links: LinkCost, now: float) -> list[Run]:
        """Who has what `to` lacks from block `first` on, each for a part; behind them who else has it, should they
        fail.
        """
        runs: list[Run] = []
        others: list[Run] = []
        for run in self._index.runs(keys, first, {to}):

            def seconds(node: str, medium: Medium = run.medium) -> float:
                read = block_bytes / links.rate(node, node) if medium is Medium.SSD else 0.0
                return read + block_bytes / links.rate(node, to)

            shared = self._index.shared(keys, run, {to})
            stripes, stand_ins = spread(run, shared, block_bytes, lambda node: links.queue(node, now), seconds)
            runs += stripes
            others += stand_ins
        if not runs:
            return []
        return [*runs, *others, *self._index.runs(keys, first, {to, *(run.node for run in runs)})]

    def only_on_ssd(self, keys: bytes, node: str) -> list[Run]:
        """Runs of these blocks that the node's SSD has, and its DRAM has not."""
        return self._index.only_on_ssd(keys, node)


class _Slots:
    """The slots of a view's nodes, or workers, in one index: worked out once for each group of them."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._epoch = -1
        self._known: dict[int, tuple[object, Ints]] = {}

    def of(self, holders: object, names: Callable[[], Sequence[str]]) -> Ints:
        # Groups hand out the same tuple until somebody comes or goes.
        if self._epoch != self._index.epoch or len(self._known) >= MAX_VIEWS:
            self._epoch = self._index.epoch
            self._known.clear()
        known = self._known.get(id(holders))
        if known is None or known[0] is not holders:
            known = self._known[id(holders)] = (holders, self._index.slots(names()))
        return known[1]
