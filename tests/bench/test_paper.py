"""Goal: what `make paper` prints follows from what was run. Method: verdicts beside their definitions, complete facts,
and the harness itself on the generated trace, which needs no files.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.paper import caches, cases, targets
from bench.paper.figure import Figure
from bench.paper.figures import FIGURES, needed
from bench.paper.runs import Outcome, Store, carry_out, run
from bench.paper.tables import Row, Table, document
from bench.paper.traces import QUICK, Traces
from pyengine.scheduler.sim.specfile import check_cluster

ROOT = Path(__file__).parents[2]
GENERATED = Traces(None, quick=True)


@pytest.fixture(scope="module")
def split() -> tuple[Figure, dict[cases.Case, Outcome]]:
    """A figure whose runs are over in seconds."""
    (figure,) = (make() for make in FIGURES if make().name == "split")
    return figure, dict(carry_out(figure.cases, GENERATED, processes=1))


@pytest.mark.parametrize(
    ("ours", "paper", "verdict"),
    [
        (1.09, 1.0, "reproduced"),
        (1.0, 1.09, "reproduced"),
        (1.11, 1.0, "near"),
        (1.0, 1.25, "near"),
        (1.26, 1.0, "differs"),
        (1.0, 1.26, "differs"),
        (0.0, 1.0, "differs"),
        (0.5, -0.5, "differs"),
        (-0.5, -0.5, "reproduced"),
        (math.nan, 1.0, "differs"),
        (math.inf, 1.0, "differs"),
        (1.0, None, "-"),
    ],
)
def test_a_verdict_is_the_larger_as_a_multiple_of_the_smaller(ours: float, paper: float | None, verdict: str) -> None:
    assert Row("a", ours, paper, "s").verdict == verdict


def test_what_does_not_match_is_said_first() -> None:
    good, bad = (
        Table("good", "What agrees", "", remarks=["why not"]),
        Table("bad", "What does not", "", remarks=["why"]),
    )
    good.add("fine", 1.0, 1.0, "s")
    bad.add("off", 3.0, 1.0, "s")
    bad.add("near", 1.2, 1.0, "s")
    bad.add("ours alone", 1.0, None, "s")
    text = document([good, bad], "# Head\n")
    first = text.index("**What does not**: off (3)")
    assert first < text.index("## What agrees")
    assert "**What agrees**" not in text
    assert "Of 3 values 1 are reproduced (within 10%), 1 are near (within 25%), 1 differ." in text
    assert "| off | 1 s | 3 s | 3 | differs |" in text
    assert "| ours alone | - | 1 s | - | - |" in text
    bad.forget_paper()
    assert {row.verdict for row in bad.rows} == {"-"}


def test_the_papers_facts_are_complete() -> None:
    for facts in (targets.TBT_SHARE, targets.PREFILL_SECONDS):
        assert list(facts) == list(targets.WORKLOADS)
        assert all(set(systems) == set(targets.SYSTEMS) for systems in facts.values())
    for systems in targets.TBT_SHARE.values():
        for shares in systems.values():
            assert len(shares) == len(targets.TBTS_MS)
            assert list(shares) == sorted(shares)
            assert 0 < min(shares) <= max(shares) <= 100
    # The headline is made of the shares: 96.6 / 16.1 is 500 % more, less rounding.
    mooncake, plain = (targets.TBT_SHARE["conversation"][name] for name in ("mooncake", "vllm"))
    gains = [100 * (ours / theirs - 1) for ours, theirs in zip(mooncake, plain, strict=True)]
    assert gains == pytest.approx(targets.GAIN["conversation"], rel=0.01)
    assert all(sum(pair) == cases.NODES for pair in targets.SPLIT)


def test_every_case_can_be_run_and_has_the_same_nodes() -> None:
    figures = [make() for make in FIGURES]
    assert len({figure.name for figure in figures}) == len(figures)
    for case in needed(figures):
        check_cluster(case.cluster)
        assert case.cluster.block_tokens == cases.BLOCK
        assert case.cluster.node.dram_tokens == cases.DRAM_TOKENS
        for worker in case.cluster.workers:
            assert worker.pages == cases.KV_TOKENS // cases.BLOCK
            assert worker.max_sequences == 256
    # A case that several figures need is run once.
    assert len(needed(figures)) < sum(len(figure.cases) for figure in figures)


def test_a_trace_is_what_its_case_says() -> None:
    plain = list(GENERATED.requests(cases.Trace("conversation")))
    assert len(plain) == QUICK
    assert {row.tenant for row in plain} == {""}
    twice = list(GENERATED.requests(cases.Trace("conversation", repeat=2, speed=2.0, limit=QUICK + 50, output=1)))
    assert len(twice) == QUICK + 50
    assert {row.output_tokens for row in twice} == {1}
    assert [row.arrival * 2 for row in twice[:QUICK]] == pytest.approx([row.arrival for row in plain])
    assert twice[QUICK].arrival > twice[QUICK - 1].arrival
    first, again = ([row.blocks for row in rows] for rows in (plain[:50], twice[QUICK:]))
    known = {key for blocks in first for key in blocks}
    assert known and not known & {key for blocks in again for key in blocks}
    # What a round's prompts share with each other is the same.
    renamed = dict(zip((k for b in first for k in b), (k for b in again for k in b), strict=True))
    assert [tuple(renamed[key] for key in blocks) for blocks in first] == again
    assert not any(row.blocks for row in GENERATED.requests(cases.Trace("conversation", shared=False)))


def test_runs_are_repeatable_and_their_tables_follow(
    split: tuple[Figure, dict[cases.Case, Outcome]], tmp_path: Path
) -> None:
    figure, outcomes = split
    case = figure.cases[0]
    assert run(case, GENERATED).digest == outcomes[case].digest
    table = figure.make(outcomes, tmp_path)
    assert len(table.rows) == 3 * len(targets.SPLIT)
    assert [row.paper for row in table.rows[:3]] == list(targets.SPLIT[5, 11])
    outcome = outcomes[case]
    assert table.rows[0].ours == pytest.approx(np.mean(outcome.records.ttft))
    kept = (outcome.records.ttft <= 10.0) & (outcome.decode_tbt <= 0.1)
    assert table.rows[2].ours == pytest.approx(100 * np.mean(kept))
    assert table.plot is not None and (tmp_path / table.plot).stat().st_size < 200_000


def test_the_hand_off_is_the_gap_that_is_left_out(split: tuple[Figure, dict[cases.Case, Outcome]]) -> None:
    _, outcomes = split
    outcome = next(iter(outcomes.values()))
    records = outcome.records
    # Two tokens are one gap, the hand-off: nothing is left. Of few the longest is what counts, mostly that one.
    two = records.output_tokens == 2
    few = (records.output_tokens > 2) & (records.output_tokens <= 10) & (records.second_gap > records.tbt_mean)
    assert two.any() and few.any()
    assert not outcome.decode_tbt[two].any()
    assert (records.tbt[few] == records.second_gap[few]).all()
    assert (outcome.decode_tbt[few] < records.tbt[few]).all()
    both = cases.Case(cases.Trace("conversation"), cases.coupled("vllm", cases.MODELS["single"]), cases.SPREAD)
    alone = run(both, GENERATED)
    assert np.array_equal(alone.decode_tbt, alone.records.tbt), "nobody hands anything off there"


def test_what_is_kept_is_found_again_by_the_same_case_and_traces_only(
    split: tuple[Figure, dict[cases.Case, Outcome]], tmp_path: Path
) -> None:
    _, outcomes = split
    case, outcome = next(iter(outcomes.items()))
    store = Store(tmp_path, GENERATED)
    assert store.find(case) is None
    store.put(case, outcome)
    found = store.find(case)
    assert found is not None and found.digest == outcome.digest
    assert store.find(replace(case, trace=cases.Trace("synthetic", speed=2.0))) is None
    assert Store(tmp_path, Traces(None)).find(case) is None
    (kept,) = carry_out([case], GENERATED, processes=1, kept=tmp_path)
    assert kept[1].seconds == outcome.seconds, "it was not run again"


def test_pools_of_the_generated_trace_hit_more_the_larger_they_are() -> None:
    curve, table = caches.tables(GENERATED)
    rates = [row.ours for row in curve.rows if row.case.startswith("conversation")]
    assert rates == sorted(rates) and rates[-1] > 0
    endless = [row.ours for row in table.rows if row.case.endswith("endless")]
    assert endless == [1.0] * 6


def test_the_command_says_what_it_lacks(tmp_path: Path) -> None:
    def paper(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bench.paper", "--traces", str(tmp_path), "--docs", str(tmp_path), *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    unknown = paper("--only", "tables")
    assert unknown.returncode == 2
    assert "there is no figure 'tables': known are tbt, " in unknown.stderr
    trial = paper("--only", "caches", "--quick")
    assert trial.returncode == 0
    assert "a generated one stands for each, nothing is compared" in trial.stderr
    lines = [json.loads(line) for line in trial.stdout.splitlines()]
    assert all("verdict" not in line and line["bench"] == "paper" for line in lines)
    assert not (tmp_path / "paper.md").exists()
