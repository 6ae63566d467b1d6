"""Keeps the index equal to what daemons have published, from their numbered changes.

        hello, gap, drift ──> order a dump ──> parts, cut before change s ──> last part: adopt; expect s + k
                                                └─ k changes after the cut are kept aside and applied to it

Everything a daemon says comes in order on one session, so changes that arrive before the first part are older than the
cut, and are in the dump. Parts are staged as they come, beside what the node is known to hold: a dump of millions of
blocks delays nobody for longer than one part takes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from .changes import CHANGE_BYTES, count
from .events import BlockDump, BlocksChanged, DaemonHeartbeat, DaemonHello
from .prefix_index import Index

logger = logging.getLogger(__name__)

#: A dump of which no next part has come for so long is ordered again (seconds): the daemon is busy, or lost a part.
DUMP_PATIENCE = 10.0
#: Changes kept aside for a dump; with more, another one is ordered, which begins behind them. 40 MB.
MAX_LATER = 1 << 20


@dataclass(slots=True)
class _Dump:
    """A dump under way. later: the changes after its cut, packed; changes: how many."""

    #: When it was ordered, or its latest part came.
    heard: float
    cut: int | None = None
    #: How many have come: the number of the next one. After a gap no other counts.
    parts: int = 0
    changes: int = 0
    later: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Source:
    incarnation: int
    expected: int = 0
    dump: _Dump | None = None


class Feed:
    """Each `on_…` returns True when a dump is to be ordered from the report's node."""

    def __init__(self, index: Index) -> None:
        self.index = index
        #: Dumps ordered, by cause.
        self.dumps = {"hello": 0, "gap": 0, "drift": 0, "late": 0, "malformed": 0}
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
        self.index.forget(node)
        self._sources.pop(node, None)

    def on_changes(self, report: BlocksChanged, now: float) -> bool:
        source = self._source(report)
        if source is None:
            return False
        dump = source.dump
        if dump is not None and dump.cut is None:
            return False
        expected = source.expected if dump is None or dump.cut is None else dump.cut + dump.changes
        if report.sequence > expected:
            return self._order(source, "gap", now)
        # What a batch repeats is known.
        changes = report.changes[(expected - report.sequence) * CHANGE_BYTES :]
        try:
            if dump is None:
                self.index.apply(report.node.node, changes)
                source.expected += len(changes) // CHANGE_BYTES
            else:
                dump.changes += count(changes)
                dump.later.append(changes)
                if dump.changes > MAX_LATER:
                    return self._order(source, "late", now)
        except ValueError as error:
            logger.warning("changes of %s are refused: %s", report.node.node, error)
            return self._order(source, "malformed", now)
        return False

    def on_dump(self, report: BlockDump, now: float) -> None:
        source = self._source(report)
        if source is None or source.dump is None:
            return
        dump, node = source.dump, report.node.node
        if report.part == 0 and dump.cut != report.sequence:
            # The first one, or that of a newer dump than the one begun.
            dump = source.dump = _Dump(now, report.sequence)
            self.index.begin(node)
        if (report.sequence, report.part) != (dump.cut, dump.parts):
            return
        try:
            self.index.stage(node, report.blocks)
        except ValueError as error:
            # As if it had been lost. Not asked for at once: it would come like this again.
            logger.warning("a dump of %s is refused: %s", node, error)
            return
        dump.parts += 1
        dump.heard = now
        if report.last:
            for changes in dump.later:
                self.index.stage(node, changes)
            self.index.adopt(node)
            source.expected = report.sequence + dump.changes
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

    def _source(self, report: BlocksChanged | BlockDump | DaemonHeartbeat) -> _Source | None:
        """None for reports of a life that is over."""
        source = self._sources.get(report.node.node)
        return source if source is not None and source.incarnation == report.node.incarnation else None

    def _order(self, source: _Source, cause: str, now: float) -> bool:
        source.dump = _Dump(now)
        self.dumps[cause] += 1
        return True
