"""Eviction policies on the traces of the paper: hits and prefill seconds saved, by capacity.

Prints one JSON object a line: bench, case, value, unit, against, ratio (above 1: more hits, more seconds saved). The
pool and the policies are those that serve; only their memory is missing (`_native.PoolModel`). Requests come one after
the other, in the order of their raw arrivals: nothing is jittered, and none is in use while the next one comes. All
blocks of a prompt are shared as the trace says, its last, partial one too. One pool serves all requests.

belady:  the most hits that any policy could have, knowing all requests to come. (Seconds saved may be beaten.)
paper:   the paper's table and curve. Its table is of a trace of which only the first 1000 requests were published, so
         what can be compared is its shape: `shape` is the share of the hits of an endless cache, ours less the paper's
saved s: seconds of prefill that the hits save, by the cost model of LLaMA3-70B on eight A800; `reuse` of all of them
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.common import line, mean, note
from pyengine._native import EVICTION_POLICIES, PoolModel
from pyengine.scheduler.sim.compute import StepTime
from pyengine.scheduler.sim.spec import ClusterSpec, NodeSpec

ROOT = Path(__file__).parents[1]
TRACES = {"conversation": "conversation_trace", "synthetic": "synthetic_trace", "report": "arxiv_first1000"}
BLOCK_TOKENS = 512

#: Blocks that the paper's table has, and tokens that its curve has, as blocks. The endless cache comes last.
TABLE = (1_000, 10_000, 30_000, 50_000, 100_000, math.inf)
CURVE = tuple(tokens // BLOCK_TOKENS for tokens in (1_000_000, 3_000_000, 10_000_000, 50_000_000))
CAPACITIES = tuple(sorted({*TABLE, *CURVE}))

#: Block hit rates of one pool, by policy, in the order of TABLE.
PAPER_TABLE = {
    "lru": (0.30, 0.40, 0.48, 0.50, 0.51, 0.51),
    "lfu": (0.30, 0.35, 0.43, 0.49, 0.51, 0.51),
    "length-aware": (0.30, 0.35, 0.42, 0.48, 0.50, 0.51),
}
#: Hit rates of one pool (LRU) by blocks. The second value of the conversation is stated as 41 % of the last.
PAPER_CURVE = {
    "conversation": dict(zip((*CURVE, math.inf), (0.087, 0.41 * 0.401, 0.326, 0.398, 0.401), strict=True)),
    "synthetic": {math.inf: 0.658},
}


#: LLaMA3-70B on eight A800, and the seconds to read the KV of a token that is cached there.
MODEL = StepTime.load("llama3-70b-a800")
PER_CACHED = ClusterSpec(workers=()).kv_bytes / NodeSpec().device_rate


def prefill(tokens: int, cached: int) -> float:
    """Seconds for a prompt of which some is cached."""
    return MODEL.seconds([(cached, tokens - cached)], 0, 0) + PER_CACHED * cached


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrivals."""

    name: str
    blocks: list[npt.NDArray[np.uint64]]
    tokens: list[int]

    @classmethod
    def read(cls, name: str, path: Path) -> Trace:
        rows = [json.loads(row) for row in path.read_text().splitlines()]
        return cls(
            name, [np.array(row["hash_ids"], np.uint64) for row in rows], [int(row["input_length"]) for row in rows]
        )

    @property
    def distinct(self) -> int:
        return len(np.unique(np.concatenate(self.blocks)))


@dataclass
class Result:
    """What one cache did for one trace."""

    hit_rate: float
    #: Of all prompt tokens.
    token_rate: float
    saved: float
    #: `saved` as a share of all prefill seconds.
    reuse: float


def judge(trace: Trace, hits: Iterable[int]) -> Result:
    """From how many leading blocks each request found."""
    found = reused = 0
    saved = total = 0.0
    for count, tokens in zip(hits, trace.tokens, strict=True):
        # At least one token is computed.
        cached = min(count * BLOCK_TOKENS, tokens - 1)
        found, reused = found + count, reused + cached
        saved += prefill(tokens, 0) - prefill(tokens, cached)
        total += prefill(tokens, 0)
    return Result(found / sum(map(len, trace.blocks)), reused / sum(trace.tokens), saved, saved / total)


def replay(trace: Trace, policy: str, capacity: float) -> Result:
    """The production pool under this policy."""
    blocks = int(min(capacity, trace.distinct + 1))
    model = PoolModel(policy, blocks, costs=(MODEL.coefficients.token, MODEL.coefficients.pair, BLOCK_TOKENS))
    return judge(trace, (model.access(blocks)[0] for blocks in trace.blocks))


def belady(trace: Trace, capacity: float) -> Result:
    """What is used again latest goes first, or is not kept at all. A parent is used whenever its child is, so a prefix
    goes from its tail here too, and no order has more hits."""
    uses: list[list[float]] = [[] for _ in trace.blocks]
    upcoming: dict[int, int] = {}
    requests = [blocks.tolist() for blocks in trace.blocks]
    for index in range(len(requests) - 1, -1, -1):
        uses[index] = [upcoming.get(block, math.inf) for block in requests[index]]
        upcoming.update(dict.fromkeys(requests[index], index))
    kept: dict[int, float] = {}
    order: list[tuple[float, int, int]] = []
    hits = []
    for blocks, following in zip(requests, uses, strict=True):
        found = 0
        while found < len(blocks) and blocks[found] in kept:
            found += 1
        hits.append(found)
        for position, (block, use) in enumerate(zip(blocks, following, strict=True)):
            kept.pop(block, None)
            if use < math.inf:
                kept[block] = use
                heapq.heappush(order, (-use, -position, block))
        while len(kept) > capacity:
            use, _, block = heapq.heappop(order)
            if kept.get(block) == -use:
                del kept[block]
    return judge(trace, hits)


