"""The tables and figures, each as the cases it needs and what it makes of their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from bench.paper import targets
from bench.paper.cases import GLOBAL, MODELS, NODES, SPREAD, Case, Trace, coupled, disaggregated
from bench.paper.runs import Outcome
from bench.paper.tables import Table
from pyengine.scheduler.sim.spec import RunSpec
from pyengine.scheduler.types import Slo

Outcomes = Mapping[Case, Outcome]
GBIT = 1e9 / 8


@dataclass(frozen=True)
class Figure:
    """cases: to be run. make: the table, of all outcomes; draws into the folder."""

    name: str
    cases: tuple[Case, ...]
    make: Callable[[Outcomes, Path], Table]


def system(name: str, workload: str, model: str) -> Case:
    """One of the four systems of the main comparison, on sixteen nodes."""
    if name == "mooncake":
        return Case(Trace(workload), disaggregated(8, 8, model), GLOBAL)
    return Case(Trace(workload), coupled(name, model), SPREAD)


def _named(kind: str) -> str:
    return MODELS[kind]


def gaps() -> Figure:
    cases = {
        (kind, workload, name): system(name, workload, _named(kind))
        for kind in MODELS
        for workload in targets.WORKLOADS
        for name in targets.SYSTEMS
    }

    def make(outcomes: Outcomes, folder: Path) -> Table:
        table = Table(
            "tbt",
            "Gaps between tokens, and who keeps them short",
            "Share of requests whose TBT (mean of the longest tenth of their gaps) is at most 100, 200, 300 ms; its"
            " 10th, 50th and 90th percentile; and how many more requests keep TTFT <= 30 s and that TBT than with plain"
            " vLLM. Sixteen nodes: Mooncake 8 prefill + 8 decode, the others sixteen coupled ones.",
        )
        for (kind, workload, name), case in cases.items():
            outcome, label = outcomes[case], f"{workload} {name} ({kind} decode)"
            shares = targets.TBT_SHARE[workload][name]
            for limit, paper in zip(targets.TBTS_MS, shares, strict=True):
                table.add(f"{label} TBT <= {limit} ms", outcome.tbt_share(limit / 1000), paper, "%")
            percentiles = targets.TBT_MS.get(workload, {}).get(name)
            for index, percent in enumerate((10, 50, 90)):
                paper_ms = percentiles[index] if percentiles else None
                table.add(f"{label} p{percent}", outcome.tbt_ms(percent), paper_ms, "ms")
            if name == "mooncake":
                plain = outcomes[cases[kind, workload, "vllm"]]
                stated = targets.GAIN.get(workload)
                for index, limit in enumerate(targets.TBTS_MS):
                    ours = outcome.share(targets.TTFT, limit / 1000)
                    theirs = plain.share(targets.TTFT, limit / 1000)
                    gain = 100 * (ours / theirs - 1) if theirs else float("inf")
                    table.add(f"{label} gain over vllm at {limit} ms", gain, stated[index] if stated else None, "%")
        distributions(outcomes, cases, folder / "tbt.png")
        table.plot = "tbt.png"
        return table

    return Figure("tbt", tuple(cases.values()), make)


def prefill_seconds() -> Figure:
    cases = {
        (workload, name): system(name, workload, _named("calibrated"))
        for workload in targets.WORKLOADS
        for name in targets.SYSTEMS
    }

    def make(outcomes: Outcomes, folder: Path) -> Table:
        table = Table(
            "prefill", "Seconds of prefill", "Mean seconds that a prompt takes of a node, by what is reused of it."
        )
        for (workload, name), case in cases.items():
            paper = targets.PREFILL_SECONDS[workload][name]
            table.add(f"{workload} {name}", outcomes[case].prefill_seconds, paper, "s")
        return table

    return Figure("prefill", tuple(cases.values()), make)


def policies() -> Figure:
    cases = {
        (prefill, name): Case(
            Trace("conversation"),
            disaggregated(prefill, NODES - prefill, _named("calibrated")),
            replace_policy(GLOBAL, name),
        )
        for prefill in (8, 7)
        for name in targets.TTFT_BY_POLICY
    }

    def make(outcomes: Outcomes, folder: Path) -> Table:
        table = Table(
            "ttft",
            "Time to first token by policy",
            "Conversation, sixteen nodes, nobody refused. Judge the multiples of the first: the paper does not say how"
            " many of its nodes prefilled.",
        )
        best = targets.TTFT_BY_POLICY["kvcache-centric"]
        for (prefill, name), case in cases.items():
            paper = targets.TTFT_BY_POLICY[name]
            label = f"{prefill}P{NODES - prefill}D {name}"
            table.add(label, outcomes[case].mean_ttft, paper, "s")
            if name != "kvcache-centric":
                first = outcomes[cases[prefill, "kvcache-centric"]].mean_ttft
                table.add(f"{label} / kvcache-centric", outcomes[case].mean_ttft / first, paper / best, "x")
        return table

    return Figure("ttft", tuple(cases.values()), make)


def replace_policy(run: RunSpec, policy: str, **changes: object) -> RunSpec:
    return msgspec.structs.replace(run, policy=policy, **changes)


def local_global() -> Figure:
    cases = {
        (workload, name): Case(
            Trace(workload, output=1),
            disaggregated(10, 1, _named("calibrated"), dram_tokens=3_000_000),
            replace_policy(GLOBAL, policy),
        )
        for workload in ("conversation", "synthetic")
        for name, policy in (
            ("local", "least-queue-time"),
            ("local, aware", "cache-aware"),
            ("global", "kvcache-centric"),
        )
    }

    def make(outcomes: Outcomes, folder: Path) -> Table:
        table = Table(
            "cache",
            "Local caches and the global one",
            "Ten prefill nodes with 3 M tokens each, answers of one token. The paper's local baseline looks weak:"
            " beside one that is blind to caches stands one that sends each request to where its prefix is"
            " (`cache-aware`).",
        )
        for (workload, name), case in cases.items():
            cached, seconds = targets.LOCAL_GLOBAL[workload]["global" if name == "global" else "local"]
            table.add(f"{workload} {name} cached", outcomes[case].cached, cached, "%")
            table.add(f"{workload} {name} prefill", outcomes[case].prefill_seconds, seconds, "s")
        return table

    return Figure("cache", tuple(cases.values()), make)


def split() -> Figure:
    cases = {
        pair: Case(Trace("synthetic"), disaggregated(*pair, _named("calibrated")), GLOBAL) for pair in targets.SPLIT
    }

    def make(outcomes: Outcomes, folder: Path) -> Table:
        table = Table("split", "Prefill and decode nodes", "Synthetic, sixteen nodes, TTFT <= 10 s, TBT <= 100 ms.")
        for (prefill, decode), case in cases.items():
            outcome, label = outcomes[case], f"{prefill}P{decode}D"
            ttft, tbt, share = targets.SPLIT[prefill, decode]
            table.add(f"{label} TTFT", outcome.mean_ttft, ttft, "s")
            table.add(f"{label} TBT", outcome.mean_tbt_ms, tbt, "ms")
            table.add(f"{label} effective", outcome.share(targets.SPLIT_TTFT, targets.SPLIT_TBT_MS / 1000), share, "%")
        curves(
            folder / "split.png",
            "prefill nodes",
            [pair[0] for pair in cases],
            {
                "TTFT s": [outcomes[case].mean_ttft for case in cases.values()],
                "TTFT s, paper": [row[0] for row in targets.SPLIT.values()],
            },
        )
        table.plot = "split.png"
        return table

    return Figure("split", tuple(cases.values()), make)


def bandwidth() -> Figure:
    def case(gbps: int | None) -> Case:
        if gbps is None:
            # No reuse: each prompt is computed whole.
            cluster = disaggregated(8, 8, _named("calibrated"), dram_tokens=1 << 17)
            return Case(Trace("synthetic"), cluster, replace_policy(GLOBAL, "least-queue-time"))
        return Case(Trace("synthetic"), disaggregated(8, 8, _named("calibrated"), link_rate=gbps * GBIT), GLOBAL)

    cases = {gbps: case(gbps) for gbps in targets.BANDWIDTH}

    def make(outcomes: Outcomes, folder: Path) -> Table:
        table = Table("bandwidth", "Bandwidth of the network", "Synthetic: mean TTFT by what each node can send.")
        for gbps, each in cases.items():
            label = "recomputed" if gbps is None else f"{gbps} Gbit/s"
            table.add(label, outcomes[each].mean_ttft, targets.BANDWIDTH[gbps], "s")
        rates = [gbps for gbps in cases if gbps is not None]
        curves(
            folder / "bandwidth.png",
            "Gbit/s",
            rates,
            {
                "TTFT s": [outcomes[cases[gbps]].mean_ttft for gbps in rates],
                "TTFT s, paper": [targets.BANDWIDTH[gbps] for gbps in rates],
            },
        )
        table.plot = "bandwidth.png"
        return table

    return Figure("bandwidth", tuple(cases.values()), make)


def replicas() -> Figure:
    case = system("mooncake", "conversation", _named("calibrated"))

    def make(outcomes: Outcomes, folder: Path) -> Table:
        table = Table(
            "replicas",
            "Replicas of hot blocks",
            "Conversation, 8 prefill + 8 decode: mean over time, by rank of the key.",
        )
        for rank, paper in targets.REPLICAS.items():
            curve = outcomes[case].series.get(f"replicas {rank}")
            table.add(f"key ranked {rank}th", float(np.mean(curve[1])) if curve else float("nan"), paper, "nodes")
        return table

    return Figure("replicas", (case,), make)


def overload() -> Figure:
    cluster = disaggregated(8, 8, _named("calibrated"), Slo(ttft=30.0, tbt=0.1))
    trace = Trace("conversation", repeat=2, speed=2.0, limit=targets.OVERLOAD_REQUESTS)
    cases = {
        name: Case(trace, cluster, replace_policy(GLOBAL, "kvcache-centric", admission=name))
        for name in (*targets.OVERLOAD, "predictive")
    }

    def make(outcomes: Outcomes, folder: Path) -> Table:
        table = Table(
            "overload",
            "Overload",
            "8 prefill + 8 decode nodes, 23,000 requests at twice the speed, TTFT <= 30 s, TBT <= 100 ms. The paper's"
            " trace of these requests was not published: these are the conversation's, twice one after the other.",
        )
        for name, case in cases.items():
            records = outcomes[case].records
            refused = float(np.sum(records.outcome == 1) + np.sum(records.outcome == 2))
            table.add(f"{name} rejected", refused, targets.OVERLOAD.get(name), "requests")
            table.add(f"{name} prefilled in vain", float(np.sum(records.wasted)), None, "requests")
            table.add(f"{name} effective", outcomes[case].share(30.0, 0.1), None, "%")
            for curve in ("prefill load", "decode load"):
                _, values = outcomes[case].series[curve]
                table.add(f"{name} {curve} mean", 100 * float(np.mean(values)), None, "%")
                table.add(f"{name} {curve} deviation", 100 * float(np.std(values)), None, "%")
        loads(outcomes, cases, folder / "overload.png")
        table.plot = "overload.png"
        return table

    return Figure("overload", tuple(cases.values()), make)


FIGURES: tuple[Callable[[], Figure], ...] = (
    gaps,
    prefill_seconds,
    policies,
    local_global,
    split,
    bandwidth,
    replicas,
    overload,
)


# -- pictures ----------------------------------------------------------------------------------------------------------


def distributions(outcomes: Outcomes, cases: Mapping[tuple[str, str, str], Case], path: Path) -> None:
    """Share of requests by TBT, one panel per decode model and workload."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(MODELS), len(targets.WORKLOADS), figsize=(13, 7), squeeze=False)
    for row, kind in enumerate(MODELS):
        for column, workload in enumerate(targets.WORKLOADS):
            panel = panels[row][column]
            for name in targets.SYSTEMS:
                outcome = outcomes[cases[kind, workload, name]]
                values = np.sort(outcome.records.tbt[outcome.done]) * 1000
                panel.plot(values, np.arange(1, len(values) + 1) / len(values) * 100, label=name)
                shares = targets.TBT_SHARE[workload][name]
                panel.plot(targets.TBTS_MS, shares, "x", color=panel.lines[-1].get_color())
            panel.set(
                title=f"{workload}, {kind} decode", xlim=(0, 600), xlabel="TBT ms (x: paper)", ylabel="% of requests"
            )
    panels[0][0].legend()
    finish(figure, path)


