"""Carries out cases in as many processes as there are cores, each once, and keeps of each what tables need."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

import pyengine.scheduler
from bench.paper.cases import Case
from bench.paper.traces import Traces
from pyengine import _native
from pyengine.scheduler.sim.cluster import Simulation
from pyengine.scheduler.sim.report import DONE, REJECTED, Records, longest_tenth

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """Of one run: the records and curves of its report.

    decode_tbt: as `records.tbt`, without the gap from a prefill node's token to the decode node's first. seconds: that
    the processor took for it.
    """

    records: Records
    series: dict[str, tuple[F64, F64]]
    totals: dict[str, float]
    decode_tbt: F64
    digest: str
    seconds: float

    @property
    def done(self) -> npt.NDArray[np.bool_]:
        return np.equal(self.records.outcome, DONE)

    @property
    def refused(self) -> int:
        """At arrival, or when the prompt was computed."""
        return int(np.sum(self.records.outcome == REJECTED))

    def tbt(self, handoff: bool = False) -> F64:
        """[R] of the requests that are done. handoff: the way from prefill to decode counts as a gap."""
        return (self.records.tbt if handoff else self.decode_tbt)[self.done]

    def effective(self, ttft: float, tbt: float, handoff: bool = False) -> npt.NDArray[np.bool_]:
        """[R] whether each request keeps both objectives (seconds)."""
        gaps = self.records.tbt if handoff else self.decode_tbt
        kept: npt.NDArray[np.bool_] = self.done & (self.records.ttft <= ttft) & (gaps <= tbt)
        return kept

    def share(self, ttft: float, tbt: float, handoff: bool = False) -> float:
        """Percent of all requests that keep both objectives."""
        return 100 * float(np.mean(self.effective(ttft, tbt, handoff)))

    def tbt_share(self, tbt: float, handoff: bool = False) -> float:
        """Percent of the requests that are done whose gaps keep the objective."""
        return 100 * float(np.mean(self.tbt(handoff) <= tbt))

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


def run(case: Case, traces: Traces) -> Outcome:
    """One simulation, here and now."""
    began = time.process_time()
    simulation = Simulation(traces.requests(case.trace), case.cluster, case.run)
    simulation.run()
    report = simulation.measure.report(str(case.trace))
    if not report.complete:
        raise RuntimeError(f"the run of {case} did not end: {'; '.join(report.notes)}")
    # Once, unless the request is of a worker that does both: what follows is an ordinary gap.
    decode_tbt = np.array(
        [longest_tenth(model.gaps()[int(model.prefill != model.decode) :]) for model in simulation.requests], np.float64
    )
    taken = time.process_time() - began
    return Outcome(report.records, report.series, report.totals, decode_tbt, report.digest, taken)


def carry_out(
    cases: Iterable[Case], traces: Traces, processes: int | None = None, kept: Path | None = None
) -> Iterator[tuple[Case, Outcome]]:
    """Each different case once, the longest first; results as they come.

    kept: folder where outcomes are looked up first and put then, so that what was interrupted goes on.
    """
    wanted = list(dict.fromkeys(cases))
    missing = []
    store = Store(kept, traces) if kept is not None else None
    for case in wanted:
        found = store.find(case) if store is not None else None
        if found is not None:
            yield case, found
        else:
            missing.append(case)
    missing.sort(key=lambda case: -weight(case))
    if not missing:
        return
    runner = _Runner(traces)
    processes = processes or os.cpu_count() or 1
    if processes == 1:
        for case in missing:
            yield _put(store, *runner(case))
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for case, outcome in pool.imap_unordered(runner, missing):
            yield _put(store, case, outcome)


def _put(store: Store | None, case: Case, outcome: Outcome) -> tuple[Case, Outcome]:
    if store is not None:
        store.put(case, outcome)
    return case, outcome


def weight(case: Case) -> float:
    """About how long it takes: coupled nodes take more steps."""
    base = {"conversation": 12.0, "synthetic": 4.0, "tool": 12.0, "report": 1.5}[case.trace.name]
    return base * case.trace.repeat * (2.0 if len(case.cluster.workers) == 1 else 1.0)


@dataclass(frozen=True)
class _Runner:
    traces: Traces

    def __call__(self, case: Case) -> tuple[Case, Outcome]:
        return case, run(case, self.traces)


class Store:
    """Outcomes in a folder, each by its case, its traces and the code that runs: another code finds none."""

    def __init__(self, folder: Path, traces: Traces) -> None:
        self.folder = folder
        self._traces = traces
        folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def _code(self) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        scheduler = Path(pyengine.scheduler.__path__[0])
        own = [Path(__file__), Path(__file__).parent / "traces.py"]
        for path in sorted([*scheduler.rglob("*.py"), *scheduler.rglob("*.toml"), Path(_native.__file__), *own]):
            digest.update(path.read_bytes())
        return digest.digest()

    def _path(self, case: Case) -> Path:
        what = f"{case!r} {self._traces!r} {self._traces.sizes()!r}".encode()
        return self.folder / f"{hashlib.blake2b(self._code + what, digest_size=16).hexdigest()}.pickle"

    def find(self, case: Case) -> Outcome | None:
        path = self._path(case)
        if not path.exists():
            return None
        outcome = pickle.loads(path.read_bytes())
        assert isinstance(outcome, Outcome)
        return outcome

    def put(self, case: Case, outcome: Outcome) -> None:
        path = self._path(case)
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(outcome))
        part.replace(path)
