"""The two tables that need no time: one pool over the whole trace, by capacity and by eviction policy."""

from __future__ import annotations

import math

import numpy as np

from bench.eviction import PAPER_CURVE, PAPER_TABLE, TABLE, TRACES, Trace, replay, spell
from bench.paper.tables import Table
from bench.paper.traces import QUICK, Traces


def read(traces: Traces, name: str) -> Trace:
    """As `bench.eviction` has it, partial blocks included, if its file is there; else of what stands for it."""
    if traces.folder is not None:
        trace = Trace.read(name, traces.folder / f"{TRACES[name]}.jsonl")
        return Trace(name, trace.blocks[:QUICK], trace.tokens[:QUICK]) if traces.quick else trace
    rows = list(traces.source(name).limit(QUICK))
    # The head of a key tells keys apart as well as all of it.
    blocks = [np.frombuffer(b"".join(key[:8] for key in row.blocks), np.uint64) for row in rows]
    return Trace(name, blocks, [row.prompt_tokens for row in rows])


def tables(traces: Traces) -> list[Table]:
    """By production pool and eviction policies, without memory behind them."""
    curve = Table(
        "capacity",
        "Hit rate of one pool by its capacity",
        "Share of all prompts' tokens that one LRU pool for all requests has, in the order of arrivals.",
        remarks=[
            "Requests of one moment come one after the other, each behind all that the one before has left. The endless"
            " pool of a trace depends on nothing else, so what its value is off by is how hits are counted."
        ],
    )
    for name, row in PAPER_CURVE.items():
        trace = read(traces, name)
        for capacity, paper in row.items():
            curve.add(f"{name} {spell(capacity)}", replay(trace, "lru", capacity).token_rate, paper, "hit rate")
    table = Table(
        "eviction",
        "Eviction policies",
        "Block hit rate of one pool. The trace is the head (1,000 requests) of the one that the paper had, so only the"
        " shape can be compared: each value as a share of the endless pool's.",
        remarks=[
            "A head of 1,000 requests has far fewer blocks than the whole: a pool of 10,000 blocks holds nearly all of"
            " it, so what lies below is nearer to the endless pool's than in the paper. The conversation, with an hour"
            " of requests, shows the order of the policies at sizes that matter."
        ],
    )
    # The conversation has an hour of requests, and no value of the paper beside it.
    for name in ("report", "conversation"):
        trace = read(traces, name)
        for policy, values in PAPER_TABLE.items():
            most = replay(trace, policy, math.inf).hit_rate
            for capacity, paper in zip(TABLE, values, strict=True):
                ours = replay(trace, policy, capacity).hit_rate / most if most else 0.0
                known = paper / values[-1] if name == "report" else None
                table.add(f"{name} {policy} {spell(capacity)}", ours, known, "of endless")
    return [curve, table]
