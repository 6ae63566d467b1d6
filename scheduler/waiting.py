"""The WAITING sequences of a worker: in line, or parked until another one has computed the blocks that both want."""

from __future__ import annotations

from collections.abc import Iterable

from .blocks import BlockPool
from .order import Line
from .sequence import Sequence
from .types import cacheable_blocks
from .underway import Underway
from .urgency import Urgency


class Waiting:
    """short: pages are short for the head of the line. Until somebody comes or goes (`again`), to look again would
    change nothing, and nobody overtakes it.
    """

    def __init__(self, pool: BlockPool, urgency: Urgency) -> None:
        self.short = False
        self._pool = pool
        self._urgency = urgency
        self._line = Line()
        self._standing: dict[int, Sequence] = {}
        self._underway = Underway(pool.block_tokens)

    @property
    def looks(self) -> bool:
        """Whether somebody stands in line who may be admitted for all that is known."""
        return bool(self._standing) and not self.short

    @property
    def first(self) -> Sequence:
        """Who came first of those that stand in line; there is somebody."""
        return self._standing[min(self._standing)]

    def join(self, sequence: Sequence) -> None:
        """It is WAITING now."""
        self._standing[sequence.arrival] = sequence
        self._line.push(self._urgency.place(sequence))
        self.short = False

    def leave(self, sequence: Sequence) -> None:
        """It waits no more."""
        if not self._underway.leave(sequence):
            self._leave_line(sequence)

    def head(self, now: float) -> Sequence | None:
        """Who is to be admitted next. Those whose next block is underway at another one are parked instead."""
        if self.short:
            return None
        while (place := self._line.head(now)) is not None:
            sequence = self._standing[place.number]
            if not self._underway or (owner := self._park(sequence)) is None:
                return sequence
            owner.lent_latest = min(owner.lent_latest, place.latest)
            owner.lent_seconds = min(owner.lent_seconds, place.seconds)
            if owner.lent_priority is None or owner.lent_priority < place.priority:
                owner.lent_priority = place.priority
            self._leave_line(sequence)
        return None

    def before(self, one: Sequence, other: Sequence, now: float) -> bool:
        """Whether the first is more urgent, tenants apart."""
        return self._rank(one, now) < self._rank(other, now)

    def by_urgency(self, sequences: list[Sequence], now: float) -> list[Sequence]:
        return sorted(sequences, key=lambda sequence: self._rank(sequence, now))

    def _rank(self, sequence: Sequence, now: float) -> tuple[float, ...]:
        return self._line.rank(self._urgency.place(sequence), now)

    def admitted(self, sequence: Sequence, have: int) -> None:
        """The head leaves, with KV of its first `have` tokens at hand: the rest of its prompt is underway."""
        self._line.served(self._urgency.place(sequence), len(sequence.tokens) - have)
        self._leave_line(sequence)
        self._underway.begin(sequence, have // self._pool.block_tokens)

    def computed(self, sequence: Sequence, tokens: int, now: float) -> None:
        """A step computes so many tokens of its prompt."""
        self._line.computed(self._urgency.place(sequence), tokens, now)

    def filled(self, sequence: Sequence, key: bytes) -> None:
        """A running sequence has filled this block: it can be reused."""
        self.short = False
        if self._underway:
            self._rejoin(self._underway.done(sequence, key))

    def released(self, sequence: Sequence) -> None:
        """A sequence lets go of its pages: what it has not computed nobody computes any more."""
        self.short = False
        self._rejoin(self._underway.end(sequence))

    def _park(self, sequence: Sequence) -> Sequence | None:
        block_tokens = self._pool.block_tokens
        most = min(cacheable_blocks(len(sequence.tokens), block_tokens), len(sequence.keys))
        found = self._pool.count(sequence.keys[:most])
        return self._underway.park(sequence, max(found, sequence.available // block_tokens), most)

    def _rejoin(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self.join(sequence)

    def _leave_line(self, sequence: Sequence) -> None:
        self._line.remove(sequence.arrival)
        del self._standing[sequence.arrival]
        self.short = False

    def check(self, waiting: list[Sequence], computing: list[Sequence]) -> None:
        """Raises AssertionError if it holds others than those that wait."""
        self._line.check()
        assert all(number in self._line for number in self._standing), "somebody stands in no line"
        assert len(self._standing) == len(self._line) == len(waiting) - self._underway.parked
        assert {s.arrival for s in self._standing.values()} <= {s.arrival for s in waiting}
        self._underway.check(computing, waiting)