def curves(path: Path, xlabel: str, x: Sequence[float], lines: Mapping[str, Sequence[float]]) -> None:
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6, 4))
    for name, values in lines.items():
        panel.plot(x, values, "x--" if name.endswith("paper") else "o-", label=name)
    panel.set(xlabel=xlabel)
    panel.legend()
    finish(figure, path)


def loads(outcomes: Outcomes, cases: Mapping[str, Case], path: Path) -> None:
    """Load of prefill and of decode over time, by admission."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(cases), 1, figsize=(10, 2.2 * len(cases)), sharex=True, squeeze=False)
    for (panel,), (name, case) in zip(panels, cases.items(), strict=True):
        for curve in ("prefill load", "decode load"):
            seconds, values = outcomes[case].series[curve]
            panel.plot(seconds, values, label=curve, linewidth=0.8)
        panel.set(title=name, ylim=(0, 2))
    panels[0][0].legend()
    finish(figure, path)


def finish(figure: object, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()  # type: ignore[attr-defined]
    figure.savefig(path, dpi=110)  # type: ignore[attr-defined]
    pyplot.close(figure)  # type: ignore[arg-type]


def needed(figures: Iterable[Figure]) -> list[Case]:
    return list(dict.fromkeys(case for figure in figures for case in figure.cases))
