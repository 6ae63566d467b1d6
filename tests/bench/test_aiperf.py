"""Goal: aiperf is given the head of a trace as it is meant: lengths scaled, prefixes shared, and a tokenizer where it
looks for one. Method: rows made by hand and the real trace's format; aiperf itself is run by hand (docs/replay.md).
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.aiperf import BLOCK, COMMIT, FIGURES, STATISTICS, TOKENIZER, report, scaled, tokenizer_cache


@pytest.mark.parametrize("block", [1, 8, 16, 512])
def test_a_head_is_scaled_with_its_prefixes(tmp_path: Path, block: int) -> None:
    rows: list[dict[str, Any]] = [
        {"timestamp": 0, "input_length": 1300, "output_length": 100, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]},
        {"timestamp": 6000, "input_length": 5, "output_length": 700, "hash_ids": [9]},
        {"timestamp": 9000, "input_length": 5, "output_length": 700, "hash_ids": [9]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    head = list(scaled(trace, 3, block, 0.5))
    assert [row["timestamp"] for row in head] == [0, 6000, 12000]
    for made, row in zip(head, rows, strict=False):
        assert made["input_length"] == max(1, row["input_length"] * block // BLOCK)
        assert made["output_length"] == max(1, row["output_length"] * block // BLOCK)
        # As aiperf checks it: all blocks but the last are full.
        assert (len(made["hash_ids"]) - 1) * block < made["input_length"] <= len(made["hash_ids"]) * block
        assert made["hash_ids"] == row["hash_ids"][: len(made["hash_ids"])]
    assert all(earlier["timestamp"] <= later["timestamp"] for earlier, later in pairwise(head))


def test_a_cache_has_the_tokenizer_where_aiperf_looks_for_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    cache = tokenizer_cache(model, tmp_path / "cache")
    folder = cache / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    assert (folder / "refs" / "main").read_text() == COMMIT
    assert (folder / "snapshots" / COMMIT / "tokenizer.json").read_text() == "{}"


def test_figures_stand_beside_each_other_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    theirs: dict[str, Any] = {name: dict.fromkeys(STATISTICS, 200.0) for name in FIGURES}
    theirs |= {
        "request_count": {"avg": 3.0},
        "error_request_count": {"avg": 1.0},
        "output_token_throughput": {"avg": 10},
    }
    ours: dict[str, Any] = {"failed": 2, "output_throughput": 20.0}
    ours["spreads"] = {name: dict.fromkeys(STATISTICS, 0.1) for name in FIGURES.values()}
    assert report([theirs], [ours]) == 3.0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["failed"] == 1.0 and lines[0]["failed_of_ours"] == 2.0
    assert {(line["value"], line["ours"], line["ratio"]) for line in lines[1:-1]} == {(0.2, 0.1, 0.5)}
    assert lines[-1]["ratio"] == 2.0 and len(lines) == 2 + len(FIGURES) * len(STATISTICS)
