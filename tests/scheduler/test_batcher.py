"""Goal: every computed position sees exactly the history it should, pages add up, and everybody ends.

Method: a fake device stores, per page and offset, a digest of all tokens up to there; each slice is checked against it
before it writes. Hypothesis drives arrivals, pool answers, losses, aborts and steps in random order. Of steps that
overlap the device reads and writes as late as it may, and for who has gone meanwhile it writes garbage.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pyengine.scheduler.batcher import Batcher, Load, Outcome, Planned, QueueFull, Sequence, State, Step, TooLarge
from pyengine.scheduler.blocks import BlockPool
from pyengine.scheduler.types import FinishReason, SamplingParams

BLOCK = 4
ROOT = b"root"
EOS = 9


def key_of(parent: bytes, tokens: list[int]) -> bytes:
    return hashlib.blake2b(parent + bytes(tokens), digest_size=8).digest()


def keys_of(tokens: list[int], block: int = BLOCK) -> list[bytes]:
    keys: list[bytes] = []
    for i in range(len(tokens) // block):
        keys.append(key_of(keys[-1] if keys else ROOT, tokens[i * block : (i + 1) * block]))
    return keys


def digest(tokens: list[int], position: int) -> bytes:
    """What the fake device stores for a position: it depends on all tokens up to there."""
    return hashlib.blake2b(bytes(tokens[: position + 1]), digest_size=8).digest()


def next_token(tokens: list[int]) -> int:
    """0 … 2, so that prompts and answers often share prefixes; rarely EOS."""
    value = hashlib.blake2b(bytes(tokens), digest_size=2).digest()
    return EOS if value[0] < 8 else value[1] % 3


class Device:
    """Pages of digests, and the check that a slice reads right history."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.cells: dict[tuple[int, int], bytes] = {}
        self.under_way: list[Step] = []
        #: Whose blocks are still on their way, and whether all of them will be good.
        self.believed: dict[tuple[int, int], bool] = {}

    def load(self, loads: list[Load], lost: dict[tuple[int, int], int] | None = None, believe: bool = False) -> None:
        for load in loads:
            sequence = self.batcher.sequences[load.id]
            good = min((load.first_block + load.blocks) * BLOCK, sequence.available)
            if lost and load.id in lost:
                good = max(load.first_block * BLOCK, good - lost[load.id] * BLOCK)
            assert not {page for step in self.under_way for each in step.slices for page in each.pages} & {*load.pages}
            for i, page in enumerate(load.pages):
                for offset in range(BLOCK):
                    position = (load.first_block + i) * BLOCK + offset
                    right = position < good
                    self.cells[page, offset] = digest(sequence.tokens, position) if right else b"garbage"
            if believe:
                self.believed[load.id] = not lost or not lost.get(load.id)
                self.batcher.loaded(load.id, sequence.available, verified=False)
            else:
                self.batcher.loaded(load.id, good)

    def settle(self, ids: Iterable[tuple[int, int]]) -> None:
        """What was on its way for these is there, or is known not to be."""
        for id in ids:
            sequence = self.batcher.sequences.get(id)
            if (good := self.believed.pop(id, None)) is None or sequence is None or sequence.believed is None:
                continue  # it was removed or preempted meanwhile
            (self.batcher.verified if good else self.batcher.unreadable)(id)
            assert (sequence.state is State.RUNNING) == good

    def execute(self, step: Step) -> list[int]:
        written: set[int] = set()
        read: list[set[int]] = []
        sampled = []
        for planned in step.slices:
            mine = self.batcher.sequences.get(planned.id)
            if mine is None or mine.state is not State.RUNNING:
                for position in range(planned.start, planned.start + planned.count):
                    self.cells[planned.pages[position // BLOCK], position % BLOCK] = b"late"
                sampled.append(0 if planned.sample else -1)
                continue
            tokens = mine.tokens
            for position in range(planned.start):
                page = planned.pages[position // BLOCK]
                assert self.cells[page, position % BLOCK] == digest(tokens, position), f"wrong history at {position}"
            touched = set(planned.pages[planned.start // BLOCK :])
            assert not touched & written
            assert all(not touched & other for other in read)
            assert not written & set(planned.pages)
            written |= touched
            read.append(set(planned.pages))
            for position in range(planned.start, planned.start + planned.count):
                self.cells[planned.pages[position // BLOCK], position % BLOCK] = digest(tokens, position)
            assert planned.sample == (planned.start + planned.count == len(tokens))
            sampled.append(next_token(tokens) if planned.sample else -1)
        return sampled


def sequence(
    number: int,
    tokens: list[int],
    *,
    max_tokens: int = 8,
    first_only: bool = False,
    handed_off: bool = False,
    ignore_eos: bool = False,
    generated_before: int = 0,
    **more: Any,
) -> Sequence:
    return Sequence(
        id=(number, 0),
        tokens=list(tokens),
        prompt_tokens=len(tokens),
        keys=keys_of(tokens),
        root=ROOT,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
        generated_before=generated_before,
        first_only=first_only,
        handed_off=handed_off,
        **more,
    )


def dump(value: object) -> object:
    """All state, by value."""
    match value:
        case dict():
            return [(dump(k), dump(v)) for k, v in value.items()]
        case list() | tuple():
            return [dump(each) for each in value]
        case np.ndarray():
            return value.tolist()
        case Sequence():
            return [(name, dump(getattr(value, name))) for name in Sequence.__slots__]
        case enum.Enum() | SamplingParams():
            return value
        case itertools.count():
            return repr(value)
        case _ if hasattr(value, "__dict__"):
            return dump({name: each for name, each in vars(value).items() if name != "_key_of"})
        case _:
            return value


def full_step(b: Batcher) -> list[Load]:
    """One step that samples zeros."""
    step = b.plan(0.0)
    for id in step.preempted:
        b.ready(id, 0)
    b.observe(b.work(step), 0.1)
    b.finish(step, [0 if planned.sample else -1 for planned in step.slices])
    return step.loads


def plain_step(b: Batcher) -> bool:
    """The same; whether it did nothing but compute a token of each running sequence."""
    before = [(s.id, len(s.tokens) + 1, len(s.pages), s.computed // b.pool.block_tokens) for s in b._running]
    samples = b.cost.samples
    loads = full_step(b)
    after = [(s.id, len(s.tokens), len(s.pages), s.computed // b.pool.block_tokens) for s in b._running]
    return before == after and not loads and b.cost.samples == samples


def batcher(pages: int = 8, **limits: int) -> Batcher:
    values = {"max_tokens": 8, "max_sequences": 4, "max_queue": 16, "max_positions": 1000} | limits
    return Batcher(BlockPool(pages, BLOCK), eos=frozenset([EOS]), key_of=key_of, **values)


class BatcherMachine(RuleBasedStateMachine):
    @initialize(pages=st.integers(3, 12), budget=st.integers(1, 12), width=st.integers(1, 4))
    def start(self, pages: int, budget: int, width: int) -> None:
        self.batcher = batcher(pages, max_tokens=budget, max_sequences=width, max_queue=6)
        self.device = Device(self.batcher)
        self.number = 0
        self.answers: dict[tuple[int, int], list[int]] = {}
        self.loading: list[Load] = []
        self.now = 0.0

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        max_tokens=st.integers(1, 14),
        kind=st.sampled_from(["both", "prefill", "decode"]),
        ttft=st.sampled_from([math.inf, 2.0, 20.0]),
        tbt=st.sampled_from([math.inf, 0.05, 1.0]),
        deadline=st.sampled_from([math.inf, math.inf, 30.0]),
        priority=st.sampled_from([0, 0, 1]),
        tenant=st.integers(0, 2),
    )
    def arrive(self, tokens: list[int], max_tokens: int, kind: str, deadline: float, **more: Any) -> None:
        if kind == "decode" and (max_tokens == 1 or next_token(tokens) == EOS):
            return  # ended at the prefill side
        new = sequence(
            self.number,
            tokens,
            max_tokens=max_tokens,
            first_only=kind == "prefill",
            handed_off=kind == "decode",
            arrived=self.now,
            deadline=self.now + deadline,
            **more,
        )
        needed = len(tokens) + (kind != "prefill")
        try:
            self.batcher.add(new)
        except TooLarge:
            assert needed > self.batcher.pool.pages * BLOCK
        except QueueFull:
            assert self.batcher.waiting >= 6
        else:
            assert needed <= self.batcher.pool.pages * BLOCK
            self.answers[new.id] = list(tokens)
            self.number += 1

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        held = [s for s in self.batcher.sequences.values() if s.state is State.HELD]
        if not held:
            return
        chosen = data.draw(st.sampled_from(sorted(held, key=lambda s: s.id)))
        if chosen.handed_off and len(chosen.tokens) == chosen.prompt_tokens:
            token = next_token(chosen.tokens)
            self.answers[chosen.id].append(token)
            if self.batcher.first_token(chosen.id, token):
                return
            self.batcher.ready(chosen.id, data.draw(st.sampled_from([chosen.prompt_tokens, 0, BLOCK])))
        else:
            blocks = data.draw(st.integers(0, len(chosen.tokens) // BLOCK))
            self.batcher.ready(chosen.id, blocks * BLOCK)

    @rule(lost=st.integers(0, 2), abort=st.booleans(), late=st.booleans(), believe=st.booleans())
    def step(self, lost: int, abort: bool, late: bool, believe: bool = False) -> None:
        """believe: what is to be copied into pages is on its way when the next step is planned."""
        while self.device.under_way:
            self.end()
        step = self.plan()
        if not late:
            self.load(lost, believe)
        self.device.settle([planned.id for planned in step.slices])
        self.finish(step, abort)

    @rule(lost=st.integers(0, 2), late=st.booleans())
    def overlap(self, lost: int, late: bool) -> None:
        """The next step is planned while one is under way, and begins before that ends."""
        self.device.settle([*self.device.believed])
        step = self.plan()
        assert not (self.device.under_way and step.preempted)
        if step.slices:
            self.batcher.begin(step)
            self.device.under_way.append(step)
            self.batcher.check()
        if not late:
            self.load(lost)
        if len(self.device.under_way) > 1 or not step.slices:
            self.end()

    @rule(abort=st.booleans())
    def end(self, abort: bool = False) -> None:
        if self.device.under_way:
            self.finish(self.device.under_way.pop(0), abort)

    def plan(self) -> Step:
        self.drop_late()
        step = self.batcher.plan(self.now)
        self.batcher.check()
        work = self.batcher.work(step)
        self.batcher.observe(work, 0.01 + 0.01 * work.prefill_tokens + 0.02 * work.decode_sequences)
        assert sum(planned.count for planned in step.slices) <= self.batcher.max_tokens
        self.loading += step.loads
        return step

    def finish(self, step: Step, abort: bool) -> None:
        tokens = self.device.execute(step)
        if abort and step.slices:
            self.batcher.remove(step.slices[0].id)
        for outcome, planned, token in self._outcomes(step, tokens):
            assert outcome.token == (token if planned.sample else None)
            mine = self.batcher.sequences[planned.id]
            for block in outcome.filled:
                assert block.key == keys_of(mine.tokens)[block.index]
                assert block.page == mine.pages[block.index]
                for offset in range(BLOCK):
                    expected = digest(mine.tokens, block.index * BLOCK + offset)
                    assert self.device.cells[block.page, offset] == expected
            if outcome.token is not None:
                assert outcome.index == len(self.answers[planned.id]) - mine.prompt_tokens
                self.answers[planned.id].append(outcome.token)
                assert mine.tokens == self.answers[planned.id]
                over = outcome.finish is not None or mine.first_only
                assert over == (mine.state is State.FINISHED)

    def drop_late(self) -> None:
        before = self.batcher.next_late
        late = self.batcher.late(self.now)
        assert not late or self.now >= before, "somebody is late who was not to be yet"
        for s in self.batcher.sequences.values():
            due = s.deadline <= self.now and s.state is not State.FINISHED
            assert not due or s.id in late
        for id in late:
            self.batcher.remove(id)

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(lost=st.integers(0, 2))
    def load(self, lost: int, believe: bool = False) -> None:
        """What was to be copied into pages is there, but for the last `lost` blocks of each."""
        loads = [load for load in self.loading if load.id in self.batcher.sequences]
        self.device.load(loads, {load.id: lost for load in loads}, believe)
        self.loading = []

    def _outcomes(self, step: Step, tokens: list[int]) -> Iterator[tuple[Outcome, Planned, int]]:
        outcomes = {outcome.id: outcome for outcome in self.batcher.finish(step, tokens)}
        for planned, token in zip(step.slices, tokens, strict=True):
            if planned.id in outcomes:
                yield outcomes[planned.id], planned, token

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.batcher.sequences:
            self.batcher.remove(data.draw(st.sampled_from(sorted(self.batcher.sequences))))

    @rule()
    def reap(self) -> None:
        for s in [s for s in self.batcher.sequences.values() if s.state is State.FINISHED]:
            self.batcher.remove(s.id)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "batcher"):
            self.batcher.check()

    def teardown(self) -> None:
        """Everybody ends when pools answer and finished ones are removed; then no page is held."""
        if not hasattr(self, "batcher"):
            return
        overlap = bool(self.device.under_way)
        for _ in range(5000):
            self.now += 0.01
            self.reap()
            if self.batcher.idle and not self.device.under_way:
                break
            for s in list(self.batcher.sequences.values()):
                if s.state is State.HELD:
                    if s.handed_off and len(s.tokens) == s.prompt_tokens:
                        self.answers[s.id].append(next_token(s.tokens))
                        self.batcher.first_token(s.id, next_token(s.tokens))
                    if s.state is State.HELD:
                        self.batcher.ready(s.id, 0)
            if overlap:
                self.overlap(0, False)
            else:
                self.step(0, False, False)
        assert self.batcher.idle, "somebody starves"
        assert self.batcher.pool.referenced == 0


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30), st.booleans()), min_size=1, max_size=5),
    pages=st.integers(6, 30),
    block=st.sampled_from([4, 7]),
    width=st.integers(1, 5),
    most=st.integers(1, 9),
)
def test_a_run_is_what_single_steps_are_and_could_not_be_longer(
    prompts: list[tuple[int, int, bool]], pages: int, block: int, width: int, most: int
) -> None:
    b = Batcher(
        BlockPool(pages, block),
        max_tokens=8,
        max_sequences=width,
        max_queue=16,
        max_positions=40,
        eos=frozenset([EOS]),
        key_of=key_of,
    )
    for number, (length, max_tokens, handed_off) in enumerate(prompts):
        new = sequence(number, [number] * length, max_tokens=max_tokens + handed_off, handed_off=handed_off)
        new.keys = keys_of(new.tokens, block)
        with contextlib.suppress(TooLarge):
            b.add(new)
            if not handed_off or b.first_token(new.id, 0) is None:
                b.ready(new.id, length if handed_off else 0)
    for _ in range(1000):
        for s in [s for s in b.sequences.values() if s.state is State.FINISHED]:
            b.remove(s.id)
        if b.idle:
            break
        length = b.run_length()
        count = min(most, length)
        singly = copy.deepcopy(b)
        b.run(count)
        for _ in range(count):
            event("a step of a run")
            assert plain_step(singly), "not a step of a run"
        assert dump(b) == dump(singly)
        b.check()
        may_admit = b._queue.looks  # whether it can is looked at by the next `plan`
        if count == length and b._observed == (0, 0, len(b._running)) and not may_admit:
            event("the end of a run")
            assert not plain_step(singly), "the run could have been longer"
        for load in full_step(b):
            b.loaded(load.id, b.sequences[load.id].available)
    assert b.idle


BatcherMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestBatcher = BatcherMachine.TestCase


def run(b: Batcher, device: Device, steps: int = 1000) -> dict[tuple[int, int], list[int]]:
    """Steps until nothing more can be planned; returns the tokens of each sequence."""
    answers: dict[tuple[int, int], list[int]] = {}
    for _ in range(steps):
        step = b.plan(0.0)
        if step.empty:
            break
        for id in step.preempted:
            b.ready(id, 0)
        device.load(step.loads)
        for outcome in b.finish(step, device.execute(step)):
            if outcome.token is not None:
                answers.setdefault(outcome.id, []).append(outcome.token)
    return answers


def test_decodes_come_first_and_chunks_share_the_rest_of_the_budget() -> None:
    b = batcher(pages=20)
    device = Device(b)
    b.add(sequence(1, [1, 2, 3], max_tokens=50, ignore_eos=True))
    b.ready((1, 0), 0)
    run(b, device, 1)
    b.add(sequence(2, [2] * 20))
    b.ready((2, 0), 0)
    counts = []
    for _ in range(3):
        step = b.plan(0.0)
        counts.append([(planned.id[0], planned.count, planned.sample) for planned in step.slices])
        b.finish(step, device.execute(step))
    assert counts == [[(1, 1, True), (2, 7, False)], [(1, 1, True), (2, 7, False)], [(1, 1, True), (2, 6, True)]]


def test_a_second_turn_reuses_the_pages_of_the_first() -> None:
    b = batcher(pages=20)
    device = Device(b)
    prompt = [0, 1, 2, 0, 1, 2, 0, 1, 2, 1]
    b.add(sequence(1, prompt, ignore_eos=True))
    b.ready((1, 0), 0)
    answer = run(b, device)[1, 0]
    b.remove((1, 0))
    second = prompt + answer
    b.add(sequence(2, second))
    b.ready((2, 0), 0)
    step = b.plan(0.0)
    # The KV of the last token of the answer was never computed: reusable are the full blocks before it.
    assert b.sequences[2, 0].cached == (len(second) - 1) // BLOCK * BLOCK
    assert step.slices[0].start == b.sequences[2, 0].cached


def test_the_whole_prompt_cached_still_computes_a_token() -> None:
    b = batcher(pages=20)
    device = Device(b)
    for number in (1, 2):
        b.add(sequence(number, [1] * 8))
        b.ready((number, 0), 8)
        step = b.plan(0.0)
        device.load(step.loads)
        if not step.slices:
            step = b.plan(0.0)
        assert (step.slices[0].start, step.slices[0].count) == (4, 4)
        b.finish(step, device.execute(step))
        b.remove((number, 0))


def test_a_handed_off_sequence_computes_only_its_own_tokens() -> None:
    b = batcher(pages=20)
    device = Device(b)
    prompt = [0, 1, 2, 0, 1, 2]
    b.add(sequence(1, prompt, max_tokens=6, handed_off=True, ignore_eos=True))
    with pytest.raises(ValueError, match="no first token"):
        b.ready((1, 0), 6)
    assert b.first_token((1, 0), next_token(prompt)) is None
    assert b.queued_tokens == 0
    b.ready((1, 0), 6)
    step = b.plan(0.0)
    (load,) = step.loads
    assert (load.first_block, load.blocks, step.slices) == (0, 2, [])
    device.load(step.loads)
    assert len(run(b, device)[1, 0]) == 5
    assert b.sequences[1, 0].recomputed == 0
    assert b.sequences[1, 0].computed == len(prompt) + 5


def test_lost_blocks_of_a_hand_off_are_recomputed_and_counted() -> None:
    b = batcher(pages=20)
    device = Device(b)
    prompt = [0, 1, 2, 0, 1, 2]
    b.add(sequence(1, prompt, handed_off=True, ignore_eos=True))
    b.first_token((1, 0), next_token(prompt))
    b.ready((1, 0), 6)
    step = b.plan(0.0)
    device.load(step.loads, {(1, 0): 1})
    run(b, device)
    assert b.sequences[1, 0].recomputed == 4


def test_blocks_on_their_way_are_nobody_elses_before_they_are_verified() -> None:
    """And if they are not intact, it is as if the sequence had never been admitted."""
    tokens = [1] * (3 * BLOCK + 1)
    for good in (True, False):
        b = batcher(pages=16, max_tokens=16)
        for number in range(2):
            b.add(sequence(number, tokens))
        b.ready((0, 0), 3 * BLOCK)
        (load,) = b.plan(0.0).loads
        b.loaded((0, 0), 3 * BLOCK, verified=False)
        first = b.sequences[0, 0]
        step = b.plan(0.0)
        assert [(planned.start, planned.count) for planned in step.slices] == [(3 * BLOCK, 1)]
        assert b.pool.count(first.keys) == 0
        b.check()
        if good:
            b.verified((0, 0))
            assert b.pool.count(first.keys) == 3
            b.ready((1, 0), 0)
            assert b.plan(0.0).slices[-1].pages[:3] == load.pages
            (outcome, *_) = b.finish(step, [0])
            assert outcome.recomputed == 0 and first.cached == 3 * BLOCK
            continue
        b.unreadable((0, 0))
        assert first.state is State.HELD and not first.pages and not first.started and b.pool.referenced == 0
        assert not b.finish(step, [0])
        b.ready((0, 0), BLOCK)
        b.loaded((0, 0), b.plan(0.0).loads[0].blocks * BLOCK)
        step = b.plan(0.0)
        (outcome,) = b.finish(step, [0])
        assert first.cached == BLOCK and outcome.recomputed == 0
        b.check()


def test_the_youngest_is_preempted_and_its_answer_does_not_change() -> None:
    alone: dict[tuple[int, int], list[int]] = {}
    for number in (1, 2):
        b = batcher(pages=6)
        b.add(sequence(number, [number] * 7, max_tokens=12, ignore_eos=True))
        b.ready((number, 0), 0)
        alone |= run(b, Device(b))
    b = batcher(pages=6)
    for number in (1, 2):
        b.add(sequence(number, [number] * 7, max_tokens=12, ignore_eos=True))
        b.ready((number, 0), 0)
    device = Device(b)
    together: dict[tuple[int, int], list[int]] = {}
    preempted = []
    for _ in range(200):
        step = b.plan(0.0)
        preempted += step.preempted
        for id in step.preempted:
            b.ready(id, 0)
        device.load(step.loads)
        for outcome in b.finish(step, device.execute(step)):
            if outcome.token is not None:
                together.setdefault(outcome.id, []).append(outcome.token)
            if b.sequences[outcome.id].state is State.FINISHED:
                b.remove(outcome.id)
        if b.idle:
            break
    assert preempted
    assert set(preempted) == {(2, 0)}
    assert together == alone


def test_preempted_sequences_are_admitted_before_new_ones() -> None:
    b = batcher(pages=5, max_sequences=2)
    device = Device(b)
    for number in (1, 2, 3):
        b.add(sequence(number, [number] * 7, max_tokens=9, ignore_eos=True))
        b.ready((number, 0), 0)
    preempted: list[tuple[int, int]] = []
    for _ in range(20):
        step = b.plan(0.0)
        preempted += step.preempted
        if preempted:
            break
        b.finish(step, device.execute(step))
    assert preempted == [(2, 0)]
    b.ready((2, 0), 0)
    b.remove((1, 0))
    assert next(planned.id for planned in b.plan(0.0).slices) == (2, 0)


def test_why_sequences_end() -> None:
    cases = [
        (sequence(1, [1, 2], max_tokens=3, ignore_eos=True), 3, FinishReason.LENGTH, {}),
        (sequence(1, [1, 2], max_tokens=5, ignore_eos=True, generated_before=2), 3, FinishReason.LENGTH, {}),
        (sequence(1, [1, 2], max_tokens=50, ignore_eos=True), 4, FinishReason.LENGTH, {"max_positions": 6}),
        (sequence(1, [1, 2], max_tokens=50, ignore_eos=True), 7, FinishReason.LENGTH, {"pages": 2}),
    ]
    for new, count, reason, limits in cases:
        b = batcher(**limits)
        b.add(new)
        b.ready(new.id, 0)
        device, outcomes = Device(b), []
        while new.state is not State.FINISHED:
            step = b.plan(0.0)
            outcomes += b.finish(step, device.execute(step))
        assert [outcome.index for outcome in outcomes] == list(
            range(new.generated_before, new.generated_before + count)
        )
        assert outcomes[-1].finish is reason
    for ends, ignore in (((7,), True), ((), False)):
        b = batcher()
        new = sequence(1, [1, 2])
        new.sampling = SamplingParams(stop_token_ids=ends, ignore_eos=ignore)
        b.add(new)
        b.ready(new.id, 0)
        (outcome,) = b.finish(b.plan(0.0), [7 if ends else EOS])
        assert outcome.finish is FinishReason.STOP


def test_a_prefill_part_ends_with_its_first_token_and_keeps_its_pages() -> None:
    b = batcher()
    device = Device(b)
    b.add(sequence(1, [1] * 6, first_only=True, ignore_eos=True))
    b.ready((1, 0), 0)
    step = b.plan(0.0)
    (outcome,) = b.finish(step, device.execute(step))
    assert (outcome.finish, outcome.prefilled, outcome.index) == (None, True, 0)
    assert b.sequences[1, 0].state is State.FINISHED
    assert b.pool.referenced == 2
    b.remove((1, 0))
    b.remove((1, 0))
    assert b.pool.referenced == 0


def test_what_can_never_fit_is_refused_with_a_sentence() -> None:
    b = batcher(pages=2, max_positions=7, max_queue=1)
    with pytest.raises(TooLarge, match="7 positions"):
        b.add(sequence(1, [1] * 7))
    b = batcher(pages=2, max_queue=1)
    with pytest.raises(TooLarge, match="holds 8 in all"):
        b.add(sequence(1, [1] * 8))
    b.add(sequence(1, [1] * 8, first_only=True))
    with pytest.raises(QueueFull, match="try again"):
        b.add(sequence(2, [1]))
    with pytest.raises(ValueError, match="earlier attempts"):
        b.add(sequence(3, [1], max_tokens=2, generated_before=2))


def test_of_a_run_of_equal_decode_steps_one_is_observed() -> None:
    b = batcher(pages=20)
    for number in (1, 2):
        b.add(sequence(number, [number] * 6, max_tokens=20, ignore_eos=True))
        b.ready((number, 0), 0)
    device = Device(b)
    works = []
    for _ in range(12):
        step = b.plan(0.0)
        works.append(b.work(step))
        b.observe(works[-1], 0.25)
        b.finish(step, device.execute(step))
    # 8 tokens of the two prompts, then the other 4 beside the first one's decoding, then both decode.
    assert works[0] == (8, 21 + 3, 0, 0)
    assert works[1] == (4, 3 + 4 + 5 + 6, 1, 7)
    assert works[2] == (0, 0, 2, 8 + 7)
    assert works[-1] == (0, 0, 2, 17 + 16)
    assert b.cost.samples == 3
    assert b.running_context == 17 + 16
    assert b.queued_tokens == b.queue_seconds == 0


def test_the_queue_takes_as_long_as_its_steps_and_tokens() -> None:
    b = batcher(pages=20)
    b.add(sequence(1, [1] * 20))
    b.add(sequence(2, [2] * 6))
    step, token, context, _, _ = b.cost.fit().coefficients
    assert b.queue_seconds == pytest.approx(4 * step + 26 * token + (210 + 21) * context)
