"""Cold replicas go: blocks that many nodes hold and nobody has reused for long make room where room is short.

    first hit ──> looked at after COLD_AFTER ──> hit since: later again
                                             ──> cold, held by more than KEEP: forgotten where room is short

A node's own eviction knows its own hits only, and so gives up the only copy of a block as soon as the tenth of another;
this sees all copies.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .cluster import SLOT_STATES, Daemon
from .events import OrderForget
from .prefix_index import Index
from .replication import Replicator

#: Seconds without a hit after which a block is cold: two half-lives of its heat.
COLD_AFTER = 120.0
#: Holders that keep a cold block: one may go at any time.
KEEP = 2
#: A node whose DRAM has less than this share of its slots free is short of room.
SHORT = 0.1
#: Blocks looked at per tick, and those that wait for it.
LOOKS = 256
MAX_WAITING = 65_536


@dataclass(frozen=True, slots=True)
class _Look:
    due: float
    key: bytes


class Dropper:
    """Looks at each key that was ever hit, COLD_AFTER after it was."""

    def __init__(self, index: Index, replicator: Replicator) -> None:
        self._index = index
        self._replicator = replicator
        self._looks: deque[_Look] = deque(maxlen=MAX_WAITING)
        #: Copies of blocks that were ordered to be forgotten.
        self.dropped = 0

    def tick(self, daemons: dict[str, Daemon], now: float) -> list[OrderForget]:
        """What is to be forgotten where."""
        fresh = self._replicator.fresh
        while fresh:
            self._looks.append(_Look(now + COLD_AFTER, fresh.popleft()))
        orders: dict[str, list[bytes]] = {}
        for _ in range(LOOKS):
            if not self._looks or self._looks[0].due > now:
                break
            key = self._looks.popleft().key
            known = self._replicator.remembered(key, now)
            if known is None:
                continue
            _, at, stretch = known
            if now - at >= COLD_AFTER:
                for node in self._spare(key, daemons):
                    orders.setdefault(node, []).append(stretch)
                at = now
            self._looks.append(_Look(at + COLD_AFTER, key))
        self.dropped += sum(len(stretch) // 16 for stretches in orders.values() for stretch in stretches)
        return [OrderForget(node, b"".join(orders[node])) for node in sorted(orders)]

    def _spare(self, key: bytes, daemons: dict[str, Daemon]) -> list[str]:
        """Holders that are short of room and need not keep the block."""
        holders = [node for node in self._index.holders(key) if node in daemons and daemons[node].takes]
        if len(holders) <= KEEP:
            return []
        by_room = sorted((-free_share(daemons[node]), node) for node in holders)
        return [node for share, node in by_room[KEEP:] if -share < SHORT]


def free_share(daemon: Daemon) -> float:
    """Of its DRAM's slots; 1 as long as it has not told."""
    slots = daemon.slots(*SLOT_STATES)
    return daemon.slots("free") / slots if slots else 1.0
