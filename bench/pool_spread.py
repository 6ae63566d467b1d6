"""Blocks of one prefix from two nodes that hold it, beside all of them from one: over tcp, three daemons of this
machine.

The plan says who sends which part (`scheduler/spreading.py`); here it is half each. Two holders share one machine's
cores with whoever receives, so what is to be shown is that it is not slower.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from bench.common import line, median
from pyengine._native import Fetched, Granted, NodeAddress
from tests.transfer.daemons import HEAD, Client, Shape, Transferd

#: Blocks of a prefix. The asker has room for one prefix only, so that each is fetched anew.
BLOCKS = 64
SHAPE = Shape(16, 64 << 10)
CASE = "fetch from two holders"


def rows(arguments: argparse.Namespace) -> None:
    if arguments.only not in CASE:
        return
    turns = 8 if arguments.quick else 40
    with tempfile.TemporaryDirectory(prefix="pyengine-bench-") as folder:
        sizes = {"asker": BLOCKS + 4, "one": 2 * BLOCKS + 4, "other": 2 * BLOCKS + 4}
        way = ("--listen", "127.0.0.1:0", "--transport", "tcp", "--log", "warn")
        daemons = {
            node: Transferd(Path(folder), node, count * (SHAPE.bytes + 4096), *way) for node, count in sizes.items()
        }
        try:
            measure(daemons, turns)
        finally:
            for daemon in daemons.values():
                daemon.kill()
                daemon.ended()


def measure(daemons: dict[str, Transferd], turns: int) -> None:
    clients = {node: Client(daemon, SHAPE, 1, node) for node, daemon in daemons.items()}
    for node in ("one", "other"):
        for prefix in (0, 1):
            fill(clients[node], prefix)
    addresses = [daemons["one"].address, daemons["other"].address]
    rates: dict[int, list[float]] = {1: [], 2: []}
    prefix = 0
    for turn in range(turns):
        for holders in (1, 2) if turn % 2 else (2, 1):
            rate = fetch(clients["asker"], prefix, addresses[:holders])
            # The first ones dial.
            if turn >= 2:
                rates[holders].append(rate)
            prefix = 1 - prefix
    one, two = median(rates[1]), median(rates[2])
    line("pool", f"{CASE} {BLOCKS}x1MiB", two, "GB/s", against="one holder", ratio=two / one, theirs=one)
    for client in clients.values():
        client.pool.close()


def keys(prefix: int) -> bytes:
    return b"".join(SHAPE.key(prefix * BLOCKS + i) for i in range(BLOCKS))


def fill(client: Client, prefix: int) -> None:
    tag = client.tag()
    client.pool.grant(tag, keys(prefix), False, HEAD, 0, "now")
    slots = client.expect(Granted, tag=tag).slots
    for i, slot in enumerate(slots):
        client.pool.store(slot.slot, slot.generation, SHAPE.content(prefix * BLOCKS + i))
    client.pool.commit(tag, list(range(BLOCKS)))
    client.pool.end(tag)


def fetch(client: Client, prefix: int, holders: list[NodeAddress]) -> float:
    """GB/s, of what was not there."""
    tag = client.tag()
    client.pool.grant(tag, keys(prefix), False, HEAD, 0, "now")
    wanted = [i for i, slot in enumerate(client.expect(Granted, tag=tag).slots) if not slot.committed]
    part = -(-len(wanted) // len(holders))
    began = time.perf_counter()
    for number in range(len(holders)):
        others = holders[number:] + holders[:number]
        client.pool.fetch(tag, wanted[number * part : (number + 1) * part], others)
    for _ in wanted:
        fetched = client.expect(Fetched, tag=tag)
        assert fetched.origin == "peer_dram", fetched
    spent = time.perf_counter() - began
    client.pool.end(tag)
    return len(wanted) * SHAPE.bytes / spent / 1e9
