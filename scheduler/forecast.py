"""Who decodes where, and until when: the load of each worker at any time to come, as far as plans tell.

    plan ---predicted end of prefill---> joins the batch ---a token per gap, up to its predicted length---> leaves
         `joins`                                          `done` of `length`

Nobody tells the conductor of single tokens, and of requests only when they end. Between, heartbeats correct: if fewer
sequences run than should, those that were to join last are late (but who was once counted runs); if more, the next ones
were early. An answer that goes
on beyond its predicted length gets a new one, of those that long (`lengths.py`).

Columns over requests, kept dense (who ends is replaced by the last), so a question is a few passes over arrays.
"""

from __future__ import annotations

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

_FLOATS = ("joins", "done", "length", "leaves", "tbt", "prefill_seconds")
_INTS = ("prefill", "decode", "prompt", "most", "table", "priority", "tenant", "seen")


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Batch:
    """What a worker decodes at one time: sequences, tokens of their context, the strictest gap promised to any."""

    sequences: int
    context: float
    tbt: float


class Forecast:
    """See the module. Times are the conductor's."""

    def __init__(self, lengths: LengthPredictor) -> None:
        self._lengths = lengths
        self._row: dict[Key, int] = {}
        self._keys: list[Key] = []
        self._columns: dict[str, npt.NDArray[Any]] = {
            **{name: np.zeros(FIRST_ROWS) for name in _FLOATS},
            **{name: np.zeros(FIRST_ROWS, dtype=np.int64) for name in _INTS},
        }
        self._workers = _Names()
        self._tenants = _Names()
        self._gap: F64 = np.full(FIRST_ROWS, UNKNOWN_GAP)
        self._strangers: Ints = np.zeros(FIRST_ROWS, dtype=np.int64)
        self._gaps: dict[str, float] = {}
        self._heard: dict[str, int] = {}
        self._settled = float("-inf")
        self.unforeseen = 0

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
            self._columns = {name: np.concatenate([c, np.zeros_like(c)]) for name, c in self._columns.items()}
        self._keys.append(key)
        self._row[key] = row
        decode = self._number(entry.decode)
        values: dict[str, float] = {
            "prefill": self._number(entry.prefill),
            "decode": decode,
            "joins": max(entry.joins, now),
            "prompt": entry.prompt,
            "most": entry.most,
            "table": entry.table,
            "tbt": entry.tbt,
            "prefill_seconds": entry.prefill_seconds,
            "priority": entry.priority,
            "tenant": self._tenants.number(entry.tenant),
            "done": 0.0,
            "seen": 0,
            "length": entry.length,
            "leaves": max(entry.joins, now) + entry.length * float(self._gap[decode]),
        }
        for name, value in values.items():
            self._columns[name][row] = value

    def end(self, key: Key) -> None:
        """The request is over, or was never known."""
        row = self._row.pop(key, None)
        if row is None:
            return
        for names, column in ((self._workers, "prefill"), (self._workers, "decode"), (self._tenants, "tenant")):
            names.drop(int(self._columns[column][row]))
        last = self._keys.pop()
        if last != key:
            self._keys[row] = last
            self._row[last] = row
            for values in self._columns.values():
                values[row] = values[len(self._keys)]

    def heartbeat(self, worker: str, running: int, gap: float) -> None:
        """The worker runs so many sequences, and should give each a token per `gap` seconds."""
        self._gaps[worker] = gap if gap > 0.0 else UNKNOWN_GAP
        if self._workers.known(worker):
            self._heard[worker] = running

    def lost(self, worker: str) -> None:
        """It is gone; its requests end when their gateways have noticed."""
        self._heard.pop(worker, None)
        self._gaps.pop(worker, None)

    def batch(self, worker: str, at: float, now: float, above: int | None = None) -> Batch:
        """What this worker should decode at the time `at`. above: of those that join later only of this priority or a
        higher one.
        """
        number = self._workers.known(worker)
        if not number:
            return Batch(0, 0.0, float("inf"))
        self._settle(now)
        there = (self._of("decode") == number) & (self._of("joins") <= at) & (self._of("leaves") > at)
        if above is not None:
            there &= (self._of("joins") <= now) | (self._of("priority") >= above)
        rows = np.flatnonzero(there)
        strangers = int(self._strangers[number])
        if not len(rows):
            return Batch(strangers, 0.0, float("inf"))
        context = float(self._context(rows, at).sum())
        return Batch(
            len(rows) + strangers,
            context * (1.0 + strangers / len(rows)),
            float(self._of("tbt")[rows].min()),
        )

    def batches(self, workers: tuple[str, ...], at: float, now: float) -> tuple[Ints, F64]:
        """[W] sequences, and tokens of context, of all these workers at the time `at`."""
        self._settle(now)
        there = np.flatnonzero((self._of("joins") <= at) & (self._of("leaves") > at))
        decode = self._of("decode")[there]
        count = len(self._gap)
        sequences = np.bincount(decode, minlength=count)
        context = np.bincount(decode, self._context(there, at), minlength=count)
        numbers = np.array([self._workers.known(worker) for worker in workers], dtype=np.int64)
        known = numbers > 0
        # A sequence nobody planned here is as long as the others of its worker.
        strangers = np.where(known, self._strangers[numbers], 0)
        mine = np.where(known, sequences[numbers], 0)
        scale = 1.0 + strangers / np.maximum(mine, 1)
        return mine + strangers, np.where(known, context[numbers] * scale, 0.0)

    def lasting(self, at: float, seconds: float | None, now: float) -> tuple[int, float]:
        """Sequences and tokens of context of all workers at the time `at`, if every decode lasted `seconds`; None: as
        long as all together do on average.
        """
        self._settle(now)
        joins = self._of("joins")
        if not len(joins):
            return 0, 0.0
        if seconds is None:
            seconds = float((self._of("length") * self._gap[self._of("decode")]).mean())
        rows = np.flatnonzero((joins <= at) & (joins > at - seconds))
        return len(rows), float(self._context(rows, at).sum())

    def joins(self, worker: str, after: float, before: float, now: float) -> F64:
        """[N] when others should join this worker's batch between two times; ascending."""
        self._settle(now)
        joins = self._of("joins")
        mine = (self._of("decode") == self._workers.known(worker)) & (joins > after) & (joins < before)
        return np.sort(joins[mine])

    def leaves(self, worker: str, at: float, now: float) -> tuple[F64, F64]:
        """[N] when those that this worker decodes at the time `at` should leave, ascending, and their contexts then."""
        self._settle(now)
        there = (self._of("decode") == self._workers.known(worker)) & (self._of("joins") <= at)
        rows = np.flatnonzero(there & (self._of("leaves") > at))
        order = np.argsort(self._of("leaves")[rows], kind="stable")
        rows = rows[order]
        return self._of("leaves")[rows], self._context(rows, at)

    def under_way(self, now: float) -> tuple[Ints, F64]:
        """[N] of those that should decode now: table of the answer, and tokens it should have."""
        self._settle(now)
        rows = np.flatnonzero(self._of("joins") <= now)
        return self._of("table")[rows].astype(np.int64), self._of("done")[rows]

    def pending(self, worker: str, now: float) -> tuple[F64, Ints, list[str]]:
        """[N] of the prompts this worker has still to compute: seconds, priorities, tenants."""
        self._settle(now)
        rows = np.flatnonzero((self._of("prefill") == self._workers.known(worker)) & (self._of("joins") > now))
        tenants = [self._tenants.name(int(number)) for number in self._of("tenant")[rows]]
        return self._of("prefill_seconds")[rows], self._of("priority")[rows].astype(np.int64), tenants

    # -- time ------------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Brings all entries up to `now`: tokens since, what heartbeats have said, lengths that were exceeded."""
        if now > self._settled:
            since = np.maximum(self._of("joins"), self._settled)
            gap = self._gap[self._of("decode")]
            self._of("done")[:] += np.maximum(now - since, 0.0) / gap
            self._settled = now
        elif not self._heard:
            return
        heard, self._heard = self._heard, {}
        for worker, running in heard.items():
            number = self._workers.known(worker)
            if number:
                self._gap[number] = self._gaps[worker]
                self._reconcile(number, running, now)
        self._relength(now)

    def _reconcile(self, number: int, running: int, now: float) -> None:
        rows = np.flatnonzero(self._of("decode") == number)
        self._strangers[number] = max(running - len(rows), 0)
        joins, seen = self._of("joins"), self._of("seen")
        # Who was among those that ran before is first, then who should have joined first.
        rows = rows[np.lexsort((joins[rows], 1 - seen[rows]))]
        there = int((joins[rows] <= now).sum())
        late = rows[running:there]
        late = late[seen[late] == 0]
        joins[late] = now + HEARTBEAT_EVERY
        self._of("done")[late] = 0.0
        joins[rows[there:running]] = now
        seen[rows[:running]] = 1

    def _relength(self, now: float) -> None:
        done = self._of("done")
        over = np.flatnonzero(done + 1.0 > self._of("length"))
        if len(over):
            table, most = self._of("table")[over].astype(np.int64), self._of("most")[over].astype(np.int64)
            np.minimum(done, self._of("most"), out=done)
            self._of("length")[over] = self._lengths.expected(table, done[over], most)
        begun = np.maximum(self._of("joins"), now)
        left = np.maximum(self._of("length") - done, 0.0)
        self._of("leaves")[:] = begun + left * self._gap[self._of("decode")]

    def _context(self, rows: Ints, at: float) -> F64:
        """[N] tokens of context of these entries at the time `at`, which is not before they have joined."""
        since = np.maximum(self._of("joins")[rows], self._settled)
        more = np.maximum(at - since, 0.0) / self._gap[self._of("decode")[rows]]
        context: F64 = self._of("prompt")[rows] + self._of("done")[rows] + more
        return context

    # -- columns ---------------------------------------------------------------------------------------------------

    def _of(self, name: str) -> npt.NDArray[Any]:
        return self._columns[name][: len(self._keys)]

    def _number(self, worker: str) -> int:
        new = not self._workers.known(worker)
        number = self._workers.number(worker)
        if number >= len(self._gap):
            self._gap = np.concatenate([self._gap, np.full(len(self._gap), UNKNOWN_GAP)])
            self._strangers = np.concatenate([self._strangers, np.zeros_like(self._strangers)])
        if new:
            self._gap[number] = self._gaps.get(worker, UNKNOWN_GAP)
            self._strangers[number] = 0
        return number

    def check(self) -> None:
        """Raises AssertionError if columns and names contradict each other."""
        assert self._row == {key: row for row, key in enumerate(self._keys)}, "a request is not where it should be"
        uses = np.bincount(np.concatenate([self._of("prefill"), self._of("decode")]).astype(np.int64), minlength=1)
        self._workers.check(uses)
        self._tenants.check(np.bincount(self._of("tenant").astype(np.int64), minlength=1))
        assert (self._of("length") <= self._of("most") + 1e-9).all(), "an answer is longer than it may be"
        assert (self._of("leaves") >= self._of("joins")).all(), "a sequence leaves before it has joined"


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

    def drop(self, number: int) -> None:
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._numbers[self._names[number]]
            self._free.append(number)

    def check(self, uses: Ints) -> None:
        for number, count in enumerate(self._uses):
            assert count == (uses[number] if number < len(uses) else 0), "a name is used more or less than counted"
        assert sorted([*self._numbers.values(), *self._free]) == list(range(1, len(self._names)))
