"""What each policy's call costs: microseconds for one choice among 64 and among 1,000 workers.

Prints one JSON object a line: bench, case, value, unit, against, ratio. A quarter of the workers prefill, half decode
and a quarter do both; loads, prefixes and links are drawn at random, a fresh request for each call. against `random`
says what choosing costs beside not choosing (above 1: cheaper than that).
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import fields

import numpy as np

from bench.common import line, note
from pyengine.scheduler.cluster import View
from pyengine.scheduler.policies import Ask, find_policy, known_policies
from pyengine.scheduler.types import KvGroup, KvSpec, Namespace, Node, Role, Slo, WorkerInfo

BLOCK_TOKENS = 512
SPEC = KvSpec((KvGroup(layers=80, kv_heads=8, head_dim=128, dtype="bfloat16"),), BLOCK_TOKENS)
#: Largest values that are drawn, by column; all others are below 1.
LARGEST = {
    "queue_seconds": 20.0, "running": 40, "free_pages": 2600, "tbt": 0.2, "step_seconds": 0.05, "token_seconds": 2e-4,
    "context_seconds": 2e-9, "queued_requests": 20, "queued_tokens": 200_000, "running_context": 500_000,
    "sequence_seconds": 4e-3, "history_seconds": 4e-8, "cached_blocks": 6000, "recent_prompt": 4_000_000,
    "recent_computed": 2_000_000, "recent_output": 100_000,
}  # fmt: skip
FIXED = {
    "pages": 2600, "pool_slots": 5860, "max_positions": 131_072, "max_tokens_per_step": 8192, "max_sequences": 256
}  # fmt: skip


def cluster(count: int, draw: np.random.Generator) -> View:
    """So many workers, each on a node of its own."""
    roles = [(Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH)[i % 4] for i in range(count)]
    namespace = Namespace("weights", "config", "bfloat16", "none", SPEC)
    workers = tuple(
        WorkerInfo(
            worker=f"w{i:04}", incarnation=1, role=role, node=Node(f"n{i:04}", "", 1), work="", model="model",
            tokenizer="", namespace=namespace, vocab_size=1, pages=FIXED["pages"], pool_slots=FIXED["pool_slots"],
            max_positions=FIXED["max_positions"], max_tokens_per_step=FIXED["max_tokens_per_step"],
            max_sequences=FIXED["max_sequences"],
        )
        for i, role in enumerate(roles)
    )  # fmt: skip
    given = {
        "workers": workers,
        "nodes": tuple(worker.node.node for worker in workers),
        "block_tokens": BLOCK_TOKENS,
        "block_bytes": SPEC.block_bytes,
        "turn": 0,
        "node": np.arange(count),
        "both": np.array([role is Role.BOTH for role in roles]),
        "prefills": np.array([role.prefills for role in roles]),
        "decodes": np.array([role.decodes for role in roles]),
        "inlines": np.array([role is Role.DECODE for role in roles]) & (draw.random(count) < 0.5),
        **{name: np.full(count, value) for name, value in FIXED.items()},
    }
    for field in fields(View):
        kind, largest = str(field.type), LARGEST.get(field.name, 1)
        if field.name in given:
            continue
        if kind == "Bools":
            given[field.name] = np.ones(count, dtype=bool)
        else:
            drawn = draw.random(count) * largest
            given[field.name] = drawn.astype(np.int64) if kind == "Ints" else drawn
    return View(**given)  # type: ignore[arg-type]


def request(count: int, draw: np.random.Generator) -> Ask:
    blocks = int(draw.integers(1, 60))
    # Most have nothing of it, some the system prompt, few all.
    prefix = np.minimum((draw.pareto(1.5, count)).astype(np.int64), blocks)
    links = draw.random(count) * 0.2
    return Ask(
        prompt_tokens=blocks * BLOCK_TOKENS + 1,
        prefix=prefix,
        best=int(prefix.max()),
        load_seconds=draw.random(count) * 0.01,
        transfer_seconds=draw.random(count) * 0.1,
        slo=Slo(ttft=30.0, tbt=0.1),
        device=prefix // 2,
        ssd=prefix // 4,
        output_tokens=300.0,
        handoff_seconds=lambda prefill: links,
    )


def microseconds(name: str, view: View, asks: list[Ask], rounds: int) -> float:
    """Of one call: the quickest of some rounds over all requests, as others on the machine only add to it."""
    policy, rng = find_policy(name), random.Random(0)
    best = math.inf
    for _ in range(rounds):
        begun = time.perf_counter()
        for ask in asks:
            policy(view, ask, rng)
        best = min(best, (time.perf_counter() - begun) / len(asks) * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer calls: some seconds")
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--policies", nargs="+", default=known_policies(), help="names, with settings if need be")
    arguments = parser.parse_args()
    if min(arguments.workers) < 4:
        parser.error("--workers must be at least 4: one for each role")
    calls, rounds = (50, 3) if arguments.quick else (300, 9)
    for count in arguments.workers:
        draw = np.random.default_rng(1)
        view, asks = cluster(count, draw), [request(count, draw) for _ in range(calls)]
        note(f"{count} workers")
        least = microseconds("random", view, asks, rounds)
        for name in arguments.policies:
            spent = microseconds(name, view, asks, rounds)
            line("policies", f"{name} {count} workers", spent, "us", against="random", ratio=least / spent)


if __name__ == "__main__":
    main()
