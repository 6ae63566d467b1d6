"""How long it takes to move bytes between nodes: rates measured per pair, and what is on its way already.

A node's link to itself is its SSD. A transfer occupies its sender and its receiver for as long as its bytes need: what
was ordered earlier and is not over yet delays the next. Columns over nodes, so that a thousand cost microseconds.
"""

from __future__ import annotations

import math

import numpy as np

from .cluster import Ints
from .cost import F64

#: Bytes per second and seconds of delay of a link while none was ever measured: 80 Gbit/s, hopefully. Who takes links
#: to be slow uses none, and never learns that they are not; one that is slow is known after its first transfer.
LINK_RATE = 1e10
LINK_DELAY = 1e-3
#: The same of an SSD: about what an NVMe drive gives that serves others too. What it alone has is read in any case.
SSD_RATE = 1e9
#: A transfer this small tells of delays, not of the rate.
TELLING = 1 << 16
#: Weight of the latest measurement of a pair, and of that in what is assumed of pairs never measured.
FRESH = 0.3
FRESH_ASSUMED = 0.05
#: Groups of nodes whose places are remembered.
MAX_GROUPS = 64


class LinkCost:
    """Rates, and who is busy until when. Names of nodes, in groups as views name them."""

    def __init__(self) -> None:
        self._slot: dict[str, int] = {}
        self._free: list[int] = []
        #: By identity of the names: to hash a thousand of them takes longer than all else here.
        self._groups: dict[int, tuple[tuple[str, ...], Ints]] = {}
        #: Rates by sender, columns over receivers; NaN: not measured.
        self._rates: dict[int, F64] = {}
        self._sending: F64 = np.zeros(0)
        self._receiving: F64 = np.zeros(0)
        #: Logarithms of what links and SSDs usually do, once one was measured.
        self._usual: float | None = None
        self._usual_ssd: float | None = None
        #: Bytes per second between a node's DRAM and the pages of its workers; NaN: not measured.
        self._device: F64 = np.zeros(0)
        #: What `rates` says of a sender that was never measured.
        self._flat: tuple[tuple[int, float], F64] = ((0, 0.0), np.zeros(0))
        #: Whether any of these was measured.
        self.copies_measured = False

    def rate(self, source: str, to: str) -> float:
        """Bytes per second."""
        sender, receiver = self._slot.get(source), self._slot.get(to)
        known = self._rates.get(sender) if sender is not None else None
        rate = math.nan if known is None or receiver is None else float(known[receiver])
        return self._assumed(source == to) if math.isnan(rate) else rate

    def rates(self, source: str, to: tuple[str, ...]) -> F64:
        """[N] bytes per second towards each of the nodes."""
        places = self._places(to)
        known = self._rates.get(self._slot.get(source, -1))
        if known is None:
            # Nobody writes to it: one will do until something else is assumed, or another group asks.
            kind = len(to), self._assumed(False)
            if self._flat[0] != kind:
                self._flat = kind, np.full(*kind)
            return self._flat[1]
        rates = known[places]
        rates[np.isnan(rates)] = self._assumed(False)
        return rates

    def ssd_rates(self, nodes: tuple[str, ...]) -> F64:
        """[N] bytes per second that each reads from its own SSD."""
        if self._usual_ssd is None:
            return np.full(len(nodes), SSD_RATE)
        return np.array([self.rate(node, node) for node in nodes])

    def device_seconds(self, nodes: tuple[str, ...]) -> F64:
        """[N] seconds for each byte that is copied from DRAM into pages; 0 where that was never measured."""
        if not self.copies_measured:
            return np.zeros(len(nodes))
        places = self._places(nodes)
        return np.nan_to_num(1.0 / self._device[places])

    def queue(self, source: str, now: float) -> float:
        """Seconds until what was ordered from this sender is sent."""
        slot = self._slot.get(source)
        return 0.0 if slot is None else max(float(self._sending[slot]) - now, 0.0)

    def queues(self, source: str, to: tuple[str, ...], now: float) -> F64:
        """[N] seconds until this sender and each of these receivers have nothing else to do."""
        places = self._places(to)
        return np.maximum(self._receiving[places] - now, self.queue(source, now))

    def seconds(self, source: str, to: str, size: int, now: float) -> float:
        """Until so many bytes more are moved; nothing is from a node to itself."""
        if source == to:
            return 0.0
        receiver = self._slot.get(to)
        busy = 0.0 if receiver is None else float(self._receiving[receiver]) - now
        return max(busy, self.queue(source, now)) + LINK_DELAY + size / self.rate(source, to)

    def order(self, source: str, to: str, size: int, now: float) -> None:
        """`size` bytes will be moved."""
        sender, receiver = self._place(source), self._place(to)
        seconds = LINK_DELAY + size / self.rate(source, to)
        for busy, slot in ((self._sending, sender), (self._receiving, receiver)):
            busy[slot] = max(busy[slot], now) + seconds

    def observe(self, source: str, to: str, size: int, seconds: float) -> None:
        """A transfer of `size` bytes took so long. Tiny ones say nothing about the rate and are ignored."""
        if size < TELLING or not 0 < seconds < math.inf:
            return
        rate = size / max(seconds - LINK_DELAY, LINK_DELAY)
        sender, receiver = self._place(source), self._place(to)
        known = self._rates.setdefault(sender, np.full(len(self._sending), np.nan))
        old = float(known[receiver])
        known[receiver] = rate if math.isnan(old) else (1 - FRESH) * old + FRESH * rate
        if source == to:
            self._usual_ssd = _blend(self._usual_ssd, rate)
        else:
            self._usual = _blend(self._usual, rate)

    def observe_device(self, node: str, size: int, seconds: float) -> None:
        """A copy from the node's DRAM into pages took so long."""
        if size < TELLING or not 0 < seconds < math.inf:
            return
        slot, rate = self._place(node), size / seconds
        self.copies_measured = True
        old = float(self._device[slot])
        self._device[slot] = rate if math.isnan(old) else (1 - FRESH) * old + FRESH * rate

    def forget(self, node: str) -> None:
        """The node is gone, and its queue with it; what was learnt of its links too."""
        slot = self._slot.pop(node, None)
        if slot is None:
            return
        self._free.append(slot)
        self._groups.clear()
        self._rates.pop(slot, None)
        self._sending[slot] = self._receiving[slot] = 0.0
        self._device[slot] = np.nan
        for known in self._rates.values():
            known[slot] = np.nan

    def _assumed(self, ssd: bool) -> float:
        usual, prior = (self._usual_ssd, SSD_RATE) if ssd else (self._usual, LINK_RATE)
        return prior if usual is None else math.exp(usual)

    def _places(self, nodes: tuple[str, ...]) -> Ints:
        known = self._groups.get(id(nodes))
        if known is None or known[0] is not nodes:
            if len(self._groups) >= MAX_GROUPS:
                self._groups.clear()
            places = np.array([self._place(node) for node in nodes], dtype=np.int64)
            known = self._groups[id(nodes)] = (nodes, places)
        return known[1]

    def _place(self, node: str) -> int:
        slot = self._slot.get(node)
        if slot is None:
            slot = self._slot[node] = self._free.pop() if self._free else len(self._slot)
            if slot >= len(self._sending):
                self._grow(max(2 * len(self._sending), 16))
        return slot

    def _grow(self, count: int) -> None:
        more = count - len(self._sending)
        self._sending = np.concatenate((self._sending, np.zeros(more)))
        self._receiving = np.concatenate((self._receiving, np.zeros(more)))
        self._device = np.concatenate((self._device, np.full(more, np.nan)))
        self._rates = {slot: np.concatenate((known, np.full(more, np.nan))) for slot, known in self._rates.items()}


def _blend(usual: float | None, rate: float) -> float:
    """The mean of logarithms: a link of 100 GB/s and one of 1 GB/s have 10 in their middle."""
    return math.log(rate) if usual is None else (1 - FRESH_ASSUMED) * usual + FRESH_ASSUMED * math.log(rate)
