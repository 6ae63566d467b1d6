"""What bench/index.py measures of Dynamo's RadixTree, in an environment of its own, and the workload of both."""

from __future__ import annotations

import json
import random
import sys
import time

QUERIES = 2000

Sequences = list[tuple[int, list[int]]]


def workload(workers: int, sequences: int, blocks: int, seed: int = 0) -> Sequences:
    """(worker, block hashes) of each sequence."""
    draw = random.Random(seed)
    groups: dict[int, list[int]] = {}
    load = []
    for worker in range(workers):
        for _ in range(sequences):
            group = draw.randrange(max(1, workers * sequences // 8))
            shared = groups.setdefault(group, [draw.getrandbits(63) for _ in range(blocks // 4)])
            load.append((worker, shared + [draw.getrandbits(63) for _ in range(blocks - len(shared))]))
    return load


def asked_for(load: Sequences) -> list[list[int]]:
    return [load[at][1] for at in random.Random(1).choices(range(len(load)), k=QUERIES)]


def figures(blocks: int, ingest: float, latencies: list[float]) -> dict[str, float]:
    micros = sorted(seconds * 1e6 for seconds in latencies)
    return {
        "ingest": blocks / ingest,
        "match p50": micros[len(micros) // 2],
        "match p99": micros[len(micros) * 99 // 100],
    }


def measured(workers: int, sequences: int, blocks: int) -> dict[str, float]:
    from dynamo._core import RadixTree  # type: ignore[import-not-found]

    load = workload(workers, sequences, blocks)
    events = []
    for at, (worker, hashes) in enumerate(load):
        blocks_of = [{"block_hash": number, "tokens_hash": number} for number in hashes]
        event = {"event_id": at, "data": {"stored": {"parent_hash": None, "blocks": blocks_of}}}
        events.append((worker, json.dumps(event).encode()))
    tree = RadixTree()
    start = time.perf_counter()
    for worker, packed in events:
        tree.apply_event(worker, packed)
    # Events go to a thread of its own: a match waits for all of them.
    tree.find_matches(load[0][1])
    ingest = time.perf_counter() - start
    latencies = []
    for hashes in asked_for(load):
        start = time.perf_counter()
        scores = tree.find_matches(hashes).scores
        latencies.append(time.perf_counter() - start)
    assert max(scores.values()) == blocks, "a stored sequence is held by whoever stored it"
    return figures(workers * sequences * blocks, ingest, latencies)


if __name__ == "__main__":
    print(json.dumps(measured(*(int(word) for word in sys.argv[1:]))))
