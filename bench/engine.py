"""Prefill and decode of one process beside transformers and beside the machine's limits, all in the same run.

fp32, same threads, same weights. Both sides compute the same thing: the KV of the whole prompt and its last logits;
then greedy steps over a cache of CONTEXT tokens per sequence. The limit of decode at batch 1 is one pass over memory as
large as the weights and the KV, by the fastest of PyTorch's reductions; that of prefill is the rate of numpy's sgemm of
2048 x 2048 x 2048. `bf16` is the same backend with weights and KV in bfloat16; `jax` is our backend on JAX, if that is
installed, beside ours on PyTorch.

Prints one JSON object a line: bench, case, value, unit, against, ratio (above 1: we are faster). All take turns, round
by round, and the median round counts, so that a busy machine disturbs all alike. transformers with the limits is a
process of its own, and so is JAX, as ours would be: threads of OpenMP and OpenBLAS beside our own pool slow down all.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import in_turn, line, note
from pyengine import env
from pyengine.backend import Slice
from pyengine.backends import lacking, load_backend
from pyengine.checkpoint import SMOLLM2, ModelConfig, resolve
from pyengine.scheduler.types import BLOCK_TOKENS, SamplingParams

PREFILLS = (128, 512, 2048)
BATCHES = (1, 4, 16)
CONTEXT = 256
SQUARE = 2048
GREEDY = SamplingParams(temperature=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps: a minute or two")
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=env.read().state_dir / "models", help="converted models")
    parser.add_argument("--only", default="", help="cases whose names begin so")
    arguments = parser.parse_args()
    rounds, steps = (3, 8) if arguments.quick else (7, 24)

    checkpoint = resolve(arguments.model, arguments.cache)
    backend = partial(Ours, arguments.model, arguments.cache, arguments.threads)
    ours, half = backend("torch", "float32"), backend("torch", "bfloat16")
    theirs = Elsewhere(partial(Theirs, checkpoint.folder, arguments.threads))
    jax = None
    if reason := lacking("jax"):
        note(reason)
    else:
        jax = Elsewhere(partial(backend, "jax", "float32"))
    config = checkpoint.config
    tokens = np.random.default_rng(0).integers(100, config.vocab_size, max(PREFILLS)).tolist()
    runs: dict[str, Callable[[], object]]
    for length in PREFILLS:
        if not (case := f"prefill {length}").startswith(arguments.only):
            continue
        prompt = tokens[:length]
        runs = {
            "ours": partial(ours.prefill, prompt),
            "bf16": partial(half.prefill, prompt),
            "transformers": partial(theirs, "prefill", prompt),
            "limit": partial(theirs, "multiply"),
        }
        if jax is not None:
            runs["jax"] = partial(jax, "prefill", prompt)
        times = in_turn(runs, rounds)
        mine = times["ours"]
        report(case, length / mine, "transformers", times["transformers"] / mine)
        rate, best = prefill_flops(config, length) / mine, 2 * SQUARE**3 / times["limit"]
        report(case, length / mine, "limit", rate / best, gflops=rate / 1e9, limit_gflops=best / 1e9)
        report(f"{case} bf16", length / times["bf16"], "fp32", mine / times["bf16"])
        if jax is not None:
            report(f"{case} jax", length / times["jax"], "torch", mine / times["jax"])
    for batch in BATCHES:
        if not (case := f"decode batch {batch}").startswith(arguments.only):
            continue
        prompts = [tokens[row : row + CONTEXT] for row in range(batch)]
        for one in (ours, half):
            one.begin(prompts, steps * (rounds + 1))
        theirs("begin", prompts, decode_numbers(config, batch))
        if jax is not None:
            jax("begin", prompts, steps * (rounds + 1))
        runs = {
            "ours": partial(ours.decode, steps),
            "bf16": partial(half.decode, steps),
            "transformers": partial(theirs, "decode", steps),
            "sum": partial(theirs, "sum"),
            "amax": partial(theirs, "amax"),
        }
        if jax is not None:
            runs["jax"] = partial(jax, "decode", steps)
        times = in_turn(runs, rounds)
        mine, count = times["ours"], batch * steps
        report(case, count / mine, "transformers", times["transformers"] / mine)
        limit = min(times["sum"], times["amax"])
        report(case, count / mine, "limit", limit * steps / mine, step_ms=mine / steps * 1e3, limit_ms=limit * 1e3)
        report(f"{case} bf16", count / times["bf16"], "fp32", mine / times["bf16"])
        if jax is not None:
            report(f"{case} jax", count / times["jax"], "torch", mine / times["jax"])


def report(case: str, speed: float, against: str, ratio: float, **more: float) -> None:
    line("engine", case, speed, "tokens/s", against=against, ratio=ratio, **more)


def layer_numbers(config: ModelConfig) -> int:
    """Weights of all layers' products."""
    heads = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    return config.layers * config.hidden_size * (heads + 3 * config.intermediate_size)


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Of a prompt: layers, causal attention, and the head for the last token."""
    attention = 2 * tokens * (tokens + 1) * config.heads * config.head_dim * config.layers
    return 2.0 * tokens * layer_numbers(config) + attention + 2.0 * config.vocab_size * config.hidden_size


def decode_numbers(config: ModelConfig, batch: int) -> int:
    """What a decode step has to read: all weights, and each sequence's keys and values."""
    kv = 2 * config.layers * config.kv_heads * config.head_dim * CONTEXT
    return layer_numbers(config) + config.vocab_size * config.hidden_size + batch * kv


class Ours:
    """A backend, driven as a worker drives it."""

    def __init__(self, model: str, cache: Path, threads: int, name: str, dtype: str) -> None:
        self.backend = load_backend(name, model, cache=cache, threads=threads, dtype=dtype)
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


class Elsewhere:
    """Somebody in a process of their own: called with a method's name and arguments, returns when that is done."""

    def __init__(self, make: Callable[[], object]) -> None:
        context = get_context("spawn")
        self._link, end = context.Pipe()
        context.Process(target=answer, args=(end, make), daemon=True).start()
        end.close()

    def __call__(self, method: str, *arguments: object) -> None:
        self._link.send((method, arguments))
        self._link.recv()


def answer(link: Connection, make: Callable[[], object]) -> None:
    """The other process, until nobody asks any more."""
    somebody = make()
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = link.recv()
            getattr(somebody, method)(*arguments)
            link.send(None)


class Theirs:
    """transformers' model with its own cache and default attention; and the limits."""

    def __init__(self, folder: Path, threads: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._memory = torch.empty(0)
        self._square = np.ones((SQUARE, SQUARE), np.float32)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._cache = None
        self._last = torch.empty(0)

    def prefill(self, prompt: list[int]) -> None:
        self._forward(torch.tensor([prompt])).logits.argmax(dim=-1)

    def multiply(self) -> None:
        _ = self._square @ self._square

    def sum(self) -> None:
        self._memory.sum()

    def amax(self) -> None:
        self._memory.amax()

    def begin(self, prompts: list[list[int]], numbers: int) -> None:
        """numbers: in the memory that `sum` and `amax` read."""
        self._memory = torch.ones(numbers)
        self._cache = None
        self._step(torch.tensor(prompts))

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self._step(self._last)

    def _step(self, tokens: torch.Tensor) -> None:
        out = self._forward(tokens, past_key_values=self._cache)
        self._cache, self._last = out.past_key_values, out.logits.argmax(dim=-1)

    def _forward(self, tokens: torch.Tensor, **more: object) -> Any:
        with torch.inference_mode():
            return self._model(input_ids=tokens, use_cache=True, logits_to_keep=1, **more)


if __name__ == "__main__":
    main()
