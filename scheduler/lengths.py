"""How long answers will be: learnt from those that ended, and asked anew while an answer grows.

Answers that were cut short (at max_tokens, or because the client left) say only "at least so long". So what is kept is
a life table: of the answers that reached a length, how many ended there (Kaplan and Meier's estimator, with the
actuarial half for those cut in the same bin). Those that are still being written say the same of the length they have:
without them the short ones, which end first, would speak for all when much begins at once. With S(x) the share of
answers longer than x, and m = max_tokens,

    E[min(L, m) | L > g] = g + (S(g) + S(g+1) + ... + S(m-1)) / S(g)

Lengths are binned (a quarter of an octave; ends are taken as even within a bin), so sums are two look-ups in a table.

Tables form three levels: all answers; those of alike prompt length and max_tokens; those of one tenant among these.
Each level counts its own answers, and as many as SHRINK more that are distributed as its parent's: a tenant's first
answers move it little, its hundredth decides. Before anything is known an answer is as long as it may be, up to
PRIOR_TOKENS.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from .cluster import Ints
from .cost import F64

#: Until an answer has ended, one that may be longer is expected to be this long: more than most chats, and below what a
#: client writes that means "no limit".
PRIOR_TOKENS = 1024
#: Answers that the parent's distribution counts for in its child's.
SHRINK = 8.0
#: Each answer lowers the weight of those before it in its table: about 1,000 are remembered.
FORGETTING = 0.999
#: Tables at most; the one unused for longest goes. One is 5 KiB.
MAX_TABLES = 1024
#: A table is made anew when it has learnt this share of new answers, or its parent STALE more.
NEWS = 1 / 32
STALE = 16
#: Values of max_tokens for which a table remembers what it said.
MAX_SAID = 64
#: Bins (EDGES[k], EDGES[k+1]]: single tokens first, then a quarter of an octave, up to beyond any context.
EDGES: Ints = np.unique(np.concatenate([[0], np.round(2.0 ** (np.arange(88) / 4))]).astype(np.int64))
BINS = len(EDGES) - 1


@dataclass(slots=True, eq=False)
class _Table:
    """Answers that ended in each bin, that were cut there, and that are there now [BINS]. row: in the predictor's
    matrices, made of so many own answers and of its parent's. said: lengths that follow, by max_tokens.
    """

    row: int
    parent: _Table | None
    ended: F64 = field(default_factory=lambda: np.zeros(BINS))
    cut: F64 = field(default_factory=lambda: np.zeros(BINS))
    growing: F64 = field(default_factory=lambda: np.zeros(BINS))
    learnt: int = 0
    made_of: tuple[int, int] = (-1, -1)
    said: dict[int, float] = field(default_factory=dict)

    def counts(self) -> tuple[F64, F64]:
        """Own counts with the parent's share."""
        if self.parent is None:
            prior = np.zeros(BINS)
            prior[_bin(PRIOR_TOKENS)] = 1.0
            return self.ended + prior, self.cut + self.growing
        ended, cut = self.parent.counts()
        share = SHRINK / (ended.sum() + cut.sum())
        return self.ended + share * ended, self.cut + self.growing + share * cut


