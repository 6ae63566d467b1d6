"""Goal: the models of vLLM combine work in steps as that does. Method: small timelines by hand, and random loads run to
their end with the Batcher's own laws checked after every step."""

from __future__ import annotations

import math
import random
from itertools import count

import pytest

from pyengine.scheduler.batcher import Batcher, Sequence
from pyengine.scheduler.blocks import BlockPool
from pyengine.scheduler.sim.baselines import CHUNK_BUDGET, DISCIPLINES, Vllm, baseline, find_discipline
from pyengine.scheduler.sim.chains import chain
from pyengine.scheduler.types import Role, SamplingParams

BLOCK = 16
VLLMS = ("vllm", "vllm-pc", "vllm-cp")


def make(name: str, pages: int = 4000, max_sequences: int = 256) -> Batcher:
    return find_discipline(name)(
        BlockPool(pages, BLOCK),
        max_tokens=64,  # of the production Batcher; the others know their own
        max_sequences=max_sequences,
        max_queue=10_000,
        max_positions=40_000,
        eos=frozenset({0}),
        key_of=lambda parent, tokens: chain(parent, tokens[0]),
    )


def sequence(number: int, prompt: int, answer: int, family: int | None = None) -> Sequence:
    """Prompts of one family have the same blocks."""
    same = number if family is None else family
    keys: list[bytes] = []
    for index in range(prompt // BLOCK):
        keys.append(chain(keys[-1] if keys else bytes(16), same << 32 | index))
    return Sequence(
        id=(number, 0),
        tokens=[number] * prompt,
        prompt_tokens=prompt,
        keys=keys,
        root=bytes(16),
        sampling=SamplingParams(max_tokens=answer, ignore_eos=True),
    )


def add(batcher: Batcher, new: Sequence, available: int = 0) -> None:
    batcher.add(new)
    batcher.ready(new.id, available)


def step(batcher: Batcher) -> list[tuple[int, int, int]]:
    """Plans and computes one; returns (number, start, count) of its slices."""
    planned = batcher.plan(0.0)
    assert not planned.loads
    for id in planned.preempted:
        batcher.ready(id, 0)
    found = [(slice.id[0], slice.start, slice.count) for slice in planned.slices]
    for outcome in batcher.finish(planned, [1 if slice.sample else -1 for slice in planned.slices]):
        if outcome.finish is not None:
            batcher.remove(outcome.id)
    batcher.check()
    return found


def test_prompts_stop_answers() -> None:
    batcher = make("vllm")
    add(batcher, sequence(1, 100, 4))
    assert step(batcher) == [(1, 0, 100)]
    assert step(batcher) == [(1, 100, 1)]
    add(batcher, sequence(2, 3000, 3))
    add(batcher, sequence(3, 50, 3))
    assert step(batcher) == [(2, 0, 3000), (3, 0, 50)], "whole, together, and no answer goes on"
    assert step(batcher) == [(1, 101, 1), (2, 3000, 1), (3, 50, 1)]


def test_prompts_that_do_not_fit_a_step_wait_for_the_next() -> None:
    batcher = make("vllm")
    for number, prompt in enumerate((30_000, 20_000, 10)):
        add(batcher, sequence(number, prompt, 2))
    assert step(batcher) == [(0, 0, 30_000)], "nobody overtakes the second, who would make it longer than 40,000"
    assert step(batcher) == [(1, 0, 20_000), (2, 0, 10)]
    assert step(batcher) == [(0, 30_000, 1), (1, 20_000, 1), (2, 10, 1)]


def test_chunks_run_beside_answers() -> None:
    batcher = make("vllm-cp")
    add(batcher, sequence(1, 100, 9))
    step(batcher)
    add(batcher, sequence(2, 3000, 3))
    add(batcher, sequence(3, 2000, 3))
    assert step(batcher) == [(1, 100, 1), (2, 0, CHUNK_BUDGET - 1)]
    assert step(batcher) == [(1, 101, 1), (2, 2047, 953), (3, 0, CHUNK_BUDGET - 954)]
    assert step(batcher) == [(1, 102, 1), (2, 3000, 1), (3, 1094, 906)]


@pytest.mark.parametrize(("name", "computed"), [("vllm", 330), ("vllm-pc", 10), ("vllm-cp", 330)])
def test_who_reuses_prefixes(name: str, computed: int) -> None:
    batcher = make(name)
    add(batcher, sequence(1, 330, 1, family=7))
    assert step(batcher) == [(1, 0, 330)]
    # What a pool beside the pages has is nobody's here.
    add(batcher, sequence(2, 330, 1, family=7), available=320)
    assert step(batcher) == [(2, 330 - computed, computed)]


@pytest.mark.parametrize("name", VLLMS)
def test_the_limit_of_sequences(name: str) -> None:
    batcher = make(name, max_sequences=2)
    for number in range(3):
        add(batcher, sequence(number, 20, 2))
    assert step(batcher) == [(0, 0, 20), (1, 0, 20)]
    assert step(batcher) == [(0, 20, 1), (1, 20, 1)]
    assert step(batcher) == [(2, 0, 20)]


@pytest.mark.parametrize("name", ["vllm", "vllm-cp"])
def test_who_was_preempted_computes_all_of_it_again(name: str) -> None:
    """Two answers outgrow 9 pages: the younger one gives its pages up, and comes back when the older one has ended."""
    batcher = make(name, pages=9)
    add(batcher, sequence(1, 40, 60))
    add(batcher, sequence(2, 40, 60))
    seen = [step(batcher) for _ in range(200)]
    again = [slice for slices in seen for slice in slices if slice[0] == 2 and slice[2] > 1]
    assert again[0] == (2, 0, 40) and len(again) == 2
    assert again[1][1] == 0 and again[1][2] > 40
    assert batcher.idle


@pytest.mark.parametrize("name", VLLMS)
@pytest.mark.parametrize("seed", range(2))
def test_everybody_ends_in_order(name: str, seed: int) -> None:
    draw = random.Random(seed)
    batcher = make(name, pages=200, max_sequences=8)
    begun: list[int] = []
    total = 40
    waiting = count()
    for _ in range(20_000):
        number = next(waiting) if draw.random() < 0.1 else total
        if number < total:
            add(batcher, sequence(number, draw.randint(1, 900), draw.randint(1, 60), family=number % 4))
        found = step(batcher)
        assert sum(size for _, _, size in found) <= batcher.max_tokens
        if name != "vllm-cp":
            assert len({size > 1 for _, start, size in found if start}) < 2 or found == [], "prompts beside answers"
        begun += [number for number, start, _ in found if number not in begun]
        if len(begun) == total and batcher.idle:
            break
    assert begun == sorted(begun) and len(begun) == total, "somebody overtook"
    assert batcher.idle and not batcher.pool.referenced


@pytest.mark.parametrize("name", VLLMS)
def test_runs_of_equal_steps_are_the_same_steps(name: str) -> None:
    """What fast-forward does: `run` instead of as many rounds of `plan` and `finish`; one waits for pages meanwhile."""
    slow, fast = make(name, pages=40), make(name, pages=40)
    for batcher in (slow, fast):
        for number in range(3):
            add(batcher, sequence(number, 33 + number, 50))
        for turn in range(3):
            if turn:
                add(batcher, sequence(2 + turn, 600, 2))
            planned = batcher.plan(0.0)
            batcher.observe(batcher.work(planned), 0.01)
            batcher.finish(planned, [1] * len(planned.slices))
    length = fast.run_length()
    assert length > 1
    fast.run(length, 1)
    for _ in range(length):
        assert len(step(slow)) == 3
    fast.check()
    for id, one in slow.sequences.items():
        other = fast.sequences[id]
        assert (one.tokens, one.computed, one.pages) == (other.tokens, other.computed, other.pages)
    assert step(slow) == step(fast)


def test_names() -> None:
    assert set(DISCIPLINES) == {"ours", "first-come", *VLLMS}
    assert find_discipline("ours") is Batcher
    with pytest.raises(ValueError, match=r"no discipline 'vllm-chunk'.*did you mean 'vllm"):
        find_discipline("vllm-chunk")
    spec = baseline("vllm-cp", 16, model="llama3-70b-a800", block_tokens=512)
    assert (spec.role, spec.count, spec.pages, spec.max_sequences) == (Role.BOTH, 16, 2597, 256)
    with pytest.raises(ValueError, match="no baseline"):
        baseline("ours", 1, model="x", block_tokens=16)
    with pytest.raises(ValueError, match="no discipline 'x'"):
        baseline("x", 1, model="x", block_tokens=16)
    assert Vllm.budget(100) == 2048


def test_first_come_knows_no_objectives() -> None:
    """A long prompt that was promised nothing, then short ones that were promised much: computed as they came."""
    done: dict[str, list[int]] = {"ours": [], "first-come": []}
    for name, order in done.items():
        batcher = make(name)
        for number, (length, ttft) in enumerate([(200, math.inf), (20, 1.0), (10, 1.0)]):
            new = sequence(number, length, 4)
            new.ttft, new.priority, new.tenant = ttft, number, number
            batcher.add(new)
            batcher.ready(new.id, 0)
        while len(order) < 3:
            step = batcher.plan(0.0)
            outcomes = batcher.finish(step, [1 if each.sample else -1 for each in step.slices])
            order += [outcome.id[0] for outcome in outcomes if outcome.prefilled]
    assert done == {"ours": [2, 1, 0], "first-come": [0, 1, 2]}
