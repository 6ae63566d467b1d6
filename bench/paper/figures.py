"""The tables and figures, each as the cases it needs and what it makes of their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from bench.paper import plots, targets
from bench.paper.cases import (
    ALGORITHM_1,
    GLOBAL,
    MODELS,
    NODES,
    SPREAD,
    Case,
    Trace,
    coupled,
    nodes,
    with_policy,
)
from bench.paper.figure import Figure, Outcomes
from bench.paper.overload import overload
from bench.paper.runs import Outcome
from bench.paper.tables import Table

GBIT = 1e9 / 8
CALIBRATED = MODELS["calibrated"]
#: Workloads of the main comparison. The reconstruction has an hour, of which half says as much.
TRACES = {
    "conversation": Trace("conversation"),
    "tool": Trace("tool", limit=11_804),
    "synthetic": Trace("synthetic"),
}


def system(name: str, workload: str, model: str) -> Case:
    """One of the four systems of the main comparison, on sixteen nodes."""
    if name == "mooncake":
        return Case(TRACES[workload], nodes(model=model, prefill=8, decode=8), GLOBAL)
    return Case(TRACES[workload], coupled(name, model), SPREAD)


def gaps() -> Figure:
    """Both decode models, but for the reconstruction: what it is like is guessed already."""
    cases = {
        (kind, workload, name): system(name, workload, model)
        for kind, model in MODELS.items()
        for workload in targets.WORKLOADS
        if workload != "tool" or kind == "calibrated"
        for name in targets.SYSTEMS
    }

    gains = "; ".join(f"{name} {', '.join(f'{gain:g}' for gain in row)}" for name, row in targets.GAIN.items())

    def make(outcomes: Outcomes, folder: Path | None) -> Table:
        table = Table(
            "tbt",
            "Gaps between tokens, and who keeps them short",
            "Share of requests whose TBT (mean of the longest tenth of their gaps) is at most 100, 200, 300 ms, and its"
            " 10th, 50th and 90th percentile. Effective: the share that keeps that TBT and TTFT <= 30 s, and how many"
            f" times plain vLLM's it is (the paper's gains, in percent more: {gains}). Sixteen nodes: Mooncake 8"
            " prefill + 8 decode, the others sixteen coupled ones.",
            remarks=[
                "Of Mooncake's gaps, the one between the prefill node's token and the decode node's first is left out"
                " where the paper is compared with: its own distributions have no room for it. On synthetic half of all"
                " answers are of 20 tokens or fewer, so that one gap would be most of their TBT; to bring 15,000 tokens"
                " of KV from DRAM into pages alone takes 35 ms at 140 GB/s, and the paper's median is 40 ms in all."
                ' Rows "with hand-off" count it.',
                "No single decode model fits all curves. Calibrated gives Mooncake's gaps; those of coupled nodes are"
                " too short on the conversation and too long on synthetic. Single is nearer for plain vLLM on"
                " synthetic, and further off for all else.",
            ],
        )
        for (kind, workload, name), case in cases.items():
            outcome, label = outcomes[case], f"{workload} {name} ({kind} decode)"
            shares = targets.TBT_SHARE[workload][name]
            for limit, paper in zip(targets.TBTS_MS, shares, strict=True):
                table.add(f"{label} TBT <= {limit} ms", outcome.tbt_share(limit / 1000), paper, "%")
            percentiles = targets.TBT_MS.get(workload, {}).get(name)
            for index, percent in enumerate((10, 50, 90)):
                paper_ms = percentiles[index] if percentiles else None
                ours = 1000 * float(np.percentile(outcome.tbt(), percent))
                table.add(f"{label} p{percent}", ours, paper_ms, "ms")
            if name != "mooncake":
                continue
            plain, theirs = outcomes[cases[kind, workload, "vllm"]], targets.TBT_SHARE[workload]["vllm"]
            for index, limit in enumerate(targets.TBTS_MS):
                for what, handoff in (("", False), (" with hand-off", True)):
                    share = outcome.share(targets.TTFT, limit / 1000, handoff)
                    known = None if handoff else shares[index] / theirs[index]
                    times = share / max(plain.share(targets.TTFT, limit / 1000), 1e-9)
                    table.add(f"{label} effective at {limit} ms{what}", share, None, "%")
                    table.add(f"{label} effective at {limit} ms{what} / vllm", times, known, "x")
            handed = outcome.records.second_gap[outcome.done]
            table.add(f"{label} hand-off p50", 1000 * float(np.nanpercentile(handed, 50)), None, "ms")
        if folder is not None:
            plots.distributions({key: outcomes[case] for key, case in cases.items()}, folder / "tbt.png")
            table.plot = "tbt.png"
        return table

    return Figure("tbt", tuple(cases.values()), make)


def spread() -> Figure:
    """What the paper does not say of its baseline."""
    cases = {
        (workload, policy): Case(TRACES[workload], coupled("vllm", CALIBRATED), with_policy(policy))
        for workload in ("conversation", "synthetic")
        for policy in ("round-robin", "random", "least-loaded")
    }

    def make(outcomes: Outcomes, folder: Path | None) -> Table:
        table = Table(
            "spread",
            "How plain vLLM's requests are spread",
            "The paper does not say how. Sixteen coupled nodes of plain vLLM (calibrated decode): in turn, as in all"
            " other tables; at random; to the fewest requests. Nothing is tuned by this: it says how much of the gain"
            " hangs on it.",
            remarks=[
                "No way to spread them explains the paper's baseline on both workloads: on the conversation its gaps"
                " are longer than ours however they are spread, on synthetic shorter than ours in turn or at random."
            ],
        )
        for (workload, policy), case in cases.items():
            shares = targets.TBT_SHARE[workload]["vllm"]
            for limit, paper in zip(targets.TBTS_MS, shares, strict=True):
                ours = outcomes[case].tbt_share(limit / 1000)
                table.add(f"{workload} {policy} TBT <= {limit} ms", ours, paper, "%")
        return table

    return Figure("spread", tuple(cases.values()), make)


def prefill_seconds() -> Figure:
    cases = {
        (workload, name): system(name, workload, CALIBRATED)
        for workload in targets.WORKLOADS
        for name in targets.SYSTEMS
    }

    def make(outcomes: Outcomes, folder: Path | None) -> Table:
        table = Table(
            "prefill",
            "Seconds of prefill",
            "Mean seconds that a prompt takes of a node, those to bring cached KV into pages included. A step that also"
            " decodes is shared by tokens.",
        )
        for (workload, name), case in cases.items():
            paper = targets.PREFILL_SECONDS[workload][name]
            table.add(f"{workload} {name}", outcomes[case].prefill_seconds, paper, "s")
        return table

    return Figure("prefill", tuple(cases.values()), make)


#: Ours by the paper's names. Who is blind to caches does not fetch from others' either.
BY_POLICY = {
    "kvcache-centric": ALGORITHM_1,
    "cache-aware": "cache-aware",
    "least-queue-time": "least-queue-time:fetch=false",
    "random": "random:fetch=false",
}


def policies() -> Figure:
    def case(prefill: int, policy: str) -> Case:
        cluster = nodes(model=CALIBRATED, prefill=prefill, decode=NODES - prefill)
        return Case(TRACES["conversation"], cluster, with_policy(policy))

    cases = {(prefill, name): case(prefill, policy) for prefill in (8, 7) for name, policy in BY_POLICY.items()}
    variants = {
        "threshold 3": case(8, f"{ALGORITHM_1},threshold=3"),
        "copies of hot prefixes ahead of requests": case(8, "kvcache-centric"),
    }

    def make(outcomes: Outcomes, folder: Path | None) -> Table:
        table = Table(
            "ttft",
            "Time to first token by policy",
            "Conversation, sixteen nodes, nobody refused. Only multiples of the first are compared: the paper does not"
            " say how many of its nodes prefilled, and nobody has reproduced its absolute times.",
        )
        best = targets.TTFT_BY_POLICY["kvcache-centric"]
        for (prefill, name), case in cases.items():
            paper = targets.TTFT_BY_POLICY[name]
            label = f"{prefill}P{NODES - prefill}D {name}"
            table.add(f"{label} (paper {paper} s)", outcomes[case].mean_ttft, None, "s")
            if name != "kvcache-centric":
                first = outcomes[cases[prefill, "kvcache-centric"]].mean_ttft
                table.add(f"{label} / kvcache-centric", outcomes[case].mean_ttft / first, paper / best, "x")
        first = outcomes[cases[8, "kvcache-centric"]].mean_ttft
        for what, case in variants.items():
            table.add(f"8P8D kvcache-centric, {what} / without", outcomes[case].mean_ttft / first, None, "x")
        return table

    return Figure("ttft", (*cases.values(), *variants.values()), make)


def local_global() -> Figure:
    """Answers of one token: a worker of both roles only prefills then, and nothing is handed off."""
    cases = {
        (workload, name): Case(Trace(workload, output=1), nodes(model=CALIBRATED, both=10), with_policy(policy))
        for workload in ("conversation", "synthetic")
        for name, policy in (
            ("local", "least-queue-time:fetch=false"),
            ("local, aware", "cache-aware"),
            ("global", ALGORITHM_1),
        )
    }

    def make(outcomes: Outcomes, folder: Path | None) -> Table:
        table = Table(
            "cache",
            "Local caches and the global one",
            "Ten nodes with 3 M tokens each, answers of one token. The paper's local baseline looks weak: beside one"
            " that is blind to caches stands one that sends each request to where its first token comes soonest"
            " (`cache-aware`).",
        )
        for (workload, name), case in cases.items():
            outcome = outcomes[case]
            cached, seconds = targets.LOCAL_GLOBAL[workload]["global" if name == "global" else "local"]
            compared = name != "local, aware"
            table.add(f"{workload} {name} cached", outcome.cached, cached if compared else None, "%")
            table.add(f"{workload} {name} prefill", outcome.prefill_seconds, seconds if compared else None, "s")
        return table

    return Figure("cache", tuple(cases.values()), make)


def split() -> Figure:
    cases = {
        pair: Case(TRACES["synthetic"], nodes(model=CALIBRATED, prefill=pair[0], decode=pair[1]), GLOBAL)
        for pair in targets.SPLIT
    }

    def make(outcomes: Outcomes, folder: Path | None) -> Table:
        table = Table(
            "split",
            "Prefill and decode nodes",
            "Synthetic, sixteen nodes; effective: TTFT <= 10 s and TBT <= 100 ms, the hand-off not counted.",
        )
        ttft, tbt = targets.SPLIT_TTFT, targets.SPLIT_TBT_MS / 1000
        for (prefill, decode), case in cases.items():
            outcome, label = outcomes[case], f"{prefill}P{decode}D"
            theirs = targets.SPLIT[prefill, decode]
            table.add(f"{label} TTFT", outcome.mean_ttft, theirs[0], "s")
            table.add(f"{label} TBT", 1000 * float(np.mean(outcome.tbt())), theirs[1], "ms")
            table.add(f"{label} effective", outcome.share(ttft, tbt), theirs[2], "%")
        if folder is not None:
            rows = [outcomes[case] for case in cases.values()]
            plots.panels(
                folder / "split.png",
                "prefill nodes of 16",
                [pair[0] for pair in cases],
                {
                    "TTFT s": ([row.mean_ttft for row in rows], [row[0] for row in targets.SPLIT.values()]),
                    "TBT ms": (
                        [1000 * float(np.mean(row.tbt())) for row in rows],
                        [row[1] for row in targets.SPLIT.values()],
                    ),
                    "effective %": ([row.share(ttft, tbt) for row in rows], [row[2] for row in targets.SPLIT.values()]),
                },
            )
            table.plot = "split.png"
        return table

    return Figure("split", tuple(cases.values()), make)


def second(outcome: Outcome) -> float:
    """Mean seconds to the second token, of those that have one."""
    records = outcome.records
    times = records.ttft + records.second_gap
    return float(np.nanmean(times[outcome.done]))


def bandwidth() -> Figure:
    def case(gbps: int | None) -> Case:
        if gbps is None:
            # What the node itself has is reused: the paper's local baseline.
            cluster = nodes(model=CALIBRATED, prefill=8, decode=8)
            return Case(TRACES["synthetic"], cluster, with_policy(BY_POLICY["least-queue-time"]))
        cluster = nodes(model=CALIBRATED, prefill=8, decode=8, link_rate=gbps * GBIT)
        return Case(TRACES["synthetic"], cluster, GLOBAL)

    cases = {gbps: case(gbps) for gbps in targets.BANDWIDTH}
    # None has anything in common with another.
    unshared = Case(Trace("synthetic", shared=False), nodes(model=CALIBRATED, prefill=8, decode=8), GLOBAL)

    def make(outcomes: Outcomes, folder: Path | None) -> Table:
        table = Table(
            "bandwidth",
            "Bandwidth of the network",
            "Synthetic, 8 prefill + 8 decode: mean TTFT by what each node can send, and receive; and the mean time to"
            " the second token, which waits for the hand-off.",
            remarks=[
                "At 24 and 40 Gbit/s it is the hand-off that fills the links: 15,000 tokens of KV of each of 3.9"
                " requests per second are 19 GB/s, and eight nodes at 24 Gbit/s send 24. A first token that leaves at"
                " the prefill node does not wait for that. The paper's times rise as those to our second token do, so"
                " its first token seems to be one that the decode node has.",
                'The paper\'s "recompute" is taken for its local baseline, which reuses what the node itself has: with'
                " nothing reused at all 3.9 prompts per second are more than eight nodes can compute.",
            ],
        )
        for gbps, each in cases.items():
            label = "nothing fetched (least-queue-time)" if gbps is None else f"{gbps} Gbit/s"
            table.add(f"{label} TTFT", outcomes[each].mean_ttft, targets.BANDWIDTH[gbps], "s")
            table.add(f"{label} second token", second(outcomes[each]), targets.BANDWIDTH[gbps], "s")
        table.add("nothing reused at all TTFT", outcomes[unshared].mean_ttft, None, "s")
        table.add("nothing reused at all prefill", outcomes[unshared].prefill_seconds, None, "s")
        if folder is not None:
            rates = [gbps for gbps in cases if gbps is not None]
            theirs = [targets.BANDWIDTH[gbps] for gbps in rates]
            drawn = {
                "TTFT s": ([outcomes[cases[gbps]].mean_ttft for gbps in rates], theirs),
                "second token s (paper: TTFT)": ([second(outcomes[cases[gbps]]) for gbps in rates], theirs),
            }
            plots.panels(folder / "bandwidth.png", "Gbit/s", rates, drawn)
            table.plot = "bandwidth.png"
        return table

    return Figure("bandwidth", (*cases.values(), unshared), make)


def replicas() -> Figure:
    cases = {
        "": system("mooncake", "conversation", CALIBRATED),
        ", copies ahead of requests": Case(
            TRACES["conversation"], nodes(model=CALIBRATED, prefill=8, decode=8), with_policy("kvcache-centric")
        ),
    }

    def make(outcomes: Outcomes, folder: Path | None) -> Table:
        table = Table(
            "replicas",
            "Replicas of hot blocks",
            "Conversation, 8 prefill + 8 decode: nodes that hold a key in DRAM, mean over time, by the rank of the key"
            " among those that most requests name.",
        )
        for what, case in cases.items():
            for rank, paper in targets.REPLICAS.items():
                curve = outcomes[case].series.get(f"replicas {rank}")
                mean = float(np.mean(curve[1])) if curve else float("nan")
                table.add(f"key ranked {rank}th{what}", mean, None if what else paper, "nodes")
        if folder is not None:
            series = outcomes[cases[""]].series
            curves = {f"{rank}th": series[f"replicas {rank}"] for rank in targets.REPLICAS}
            plots.over_time(folder / "replicas.png", "nodes", curves)
            table.plot = "replicas.png"
        return table

    return Figure("replicas", tuple(cases.values()), make)


FIGURES: tuple[Callable[[], Figure], ...] = (
    gaps,
    spread,
    prefill_seconds,
    policies,
    local_global,
    split,
    bandwidth,
    replicas,
    overload,
)


def needed(figures: Iterable[Figure]) -> list[Case]:
    return list(dict.fromkeys(case for figure in figures for case in figure.cases))
