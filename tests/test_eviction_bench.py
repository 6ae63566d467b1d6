"""Goal: the figures of `bench/eviction.py` mean what it says. Method: random prefixes, beside the definitions."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.eviction import Trace, belady, judge, prefill, replay
from pyengine._native import EVICTION_POLICIES

ROOT = Path(__file__).parents[1]


def random_trace(seed: int, requests: int, length: int) -> Trace:
    """Prompts that mostly continue an earlier one."""
    random = np.random.default_rng(seed)
    prompts: list[list[int]] = []
    fresh = itertools.count()
    for _ in range(requests):
        old = prompts[int(random.integers(len(prompts)))] if prompts and random.random() < 0.7 else []
        prompt = old[: int(random.integers(len(old) + 1))]
        prompts.append(prompt + [next(fresh) for _ in range(length - len(prompt))])
    return Trace("random", [np.array(prompt, np.uint64) for prompt in prompts], [512 * length] * requests)


def best(trace: Trace, capacity: int) -> int:
    """The most hits there can be, by trying all that can be kept."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for blocks in (row.tolist() for row in trace.blocks):
        following: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            found = next((at for at, block in enumerate(blocks) if block not in kept), len(blocks))
            for size in range(capacity + 1):
                for choice in itertools.combinations(sorted(kept | set(blocks)), size):
                    state = frozenset(choice)
                    following[state] = max(following.get(state, 0), hits + found)
        states = following
    return max(states.values())


@pytest.mark.parametrize("seed", range(8))
def test_belady_is_the_best_there_is(seed: int) -> None:
    trace = random_trace(seed, requests=6, length=3)
    for capacity in (1, 2, 3, 4):
        hits = belady(trace, capacity).hit_rate * sum(map(len, trace.blocks))
        assert hits == pytest.approx(best(trace, capacity)), capacity


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_no_policy_beats_it_and_all_are_equal_without_limit(policy: str) -> None:
    trace = random_trace(1, requests=400, length=12)
    endless = belady(trace, math.inf)
    assert replay(trace, policy, math.inf) == endless
    rates = [replay(trace, policy, capacity).hit_rate for capacity in (20, 100, 400)]
    limits = [belady(trace, capacity).hit_rate for capacity in (20, 100, 400)]
    assert all(0 < rate <= limit < endless.hit_rate for rate, limit in zip(rates, limits, strict=True))


def test_seconds_saved() -> None:
    trace = Trace("two", [np.array([1, 2], np.uint64), np.array([1, 2], np.uint64)], [600, 600])
    result = judge(trace, [0, 2])
    assert result.hit_rate == 0.5
    # The last token is computed, though its block is there.
    assert result.token_rate == 599 / 1200
    assert result.saved == pytest.approx(prefill(600, 0) - prefill(600, 599))
    # A figure of the paper: 16k tokens on eight A800 take 2.056 s.
    assert prefill(16384, 0) == pytest.approx(2.056, rel=0.02)


def test_without_traces_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.eviction", "--traces", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout == "" and run.stderr.count("left out") == 3

    row = {"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [0, 1]}
    (tmp_path / "conversation_trace.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    run = subprocess.run([*command, "--quick"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    lines = [json.loads(each) for each in run.stdout.splitlines()]
    endless = [each for each in lines if each["case"] == "conversation lru endless hits"]
    assert [(each["value"], each["ratio"]) for each in endless] == [(pytest.approx(4 / 6, rel=1e-3), 1.0)]
