"""Keeps the PrefixIndex equal to what daemons have published, from their numbered events.

        hello, gap, drift ──> order a dump ──> parts, cut before event s ──> last part: replace; expect s + k
                                                └─ k events after the cut are kept aside and applied to it

Everything a daemon says comes in order on one session, so events that arrive before the first part are older than the
cut, and are in the dump.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .events import BlockDump, BlockRemoved, BlockStored, DaemonHeartbeat, DaemonHello
from .prefix_index import PrefixIndex
from .types import Medium

#: A dump of which no next part has come for so long is ordered again (seconds): the daemon is busy, or lost a part.
DUMP_PATIENCE = 10.0


@dataclass(slots=True)
class _Dump:
    """A dump under way. stored: its blocks so far, and those of later events; removed: by later events."""

    #: When it was ordered, or its latest part came.
    heard: float
    cut: int | None = None
    #: How many have come: the number of the next one. After a gap no other counts.
    parts: int = 0
    events: int = 0
    stored: dict[tuple[bytes, Medium], tuple[bytes, int]] = field(default_factory=dict)
    removed: set[tuple[bytes, Medium]] = field(default_factory=set)


@dataclass(slots=True)
class _Source:
    incarnation: int
    expected: int = 0
    dump: _Dump | None = None


class Feed:
    """Each `on_…` returns True when a dump is to be ordered from the report's node."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        #: Dumps ordered, by cause.
        self.dumps = {"hello": 0, "gap": 0, "drift": 0, "late": 0}
        self._sources: dict[str, _Source] = {}

    def on_hello(self, report: DaemonHello, now: float) -> bool:
        """A new session: what was known of the node's earlier life is dropped."""
        node = report.node.node
        known = self._sources.get(node)
        if known is None or known.incarnation != report.node.incarnation:
            self.index.clear(node)
            known = self._sources[node] = _Source(report.node.incarnation)
        # A dump under way on the old session will not come.
        known.dump = None
        return known.expected != report.next_sequence and self._order(known, "hello", now)

    def synced(self, node: str) -> bool:
        """All that the node holds is known, but for what is on its way."""
        source = self._sources.get(node)
        return source is not None and source.dump is None

    def on_gone(self, node: str) -> None:
        """Nothing can be fetched from there; if it comes back, it is asked for a dump."""
        self.index.clear(node)
        self._sources.pop(node, None)

    def on_event(self, report: BlockStored | BlockRemoved, now: float) -> bool:
        source = self._source(report)
        if source is None:
            return False
        dump = source.dump
        if dump is None:
            if report.sequence < source.expected:
                return False
            if report.sequence > source.expected:
                return self._order(source, "gap", now)
            source.expected += 1
            if isinstance(report, BlockStored):
                self.index.add(report.node.node, report.key, report.parent, report.position, report.medium)
            else:
                self.index.remove(report.node.node, report.key, report.medium)
        elif dump.cut is not None:
            if report.sequence != dump.cut + dump.events:
                return self._order(source, "gap", now)
            dump.events += 1
            block = (report.key, report.medium)
            if isinstance(report, BlockStored):
                dump.stored[block] = (report.parent, report.position)
                dump.removed.discard(block)
            else:
                dump.stored.pop(block, None)
                dump.removed.add(block)
        return False

    def on_dump(self, report: BlockDump, now: float) -> None:
        source = self._source(report)
        if source is None or source.dump is None:
            return
        dump = source.dump
        if report.part == 0 and dump.cut != report.sequence:
            # The first one, or that of a newer dump than the one begun.
            dump = source.dump = _Dump(now, report.sequence)
        if (report.sequence, report.part) != (dump.cut, dump.parts):
            return
        dump.parts += 1
        dump.heard = now
        for key, parent, position, medium in report.blocks:
            if (key, medium) not in dump.removed:
                dump.stored.setdefault((key, medium), (parent, position))
        if report.last:
            self.index.replace(
                report.node.node, ((key, *where, medium) for (key, medium), where in dump.stored.items())
            )
            source.expected = report.sequence + dump.events
            source.dump = None

    def on_heartbeat(self, report: DaemonHeartbeat, now: float) -> bool:
        source = self._source(report)
        if source is None:
            return False
        if source.dump is not None:
            return now - source.dump.heard > DUMP_PATIENCE and self._order(source, "late", now)
        if report.next_sequence != source.expected:
            return self._order(source, "gap", now)
        node = report.node.node
        drifted = (report.count, report.xor) != (self.index.count(node), self.index.digest(node))
        return drifted and self._order(source, "drift", now)

    def _source(self, report: BlockStored | BlockRemoved | BlockDump | DaemonHeartbeat) -> _Source | None:
        """None for reports of a life that is over."""
        source = self._sources.get(report.node.node)
        return source if source is not None and source.incarnation == report.node.incarnation else None

    def _order(self, source: _Source, cause: str, now: float) -> bool:
        source.dump = _Dump(now)
        self.dumps[cause] += 1
        return True
