"""Who decodes where, and until when: the load of each worker at any time to come, as far as plans tell.

    plan ---predicted end of prefill---> joins the batch ---a token per gap, up to its predicted length---> leaves
         `joins`                                          `done` of `length`

Nobody tells the conductor of single tokens, and of requests only when they end. Between, heartbeats correct: if fewer
sequences run than should, those that were to join last are late (but who was once counted runs); if more, the next ones
were early. An answer that goes on beyond its predicted length gets a new one, of those that long (`lengths.py`).

Columns over requests, kept dense (who ends is replaced by the last), so a question is a few passes over arrays. A
worker's requests are brought up to date when somebody asks about that worker: one heartbeat costs a few additions, and
a question costs no more for the workers that it is not about.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .cluster import Ints
from .cost import F64
from .lengths import LengthPredictor
from .messages import HEARTBEAT_EVERY

Key = tuple[str, int]

#: Requests at most, as the conductor has routes; beyond, newcomers are not foreseen, and counted.
MAX_ENTRIES = 100_000
#: Rows that columns begin with; they double.
FIRST_ROWS = 256
#: Gap between tokens (seconds) of a worker that nobody has told anything of.
UNKNOWN_GAP = 0.05

#: Columns, in the order in which `add` writes them.
_FLOATS = ("joins", "done", "length", "leaves", "tbt", "prefill_seconds")
_INTS = ("prefill", "decode", "prompt", "most", "table", "priority", "tenant", "seen")


@dataclass(slots=True)
class Entry:
    """One planned request. joins: when its prefill should end. most: max_tokens. table, length: of its answer. tbt:
    promised gap, infinite if none. prefill_seconds: predicted to compute its prompt.
    """

    prefill: str
    decode: str
    joins: float
    prompt: int
    most: int
    table: int
    length: float
    tbt: float
    prefill_seconds: float
    priority: int = 0
    tenant: str = ""


@dataclass(slots=True)
class Batch:
    """What a worker decodes at one time: sequences, tokens of their context, the strictest gap promised to any."""

    sequences: int
    context: float
    tbt: float


@dataclass(slots=True)
class Course:
    """The same at several times [T]."""

    sequences: Ints
    context: F64
    tbt: F64


@dataclass(slots=True, eq=False)
class _Heard:
    """The latest heartbeat that is not worked in yet. tokens: that each sequence got from when the worker's requests
    were up to date until it came.
    """

    at: float
    running: int
    gap: float
    tokens: float


class Forecast:
    """See the module. Times are the conductor's."""

    def __init__(self, lengths: LengthPredictor) -> None:
        self._lengths = lengths
        self._row: dict[Key, int] = {}
        self._keys: list[Key] = []
        #: [column, row] each, and their columns by name.
        self._floats: F64 = np.zeros((len(_FLOATS), FIRST_ROWS))
        self._ints: Ints = np.zeros((len(_INTS), FIRST_ROWS), dtype=np.int64)
        self._columns = self._named()
        self._workers = _Names()
        self._tenants = _Names()
        # By number of the worker: its gap, who runs there without a plan, and up to when its requests are counted.
        self._gap: F64 = np.full(FIRST_ROWS, UNKNOWN_GAP)
        self._strangers: Ints = np.zeros(FIRST_ROWS, dtype=np.int64)
        self._settled: F64 = np.zeros(FIRST_ROWS)
        self._gaps: dict[str, float] = {}
        self._heard: dict[int, _Heard] = {}
        #: Rows by decode worker, as long as nobody comes or goes.
        self._rows: dict[int, Ints] = {}
        self.unforeseen = 0

    def aside(self, lengths: LengthPredictor) -> Forecast:
        """Another that foresees the same: to be asked, and not to be told of anybody. Who is in it is not copied."""
        other = copy.copy(self)
        other._lengths = lengths
        other._columns = {name: column.copy() for name, column in self._columns.items()}
        other._gap, other._strangers, other._settled = self._gap.copy(), self._strangers.copy(), self._settled.copy()
        other._heard, other._rows = self._heard.copy(), self._rows.copy()
        return other

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: Key, entry: Entry, now: float) -> None:
        """A request was planned; one of the same key is replaced."""
        self.end(key)
        if len(self._keys) >= MAX_ENTRIES:
            self.unforeseen += 1
            return
        row = len(self._keys)
        if row == len(self._columns["joins"]):
            self._floats = np.concatenate([self._floats, np.zeros_like(self._floats)], axis=1)
            self._ints = np.concatenate([self._ints, np.zeros_like(self._ints)], axis=1)
            self._columns = self._named()
        self._keys.append(key)
        self._row[key] = row
        self._rows.clear()
        decode = self._number(entry.decode, now)
        joins = max(entry.joins, now)
        # Cell by cell, in the order of their names: numpy takes longer to make a row of a tuple.
        floats, ints = self._floats, self._ints
        floats[0, row] = joins
        floats[1, row] = 0.0
        floats[2, row] = entry.length
        floats[3, row] = joins + entry.length * self._gap.item(decode)
        floats[4, row] = entry.tbt
        floats[5, row] = entry.prefill_seconds
        ints[0, row] = self._number(entry.prefill, now)
        ints[1, row] = decode
        ints[2, row] = entry.prompt
        ints[3, row] = entry.most
        ints[4, row] = entry.table
        ints[5, row] = entry.priority
        ints[6, row] = self._tenants.number(entry.tenant)
        ints[7, row] = 0

    def end(self, key: Key) -> None:
        """The request is over, or was never known."""
        row = self._row.pop(key, None)
        if row is None:
            return
        self._rows.clear()
        for names, column in ((self._workers, "prefill"), (self._workers, "decode"), (self._tenants, "tenant")):
            number = int(self._columns[column][row])
            if names.drop(number) and names is self._workers:
                self._heard.pop(number, None)
        last = self._keys.pop()
        if last != key:
            self._keys[row] = last
            self._row[last] = row
            for table in (self._floats, self._ints):
                table[:, row] = table[:, len(self._keys)]

    def heartbeat(self, worker: str, running: int, gap: float, now: float) -> None:
        """The worker runs so many sequences, and should give each a token per `gap` seconds."""
        gap = self._gaps[worker] = gap if gap > 0.0 else UNKNOWN_GAP
        number = self._workers.known(worker)
        if number:
            before = self._heard.get(number)
            if before is None:
                tokens = (now - float(self._settled[number])) / float(self._gap[number])
            else:
                tokens = before.tokens + (now - before.at) / before.gap
            self._heard[number] = _Heard(now, running, gap, tokens)

    def lost(self, worker: str) -> None:
        """It is gone; its requests end when their gateways have noticed."""
        self._heard.pop(self._workers.known(worker), None)
        self._gaps.pop(worker, None)

    def batch(self, worker: str, at: float, now: float, above: int | None = None) -> Batch:
        """What this worker should decode at the time `at`. above: of those that join later only of this priority or a
        higher one.
        """
        course = self.course(worker, np.array([at]), now, above)
        return Batch(int(course.sequences[0]), float(course.context[0]), float(course.tbt[0]))

    def course(self, worker: str, at: F64, now: float, above: int | None = None) -> Course:
        """The same at each of these times [T], which are not before `now`."""
        number, rows = self._settle(worker, now)
        strangers = int(self._strangers[number]) if number else 0
        joins, gap = self._of("joins")[rows], self._gap[number]
        there = (joins <= at[:, None]) & (self._of("leaves")[rows] > at[:, None])
        if above is not None:
            there &= (joins <= now) | (self._of("priority")[rows] >= above)
        # Tokens of a sequence at time t: those it has, and one per gap since it joined, or since they were counted.
        have = self._of("prompt")[rows] + self._of("done")[rows]
        more = (at[:, None] - np.maximum(joins, self._settled[number])) / gap
        context = np.where(there, have + more, 0.0).sum(axis=1)
        mine = there.sum(axis=1)
        # A sequence nobody planned here is as long as the others of its worker.
        return Course(
            mine + strangers,
            context * (1.0 + strangers / np.maximum(mine, 1)),
            np.where(there, self._of("tbt")[rows], np.inf).min(axis=1, initial=np.inf),
        )

    def lasting(self, at: float, seconds: float | None, now: float) -> tuple[int, float]:
        """Sequences and tokens of context of all workers at the time `at`, if every decode lasted `seconds`; None: as
        long as all together do on average.
        """
        self._settle_all(now)
        joins = self._of("joins")
        if not len(joins):
            return 0, 0.0
        if seconds is None:
            seconds = float((self._of("length") * self._gap[self._of("decode")]).mean())
        rows = np.flatnonzero((joins <= at) & (joins > at - seconds))
        return len(rows), float(self._context(rows, at).sum())

    def joins(self, worker: str, after: float, before: float, now: float) -> F64:
        """[N] when others should join this worker's batch between two times; ascending."""
        _, rows = self._settle(worker, now)
        joins = self._of("joins")[rows]
        return np.sort(joins[(joins > after) & (joins < before)])

    def leaves(self, worker: str, at: float, now: float) -> tuple[F64, F64]:
        """[N] when those that this worker decodes at the time `at` should leave, ascending, and their contexts then."""
        _, rows = self._settle(worker, now)
        rows = rows[(self._of("joins")[rows] <= at) & (self._of("leaves")[rows] > at)]
        rows = rows[np.argsort(self._of("leaves")[rows], kind="stable")]
        return self._of("leaves")[rows], self._context(rows, at)

    def under_way(self, now: float) -> tuple[Ints, F64]:
        """[N] of those that should decode now: table of the answer, and tokens it should have."""
        self._settle_all(now)
        rows = np.flatnonzero(self._of("joins") <= now)
        return self._of("table")[rows].astype(np.int64), self._of("done")[rows]

    def pending(self, worker: str, now: float) -> tuple[F64, Ints, list[str]]:
        """[N] of the prompts this worker has still to compute: seconds, priorities, tenants. As far as was known when
        anybody last asked about the workers that will decode them.
        """
        rows = np.flatnonzero((self._of("prefill") == self._workers.known(worker)) & (self._of("joins") > now))
        tenants = [self._tenants.name(number) for number in self._of("tenant")[rows].tolist()]
        return self._of("prefill_seconds")[rows], self._of("priority")[rows], tenants

    # -- time ------------------------------------------------------------------------------------------------------

    def _settle(self, worker: str, now: float) -> tuple[int, Ints]:
        """The worker's number, and the rows of what it decodes, brought up to `now`."""
        number = self._workers.known(worker)
        rows = self._rows.get(number)
        if rows is None:
            rows = self._rows[number] = np.flatnonzero(self._of("decode") == number)
        if number and (number in self._heard or now > self._settled[number]):
            self._bring(number, rows, now)
        return number, rows

    def _settle_all(self, now: float) -> None:
        for number in list(self._heard):
            self._settle(self._workers.name(number), now)
        settled = self._settled[self._of("decode")]
        rows = np.flatnonzero(now > settled)
        if len(rows):
            gap = self._gap[self._of("decode")[rows]]
            self._of("done")[rows] += np.maximum(now - np.maximum(self._of("joins")[rows], settled[rows]), 0.0) / gap
            self._settled[:] = np.maximum(self._settled, now)
            self._relength(rows, now)

    def _bring(self, number: int, rows: Ints, now: float) -> None:
        """Brings a worker's rows up to `now`: tokens since, what a heartbeat has said, lengths that were exceeded."""
        heard = self._heard.pop(number, None)
        if heard is not None:
            since = float(self._settled[number])
            if heard.at > since:
                self._advance(rows, since, heard.at, heard.tokens / (heard.at - since))
            self._gap[number] = heard.gap
            self._reconcile(number, rows, heard)
            self._settled[number] = max(since, heard.at)
        since = float(self._settled[number])
        if now > since:
            self._advance(rows, since, now, 1.0 / float(self._gap[number]))
            self._settled[number] = now
        self._relength(rows, now)

    def _advance(self, rows: Ints, since: float, now: float, rate: float) -> None:
        """Whoever has joined gets `rate` tokens a second."""
        self._of("done")[rows] += np.maximum(now - np.maximum(self._of("joins")[rows], since), 0.0) * rate

    def _reconcile(self, number: int, rows: Ints, heard: _Heard) -> None:
        running = heard.running
        self._strangers[number] = max(running - len(rows), 0)
        joins, seen = self._of("joins"), self._of("seen")
        there = int(np.count_nonzero(joins[rows] <= heard.at))
        if running == there and seen[rows].sum() == there:
            return  # as foreseen, and nobody is new
        # Who was among those that ran before is first, then who should have joined first.
        rows = rows[np.lexsort((joins[rows], 1 - seen[rows]))]
        late = rows[running:there]
        late = late[seen[late] == 0]
        joins[late] = heard.at + HEARTBEAT_EVERY
        self._of("done")[late] = 0.0
        joins[rows[there:running]] = heard.at
        seen[rows[:running]] = 1

    def _relength(self, rows: Ints, now: float) -> None:
        """These rows are up to date: new lengths for whoever is beyond its own, and when each should leave."""
        columns, gap = self._columns, self._gap[self._columns["decode"][rows]]
        done, length = columns["done"][rows], columns["length"][rows]
        over = np.flatnonzero(done + 1.0 > length)
        if len(over):
            at = rows[over]
            most = columns["most"][at]
            done[over] = columns["done"][at] = np.minimum(done[over], most)
            length[over] = columns["length"][at] = self._lengths.expected(columns["table"][at], done[over], most)
        begun = np.maximum(columns["joins"][rows], now)
        columns["leaves"][rows] = begun + np.maximum(length - done, 0.0) * gap

    def _context(self, rows: Ints, at: float) -> F64:
        """[N] tokens of context of these entries at the time `at`, which is not before they have joined."""
        decode = self._of("decode")[rows]
        since = np.maximum(self._of("joins")[rows], self._settled[decode])
        more = np.maximum(at - since, 0.0) / self._gap[decode]
        context: F64 = self._of("prompt")[rows] + self._of("done")[rows] + more
        return context

    # -- columns ---------------------------------------------------------------------------------------------------

    def _named(self) -> dict[str, npt.NDArray[Any]]:
        return dict(zip((*_FLOATS, *_INTS), (*self._floats, *self._ints), strict=True))

    def _of(self, name: str) -> npt.NDArray[Any]:
        return self._columns[name][: len(self._keys)]

    def _number(self, worker: str, now: float) -> int:
        new = not self._workers.known(worker)
        number = self._workers.number(worker)
        if number >= len(self._gap):
            self._gap = np.concatenate([self._gap, np.full(len(self._gap), UNKNOWN_GAP)])
            self._strangers = np.concatenate([self._strangers, np.zeros_like(self._strangers)])
            self._settled = np.concatenate([self._settled, np.zeros_like(self._settled)])
        if new:
            self._gap[number] = self._gaps.get(worker, UNKNOWN_GAP)
            self._strangers[number] = 0
            self._settled[number] = now
        return number

    def check(self) -> None:
        """Raises AssertionError if columns and names contradict each other."""
        assert self._row == {key: row for row, key in enumerate(self._keys)}, "a request is not where it should be"
        uses = np.bincount(np.concatenate([self._of("prefill"), self._of("decode")]).astype(np.int64), minlength=1)
        self._workers.check(uses)
        self._tenants.check(np.bincount(self._of("tenant").astype(np.int64), minlength=1))
        assert (self._of("length") <= self._of("most") + 1e-9).all(), "an answer is longer than it may be"
        assert (self._of("leaves") >= self._of("joins")).all(), "a sequence leaves before it has joined"
        assert all(self._workers.name(number) in self._gaps for number in self._heard), "a heartbeat of nobody is kept"


class _Names:
    """Small numbers from 1 for names in use; a number is used again when all uses of its name have been dropped."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = [""]
        self._uses: list[int] = [0]
        self._free: list[int] = []

    def number(self, name: str) -> int:
        """Its number, used once more."""
        number = self._numbers.get(name)
        if number is None:
            if not self._free:
                self._free.append(len(self._names))
                self._names.append("")
                self._uses.append(0)
            number = self._numbers[name] = self._free.pop()
            self._names[number] = name
        self._uses[number] += 1
        return number

    def known(self, name: str) -> int:
        """Its number, or 0."""
        return self._numbers.get(name, 0)

    def name(self, number: int) -> str:
        return self._names[number]

    def drop(self, number: int) -> bool:
        """One use less; True: it was the last."""
        self._uses[number] -= 1
        if self._uses[number]:
            return False
        del self._numbers[self._names[number]]
        self._free.append(number)
        return True

    def check(self, uses: Ints) -> None:
        for number, count in enumerate(self._uses):
            assert count == (uses[number] if number < len(uses) else 0), "a name is used more or less than counted"
        assert sorted([*self._numbers.values(), *self._free]) == list(range(1, len(self._names)))
