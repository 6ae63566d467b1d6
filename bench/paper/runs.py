"""Carries out cases in as many processes as there are cores, each once, and keeps of each what tables need."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.paper.cases import BLOCK, Case, Trace
from pyengine.scheduler.sim.cluster import simulate
from pyengine.scheduler.sim.report import Records, Report
from pyengine.scheduler.sim.sessions import tool_agent
from pyengine.scheduler.sim.trace import Request
from pyengine.scheduler.sim.traces import read_trace

FILES = {"conversation": "conversation_trace.jsonl", "synthetic": "synthetic_trace.jsonl"}
DONE, REJECTED = 0, 1
#: Of what is generated.
SEED = 1


@dataclass(frozen=True)
class Outcome:
    """Of one run: the records, curves, and what a report says of itself."""

    records: Records
    series: dict[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]
    totals: dict[str, float]
    digest: str

    @property
    def done(self) -> npt.NDArray[np.bool_]:
        return np.equal(self.records.outcome, DONE)

    def share(self, ttft: float, tbt: float) -> float:
        """Percent of all requests that keep both objectives (seconds)."""
        return 100 * float(np.mean(self.done & (self.records.ttft <= ttft) & (self.records.tbt <= tbt)))

    def tbt_share(self, tbt: float) -> float:
        """Percent of the requests that are done whose gaps keep the objective."""
        return 100 * float(np.mean(self.records.tbt[self.done] <= tbt))

    def tbt_ms(self, percent: float) -> float:
        return 1000 * float(np.percentile(self.records.tbt[self.done], percent))

    @property
    def mean_tbt_ms(self) -> float:
        return 1000 * float(np.mean(self.records.tbt[self.done]))

    @property
    def mean_ttft(self) -> float:
        return float(np.mean(self.records.ttft[self.done]))

    @property
    def prefill_seconds(self) -> float:
        return float(np.nanmean(self.records.prefill_seconds[self.done]))

    @property
    def cached(self) -> float:
        """Percent of the prompts' tokens."""
        return 100 * float(self.records.cached.sum() / self.records.prompt_tokens.sum())


class Traces:
    """The traces of the papers' authors from a folder, and the one that is made again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def missing(self) -> list[Path]:
        return [path for name in FILES.values() if not (path := self.folder / name).exists()]

    def requests(self, wanted: Trace) -> Iterator[Request]:
        one = list(tool_agent(SEED) if wanted.name == "tool" else read_trace(self.folder / FILES[wanted.name], BLOCK))
        # The next round begins one mean gap after the last request of the one before.
        length = one[-1].arrival + one[-1].arrival / max(len(one) - 1, 1)
        rows = (replace(row, arrival=row.arrival + turn * length) for turn in range(wanted.repeat) for row in one)
        for row in itertools.islice(rows, wanted.limit):
            output = row.output_tokens if wanted.output is None else wanted.output
            yield replace(row, arrival=row.arrival / wanted.speed, output_tokens=output)


def carry_out(cases: Iterable[Case], folder: Path, processes: int | None = None) -> Iterator[tuple[Case, Outcome]]:
    """Each different case once, the longest first; results as they come."""
    wanted = list(dict.fromkeys(cases))
    wanted.sort(key=lambda case: -weight(case))
    with multiprocessing.get_context("spawn").Pool(processes or os.cpu_count()) as pool:
        yield from pool.imap_unordered(_Runner(folder), wanted)


def weight(case: Case) -> float:
    """About how long it takes: coupled nodes take more steps."""
    base = {"conversation": 12.0, "synthetic": 4.0, "tool": 10.0}[case.trace.name]
    return base * case.trace.repeat * (2.0 if len(case.cluster.workers) == 1 else 1.0)


@dataclass(frozen=True)
class _Runner:
    folder: Path

    def __call__(self, case: Case) -> tuple[Case, Outcome]:
        report: Report = simulate(
            Traces(self.folder).requests(case.trace), case.cluster, case.run, description=str(case.trace)
        )
        return case, Outcome(report.records, report.series, report.totals, report.digest)
