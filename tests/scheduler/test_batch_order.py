"""Goal: prompts are computed by whoever is most urgent, beside decodes only as far as promises allow, each block once.

Method: the Batcher alone; steps are computed by the fake device of test_batcher, which checks every history.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.batcher import Batcher, State
from pyengine.scheduler.cost import StepCost, StepWork, context_of
from pyengine.scheduler.order import OVERDUE, PATIENCE
from pyengine.scheduler.room import LEAST, Room
from tests.scheduler.test_batcher import BLOCK, Device, batcher, sequence

#: Seconds per step, prompt token, context token, decoding sequence, token of its context.
COSTS = (0.01, 0.002, 2e-8, 0.003, 1e-6)


def measured(b: Batcher) -> Batcher:
    """Its cost model is exact."""
    b.cost.__dict__.update(exact().__dict__)
    return b


def exact() -> StepCost:
    cost = StepCost()
    shapes = ((1, 0, 0, 0), (64, 0, 0, 0), (512, 90_000, 1, 90), (0, 0, 4, 80), (2, 90, 9, 90_000))
    for _ in range(100):
        for tokens, start, sequences, history in shapes:
            work = StepWork(tokens, context_of(start, start + tokens), sequences, history)
            cost.observe(work, COSTS[0] + sum(c * n for c, n in zip(COSTS[1:], work, strict=True)))
    assert cost.error < 0.02
    return cost


def waiting(b: Batcher, number: int, length: int, **more: Any) -> None:
    b.add(sequence(number, [number % 3] * length, ignore_eos=True, **more))
    b.sequences[number, 0].keys.clear()  # nobody shares anything
    b.ready((number, 0), 0)


def completions(b: Batcher, device: Device, now: float) -> list[int]:
    """In which order prompts complete, one step after the other."""
    completed: list[int] = []
    while len(completed) < len(b.sequences):
        step = b.plan(now)
        assert not step.empty
        completed += [outcome.id[0] for outcome in b.finish(step, device.execute(step)) if outcome.prefilled]
    return completed


def test_the_shortest_that_can_be_in_time_is_computed_first() -> None:
    b = measured(batcher(pages=100, max_sequences=8))
    for number, (length, ttft) in enumerate([(30, math.inf), (30, 9.0), (40, 2.0), (10, 2.0), (20, 0.01)]):
        waiting(b, number, length, first_only=True, ttft=ttft)
    # 0 was promised nothing; 4 misses its objective in any case.
    assert completions(b, Device(b), 0.0) == [3, 1, 2, 0, 4]


def test_an_answer_that_has_begun_elsewhere_goes_on_before_any_prompt_is_begun() -> None:
    b = measured(batcher(pages=100, max_sequences=1))
    waiting(b, 0, 8, ttft=0.1)
    b.add(sequence(1, [1] * 8, handed_off=True, ignore_eos=True))
    b.first_token((1, 0), 2)
    b.ready((1, 0), 8)
    (load,) = b.plan(0.0).loads
    assert load.id == (1, 0)


def test_a_more_urgent_prompt_overtakes_one_that_is_half_computed() -> None:
    b = measured(batcher(pages=100))
    device = Device(b)
    waiting(b, 0, 40, first_only=True)
    step = b.plan(0.0)
    b.finish(step, device.execute(step))
    waiting(b, 1, 8, first_only=True, ttft=1.0)
    assert completions(b, device, 0.0) == [1, 0]


def test_whoever_runs_out_of_patience_has_a_turn() -> None:
    b = measured(batcher(pages=100, max_sequences=8))
    waiting(b, 0, 8, first_only=True)
    for number in range(1, 4):
        waiting(b, number, 8, first_only=True, arrived=PATIENCE - 1.0, ttft=5.0, priority=5)
    step = b.plan(PATIENCE - 0.5)
    assert [planned.id[0] for planned in step.slices] == [1]
    b.finish(step, [0])
    step = b.plan(PATIENCE)
    assert [planned.id[0] for planned in step.slices] == [0]


@pytest.mark.parametrize("begun", [False, True])
def test_nobody_starves(begun: bool) -> None:
    """Short prompts that can be in time come without end, as many as can be computed; a long one goes on all the same,
    at its share of the tokens from the end of its patience on. begun: some of it was computed before they came.
    """
    b = measured(batcher(pages=100, max_sequences=4))
    device, now, computed, long = Device(b), 0.0, 0, 60
    waiting(b, 0, long, first_only=True, ttft=1.0)
    if begun:
        step = b.plan(now)
        b.finish(step, device.execute(step))
    left = len(b.sequences[0, 0].tokens) - b.sequences[0, 0].computed
    for number in itertools.count(1):
        while b.waiting < 3:
            waiting(b, number * 10 + b.waiting, b.max_tokens // 2, first_only=True, arrived=now, ttft=20.0)
        step = b.plan(now)
        if now >= PATIENCE:
            computed += sum(planned.count for planned in step.slices)
        for outcome in b.finish(step, device.execute(step)):
            if outcome.prefilled:
                b.remove(outcome.id)
        if (0, 0) not in b.sequences:
            break
        assert computed <= left / OVERDUE + 2 * b.max_tokens, "a prompt gets less than its share"
        now += 1.0
    assert now >= PATIENCE, "the short ones did not come as fast as they can be computed"
    assert computed >= (left - b.max_tokens) / OVERDUE * 0.8, "a prompt that is overdue takes the time of others"


def test_a_tenants_hundred_requests_do_not_hold_up_anothers_one() -> None:
    b = batcher(pages=100, max_queue=200, max_sequences=2)
    for number in range(100):
        waiting(b, number, 8, first_only=True, tenant=1)
    waiting(b, 100, 8, first_only=True, tenant=2)
    device = Device(b)
    completed: list[int] = []
    while 100 not in completed:
        step = b.plan(0.0)
        for outcome in b.finish(step, device.execute(step)):
            completed.append(outcome.id[0])
            b.remove(outcome.id)
    assert len(completed) <= 3


def test_to_plan_with_a_thousand_waiting_looks_at_few() -> None:
    """Counted in places that are made, not in seconds."""
    b = measured(batcher(pages=10, max_queue=2000, max_sequences=1))
    for number in range(1000):
        waiting(b, number, 8, ttft=1000.0)
    made = 0
    place = b._urgency.place

    def counted(sequence: Any) -> Any:
        nonlocal made
        made += 1
        return place(sequence)

    b._urgency.place = counted  # type: ignore[method-assign]
    device = Device(b)
    for _ in range(20):
        step = b.plan(0.0)
        b.finish(step, device.execute(step))
    assert made < 100


# -- deadlines -----------------------------------------------------------------------------------------------------


def test_who_cannot_be_in_time_is_late_before_its_deadline() -> None:
    b = measured(batcher(pages=100))
    waiting(b, 0, 40, deadline=10.0)
    seconds = 5 * COSTS[0] + 40 * COSTS[1] + context_of(0, 40) * COSTS[2]
    assert b.late(10.0 - 1.1 * seconds) == []
    assert b.next_late == pytest.approx(10.0 - seconds, abs=0.05 * seconds)
    assert b.late(10.0 - 0.9 * seconds) == [(0, 0)]
    assert b.late(10.0 - 0.9 * seconds) == [(0, 0)], "it is still there"
    b.remove((0, 0))
    assert b.late(20.0) == []
    assert b.next_late == math.inf


def test_a_model_without_measurements_makes_nobody_late() -> None:
    b = batcher(pages=100)
    waiting(b, 0, 40, deadline=10.0)
    assert b.late(9.99) == []
    assert b.late(10.0) == [(0, 0)]


@pytest.mark.parametrize("state", list(State))
def test_a_deadline_counts_in_every_state_but_the_last(state: State) -> None:
    b = batcher(pages=100)
    b.add(sequence(0, [1] * 8, deadline=10.0, first_only=True, ignore_eos=True))
    if state is not State.HELD:
        b.ready((0, 0), 4 if state is State.LOADING else 0)
    if state not in (State.HELD, State.WAITING):
        step = b.plan(0.0)
        if state is State.FINISHED:
            b.finish(step, [1])
    assert b.sequences[0, 0].state is state
    assert b.late(10.0) == ([] if state is State.FINISHED else [(0, 0)])


# -- beside what decodes -------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    start=st.integers(0, 2000),
    most=st.integers(1, 512),
    strictest=st.floats(0.001, 2.0),
    sequences=st.integers(1, 20),
)
def test_a_step_keeps_the_strictest_promise_or_computes_the_least(
    start: int, most: int, strictest: float, sequences: int
) -> None:
    cost = EXACT
    decoding = StepWork(0, 0, sequences, sequences * 100)
    count = Room(cost, decoding, strictest, 512).take(start, most)
    least = min(int(512 * LEAST), most)
    assert least <= count <= most

    def seconds(count: int) -> float:
        return cost.seconds(StepWork(count, context_of(start, start + count), sequences, sequences * 100))

    if count > least:
        assert seconds(count) <= strictest * 1.0001
    if count < most:
        assert seconds(count + 1) > strictest * 0.9999


EXACT = exact()


def test_two_prompts_share_what_room_there_is() -> None:
    decoding = StepWork(0, 0, 4, 400)
    room = Room(EXACT, decoding, 0.2, 512)
    first, second = room.take(0, 40), room.take(0, 400)
    work = StepWork(first + second, context_of(0, first) + context_of(0, second), 4, 400)
    assert first == 40
    assert 0 < second < 400
    assert EXACT.seconds(work) <= 0.2 * 1.0001


def test_all_prompts_together_get_the_least_if_nothing_can_be_kept() -> None:
    room = Room(EXACT, StepWork(0, 0, 4, 400), 0.001, 512)
    assert [room.take(0, 20), room.take(0, 400), room.take(0, 400)] == [20, 12, 0]


def test_the_batcher_asks_those_that_decode_in_the_step() -> None:
    counts = {}
    for tbt in (math.inf, 0.05):
        b = measured(batcher(pages=200, max_tokens=64))
        device = Device(b)
        waiting(b, 0, 4, max_tokens=50, tbt=tbt)
        step = b.plan(0.0)
        b.finish(step, device.execute(step))
        waiting(b, 1, 200)
        step = b.plan(0.0)
        counts[tbt] = [planned.count for planned in step.slices]
    assert counts[math.inf] == [1, 63]
    decode, prompt = counts[0.05]
    assert decode == 1
    assert prompt < 20


# -- one prefill for many ------------------------------------------------------------------------------------------


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    b = batcher(pages=100, max_sequences=8)
    device = Device(b)
    common = [0, 1, 2, 1] * 5
    computed = []
    for number in range(4):
        b.add(sequence(number, [*common, number, 1, 1], ignore_eos=True))
        b.ready((number, 0), 0)
    b.add(sequence(9, [2] * 6, ignore_eos=True))
    b.ready((9, 0), 0)
    for _ in range(6):
        step = b.plan(0.0)
        computed += [(p.id[0], p.start, p.count) for p in step.slices if not p.decodes]
        b.finish(step, device.execute(step))
        b.check()
    tokens = {number: sum(count for id, _, count in computed if id == number) for number in (0, 1, 2, 3, 9)}
    assert tokens == {0: 23, 1: 3, 2: 3, 3: 3, 9: 6}
    assert {b.sequences[number, 0].cached for number in (1, 2, 3)} == {20}
    # The one that shares nothing did not wait for those that wait.
    order = [id for id, _, _ in computed]
    assert order.index(9) < order.index(1)


def test_pools_supply_ahead_of_a_full_step_but_for_one_step_only() -> None:
    """What is on its way into pages while others compute is ready when they have done; more would only hold pages."""
    b = batcher(pages=100, max_sequences=16)
    waiting(b, 0, 40)
    for number in range(1, 9):
        b.add(sequence(number, [number % 3] * (3 * BLOCK + 3), ignore_eos=True))
        b.ready((number, 0), 3 * BLOCK)
    step = b.plan(0.0)
    assert [(p.id[0], p.count) for p in step.slices] == [(0, 8)]
    # 3 tokens each are left to compute, a step computes 8.
    assert [load.id[0] for load in step.loads] == [1, 2, 3]


@pytest.mark.parametrize("end", ["remove", "preempt"])
def test_who_waits_for_one_that_goes_computes_itself(end: str) -> None:
    b = batcher(pages=12, max_sequences=8)
    device = Device(b)
    common = [0, 1, 2, 1] * 5
    for number in (0, 1):
        b.add(sequence(number, [*common, number], ignore_eos=True))
        b.ready((number, 0), 0)
    step = b.plan(0.0)
    b.finish(step, device.execute(step))
    assert b.sequences[1, 0].state is State.WAITING
    b.check()
    if end == "remove":
        b.remove((0, 0))
    else:
        b._preempt(b.sequences[0, 0], step)
    b.check()
    step = b.plan(0.0)
    assert [(p.id[0], p.start) for p in step.slices] == [(1, 8)]
    b.remove((1, 0))
    b.check()


def test_one_that_waits_can_be_removed_and_lends_its_urgency() -> None:
    b = batcher(pages=100, max_sequences=8)
    device = Device(b)
    common = [0, 1, 2, 1] * 5
    b.add(sequence(0, [*common, 0], ignore_eos=True))
    b.ready((0, 0), 0)
    step = b.plan(0.0)
    b.finish(step, device.execute(step))
    waiting(b, 1, 30, ttft=4.0)
    b.add(sequence(2, [*common, 2], ignore_eos=True, priority=1))
    b.ready((2, 0), 0)
    step = b.plan(0.0)
    assert [p.id[0] for p in step.slices] == [0], "it goes on first, for the sake of a higher priority"
    b.check()
    b.remove((2, 0))
    b.check()


def test_what_a_pool_can_supply_is_not_waited_for() -> None:
    b = batcher(pages=100, max_sequences=8)
    device = Device(b)
    common = [0, 1, 2, 1] * 5
    for number, available in ((0, 0), (1, 5 * BLOCK)):
        b.add(sequence(number, [*common, number], ignore_eos=True))
        b.ready((number, 0), available)
    step = b.plan(0.0)
    device.load(step.loads)
    assert [load.id[0] for load in step.loads] == [1]
