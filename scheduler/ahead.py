"""How long a newcomer waits in a worker's queue, by how long its own prompt takes.

Workers compute the shortest prompts first (`order.py`), so a queue has no one length. A worker tells it at a few
lengths of prompts (QUEUE_LENGTHS); a prompt counts as long as the next of them, so those of about one length are before
each other as they come.

    ahead[k]   what is computed before a prompt of QUEUE_LENGTHS[k] seconds can be, and beside its last step
    queue      all of it: for whoever is longer than the longest, or was promised nothing

A worker that computes prompts as they came tells nothing by length: all of its queue goes before everybody.

Who has a long prompt is overtaken for as long as it waits and computes. If of each second the share r goes to prompts
that are shorter than it, s seconds become s / (1 - r), as in a queue that serves the shortest first (Schrage and Miller
1966). r is what the worker was given of late.

    worker: `tell` ---heartbeat---> conductor: `Ends`, with the plans that it does not show yet, and `Given`, by worker;
                                    `Queues`: both as columns, for one request `before`
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .cost import F64
from .messages import HEARTBEAT_EVERY, QUEUE_LENGTHS
from .sequence import Sequence, State

Ints = npt.NDArray[np.int64]

POINTS = len(QUEUE_LENGTHS)
SHORTEST = QUEUE_LENGTHS[0]
#: Told by whoever has no queue.
NOTHING = (0.0,) * POINTS
#: Rounds of the loop until a prompt that will be handed off can be computed: in the first its worker hears of it, in
#: the second that the decode node has room. A round in which others compute lasts a step.
ROUNDS = 2
#: Seconds over which is counted what a worker is given: about as long as anybody waits.
WINDOW = 30.0
#: It is forgotten so many seconds at a time: a small part of that.
TICK = 1.0
#: Share of a worker's time that shorter ones are believed to take, at most: who waits is not said to wait forever.
MOST_TAKEN = 0.75


def point_of(seconds: float) -> int:
    """The first point before which a prompt of so many seconds goes; POINTS: none."""
    return bisect_left(QUEUE_LENGTHS, seconds)


def tell(sequences: Iterable[Sequence], costs: tuple[float, float, float], most: int, now: float) -> tuple[float, ...]:
    """[POINTS] seconds until a newcomer of each length can be computed alone: as a worker tells it. It has priority 0,
    can be in time, and its tenant is everybody's.

    sequences: those of the worker; who has nothing of its prompt to compute counts for nothing. costs: seconds of a
    step, of a prompt's token and of a token of its context. most: tokens of a step.
    """
    step, token, context = costs
    sums = [0.0] * (POINTS + 1)
    running, tokens, rounds = 0.0, 0, 0
    for each in sequences:
        if not each.owed:
            continue
        count = each.owed
        seconds = -(-count // most) * step + count * token + each.owed_context * context
        if each.preempted or each.handed_off or each.priority > 0:
            point = 0
        elif each.priority < 0 or each.ttft == math.inf or each.arrived + each.ttft - seconds < now:
            point = POINTS
        else:
            point = bisect_left(QUEUE_LENGTHS, seconds)
        sums[point] += seconds
        tokens += count
        if each.state is State.RUNNING:
            running += seconds
        if each.first_only:
            rounds = ROUNDS
    total = sum(sums)
    if not total:
        return NOTHING
    # Nobody ends a step under way. It is half over in the mean, and the next one has begun before the next heartbeat.
    whole = total * min(most / max(tokens, 1), 1.0)
    begins = min(0.5 * (whole + HEARTBEAT_EVERY), running) + rounds * whole
    told, before = [], 0.0
    for k, length in enumerate(QUEUE_LENGTHS):
        before += sums[k]
        rest = before - begins if before > begins else 0.0
        # Its last step is filled up with others.
        wait = begins + rest + -(rest + length) % whole
        if wait > total:
            wait = total
        told.append(wait if wait > before else before)
    return tuple(told)


class Ends:
    """Of one worker's queue, when a newcomer of each length could be computed.

    told: the time of which `ahead` and `seconds` speak: what the worker told by length, and all of its queue. factor:
    by which its predictions are corrected. times: [POINTS + 1], the last of all of it.
    """

    def __init__(self, told: float, ahead: tuple[float, ...], seconds: float, factor: float) -> None:
        self._by_length = bool(ahead)
        self.times: F64 = np.array((*ahead, seconds) if ahead else (seconds,) * (POINTS + 1))
        np.minimum(self.times, seconds, out=self.times)
        self.times *= factor
        self.times += told

    def add(self, at: float, seconds: float, point: int) -> None:
        """One more comes, not before those added so far, and goes before newcomers of the lengths from `point` on."""
        times = self.times[point:] if self._by_length else self.times
        np.maximum(times, at, out=times)
        times += seconds


class Given:
    """Seconds of prompts that one worker was given per second, those that go before each length: [POINTS + 1], with
    exponential forgetting.
    """

    def __init__(self) -> None:
        self.rates: F64 = np.zeros(POINTS + 1)
        self._at = 0.0
        self._more: F64 | None = None

    def add(self, at: float, seconds: float, point: int) -> None:
        self.pass_by(at)
        self.rates[point:] += seconds / WINDOW
        self._more = None

    def pass_by(self, now: float) -> None:
        """So late is it now."""
        if now > self._at + TICK:
            self.rates *= math.exp((self._at - now) / WINDOW)
            self._at, self._more = now, None

    @property
    def more(self) -> F64:
        """[POINTS + 1] seconds that come in between, for each second that a newcomer waits and computes."""
        if self._more is None:
            taken = np.minimum(self.rates, MOST_TAKEN)
            self._more = taken / (1.0 - taken)
        return self._more


class Queues:
    """The queues of many workers, as columns."""

    def __init__(self, workers: int) -> None:
        # [POINTS + 1, W], and the same as one row: numbers are found faster in that.
        shape = (POINTS + 1, workers)
        self._ends, self._more = np.zeros(shape), np.zeros(shape)
        self._all_ends, self._all_more = self._ends.reshape(-1), self._more.reshape(-1)
        # Seconds of a prompt's token, and of half a token of its context, over SHORTEST.
        self._token, self._half_context = np.zeros(workers), np.zeros(workers)
        self._rows: Ints = np.arange(workers)
        # numpy takes twice as long with the number.
        self._nothing = np.zeros(workers)
        self._count = workers
        self._queued = [False] * workers

    def measure(self, row: int, token: float, context: float) -> None:
        """What a worker predicts of itself, uncorrected: seconds of a prompt's token with its share of a step, and of a
        token of its context.
        """
        self._token[row], self._half_context[row] = token / SHORTEST, context / (2 * SHORTEST)

    def write(self, row: int, ends: F64, given: Given) -> None:
        """Rewrites one worker's: its `Ends.times`, and what it was given."""
        self._queued[row] = True
        self._ends[:, row] = ends
        # Those of the same length do not overtake.
        self._more[1:, row] = given.more[:-1]

    def clear(self, row: int) -> None:
        """It has nothing to do: nobody waits there."""
        if self._queued[row]:
            self._queued[row] = False
            self._ends[:, row] = self._more[:, row] = 0.0

    def seconds(self, now: float) -> F64:
        """[W] all of each queue."""
        left: F64 = np.maximum(self._ends[POINTS] - now, self._nothing)
        return left

    def before(self, tokens: int, cached: Ints, now: float) -> F64:
        """[W] that a newcomer waits, or is interrupted, of whose `tokens` each worker need not compute `cached` [W]."""
        lengths = (tokens - cached) * (self._token + (cached + (tokens + 1)) * self._half_context)
        # The exponent of a square counts half octaves, as the lengths do.
        _, exponent = np.frexp(lengths * lengths)
        at = np.minimum(np.maximum(exponent, 0), POINTS) * self._count + self._rows
        wait = np.maximum(self._all_ends[at] - now, self._nothing)
        longer: F64 = wait + (wait + lengths * SHORTEST) * self._all_more[at]
        return longer
