"""Prefill and decode of one process beside transformers, in the same run: fp32, same threads, same weights.

Prints one JSON object a line: bench, case, value, unit (tokens/s), against, ratio (above 1: we are faster). Both sides
compute the same thing: the KV of the whole prompt and its last logits; then greedy steps over a cache of CONTEXT tokens
per sequence. The two take turns, round by round, and the median round counts, so that a busy machine disturbs both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pyengine import env
from pyengine.backend import Slice
from pyengine.backends.torch import TorchBackend
from pyengine.checkpoint import SMOLLM2, resolve
from pyengine.scheduler.types import BLOCK_TOKENS, SamplingParams

PREFILLS = (128, 512, 2048)
BATCHES = (1, 4, 16)
CONTEXT = 256
GREEDY = SamplingParams(temperature=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps: a minute or two")
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=env.read().state_dir / "models", help="converted models")
    arguments = parser.parse_args()
    rounds, steps = (3, 8) if arguments.quick else (7, 24)

    torch.set_num_threads(arguments.threads)
    ours = Ours(arguments.model, arguments.cache, arguments.threads)
    theirs = Theirs(resolve(arguments.model, arguments.cache).folder)
    tokens = np.random.default_rng(0).integers(100, ours.backend.vocab_size, max(PREFILLS)).tolist()
    for length in PREFILLS:
        prompt = tokens[:length]
        report(f"prefill {length}", length, rounds, partial(ours.prefill, prompt), partial(theirs.prefill, prompt))
    for batch in BATCHES:
        prompts = [tokens[row : row + CONTEXT] for row in range(batch)]
        ours.begin(prompts, steps * (rounds + 1))
        theirs.begin(prompts)
        report(
            f"decode batch {batch}", batch * steps, rounds, partial(ours.decode, steps), partial(theirs.decode, steps)
        )


def report(case: str, tokens: int, rounds: int, ours: Callable[[], None], theirs: Callable[[], None]) -> None:
    """Runs both in turn, once to warm up and then `rounds` times; prints the line."""
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for index in range(rounds + 1):
        for name, run in (("ours", ours), ("theirs", theirs)):
            start = time.perf_counter()
            run()
            if index:
                times[name].append(time.perf_counter() - start)
    speed, other = (tokens / statistics.median(times[name]) for name in ("ours", "theirs"))
    line = {
        "bench": "engine",
        "case": case,
        "value": round(speed, 1),
        "unit": "tokens/s",
        "against": "transformers",
        "ratio": round(speed / other, 3),
    }
    print(json.dumps(line), flush=True)


class Ours:
    """TorchBackend, driven as a worker drives it."""

    def __init__(self, model: str, cache: Path, threads: int) -> None:
        self.backend = TorchBackend.load(model, cache=cache, threads=threads)
        self._each = -(-max(max(PREFILLS), CONTEXT + 512) // BLOCK_TOKENS)
        self.backend.allocate(self._each * max(BATCHES))
        self._last: list[int] = []
        self._length = 0

    def prefill(self, prompt: list[int]) -> None:
        self.backend.execute([self._slice(prompt, 0, 0)])

    def begin(self, prompts: list[list[int]], steps: int) -> None:
        if CONTEXT + steps > self._each * BLOCK_TOKENS:
            raise ValueError(f"{steps} steps do not fit in {self._each} pages")
        self._last = [self.backend.execute([self._slice(prompt, 0, row)])[0] for row, prompt in enumerate(prompts)]
        self._length = CONTEXT

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            batch = [self._slice([token], self._length, row) for row, token in enumerate(self._last)]
            self._last = self.backend.execute(batch)
            self._length += 1

    def _slice(self, tokens: list[int], start: int, row: int) -> Slice:
        pages = np.arange(row * self._each, (row + 1) * self._each, dtype=np.int32)
        return Slice(np.array(tokens, dtype=np.uint32), start, pages, GREEDY)


class Theirs:
    """transformers' Llama with its own cache and default attention."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._cache = None
        self._last = torch.empty(0)

    def prefill(self, prompt: list[int]) -> None:
        with torch.inference_mode():
            self._model(input_ids=torch.tensor([prompt]), use_cache=True, logits_to_keep=1).logits.argmax(dim=-1)

    def begin(self, prompts: list[list[int]]) -> None:
        with torch.inference_mode():
            out = self._model(input_ids=torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        self._cache, self._last = out.past_key_values, out.logits.argmax(dim=-1)

    def decode(self, steps: int) -> None:
        with torch.inference_mode():
            for _ in range(steps):
                out = self._model(input_ids=self._last, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
                self._cache, self._last = out.past_key_values, out.logits.argmax(dim=-1)


if __name__ == "__main__":
    main()