@dataclass
class Findings:
    """Results by policy and capacity; the best possible is the policy "belady"."""

    trace: Trace
    by: dict[tuple[str, float], Result] = field(default_factory=dict)

    def run(self, capacities: Sequence[float]) -> None:
        for capacity in capacities:
            limit = self.by["belady", capacity] = belady(self.trace, capacity)
            self.say("belady", capacity, limit, None)
            for policy in EVICTION_POLICIES:
                result = self.by[policy, capacity] = replay(self.trace, policy, capacity)
                self.say(policy, capacity, result, limit)

    def say(self, policy: str, capacity: float, result: Result, limit: Result | None) -> None:
        case = f"{self.trace.name} {policy} {spell(capacity)}"
        against = None if limit is None else "belady"
        hits = None if limit is None or not limit.hit_rate else result.hit_rate / limit.hit_rate
        saved = None if limit is None or not limit.saved else result.saved / limit.saved
        line("eviction", f"{case} hits", result.hit_rate, "hit rate", against=against, ratio=hits)
        line("eviction", f"{case} saved s", result.saved, "s", against=against, ratio=saved, reuse=result.reuse)

    def beside_the_table(self) -> None:
        for policy, row in PAPER_TABLE.items():
            for capacity, paper in zip(TABLE, row, strict=True):
                if (policy, capacity) not in self.by:
                    continue
                ours, most = self.by[policy, capacity].hit_rate, self.by[policy, math.inf].hit_rate
                beside(self.trace, f"table {policy}", capacity, ours, paper, shape=ours / most - paper / row[-1])

    def beside_the_curve(self) -> None:
        row = PAPER_CURVE.get(self.trace.name, {})
        for capacity, paper in row.items():
            if ("lru", capacity) in self.by:
                ours, most = self.by["lru", capacity].token_rate, self.by["lru", math.inf].token_rate
                beside(self.trace, "curve lru", capacity, ours, paper, shape=ours / most - paper / row[math.inf])

    def overall(self) -> None:
        """Means over the capacities at which somebody has to go, in shares of the best possible."""
        limits = {capacity: limit for (policy, capacity), limit in self.by.items() if policy == "belady"}
        scarce = [capacity for capacity in limits if capacity < self.trace.distinct and limits[capacity].hit_rate > 0]
        if not scarce:
            return
        for policy in EVICTION_POLICIES:
            for what in ("hit_rate", "saved"):
                shares = [
                    getattr(self.by[policy, capacity], what) / getattr(limits[capacity], what) for capacity in scarce
                ]
                case = f"{self.trace.name} {policy} mean {'hits' if what == 'hit_rate' else 'saved s'}"
                line("eviction", case, mean(shares), "of belady", capacities=len(scarce))


def spell(capacity: float) -> str:
    return "endless" if capacity == math.inf else f"{capacity:.0f} blocks"


def beside(trace: Trace, what: str, capacity: float, ours: float, paper: float, *, shape: float) -> None:
    case = f"{trace.name} {what} {spell(capacity)}"
    line(
        "eviction",
        case,
        ours,
        "hit rate",
        against="paper",
        ratio=ours / paper,
        paper=paper,
        difference=ours - paper,
        shape=shape,
    )


def plot(all_findings: Sequence[Findings], path: Path) -> None:
    """Hit rate by capacity, one panel for each trace."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(all_findings), figsize=(5 * len(all_findings), 4), squeeze=False)
    for panel, findings in zip(panels[0], all_findings, strict=True):
        finite = sorted({capacity for _, capacity in findings.by if capacity < math.inf})
        for policy in ("belady", *EVICTION_POLICIES):
            rates = [findings.by[policy, capacity].hit_rate for capacity in finite]
            panel.plot(finite, rates, "k--" if policy == "belady" else "o-", markersize=3, label=policy)
        curve = {blocks: rate for blocks, rate in PAPER_CURVE.get(findings.trace.name, {}).items() if blocks < math.inf}
        if curve:
            panel.plot(list(curve), list(curve.values()), "kx", label="paper (curve)")
        panel.set(
            title=findings.trace.name, xlabel=f"blocks of {BLOCK_TOKENS} tokens", ylabel="block hit rate", xscale="log"
        )
        panel.grid(alpha=0.3)
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the capacities of the paper's table only")
    parser.add_argument(
        "--traces",
        type=Path,
        default=ROOT.parent / "shared" / "traces",
        help="folder with the traces that the paper's authors published (%(default)s)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw hit rates by capacity (needs matplotlib)")
    arguments = parser.parse_args()
    if arguments.plot:
        # Before minutes of work, not after.
        try:
            import matplotlib

            matplotlib.use("Agg")
        except ImportError:
            parser.error("--plot needs matplotlib: install pyengine-llm[bench]")

    all_findings = []
    for name, file in TRACES.items():
        path = arguments.traces / f"{file}.jsonl"
        if not path.exists():
            note(f"{name}: left out: {path} is not there (say with --traces where the traces are)")
            continue
        findings = Findings(Trace.read(name, path))
        findings.run(TABLE if arguments.quick else CAPACITIES)
        findings.beside_the_table()
        findings.beside_the_curve()
        findings.overall()
        all_findings.append(findings)
    if arguments.plot and all_findings:
        plot(all_findings, arguments.plot)


if __name__ == "__main__":
    main()
