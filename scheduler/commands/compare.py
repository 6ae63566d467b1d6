"""`conductor compare`: policies over rates and seeds; their goodput curves, and which differences are real."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

from ..backends import BackendError, ClusterBackend, Task, find_backend
from ..report.document import dumps, objectives, plain, provenance
from ..report.plots import plot_curves
from ..report.statistics import LEVEL, Difference, interval, seeds_needed
from ..report.statistics import compare as compare_rows
from ..report.summary import Summary, summarize
from ..report.table import cell, percent, table
from ..sim.report import F64, FAILED
from ..sim.spec import ClusterSpec, RunSpec
from .contenders import contenders, cores, each, pool
from .guard import INTERRUPTED, InputError, Watch, guarded, told, write_text
from .options import ClusterOptions, Flag, Output, at_least, positive
from .trace import TraceOptions

#: Of one comparison, so that a slip of the pen does not ask for days of work.
MAX_RUNS = 10_000
ALL_RATES = "mean"


@dataclass(frozen=True)
class Cell:
    """One run: a contender under a rate and a seed. All that a process of its own needs."""

    backend: str
    trace: TraceOptions
    cluster: ClusterSpec
    run: RunSpec
    rate: float


@dataclass(frozen=True)
class Run:
    summary: Summary
    digest: str
    provenance: dict[str, Any]
    notes: tuple[str, ...]
    failed: bool = False


def compare(
    *,
    trace: TraceOptions | None = None,
    cluster: ClusterOptions | None = None,
    policies: str = "kvcache-centric,least-loaded,random",
    admission: str = "none",
    rates: str = "1",
    seeds: int = 8,
    raw: Flag = False,
    jobs: int | None = None,
    backend: Annotated[str, Parameter(name="--backend")] = "sim",
    output: Output | None = None,
) -> int:
    """Compares policies on one trace at several rates: goodput (requests per second within all objectives), and which
    differences are real.

    Each seed makes the trace anew (its jitter; the generated trace itself) and draws for the policies; all policies see
    the same trace under the same seed, so they are compared pair by pair. A difference is called real if a test that
    assumes no distribution (all signs of the seeds' differences, corrected for all comparisons shown) gives it at most
    a chance of 5 %. Ctrl-C leaves the runs that are done. Ends with 1 if a policy failed in any run.

    Parameters
    ----------
    policies
        POLICY[+ADMISSION][+roles], with commas between.
    admission
        Of those that name none.
    rates
        How much faster than the trace requests come, with commas between.
    seeds
        Runs of each policy at each rate, under seeds 0, 1, ...; fewer than 6 can show nothing, 6 little.
    raw
        Arrivals as the trace has them: without, seeds jitter them.
    jobs
        Processes (default: as many as there are cores). Results are the same with any number.
    backend
        As for simulate; one that makes clusters.
    """
    trace, cluster, output = trace or TraceOptions(), cluster or ClusterOptions(), output or Output()

    def work() -> int:
        output.check()
        spec = cluster.spec()
        made = replace(trace, jitter=not raw and trace.trace != "generated")
        named = contenders(policies, admission)
        speeds = _rates(rates)
        at_least("--seeds", seeds, 1)
        processes = at_least("--jobs", jobs, 1) if jobs is not None else cores()
        runs = len(named) * len(speeds) * seeds
        if runs > MAX_RUNS:
            raise InputError(f"{runs:,} runs are too many: at most {MAX_RUNS:,}; take fewer seeds, rates or policies")
        maker(find_backend(backend))
        described = made.made(spec.block_tokens, 0).description
        if seeds > 1 and not made.seeded:
            _warn("without jitter seeds change only what policies draw: those that draw nothing run alike under all")
        cells = [
            Cell(backend, made, spec, _seeded(run, seed), rate)
            for run, rate, seed in itertools.product(named.values(), speeds, range(seeds))
        ]
        watch = Watch("runs", output.progress)
        with pool(min(processes, len(cells))) as executor:
            results, complete = each(executor, run_cell, cells, watch)
        watch.close()
        grid = Grid(list(named), speeds, seeds, results)
        facts = {
            "trace": f"{described}; and so for each seed" if made.seeded else described,
            "policies": list(named),
            "rates": speeds,
            "seeds": seeds,
            "objectives": objectives(spec.slo),
            **grid.provenance(),
        }
        with told(grid.text(facts, complete)):
            write_text(output.json, dumps(grid.document(facts, complete)))
            if output.plot is not None and grid.curves():
                axes = ("requests/s offered", "goodput, requests/s")
                plot_curves(grid.curves(), axes, output.plot, str(trace.trace))
        if not complete:
            return INTERRUPTED
        return 1 if grid.failed else 0

    return guarded("compare", work)


def run_cell(cell: Cell) -> Run:
    """In whichever process."""
    requests = cell.trace.made(cell.cluster.block_tokens, cell.run.seed, cell.rate)
    task = Task(requests=requests, description=requests.description, cluster=cell.cluster, run=cell.run)
    report = find_backend(cell.backend).run(task)
    if not report.complete:
        raise KeyboardInterrupt
    failed = bool(report.totals.get(FAILED))
    return Run(
        summarize(report, cell.cluster.slo), report.digest, plain(report.provenance), tuple(report.notes), failed
    )


def maker(backend: ClusterBackend) -> ClusterBackend:
    """Raises BackendError if it has a cluster of its own, which takes no policy and no number of nodes from here."""
    if backend.cluster() is not None:
        raise BackendError(f"the backend {backend.name} has a cluster of its own: it cannot be given other policies")
    return backend


class Grid:
    """Runs by contender, rate and seed; None where Ctrl-C came first."""

    def __init__(self, names: Sequence[str], rates: Sequence[float], seeds: int, runs: Sequence[Run | None]) -> None:
        self.names, self.rates, self.seeds = list(names), list(rates), seeds
        self.runs = np.array(list(runs), dtype=object).reshape(len(names), len(rates), seeds)
        #: Seeds under which every contender was run at every rate: only those are compared.
        self.whole = [seed for seed in range(seeds) if all(run is not None for run in self.runs[:, :, seed].flat)]

    @property
    def failed(self) -> bool:
        """A policy failed in some run: what it leaves compares with nothing."""
        return any(run.failed for run in self.runs.flat if run is not None)

    def values(self, field: str) -> F64:
        """[contender, rate, whole seeds]"""
        chosen = self.runs[:, :, self.whole]
        flat = [float(getattr(run.summary, field)) for run in chosen.flat]
        return np.array(flat, dtype=np.float64).reshape(chosen.shape)

    def differences(self) -> list[tuple[str, str, str, Difference]]:
        """(one, other, rate, difference of goodput) for all pairs, at each rate and over all rates."""
        if not self.whole:
            return []
        goodput = self.values("goodput")
        labels = [(f"{rate:g}", goodput[:, i]) for i, rate in enumerate(self.rates)]
        if len(self.rates) > 1:
            labels.append((ALL_RATES, goodput.mean(axis=1)))
        pairs = [
            (one, other, rate, values[one] - values[other])
            for one, other in itertools.combinations(range(len(self.names)), 2)
            for rate, values in labels
        ]
        found = compare_rows(np.array([row for *_, row in pairs]).reshape(len(pairs), len(self.whole)))
        return [
            (self.names[one], self.names[other], rate, difference)
            for (one, other, rate, _), difference in zip(pairs, found, strict=True)
        ]

    def curves(self) -> dict[str, tuple[F64, F64, F64, F64]]:
        """Goodput over the offered rate: (x, mean, low, high) by contender."""
        if not self.whole:
            return {}
        goodput, offered = self.values("goodput"), self.values("offered")
        found = {}
        for i, name in enumerate(self.names):
            low, high = np.array([interval(row) for row in goodput[i]]).T
            found[name] = (offered[i].mean(axis=1), goodput[i].mean(axis=1), low, high)
        return found

    def provenance(self) -> dict[str, object]:
        """What all runs have in common, of how they were made."""
        kept = ("backend", "fidelity", "version", "cost models", "cluster")
        first = next((run for run in self.runs.flat if run is not None), None)
        return {} if first is None else {name: first.provenance[name] for name in kept if name in first.provenance}

    def text(self, facts: Mapping[str, object], complete: bool) -> str:
        parts = []
        if not complete:
            parts.append(f"PARTIAL: stopped early, with {len(self.whole)} of {self.seeds} seeds whole.")
        parts.append(provenance(facts))
        if not self.whole:
            return "\n\n".join(
                [*parts, "No seed was run under every policy at every rate: there is nothing to compare."]
            )
        parts += [self._curves(), self._differences()]
        notes = sorted({note for run in self.runs.flat if run is not None for note in run.notes})
        return "\n\n".join([*parts, *(f"note: {note}" for note in notes)])

    def _curves(self) -> str:
        rows = []
        columns = [self.values(name) for name in ("offered", "goodput", "effective", "hit")]
        ttft, tbt = self._spreads("ttft"), self._spreads("tbt")
        for j, rate in enumerate(self.rates):
            for i, name in enumerate(self.names):
                offered, goodput, effective, hit = (column[i, j] for column in columns)
                low, high = interval(goodput)
                rows.append(
                    (f"{rate:g}", name, offered.mean(), goodput.mean(), f"{cell(low)}..{cell(high)}",
                     percent(effective.mean()), ttft[i][j], tbt[i][j], percent(hit.mean()))
                )  # fmt: skip
        headers = ("rate", "policy", "offered/s", "goodput/s", "95%", "effective", "TTFT p90", "TBT p90", "hit")
        return table(headers, rows, left=2)

    def _spreads(self, field: str) -> list[list[float | None]]:
        """p90 [contender][rate], mean over seeds."""
        found: list[list[float | None]] = []
        for i in range(len(self.names)):
            found.append([])
            for j in range(len(self.rates)):
                values = [getattr(self.runs[i, j, seed].summary, field).p90 for seed in self.whole]
                known = [value for value in values if value is not None]
                found[-1].append(float(np.mean(known)) if known else None)
        return found

    def _differences(self) -> str:
        found = self.differences()
        if not found:
            return ""
        rows = [
            (f"{one} - {other}", rate, d.mean, f"{cell(d.low)}..{cell(d.high)}", cell(d.p), "real" if d.real else "-")
            for one, other, rate, d in found
        ]
        shown = table(("difference of goodput", "rate", "mean/s", "95%", "p", f"p <= {LEVEL:g}"), rows, left=2)
        if len(self.whole) < seeds_needed():
            shown += f"\n{len(self.whole)} seeds can call no difference real, however large: it takes {seeds_needed()}"
        return shown

    def document(self, facts: Mapping[str, object], complete: bool) -> dict[str, Any]:
        runs = [
            {"policy": name, "rate": rate, "seed": seed, "digest": run.digest, "summary": run.summary,
             "provenance": run.provenance}
            for i, name in enumerate(self.names)
            for j, rate in enumerate(self.rates)
            for seed in range(self.seeds)
            if (run := self.runs[i, j, seed]) is not None
        ]  # fmt: skip
        differences = [
            {"one": one, "other": other, "rate": rate, "goodput": d, "real": d.real}
            for one, other, rate, d in self.differences()
        ]
        return {"complete": complete, "provenance": facts, "runs": runs, "differences": differences}


def _warn(sentence: str) -> None:
    print(f"conductor compare: {sentence}", file=sys.stderr)


def _rates(text: str) -> list[float]:
    try:
        rates = [positive("--rates", float(part)) for part in text.split(",") if part.strip()]
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"--rates {text}: write numbers with commas between, 1,1.5,2 say") from None
    if not rates or len(set(rates)) != len(rates):
        raise InputError(f"--rates {text}: name at least one rate, and none twice")
    return rates


def _seeded(run: RunSpec, seed: int) -> RunSpec:
    return RunSpec(policy=run.policy, admission=run.admission, roles=run.roles, seed=seed)
