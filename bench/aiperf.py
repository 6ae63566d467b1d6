"""The head of a trace, its lengths scaled, replayed by aiperf and by `pyengine bench` against one server, in turns.

    make peers; make serve                        # once; and the server, in another terminal
    python -m bench.aiperf TRACE                  # Mooncake's JSONL, as conversation_trace.jsonl

aiperf (in .venv-peers, by `make peers`) is NVIDIA's client: a stranger to this server, so that it runs at all says that
the API is what clients expect. Both send the same arrivals, lengths and shared prefixes; the texts are each one's own.
Prints one JSON object a line: a figure of aiperf, against ours, ratio ours to aiperf's (1: they agree). Requests that
failed are counted in a line too, and make the exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.common import line, median, note
from pyengine import env
from pyengine.checkpoint import SMOLLM2, resolve

AIPERF = Path(__file__).parents[1] / ".venv-peers" / "aiperf" / "bin" / "aiperf"
#: Tokens of a block of Mooncake's traces.
BLOCK = 512
#: Statistics that are compared.
STATISTICS = ("avg", "p50", "p90", "p99")
#: A figure: as aiperf calls it, in milliseconds, and as `pyengine bench --json` does, in seconds.
FIGURES = {
    "time_to_first_token": "ttft",
    "time_to_second_token": "ttst",
    "inter_token_latency": "itl",
    "inter_chunk_latency": "icl",
    "request_latency": "latency",
}
#: How aiperf calls the tokenizer: its workers look for tokenizers in a cache of Hugging Face's only, so it gets one of
#: its own with nothing else in it, and no network is asked.
TOKENIZER, COMMIT = "local/tokenizer", "0" * 40
PARTS = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2", help="as the server calls it")
    parser.add_argument("--tokenizer", default=SMOLLM2, help="a model whose tokenizer makes aiperf's prompts")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--scale", type=float, default=1 / 32, help="of lengths")
    parser.add_argument("--speed", type=float, default=0.25, help="how many times faster than in the trace")
    parser.add_argument("--rounds", type=int, default=1, help="each client's turns; the figures are of the median one")
    arguments = parser.parse_args()
    if not AIPERF.is_file():
        print(f"{AIPERF} is not there: make peers", file=sys.stderr)
        return 2
    block = round(BLOCK * arguments.scale)
    if block < 1 or not 0 < arguments.scale <= 1:
        print("--scale is a share of each length, from 1/512 to 1", file=sys.stderr)
        return 2
    model = resolve(arguments.tokenizer, env.read().state_dir / "models").folder
    with tempfile.TemporaryDirectory(prefix="aiperf-") as name:
        folder = Path(name)
        head = folder / "head.jsonl"
        rows = list(scaled(arguments.trace, arguments.requests, block, arguments.speed))
        head.write_text("".join(json.dumps(row) + "\n" for row in rows))
        cache = tokenizer_cache(model, folder / "cache")
        theirs, ours = [], []
        for turn in range(arguments.rounds):
            note(f"round {turn + 1} of {arguments.rounds}: aiperf, then pyengine bench")
            theirs.append(by_aiperf(arguments, head, block, cache, folder / f"round-{turn}"))
            ours.append(by_bench(arguments))
    failed = report(theirs, ours)
    return 1 if failed else 0


def scaled(trace: Path, count: int, block: int, speed: float) -> Iterator[dict[str, Any]]:
    """Rows of Mooncake's format with `block` tokens where it has BLOCK."""
    with trace.open() as lines:
        for _, text in zip(range(count), lines, strict=False):
            row = json.loads(text)
            length = max(1, row["input_length"] * block // BLOCK)
            yield {
                "timestamp": row["timestamp"] / speed,
                "input_length": length,
                "output_length": max(1, row["output_length"] * block // BLOCK),
                "hash_ids": row["hash_ids"][: -(-length // block)],
            }


def tokenizer_cache(model: Path, cache: Path) -> Path:
    """A cache as Hugging Face's libraries have it (models--OWNER--NAME/snapshots/COMMIT), with a model's tokenizer."""
    made = cache / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    snapshot = made / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for part in PARTS:
        if (model / part).is_file():
            (snapshot / part).symlink_to(model / part)
    (made / "refs").mkdir()
    (made / "refs" / "main").write_text(COMMIT)
    return cache


def by_aiperf(arguments: argparse.Namespace, head: Path, block: int, cache: Path, folder: Path) -> dict[str, Any]:
    """aiperf's figures, in its own layout. Raises SystemExit with the end of its log if it fails."""
    command = [
        *(str(AIPERF), "profile", "--model", arguments.model, "--url", arguments.url),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", TOKENIZER),
        *("--input-file", str(head), "--custom-dataset-type", "mooncake-trace", "--fixed-schedule"),
        *("--isl-block-size", str(block), "--extra-inputs", "ignore_eos:true"),
        *("--random-seed", "1", "--output-artifact-dir", str(folder), "--ui", "none"),
    ]
    note(f"HF_HOME={cache} HF_HUB_OFFLINE=1 {shlex.join(command)}")
    environment = {**os.environ, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True, check=False)
    made = next(iter(folder.rglob("profile_export_aiperf.json")), None)
    if run.returncode or made is None:
        raise SystemExit(f"aiperf failed ({run.returncode}):\n{(run.stdout + run.stderr)[-4000:]}")
    figures: dict[str, Any] = json.loads(made.read_text())
    return figures


def by_bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of `pyengine bench` with the same head."""
    command = [
        *(sys.executable, "-m", "pyengine", "bench", arguments.url, "--model", arguments.model, "--json"),
        *("--trace", str(arguments.trace), "--requests", str(arguments.requests)),
        *("--scale", str(arguments.scale), "--speed", str(arguments.speed)),
    ]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    figures: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        figures = json.loads(run.stdout)
    if not figures:
        raise SystemExit(f"pyengine bench failed ({run.returncode})")
    return figures


def report(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> float:
    """The medians over rounds. Returns how many requests failed."""
    failed = sum(float(each.get("error_request_count", {}).get("avg", 0.0)) for each in theirs)
    missed = sum(float(each["failed"]) for each in ours)
    done = sum(each["request_count"]["avg"] for each in theirs)
    line("aiperf", "requests", done, "answered", failed=failed, failed_of_ours=missed)
    for name, own in FIGURES.items():
        for statistic in STATISTICS:
            their = median([each[name][statistic] / 1000.0 for each in theirs])
            our = median([each["spreads"][own][statistic] for each in ours])
            case = f"{name.replace('_', ' ')} {statistic}"
            line("aiperf", case, their, "s", against="pyengine bench", ratio=our / their, ours=our)
    their = median([each["output_token_throughput"]["avg"] for each in theirs])
    our = median([each["output_throughput"] for each in ours])
    line("aiperf", "output throughput", their, "tokens/s", against="pyengine bench", ratio=our / their, ours=our)
    return failed + missed


if __name__ == "__main__":
    sys.exit(main())
