"""Runs of the goodput bench, and what is remembered of them: one run is a contender on a piece of a trace at a load.

A run's key says all that its result depends on, the scheduler's sources included: a result that is in the cache stands
for the run. So the work can be spread over sessions, and no figure outlives the code that it was measured with.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from bench.common import note
from pyengine.scheduler.report.summary import summarize
from pyengine.scheduler.sim import spec
from pyengine.scheduler.sim.cluster import simulate
from pyengine.scheduler.sim.sessions import AGENT, CHAT, sessions
from pyengine.scheduler.sim.spec import ClusterSpec, RunSpec, WorkerSpec
from pyengine.scheduler.sim.trace import Trace
from pyengine.scheduler.sim.traces import read_trace
from pyengine.scheduler.types import Role, Slo

#: In place of a path: sessions that are generated, for machines without traces.
GENERATED = "generated"
BLOCK_TOKENS = 512
#: The paper's for its clusters: seconds to the first token, and the mean of the longest tenth of the gaps.
OBJECTIVES = Slo(ttft=30.0, tbt=0.1)


@dataclass(frozen=True)
class Case:
    """half: 0, 1. first, count: requests of that half. seed: of jitter, and of what policies draw; raw: no jitter.

    split: prefill and decode workers. speed: of arrivals, against the trace's. roles: workers may change theirs.
    discipline: of the workers, as cluster files name it.
    """

    trace: str
    half: int
    first: int
    count: int
    seed: int
    raw: bool
    speed: float
    split: tuple[int, int]
    policy: str
    admission: str = "none"
    roles: bool = False
    pacing: bool = True
    discipline: str = "ours"

    def key(self) -> str:
        return json.dumps(asdict(self) | {"trace": Path(self.trace).name, "sources": sources()}, sort_keys=True)


@dataclass(frozen=True)
class Result:
    """effective: share of all requests that met all objectives; goodput: those per second. Seconds, shares."""

    effective: float
    goodput: float
    offered: float
    met_ttft: float
    met_tbt: float
    rejected: float
    wasted: float
    ttft_p90: float
    tbt_p90: float
    hit: float
    switches: int
    digest: str


@cache
def sources() -> str:
    """Digest of the scheduler's sources, and of the cost models beside them."""
    digest = hashlib.blake2b(digest_size=8)
    root = Path(spec.__file__).parents[1]
    skipped = {"commands", "report", "backends"}
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".toml")):
        if not skipped & set(path.relative_to(root).parts):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _trace(name: str) -> Trace:
    if name == GENERATED:
        made = sessions((CHAT, AGENT), rate=3.4, seed=1, block_tokens=BLOCK_TOKENS).limit(4_000)
    else:
        made = read_trace(name, BLOCK_TOKENS)
    return made.cached()


def run(case: Case) -> Result:
    """One simulation, here and now."""
    half = _trace(case.trace).halves()[case.half]
    half = half if case.raw else half.jitter(case.seed)
    rows = list(half)[case.first : case.first + case.count]
    start = rows[0].arrival
    rows = [replace(row, arrival=(row.arrival - start) / case.speed) for row in rows]
    prefill, decode = case.split
    workers = (
        WorkerSpec(role=Role.PREFILL, count=prefill, discipline=case.discipline),
        WorkerSpec(role=Role.DECODE, count=decode, discipline=case.discipline),
    )
    cluster = ClusterSpec(workers=workers, slo=OBJECTIVES)
    how = RunSpec(
        policy=case.policy,
        admission=case.admission,
        roles=case.roles,
        seed=case.seed,
        pacing=case.pacing,
    )
    report = simulate(rows, cluster, how, description=case.trace)
    found = summarize(report, OBJECTIVES)
    return Result(
        effective=found.effective,
        goodput=found.goodput,
        offered=found.offered,
        met_ttft=found.met_ttft,
        met_tbt=found.met_tbt,
        rejected=found.rejected / found.requests,
        wasted=found.wasted / found.requests,
        ttft_p90=found.ttft.p90 or 0.0,
        tbt_p90=found.tbt.p90 or 0.0,
        hit=found.hit,
        switches=int(report.totals["role switches"]),
        digest=report.digest,
    )


class Cache:
    """Results by key, as JSON lines in a file that grows. path: None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._known: dict[str, Result] = {}
        if path is not None and path.exists():
            for text in path.read_text().splitlines():
                row = json.loads(text)
                self._known[row["key"]] = Result(**row["result"])

    def run(self, cases: Iterable[Case], jobs: int) -> dict[Case, Result]:
        """All of them; those that are not known are run, in so many processes, and remembered one by one."""
        cases = list(dict.fromkeys(cases))
        missing = [case for case in cases if case.key() not in self._known]
        begun = time.monotonic()
        for done, (case, result) in enumerate(_run_all(missing, jobs), 1):
            self._remember(case, result)
            left = (time.monotonic() - begun) / done * (len(missing) - done)
            note(f"{done}/{len(missing)} runs, {left:.0f} s left: {case.policy} {case.speed:g}x {result.effective:.3f}")
        return {case: self._known[case.key()] for case in cases}

    def _remember(self, case: Case, result: Result) -> None:
        self._known[case.key()] = result
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps({"key": case.key(), "result": asdict(result)}) + "\n")


def _run_all(cases: list[Case], jobs: int) -> Iterator[tuple[Case, Result]]:
    if jobs == 1:
        for case in cases:
            yield case, run(case)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as executor:
        futures = {executor.submit(run, case): case for case in cases}
        for future in as_completed(futures):
            yield futures[future], future.result()