class LengthPredictor:
    """See the module. Predictions are never above max_tokens, and above what has been generated while more may come."""

    def __init__(self) -> None:
        self._all = _Table(0, None)
        self._tables: OrderedDict[tuple[str, int, int], _Table] = OrderedDict()
        self._free = list(range(MAX_TABLES, 0, -1))
        #: By row: S at EDGES, its fall per token within each bin, and the sum of S over all lengths below EDGES.
        self._above: F64 = np.ones((MAX_TABLES + 1, BINS + 1))
        self._fall: F64 = np.zeros((MAX_TABLES + 1, BINS + 1))
        self._area: F64 = np.zeros((MAX_TABLES + 1, BINS + 1))
        self._off = self._signed = self._total = 0.0
        self._refresh(self._all)

    def first(self, tenant: str, prompt_tokens: int, max_tokens: int) -> tuple[int, float]:
        """The table for such a request, as a number for `expected`, and the length of its answer as predicted at first.

        Others may take the number over when the table is long unused.
        """
        table = self._table(tenant, prompt_tokens, max_tokens)
        self._refresh(table)
        length = table.said.get(max_tokens)
        if length is None:
            if len(table.said) >= MAX_SAID:
                table.said.clear()
            length = table.said[max_tokens] = self.expected_one(table.row, max_tokens)
        return table.row, length

    def expected(self, rows: Ints, generated: F64, max_tokens: Ints) -> F64:
        """[N] whole lengths of answers of which so many tokens are there."""
        begun = np.minimum(np.floor(generated).astype(np.int64), max_tokens)
        share, before = self._at(rows, begun)
        _, until = self._at(rows, max_tokens)
        # Longer than all before it: it may well be as long again.
        unknown = share <= 1e-9
        more = np.where(unknown, begun, (until - before) / np.where(unknown, 1.0, share))
        length: F64 = np.clip(np.maximum(begun + more, generated + 1.0), 0.0, max_tokens.astype(float))
        return length

    def expected_one(self, row: int, max_tokens: int, generated: float = 0.0) -> float:
        """The same for one."""
        one = self.expected(np.array([row]), np.array([generated]), np.array([max_tokens]))
        return float(one[0])

    def learn(self, tenant: str, prompt_tokens: int, max_tokens: int, length: int, whole: bool, said: float) -> None:
        """An answer ended with `length` tokens, by itself (`whole`) or cut short. said: what was predicted at first."""
        if length < 1:
            return
        if whole:
            for name, value in (("_off", abs(said - length)), ("_signed", said - length), ("_total", length)):
                setattr(self, name, FORGETTING * getattr(self, name) + value)
        at = _bin(length)
        table: _Table | None = self._table(tenant, prompt_tokens, max_tokens)
        while table is not None:
            table.ended *= FORGETTING
            table.cut *= FORGETTING
            (table.ended if whole else table.cut)[at] += 1.0
            table.learnt += 1
            table = table.parent

    def under_way(self, rows: Ints, generated: F64) -> None:
        """All answers that are being written: table, and tokens so far. What was told before is void."""
        begun = generated >= 1.0
        at = np.minimum(np.searchsorted(EDGES, np.floor(generated[begun]), side="left") - 1, BINS - 1)
        counts = np.bincount(rows[begun] * BINS + at, minlength=(MAX_TABLES + 1) * BINS).reshape(-1, BINS)
        tables = [self._all, *self._tables.values()]
        for table in tables:
            table.growing = np.zeros(BINS)
        for table in tables:
            # Rows of tables that have gone are nobody's, or another's: a few answers in the wrong place.
            if counts[table.row].any():
                above: _Table | None = table
                while above is not None:
                    above.growing = above.growing + counts[table.row]
                    above = above.parent

    @property
    def error(self) -> float:
        """Sum of what first predictions were off by, over the sum of the lengths of whole answers; recent ones."""
        return self._off / self._total if self._total else 0.0

    @property
    def bias(self) -> float:
        """The same with signs: positive if answers are shorter than predicted."""
        return self._signed / self._total if self._total else 0.0

    # -- tables ----------------------------------------------------------------------------------------------------

    def _table(self, tenant: str, prompt_tokens: int, max_tokens: int) -> _Table:
        # Four times as long a prompt, or four times as much leave, is another kind of request.
        kind = (prompt_tokens.bit_length() // 2, max_tokens.bit_length() // 2)
        parent = self._known(("", *kind), self._all)
        return self._known((tenant, *kind), parent) if tenant else parent

    def _known(self, key: tuple[str, int, int], parent: _Table) -> _Table:
        table = self._tables.get(key)
        if table is None:
            if not self._free:
                self._free.append(self._tables.popitem(last=False)[1].row)
            table = self._tables[key] = _Table(self._free.pop(), parent)
        self._tables.move_to_end(key)
        return table

    def _refresh(self, table: _Table) -> None:
        """Makes the table's rows of its counts, if these have changed enough."""
        above = table.parent.learnt if table.parent is not None else 0
        own, theirs = table.made_of
        if table.learnt - own <= own * NEWS and above - theirs < STALE and own >= 0:
            return
        table.made_of = (table.learnt, above)
        table.said.clear()
        ended, cut = table.counts()
        at_risk = np.cumsum((ended + cut)[::-1])[::-1] - cut / 2
        hazard = np.divide(ended, at_risk, out=np.zeros(BINS), where=at_risk > 0)
        left = np.concatenate([[1.0], np.cumprod(1.0 - np.minimum(hazard, 1.0))])
        width = np.diff(EDGES).astype(float)
        fall = (left[:-1] - left[1:]) / width
        self._above[table.row] = left
        self._fall[table.row, :-1] = fall
        self._area[table.row] = np.concatenate([[0.0], np.cumsum(width * left[:-1] - fall * width * (width - 1) / 2)])

    def _at(self, rows: Ints, lengths: Ints) -> tuple[F64, F64]:
        """[N] S(length), and the sum of S over all shorter lengths."""
        at = np.searchsorted(EDGES, lengths, side="right") - 1
        into = lengths - EDGES[at]
        above, fall = self._above[rows, at], self._fall[rows, at]
        return above - fall * into, self._area[rows, at] + into * above - fall * into * (into - 1) / 2

    def check(self) -> None:
        """Raises AssertionError if tables contradict themselves."""
        rows = [table.row for table in self._tables.values()]
        assert sorted(rows + self._free) == list(range(1, MAX_TABLES + 1)), "a row belongs to two tables or none"
        assert (np.diff(self._above, axis=1) <= 1e-12).all(), "more answers are longer than a longer length"
        assert (self._above >= 0.0).all(), "a negative share of answers"


def _bin(length: int) -> int:
    return min(int(np.searchsorted(EDGES, length, side="left")) - 1, BINS - 1)
