"""The prefix index: blocks a second in, microseconds for a match, bytes a block.

`workers` holders have `sequences` sequences of `blocks` blocks each; a quarter of each is shared in groups of 8. Whole
stored sequences are asked for. Everything is timed as a caller in Python sees it, decoding included: ours takes packed
changes (one call per sequence) and keys as bytes, and gives arrays over all holders; Dynamo's `RadixTree` takes one
JSON event per sequence and a list of numbers, and gives a dictionary. Both hold the same blocks, in a process each,
one after the other. The plain twin is the one in `scheduler/prefix_index.py`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bench.common import line, note, percentile
from bench.peers.dynamo_radix import Sequences, asked_for, figures, workload
from pyengine.scheduler.changes import CHANGE_BYTES, RECORD
from pyengine.scheduler.native_index import NativeIndex
from pyengine.scheduler.prefix_index import DRAM, Index, PrefixIndex
from pyengine.scheduler.types import KEY_BYTES

ROOT = Path(__file__).parents[1]
DYNAMO = ROOT / ".venv-peers/dynamo/bin/python"
#: Workers, sequences of each, blocks of a sequence: as many blocks in all as Dynamo's own benchmark has.
SHAPES = ((64, 100, 128), (64, 50, 256), (1000, 20, 128), (1000, 10, 256))
QUICK_SHAPES = ((64, 20, 128), (1000, 2, 256))
#: Blocks of the large index, and its nodes; blocks in a part of a dump, as daemons cut them, and in a prefix.
LARGE, QUICK_LARGE, NODES, PART, LENGTH = 10_000_000, 1_000_000, 64, 1024, 128


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") * 2


def packed(hashes: list[int]) -> bytes:
    """The changes that publish a sequence."""
    parents = [0, *hashes[:-1]]
    pairs = enumerate(zip(hashes, parents, strict=True))
    return b"".join(RECORD.pack(0, DRAM, 0, at, key(number), key(parent)) for at, (number, parent) in pairs)


def timed(what: Callable[[], object]) -> float:
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def ours(make: Callable[[], Index], load: Sequences, queries: list[list[int]]) -> dict[str, float]:
    events = [(f"worker-{worker}", packed(hashes)) for worker, hashes in load]
    asked = [b"".join(map(key, hashes)) for hashes in queries]
    index = make()
    start = time.perf_counter()
    for name, changes in events:
        index.apply(name, changes)
    ingest = time.perf_counter() - start
    latencies = []
    for keys in asked:
        start = time.perf_counter()
        match = index.match(keys)
        latencies.append(time.perf_counter() - start)
    assert match.best == match.held.max() == len(queries[-1]), "a stored sequence is held by whoever stored it"
    return figures(sum(len(hashes) for _, hashes in load), ingest, latencies)


def beside_dynamo(shape: tuple[int, int, int]) -> dict[str, float] | None:
    if not DYNAMO.exists():
        return None
    command = [str(DYNAMO), "bench/peers/dynamo_radix.py", *map(str, shape)]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def compare(shape: tuple[int, int, int], plain: bool) -> None:
    workers, _, blocks = shape
    load = workload(*shape)
    queries = asked_for(load)
    mine = ours(NativeIndex, load, queries)
    others = {"dynamo": beside_dynamo(shape)}
    if plain:
        others["plain twin"] = ours(PrefixIndex, load, queries)
    for name, value in mine.items():
        case, unit = f"{name} {workers} workers {blocks} blocks", "blocks/s" if name == "ingest" else "us"
        line("index", case, value, unit)
        for against, theirs in others.items():
            if theirs is not None:
                ratio = value / theirs[name] if name == "ingest" else theirs[name] / value
                line("index", case, value, unit, against=against, ratio=ratio, theirs=theirs[name])
    if others["dynamo"] is None:
        note("dynamo: not installed (make peers)")


def packed_chains(count: int, length: int, seed: int) -> tuple[bytes, bytes]:
    """Keys of `count` blocks of random names in prefixes of `length`, and the changes that publish them."""
    keys = np.random.default_rng(seed).integers(0, 256, (count, KEY_BYTES), dtype=np.uint8)
    position = np.arange(count, dtype=np.uint32) % length
    changes = np.zeros((count, CHANGE_BYTES), dtype=np.uint8)
    changes[:, 1] = DRAM
    changes[:, 4:8] = position.view(np.uint8).reshape(-1, 4)
    changes[:, 8:24] = keys
    changes[1:, 24:40] = keys[:-1]
    changes[position == 0, 24:40] = 0
    return keys.tobytes(), changes.tobytes()


def parts(changes: bytes) -> Iterator[bytes]:
    step = PART * CHANGE_BYTES
    return (changes[at : at + step] for at in range(0, len(changes), step))


def large(blocks: int) -> None:
    """One holder for each block, which costs most. What follows works on an index of this size."""
    each = blocks // NODES
    index = NativeIndex()
    millions = f"{blocks // 1_000_000}M blocks {NODES} nodes"
    seconds, pauses = 0.0, []
    for node in range(NODES):
        _, changes = packed_chains(each, LENGTH, node)
        for part in parts(changes):
            pause = timed(lambda part=part, node=node: index.apply(f"node-{node}", part))  # type: ignore[misc]
            pauses.append(pause)
            seconds += pause
    line("index", f"ingest {millions}", each * NODES / seconds, "blocks/s", longest_ms=max(pauses) * 1e3)
    line("index", f"memory {millions}", index.size / (each * NODES), "B/block-holder")

    draw = random.Random(0)
    latencies = []
    chains: list[tuple[int, bytes]] = []
    for _ in range(20):
        node = draw.randrange(NODES)
        keys, _ = packed_chains(each, LENGTH, node)
        chains += [
            (node, keys[at : at + LENGTH * KEY_BYTES]) for at in range(0, 100 * LENGTH * KEY_BYTES, LENGTH * KEY_BYTES)
        ]
    draw.shuffle(chains)
    for node, chain in chains:
        start = time.perf_counter()
        match = index.match(chain)
        latencies.append((time.perf_counter() - start) * 1e6)
        assert match.held[index.slot(f"node-{node}")] == LENGTH
    for percent in (50, 99):
        line("index", f"match p{percent} {LENGTH} blocks of {millions}", percentile(latencies, percent), "us")

    dump: bytes = b""

    def take() -> None:
        nonlocal dump
        dump = index.dump("node-0")

    seconds = timed(take)
    line("index", f"dump {each} of {millions}", len(dump) / CHANGE_BYTES / seconds, "blocks/s")
    line("index", f"clear {each} of {millions}", timed(lambda: index.clear("node-0")) * 1e3, "ms")

    # A dump of two million blocks, as the feed takes it in, between matches.
    _, two = packed_chains(2_000_000 if blocks == LARGE else 200_000, LENGTH, NODES)
    index.begin("node-1")
    pauses = [timed(lambda part=part: index.stage("node-1", part)) for part in parts(two)]  # type: ignore[misc]
    pauses.append(timed(lambda: index.adopt("node-1")))
    count = len(two) // CHANGE_BYTES
    line("index", f"restore {count} in parts", count / sum(pauses), "blocks/s")
    line("index", f"restore {count} longest pause", max(pauses) * 1e3, "ms")
    line("index", f"restore {count} p99 pause", percentile([pause * 1e3 for pause in pauses], 99), "ms")
    assert index.count("node-1") == count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller indexes")
    parser.add_argument("--only", default="", help="a part of the name: compare or large")
    arguments = parser.parse_args()
    if arguments.only in "compare":
        for shape in QUICK_SHAPES if arguments.quick else SHAPES:
            compare(shape, plain=True)
    if arguments.only in "large":
        large(QUICK_LARGE if arguments.quick else LARGE)


if __name__ == "__main__":
    main()
