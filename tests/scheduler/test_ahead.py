"""Goal: what a worker tells of its queue by length is what a newcomer of that length waits there, and the conductor
reads it so: with the plans that are under way, between the lengths, and with those that will overtake.

Method: the production Batcher, run step by step with the costs it knows, is the oracle of `tell`; slow sums that of the
columns; one conductor and two workers, by hand, for what becomes of it.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left

import msgspec
import numpy as np
import pytest

from pyengine.scheduler.ahead import MOST_TAKEN, NOTHING, POINTS, WINDOW, Ends, Given, Queues, point_of
from pyengine.scheduler.batcher import Batcher, Sequence, Step
from pyengine.scheduler.blocks import BlockPool
from pyengine.scheduler.messages import (
    HEARTBEAT_EVERY,
    PROTOCOL,
    QUEUE_LENGTHS,
    Codec,
    CostFit,
    ProtocolError,
    ToConductor,
    WorkerAlive,
)
from pyengine.scheduler.sim.baselines import DISCIPLINES
from pyengine.scheduler.types import Role, SamplingParams, Slo

from .test_estimates import FIT, prefill, world
from .world import World

#: Seconds of a token, and tokens of a step, of the workers here; a step itself costs nothing.
TOKEN = 0.001
STEP = 500


def batcher(discipline: str = "ours") -> Batcher:
    """With room for all, whose costs are known exactly."""
    made = DISCIPLINES[discipline](
        BlockPool(4_000, 16),
        max_tokens=STEP,
        max_sequences=256,
        max_queue=1_000,
        max_positions=40_000,
        eos=frozenset(),
        key_of=lambda parent, tokens: parent,
    )
    made.cost.fit = lambda: CostFit((0.0, TOKEN, 0.0, 0.0, 0.0), samples=100)  # type: ignore[method-assign]
    made.cost.samples = 100
    return made


def add(b: Batcher, number: int, seconds: float, **changes: object) -> Sequence:
    """It waits for nothing but its turn."""
    tokens = max(round(seconds / TOKEN), 1)
    fields: dict[str, object] = {"ttft": 1_000.0}
    sequence = Sequence(
        id=(number, 0),
        tokens=[number] * tokens,
        prompt_tokens=tokens,
        keys=[],
        root=b"",
        sampling=SamplingParams(max_tokens=1),
        **(fields | changes),  # type: ignore[arg-type]
    )
    b.add(sequence)
    b.ready(sequence.id, 0)
    return sequence


def step(b: Batcher, now: float) -> float:
    """When the next step is over: it takes what it should."""
    planned = b.plan(now)
    assert planned.slices, "nobody computes"
    seconds = b.cost.seconds(b.work(planned))
    finish(b, planned)
    return now + seconds


def finish(b: Batcher, planned: Step) -> None:
    for outcome in b.finish(planned, [7 if each.sample else -1 for each in planned.slices]):
        if outcome.finish is not None:
            b.remove(outcome.id)


@pytest.mark.parametrize("seed", range(12))
def test_a_newcomer_waits_as_told(seed: int) -> None:
    """Nobody comes after it. Who computes gets shorter meanwhile, and so may pass one that was shorter: what is told of
    a length is to lie between what a third shorter and a third longer one waits, to the step in which it ends and the
    half heartbeat that is added.
    """
    draw = random.Random(seed)
    lengths = [draw.choice((0.02, 0.2, 1.0, 3.0, 9.0)) * draw.uniform(0.7, 1.4) for _ in range(draw.randint(1, 12))]
    for point, length in enumerate(QUEUE_LENGTHS):
        waits = []
        for newcomer in (length / 1.3, length, length * 1.3):
            told, waited = wait(lengths, newcomer)
            waits.append(waited)
        slack = STEP * TOKEN + HEARTBEAT_EVERY / 2 + 0.01
        assert min(waits) - slack <= told[point] <= max(waits) + slack, (point, lengths)


def wait(lengths: list[float], newcomer: float) -> tuple[tuple[float, ...], float]:
    """What a worker with these prompts tells in the middle of its second step, and what one waits that comes then."""
    b = batcher()
    for number, seconds in enumerate(lengths):
        add(b, number, seconds)
    now = step(b, 0.0)
    told, came = b.queue_ahead(now), now
    if b.sequences:
        planned = b.plan(now)
        told = b.queue_ahead(now)
        now += b.cost.seconds(b.work(planned))
        came = (came + now) / 2
        finish(b, planned)
    add(b, 99, newcomer)
    while (99, 0) in b.sequences:
        now = step(b, now)
    return told, now - came - max(round(newcomer / TOKEN), 1) * TOKEN


def test_who_goes_before_whom() -> None:
    """A prompt of 1 s is before those that are longer; others before all, or before nobody that is told of."""
    much = 60 * STEP * TOKEN
    for changes, before in (
        ({"priority": 1}, "all"),
        ({"preempted": True}, "all"),
        ({"priority": -1}, "nobody"),
        ({"ttft": math.inf}, "nobody"),
        ({"ttft": 0.5}, "nobody"),  # cannot be in time any more
    ):
        b = batcher()
        add(b, 0, much, **changes)
        told = b.queue_ahead(0.0)
        # A last step that is filled up with it is all that who overtakes it sees.
        assert (min(told) >= much) == (before == "all"), changes
        assert (max(told) <= STEP * TOKEN) == (before == "nobody"), changes


def test_what_is_to_be_handed_off_waits_two_rounds_more() -> None:
    """In which others compute, but not longer than they do."""
    told = []
    for first_only in (False, True):
        b = batcher()
        add(b, 0, 60 * STEP * TOKEN, first_only=first_only)
        told.append(b.queue_ahead(0.0)[0])
    # Its own step is filled up with the other's prompt.
    assert told[0] == pytest.approx(STEP * TOKEN - QUEUE_LENGTHS[0])
    assert told[1] - told[0] == pytest.approx(2 * STEP * TOKEN)
    few = batcher()
    add(few, 0, 0.1, first_only=True)
    assert max(few.queue_ahead(0.0)) == pytest.approx(0.1)


def test_nothing_to_compute_is_no_queue() -> None:
    b = batcher()
    assert b.queue_ahead(0.0) == NOTHING
    add(b, 0, 1.0)
    b.remove((0, 0))
    assert b.queue_ahead(0.0) == NOTHING


def test_what_a_pool_supplies_is_not_computed() -> None:
    """Known once the pool has answered."""
    b = batcher()
    sequence = add(b, 0, 2.0)
    held = Sequence(
        id=(1, 0), tokens=[1] * 1_601, prompt_tokens=1_601, keys=[bytes([i]) for i in range(100)], root=b"",
        sampling=SamplingParams(max_tokens=1), ttft=1_000.0,
    )  # fmt: skip
    b.add(held)
    assert b.queued_tokens == sequence.prompt_tokens + 1_601
    b.ready(held.id, 1_600)
    assert b.queued_tokens == sequence.prompt_tokens + 1
    b.check()


@pytest.mark.parametrize("name", sorted(set(DISCIPLINES) - {"ours"}))
def test_models_of_others_tell_of_no_lengths(name: str) -> None:
    b = batcher(name)
    add(b, 0, 1.0)
    assert b.queue_ahead(0.0) == ()


def test_ends_are_those_of_one_queue_for_each_length() -> None:
    draw = random.Random(5)
    for _ in range(200):
        told, factor, seconds = draw.uniform(0, 9), draw.uniform(0.5, 2), draw.uniform(0, 20)
        ahead = tuple(sorted(draw.uniform(0, 25) for _ in range(POINTS))) if draw.random() < 0.8 else ()
        ends = Ends(told, ahead, seconds, factor)
        slow = (
            [told + factor * min(each, seconds) for each in (*ahead, seconds)] if ahead else [told + factor * seconds]
        )
        at = told
        for _ in range(draw.randrange(6)):
            at += draw.expovariate(0.3)
            length = draw.choice((0.001, 0.3, 5.0, 40.0))
            ends.add(at, length, point_of(length))
            for k, limit in enumerate((*QUEUE_LENGTHS, math.inf) if ahead else (math.inf,)):
                if length <= limit:
                    slow[k] = max(slow[k], at) + length
        assert ends.times.tolist() == pytest.approx(slow if ahead else slow * (POINTS + 1))


def test_a_newcomer_is_as_long_as_the_next_length() -> None:
    """Against a loop over workers; who is overtaken waits longer, but not where nobody waits."""
    draw = random.Random(6)
    for _ in range(100):
        count, now = draw.randint(1, 5), draw.uniform(0, 3)
        queues, rows = Queues(count), []
        costs = [(2.0 ** draw.uniform(-16, -5), draw.choice((0.0, 1e-7))) for _ in range(count)]
        for row in range(count):
            times = np.array(sorted(draw.uniform(0, 9) for _ in range(POINTS + 1)))
            given = Given()
            for _ in range(draw.randrange(9)):
                given.add(now, draw.uniform(0, 6), draw.randrange(POINTS + 1))
            queues.write(row, times, given)
            queues.measure(row, costs[row][0], costs[row][1])
            rows.append((times.tolist(), given.more.tolist()))
        tokens, cached = 1_000, [draw.randrange(1_000) for _ in range(count)]
        seconds = [
            (tokens - have) * (token + context * (tokens + have + 1) / 2)
            for have, (token, context) in zip(cached, costs, strict=True)
        ]
        queues.clear(idle := draw.randrange(count))
        rows[idle] = ([0.0] * (POINTS + 1), [0.0] * (POINTS + 1))
        assert queues.seconds(now).tolist() == pytest.approx([max(times[-1] - now, 0.0) for times, _ in rows])
        found = queues.before(tokens, np.array(cached), now).tolist()
        for (times, more), own, wait in zip(rows, seconds, found, strict=True):
            left = [max(each - now, 0.0) for each in times]
            slow = left[point := bisect_left(QUEUE_LENGTHS, own)]
            # Those of its own length come behind it.
            overtaken = more[point - 1] if point else 0.0
            assert wait == pytest.approx(slow + (slow + own) * overtaken), (own, times)


def test_those_that_overtake_are_what_was_given_of_late() -> None:
    """Half of each second went to prompts of 0.1 s: who is shorter waits as it is, who is longer for twice as long; and
    a minute later hardly anybody comes.
    """
    given = Given()
    for n in range(4_000):
        given.add(n * 0.2, 0.1, point_of(0.1))
    assert given.more[: point_of(0.1)].tolist() == [0.0] * point_of(0.1)
    assert given.more[point_of(0.1) :].tolist() == pytest.approx([1.0] * (POINTS + 1 - point_of(0.1)), rel=0.06)
    given.pass_by(4_000 * 0.2 + 2 * WINDOW)
    assert given.more[-1] < 0.1
    for n in range(4_000):
        given.add(2_000 + n * 0.1, 1.0, 0)
    assert given.more.max() == pytest.approx(MOST_TAKEN / (1 - MOST_TAKEN))


# -- in the conductor --------------------------------------------------------------------------------------------------

SLO = Slo(ttft=100.0)


def told(made: World, name: str, ahead: list[float], queue: float) -> None:
    """ahead: as many as there are from the last length backwards; 0 for shorter ones."""
    tail = tuple(ahead)
    made.alive(name, cost=FIT, queued_requests=1, queue_seconds=queue, queue_ahead=(0.0,) * (POINTS - len(tail)) + tail)


def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    made = world(Role.BOTH)
    told(made, "both-0", [9.0], 10.0)
    assert made.plan([], 100, request=1, slo=SLO).predicted_ttft == pytest.approx(prefill(100))
    made.end(1)
    # Without a promise, or of lower priority, it waits for all.
    assert made.plan([], 100, request=2).predicted_ttft == pytest.approx(10.0 + prefill(100))
    made.end(2)
    assert made.plan([], 100, request=3, slo=SLO, priority=-1).predicted_ttft == pytest.approx(10.0 + prefill(100))


def test_of_plans_that_no_heartbeat_shows_only_shorter_ones_go_before() -> None:
    made = world(Role.BOTH)
    told(made, "both-0", [], 0.0)
    long = made.plan([], 2_000, request=1, slo=SLO)
    assert long.predicted_ttft == pytest.approx(prefill(2_000))
    short = made.plan([], 100, request=2, slo=SLO)
    again = made.plan([], 100, request=3, slo=SLO)
    assert short.predicted_ttft == pytest.approx(prefill(100))
    assert again.predicted_ttft == pytest.approx(2 * prefill(100))
    # Who has a long prompt waits for all of them, and a little more for those that will come as the short ones did.
    last = made.plan([], 2_000, request=4, slo=SLO)
    alone = 2 * (prefill(2_000) + prefill(100))
    assert alone * 1.001 < last.predicted_ttft < alone * 1.1


def test_each_goes_where_its_own_wait_is_short() -> None:
    """One worker has one long prompt, the other many short ones: less in all, but more for who is short."""
    made = world(Role.BOTH, Role.BOTH)
    told(made, "both-0", [20.0] * (POINTS - point_of(1.0)), 20.0)
    told(made, "both-1", [4.0] * POINTS, 4.0)
    assert made.plan([], 100, slo=SLO).prefill.worker == "both-0"
    assert made.plan([], 100).prefill.worker == "both-1"
    assert made.plan([], 1_500, slo=SLO).prefill.worker == "both-1"


def test_what_is_told_stays_when_a_worker_dials_in_again() -> None:
    made = world(Role.BOTH)
    told(made, "both-0", [9.0], 10.0)
    made.dial_in()
    assert made.plan([], 100, slo=SLO).predicted_ttft == pytest.approx(prefill(100))
    # One that computes prompts as they came tells nothing by length.
    made.alive("both-0", cost=FIT, queued_requests=1, queue_seconds=10.0, queue_ahead=())
    made.now += 2.0
    assert made.plan([], 100, slo=SLO).predicted_ttft >= 8.0


@pytest.mark.parametrize("ahead", [(1.0,), (-1.0, *NOTHING[1:]), (math.nan, *NOTHING[1:]), (*NOTHING[1:], math.inf)])
def test_a_queue_that_nobody_can_have_is_no_frame(ahead: tuple[float, ...]) -> None:
    codec = Codec(ToConductor)
    good = WorkerAlive(
        worker="w", progress=0, queued_requests=0, queued_tokens=0, running=0, free_pages=0, cost=FIT, counters={},
        queue_ahead=NOTHING,
    )  # fmt: skip
    assert codec.decode(codec.encode([good])) == [good]
    fields = {"type": "WorkerAlive", **msgspec.structs.asdict(good), "queue_ahead": ahead}
    with pytest.raises(ProtocolError, match="no queue is told by length"):
        codec.decode(msgspec.msgpack.encode([PROTOCOL, fields]))
