"""The two tables that need no time: one pool over the whole trace, by capacity and by eviction policy."""

from __future__ import annotations

import math
from pathlib import Path

from bench.eviction import PAPER_CURVE, PAPER_TABLE, TABLE, TRACES, Trace, replay, spell
from bench.paper.tables import Table


def tables(folder: Path) -> list[Table]:
    """By production pool and eviction policies, without memory behind them."""
    curve = Table(
        "capacity",
        "Hit rate of one pool by its capacity",
        "Share of all prompts' tokens that one LRU pool for all requests has, in the order of arrivals.",
    )
    traces = {name: Trace.read(name, folder / f"{file}.jsonl") for name, file in TRACES.items()}
    for name, row in PAPER_CURVE.items():
        for capacity, paper in row.items():
            curve.add(f"{name} {spell(capacity)}", replay(traces[name], "lru", capacity).token_rate, paper, "hit rate")
    table = Table(
        "eviction",
        "Eviction policies",
        "Block hit rate of one pool. The trace is the head (1,000 requests) of the one that the paper had, so only the"
        " shape can be compared: each value as a share of the endless pool's.",
    )
    trace = traces["report"]
    for policy, values in PAPER_TABLE.items():
        most = replay(trace, policy, math.inf).hit_rate
        for capacity, paper in zip(TABLE, values, strict=True):
            ours = replay(trace, policy, capacity).hit_rate
            table.add(f"{policy} {spell(capacity)}", ours / most, paper / values[-1], "of endless")
    return [curve, table]
