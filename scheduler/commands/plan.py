"""`conductor plan`: the cheapest cluster for a trace and its objectives, with all that was tried on the way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from ..backends import BackendError, ClusterBackend, Task, find_backend
from ..report.document import dumps, objectives, provenance
from ..report.plots import plot_lines
from ..report.summary import needed_stretch, summarize
from ..report.table import cell, percent, seconds, table
from ..sim.report import FAILED, Report
from ..sim.spec import MAX_WORKERS, ClusterSpec, RunSpec, WorkerSpec
from ..sim.specfile import load_cluster
from ..types import Role, Slo
from .compare import maker
from .guard import INTERRUPTED, InputError, Watch, guarded, told, write_text
from .options import Output, RunOptions, at_least, positive, share
from .search import Point, Search
from .trace import TraceOptions


def plan(
    *,
    trace: TraceOptions | None = None,
    ttft: float,
    tbt: float,
    goodput: float = 0.95,
    nodes_max: int = 64,
    cluster: str = "paper",
    run: RunOptions | None = None,
    backend: Annotated[str, Parameter(name="--backend")] = "sim",
    output: Output | None = None,
) -> int:
    """Finds the cheapest cluster, in nodes, that serves a trace well enough: its split between prefill and decode, or
    none, with workers of role both.

    Ends with 1 if no cluster up to the largest does; then it says which is best, and which objectives it would meet.
    Ctrl-C leaves what was tried.

    Parameters
    ----------
    ttft
        Objective for the time to the first token, seconds.
    tbt
        Objective for the time between tokens (mean of a request's longest tenth), seconds.
    goodput
        Share of the requests that has to be served within both.
    nodes_max
        The largest cluster to try.
    cluster
        A cluster file (or one that comes along) whose nodes and first prefill and decode workers are multiplied; and
        the first of role both, or else the first decode worker in that role.
    backend
        As for simulate; one that makes clusters.
    """
    trace, run, output = trace or TraceOptions(), run or RunOptions(), output or Output()

    def work() -> int:
        output.check()
        base = load_cluster(cluster)
        slo = Slo(ttft=positive("--ttft", ttft), tbt=positive("--tbt", tbt))
        wanted = share("--goodput", goodput)
        at_least("--nodes-max", nodes_max, 2)
        if nodes_max > MAX_WORKERS:
            raise InputError(f"--nodes-max {nodes_max:,}: at most {MAX_WORKERS:,} can be simulated")
        where = maker(find_backend(backend))
        watch = Watch("clusters tried", output.progress)
        trial = Trial(where, trace, msgspec.structs.replace(base, slo=slo), run.spec(), wanted, watch)
        search = Search(trial, wanted, nodes_max)
        complete = True
        try:
            search.run()
        except KeyboardInterrupt:
            complete = False
        watch.close()
        with told(_text(search, slo, trial.facts, complete)):
            write_text(output.json, dumps(_document(search, slo, trial.facts, complete)))
            if output.plot is not None and search.tried:
                title = f"{trace.trace}: {objectives(slo)}"
                axes = ("prefill nodes", "share within the objectives")
                plot_lines(_lines(search), axes, wanted, output.plot, title)
        if not complete:
            return INTERRUPTED
        return 0 if search.best is not None else 1

    return guarded("plan", work)


class Trial:
    """Runs the trace on a cluster of so many workers. facts: of the runs, for the report."""

    def __init__(
        self, backend: ClusterBackend, trace: TraceOptions, base: ClusterSpec, run: RunSpec, wanted: float, watch: Watch
    ) -> None:
        self.facts: dict[str, object] = {}
        self._backend, self._trace, self._base, self._run = backend, trace, base, run
        self._wanted, self._watch = wanted, watch
        self._count = 0
        # Now, so that a template without one of the roles is told before the first run.
        self.cluster(1, 1)

    def __call__(self, prefill: int, decode: int, both: int) -> Point:
        cluster = self.cluster(prefill, decode, both)
        requests = self._trace.made(cluster.block_tokens, self._run.seed)
        task = Task(requests=requests, description=requests.description, cluster=cluster, run=self._run)
        report = self._backend.run(task)
        if not report.complete:
            raise KeyboardInterrupt
        if report.totals.get(FAILED):
            raise BackendError(f"{prefill}P{decode}D cannot be judged: {'; '.join(report.notes)}")
        self._count += 1
        self._watch(self._count, None)
        return self._point(prefill, decode, both, report)

    def cluster(self, prefill: int, decode: int, both: int = 0) -> ClusterSpec:
        """Raises InputError if the template has nobody for a role."""
        counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.BOTH: both}
        workers = tuple(self._of(role, count) for role, count in counts.items() if count)
        return msgspec.structs.replace(self._base, workers=workers)

    def _of(self, role: Role, count: int) -> WorkerSpec:
        """Its first worker of the role, else the first of role both, or of decode for that."""
        for wanted in (role, Role.BOTH if role is not Role.BOTH else Role.DECODE):
            for worker in self._base.workers:
                if worker.role is wanted:
                    return msgspec.structs.replace(worker, role=role, count=count)
        raise InputError(f"the cluster file has no {role.value} worker to be multiplied: add one")

    def _point(self, prefill: int, decode: int, both: int, report: Report) -> Point:
        slo = self._base.slo
        s = summarize(report, slo)
        self.facts = {name: value for name, value in report.provenance.items() if name != "cluster"}
        first, gaps = Slo(ttft=slo.ttft), Slo(tbt=slo.tbt)
        both_longer, first_longer, gaps_longer = (
            needed_stretch(report.records, stretched, self._wanted, kept)
            for stretched, kept in ((slo, Slo()), (first, gaps), (gaps, first))
        )
        met = s.effective, s.met_ttft, s.met_tbt
        return Point(prefill, decode, *met, both_longer, first_longer, gaps_longer, both)


def _text(search: Search, slo: Slo, facts: Mapping[str, object], complete: bool) -> str:
    rows = [
        (name_of(p), p.nodes, percent(p.share), percent(p.ttft), percent(p.tbt), p.stretch)
        for p in sorted(search.tried.values(), key=lambda p: (p.nodes, p.prefill))
    ]
    headers = ("cluster", "nodes", "within both", "TTFT", "TBT", "stretch")
    parts = [] if complete else ["PARTIAL: stopped early."]
    parts += [provenance({**facts, "objectives": objectives(slo), "wanted": percent(search.wanted)})]
    if rows:
        parts.append(table(headers, rows))
        parts.append("stretch: by how much both objectives would have to be longer for the wanted share (1: met)")
    return "\n\n".join([*parts, verdict(search, slo, complete)])


def verdict(search: Search, slo: Slo, complete: bool) -> str:
    """The answer in a sentence or two."""
    best = search.best
    if not complete:
        return f"So far the cheapest that suffices is {name_of(best)}." if best else "Nothing tried so far suffices."
    if best is not None:
        less = max((p for p in search.tried.values() if p.nodes == best.nodes - 1), key=lambda p: p.share, default=None)
        beside = f" With {_nodes(less.nodes)} it is {percent(less.share)} at best ({name_of(less)})." if less else ""
        serve = "serves" if best.nodes == 1 else "serve"
        return f"{name_of(best)}: {_nodes(best.nodes)} {serve} {percent(best.share)} within the objectives.{beside}"
    top = max(search.tried.values(), key=lambda p: (p.share, -p.stretch))
    said = (
        f"No cluster of up to {search.most} nodes suffices: the best possible is {percent(top.share)} ({name_of(top)})."
    )
    return f"{said} {_instead(search, slo)}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _instead(search: Search, slo: Slo) -> str:
    """Objectives that one of the clusters tried would meet, the nearest to those asked for."""
    assert slo.ttft is not None and slo.tbt is not None
    points = list(search.tried.values())
    one = min(points, key=lambda p: min(p.ttft_stretch, p.tbt_stretch))
    both = min(points, key=lambda p: p.stretch)
    if one.tbt_stretch < math.inf and one.tbt_stretch <= one.ttft_stretch:
        return f"{name_of(one)} would do with a TBT of {seconds(slo.tbt * one.tbt_stretch)}, TTFT as it is."
    if one.ttft_stretch < math.inf:
        return f"{name_of(one)} would do with a TTFT of {seconds(slo.ttft * one.ttft_stretch)}, TBT as it is."
    if both.stretch < math.inf:
        longer = objectives(Slo(ttft=slo.ttft * both.stretch, tbt=slo.tbt * both.stretch))
        return f"{name_of(both)} would do with both {cell(both.stretch)} times as long: {longer}."
    return "Nor would longer objectives do: too few requests come to an end at all."


def name_of(point: Point) -> str:
    """As 3P2D, or 5B for workers of role both."""
    return f"{point.both}B" if point.both else f"{point.prefill}P{point.decode}D"


def _document(search: Search, slo: Slo, facts: Mapping[str, object], complete: bool) -> dict[str, Any]:
    return {
        "complete": complete,
        "provenance": facts,
        "slo": slo,
        "wanted": search.wanted,
        "nodes_max": search.most,
        "best": asdict(search.best) if search.best else None,
        "verdict": verdict(search, slo, complete),
        "tried": [asdict(point) for point in search.tried.values()],
    }


def _lines(search: Search) -> dict[str, list[tuple[float, float]]]:
    """Share over prefill nodes, a line for each number of nodes."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for point in sorted((p for p in search.tried.values() if not p.both), key=lambda p: (p.nodes, p.prefill)):
        lines.setdefault(f"{point.nodes} nodes", []).append((float(point.prefill), point.share))
    return lines
