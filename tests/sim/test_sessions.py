"""Goal: generated traces have what they were asked for. Method: statistics against the parameters, prefixes by walking
them, and the reconstruction against what is known of the trace that it stands for."""

from __future__ import annotations

import math
from itertools import islice

import pytest

from pyengine.scheduler.sim.sessions import AGENT, CHAT, Kind, Lengths, sessions, tool_agent
from pyengine.scheduler.sim.trace import Request, TraceError

FIXED = Kind(
    name="fixed", share=1, system=40, first=Lengths(mean=24), turn=Lengths(mean=10), output=Lengths(mean=6), turns=3.0
)


def test_turns_continue_their_session() -> None:
    """Lengths without spread: turn k has 64 + 16 k tokens. Two prompts share the system's 2 full blocks, or all of the
    shorter one."""
    requests = list(sessions([FIXED], rate=5.0, seed=1, block_tokens=16).limit(300))
    assert {(row.prompt_tokens - 64) % 16 for row in requests} == {0}
    assert {row.output_tokens for row in requests} == {6} and {row.tenant for row in requests} == {"fixed"}
    latest: dict[bytes, Request] = {}
    for row in requests:
        assert len(row.blocks) == row.prompt_tokens // 16
        assert row.blocks[:2] == requests[0].blocks[:2]
        before = latest.get(row.blocks[3])
        if before is None:
            assert row.prompt_tokens == 64, "a session begins with its first turn"
        else:
            assert row.prompt_tokens == before.prompt_tokens + 16 and row.blocks[:-1] == before.blocks
        latest[row.blocks[3]] = row
    keys = [key for row in latest.values() for key in row.blocks[2:]]
    assert len(keys) == len(set(keys)), "sessions share more than the system prompt"


def test_statistics_are_those_asked_for() -> None:
    requests = list(sessions(rate=8.0, seed=3).duration(1000.0))
    assert [row.arrival for row in requests] == sorted(row.arrival for row in requests)
    assert len(requests) / 1000.0 == pytest.approx(8.0, rel=0.1)
    for kind in (CHAT, AGENT):
        own = [row for row in requests if row.tenant == kind.name]
        assert len(own) / len(requests) == pytest.approx(kind.share, abs=0.05)
        assert sum(row.output_tokens for row in own) / len(own) == pytest.approx(kind.output.mean, rel=0.1)
        assert min(row.prompt_tokens for row in own) > kind.system
        assert max(row.prompt_tokens for row in own) <= kind.longest


def test_same_seed_same_trace() -> None:
    trace = sessions(rate=2.0, seed=5).limit(50)
    assert list(trace) == list(trace) == list(sessions(rate=2.0, seed=5).limit(50))
    assert list(trace) != list(sessions(rate=2.0, seed=6).limit(50))
    assert "seed 5" in trace.description and "chat" in trace.description


def test_first_prompts_are_cut_at_the_longest() -> None:
    kind = Kind(name="x", share=1, system=10, first=Lengths(mean=500), output=Lengths(mean=1), turns=9.0, longest=100)
    rows = list(islice(sessions([kind], rate=1.0, seed=0), 20))
    assert {row.prompt_tokens for row in rows} == {100}


def test_the_reconstruction_is_like_the_trace() -> None:
    """Stated of the original: 23,608 requests, mean prompt 8,596 and answer 182 tokens, 59 % of the blocks hit an
    endless cache; digitised: 1.116 s of mean prefill without a cache on the paper's hardware."""
    trace = tool_agent(seed=0)
    assert "RECONSTRUCTION" in trace.description
    count = prompt = output = hits = blocks = 0
    seconds = 0.0
    seen: set[bytes] = set()
    for row in trace:
        count += 1
        prompt += row.prompt_tokens
        output += row.output_tokens
        seconds += 0.0441 + 1.106e-4 * row.prompt_tokens + 7.58e-10 * row.prompt_tokens**2
        blocks += len(row.blocks)
        hits += next((at for at, key in enumerate(row.blocks) if key not in seen), len(row.blocks))
        seen.update(row.blocks)
    assert count == pytest.approx(23_608, rel=0.03)
    assert prompt / count == pytest.approx(8_596, rel=0.05)
    assert output / count == pytest.approx(182, rel=0.05)
    assert hits / blocks == pytest.approx(0.59, abs=0.03)
    assert seconds / count == pytest.approx(1.116, rel=0.1)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_bad_rates(rate: float) -> None:
    with pytest.raises(TraceError, match="rate above 0"):
        sessions(rate=rate, seed=0)


def test_bad_kinds() -> None:
    with pytest.raises(TraceError, match="need a kind"):
        sessions([], rate=1.0, seed=0)
    with pytest.raises(TraceError, match="'x' are impossible"):
        Kind(name="x", share=0, system=1, first=Lengths(mean=1), output=Lengths(mean=1))
    with pytest.raises(TraceError, match="impossible"):
        Kind(name="x", share=1, system=100, first=Lengths(mean=1), output=Lengths(mean=1), longest=100)
