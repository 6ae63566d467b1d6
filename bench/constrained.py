"""What it costs a decode step that its answers are held to a grammar.

SmolLM2 in float32 on PyTorch: two workers with batches of the same prompts, one free and one held to a JSON schema
whose answers do not end while they are measured. They take turns, a few steps each, with all that the loop does for a
step: the matchers take the last tokens, the masks are made and applied, the choice is made.

Prints one JSON object a line: milliseconds of a constrained step, the median turn's; `ratio` to `free` (below 1: the
constrained one is slower), and the same as per cent that it takes more.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from bench.common import PAUSE, line, median
from bench.loop import Loop, answers
from pyengine import env
from pyengine.backends import load_backend
from pyengine.checkpoint import SMOLLM2
from pyengine.scheduler.types import Grammar, SamplingParams

#: Records without an end, of all that schemas are usually made of.
SCHEMA = {
    "type": "array",
    "minItems": 4000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "kind": {"enum": ["river", "mountain", "city", "island"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 9999},
            "height": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "kind", "age", "height", "tags"],
        "additionalProperties": False,
    },
}
#: Steps of either kind before any is counted, and in a turn.
WARM, TURN = 8, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps: half a minute")
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=env.read().state_dir / "models", help="converted models")
    arguments = parser.parse_args()
    steps = 96 if arguments.quick else 384

    def loop(batch: int, sampling: SamplingParams) -> Loop:
        backend = load_backend(
            "torch", arguments.model, cache=arguments.cache, threads=arguments.threads, dtype="float32"
        )
        return Loop(backend, batch, sampling, pooled=False)

    length = steps + WARM + 16
    held = SamplingParams(temperature=0.0, max_tokens=length, grammar=Grammar("json_schema", json.dumps(SCHEMA)))
    for batch in (1, 16):
        loops = [loop(batch, answers(length)), loop(batch, held)]
        free, constrained = in_turns(loops, steps)
        for each in loops:
            each.close()
        line(
            "constrained",
            f"decode batch {batch}",
            constrained * 1e3,
            "ms a step",
            against="free",
            ratio=free / constrained,
            more_percent=(constrained / free - 1) * 100,
        )


def in_turns(loops: Sequence[Loop], steps: int) -> tuple[float, ...]:
    """Seconds of a step of each, the median turn's. Raises RuntimeError if a batch did not decode as a whole."""
    for each in loops:
        for _ in range(WARM):
            each.round()
    turns: list[list[float]] = [[] for _ in loops]
    for _ in range(steps // TURN):
        for each, seconds in zip(loops, turns, strict=True):
            time.sleep(PAUSE)
            before, began = each.tokens, time.perf_counter()
            for _ in range(TURN):
                each.round()
            seconds.append((time.perf_counter() - began) / TURN)
            if each.tokens - before != TURN * each.batch:
                raise RuntimeError(f"{each.tokens - before} tokens in {TURN} steps of {each.batch}")
    return tuple(median(seconds) for seconds in turns)


if __name__ == "__main__":
    main()
