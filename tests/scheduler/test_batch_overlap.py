"""Goal: with the next step planned while one is under way, everybody gets the tokens he would get without, and no page
is used by two.

Method: the fake device of test_batcher.py, which reads and writes as late as it may; random work is computed in both
ways, and what is dangerous is done by hand: who ends, goes or lacks a page while a step is under way.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.batcher import Batcher, Outcome, State, Step
from tests.scheduler.test_batcher import BLOCK, Device, batcher, next_token, run, sequence


class Overlapped:
    """The loop of a worker whose device computes beside it. answers: tokens by sequence, of steps that have ended."""

    def __init__(self, b: Batcher) -> None:
        self.batcher, self.device = b, Device(b)
        self.answers: dict[tuple[int, int], list[int]] = {}
        self.outcomes: list[Outcome] = []

    @property
    def under_way(self) -> list[Step]:
        return self.device.under_way

    def round(self) -> Step:
        """Plans and begins the next step, and ends the one before it; of nothing to plan, the one under way."""
        b = self.batcher
        step = b.plan(0.0)
        b.check()
        assert not (self.under_way and step.preempted)
        if step.slices:
            b.begin(step)
            self.under_way.append(step)
        for id in step.preempted:
            b.ready(id, 0)
        self.device.load(step.loads)
        if len(self.under_way) > bool(step.slices):
            self.end()
        return step

    def end(self) -> list[Outcome]:
        step = self.under_way.pop(0)
        outcomes = self.batcher.finish(step, self.device.execute(step))
        for outcome in outcomes:
            if outcome.token is not None:
                self.answers.setdefault(outcome.id, []).append(outcome.token)
        self.batcher.check()
        return outcomes

    def reap(self) -> None:
        for s in [s for s in self.batcher.sequences.values() if s.state is State.FINISHED]:
            self.batcher.remove(s.id)

    def run(self) -> None:
        for _ in range(2000):
            self.round()
            self.reap()
            if self.batcher.idle and not self.under_way:
                return
        raise AssertionError("it never ends")


def decoding(b: Batcher, prompt: int = BLOCK + 1, **more: int | bool) -> Overlapped:
    """A loop in which sequence 1 decodes, with a step under way."""
    loop = Overlapped(b)
    b.add(sequence(1, [1] * prompt, **{"ignore_eos": True, "max_tokens": 50} | more))  # type: ignore[arg-type]
    b.ready((1, 0), 0)
    while not loop.answers:
        loop.round()
    return loop


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 20), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    pages=st.integers(8, 24),
    width=st.integers(1, 4),
    budget=st.integers(1, 9),
)
def test_tokens_are_those_without_overlap(
    prompts: list[tuple[list[int], int, bool]], pages: int, width: int, budget: int
) -> None:
    def filled() -> Batcher:
        b = batcher(pages, max_tokens=budget, max_sequences=width)
        for number, (tokens, most, first_only) in enumerate(prompts):
            b.add(sequence(number, tokens, max_tokens=most, first_only=first_only))
            b.ready((number, 0), 0)
        return b

    loop = Overlapped(filled())
    loop.run()
    expected: dict[tuple[int, int], list[int]] = {}
    for number, (tokens, most, first_only) in enumerate(prompts):
        alone = batcher(pages, max_tokens=budget)
        alone.add(sequence(number, tokens, max_tokens=most, first_only=first_only))
        alone.ready((number, 0), 0)
        expected |= run(alone, Device(alone))
    assert loop.answers == expected
    assert loop.batcher.idle
    assert loop.batcher.pool.referenced == 0


def test_a_decoding_sequence_is_in_the_next_step_before_its_token_is_known() -> None:
    loop = decoding(batcher())
    length = len(loop.batcher.sequences[1, 0].tokens)
    (planned,) = loop.round().slices
    assert (planned.start, planned.count, planned.sample, planned.decodes) == (length, 1, True, True)
    assert len(loop.under_way) == 1


def test_chunks_of_a_prompt_follow_each_other() -> None:
    b = batcher(pages=20)
    b.add(sequence(1, [1] * 20, first_only=True))
    b.ready((1, 0), 0)
    loop = Overlapped(b)
    starts = [[(each.start, each.count, each.sample) for each in loop.round().slices] for _ in range(4)]
    assert starts == [[(0, 8, False)], [(8, 8, False)], [(16, 4, True)], []]
    # The prefill part ends by its first token: nothing was planned behind it.
    assert loop.answers == {(1, 0): [next_token([1] * 20)]}


def test_who_ends_by_length_is_in_no_step_too_many() -> None:
    loop = decoding(batcher(), max_tokens=4)
    counts = [len(loop.round().slices) for _ in range(4)]
    assert counts == [1, 1, 0, 0]
    assert len(loop.answers[1, 0]) == 4


def test_what_is_written_behind_an_end_is_told_to_nobody() -> None:
    """It ends by a token that was not foreseen, just where its last block would have become full by the step after."""
    b = batcher()
    loop = Overlapped(b)
    tokens = [1] * (2 * BLOCK - 2)
    b.add(sequence(1, tokens, max_tokens=50))
    b.sequences[1, 0].stops = frozenset([next_token(tokens)])
    b.ready((1, 0), 0)
    first = loop.round()
    second = loop.round()
    assert [len(step.slices) for step in (first, second)] == [1, 1]
    assert loop.answers == {(1, 0): [next_token(tokens)]}
    assert b.sequences[1, 0].state is State.FINISHED
    cached = b.pool.cached
    b.remove((1, 0))
    assert b.pool.referenced == 2  # until the step is over that writes there
    assert loop.end() == []
    assert b.pool.referenced == 0
    assert b.pool.cached == cached == 1


def test_pages_of_the_removed_are_not_reused_before_the_steps_under_way_end() -> None:
    b = batcher(pages=4)
    loop = decoding(b)  # one step is under way, which writes into pages of 1
    mine = set(b.sequences[1, 0].pages)
    loop.batcher.remove((1, 0))
    b.add(sequence(2, [2] * (3 * BLOCK)))
    b.ready((2, 0), 2 * BLOCK)
    assert b.plan(0.0).empty
    assert b.pool.free == 4 - len(mine)
    assert loop.end() == []
    assert b.pool.free == 4
    (load,) = b.plan(0.0).loads
    assert mine & {*load.pages}


def test_pages_wait_for_the_later_of_two_steps() -> None:
    b = batcher(pages=4)
    loop = decoding(b)
    step = b.plan(0.0)
    b.begin(step)
    loop.under_way.append(step)
    b.remove((1, 0))
    b.check()
    loop.end()
    assert b.pool.free < 4
    loop.end()
    assert b.pool.free == 4


def test_who_lacks_a_page_waits_until_nothing_is_under_way() -> None:
    """Only then is somebody preempted, and it is the youngest."""
    b = batcher(pages=5, max_sequences=2, max_tokens=16)
    loop = Overlapped(b)
    for number in (1, 2):
        b.add(sequence(number, [number] * (2 * BLOCK - 1), max_tokens=20, ignore_eos=True))
        b.ready((number, 0), 0)
    # Their prompts, and a token of each, fill two pages each; of the page that is left the first gets its third.
    assert [len(loop.round().slices) for _ in range(2)] == [2, 2]
    assert loop.round().empty
    assert not loop.under_way
    step = loop.round()
    assert step.preempted == [(2, 0)]
    assert [planned.id for planned in step.slices] == [(1, 0)]
    loop.run()
    # Then the space is full.
    assert {id: len(tokens) for id, tokens in loop.answers.items()} == {(1, 0): 14, (2, 0): 14}


def test_two_steps_at_most_and_in_order() -> None:
    b = batcher(pages=8)
    loop = decoding(b)
    step = b.plan(0.0)
    b.begin(step)
    with pytest.raises(ValueError, match="two steps"):
        b.begin(b.plan(0.0))
    with pytest.raises(ValueError, match="another step"):
        b.finish(step, [0])
    assert len(loop.under_way) == 1


def test_a_sequence_of_the_same_name_gets_nothing_of_the_one_before_it() -> None:
    b = batcher()
    loop = decoding(b)
    b.remove((1, 0))
    b.add(sequence(1, [2] * 5))
    b.ready((1, 0), 0)
    step = b.plan(0.0)
    b.begin(step)
    assert b.finish(loop.under_way.pop(), [0]) == []
    assert (b.sequences[1, 0].under_way, b.sequences[1, 0].coming) == (5, 1)
    (outcome,) = b.finish(step, loop.device.execute(step))
    assert outcome.token == next_token([2] * 5)
