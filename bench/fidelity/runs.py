"""One cluster compared: constants measured once, the load with the most goodput sought, then turn by turn."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from bench.common import line, note
from bench.fidelity.clusters import Setting, cores
from bench.fidelity.constants import Constants, fit
from bench.fidelity.costs import Told
from bench.fidelity.machine import Load, Watched, give_way, hurry, pin, prefer
from bench.fidelity.traces import Part, made, parts_of, singles
from bench.server import Server
from pyengine.scheduler.backends import Task, find_backend
from pyengine.scheduler.report.fidelity import Gap, gaps
from pyengine.scheduler.report.summary import Summary, summarize
from pyengine.scheduler.sim.report import Records, Report
from pyengine.scheduler.sim.spec import ClusterSpec, RunSpec
from pyengine.scheduler.sim.trace import Trace
from pyengine.scheduler.types import Slo

#: As the client asks, and as workers serve.
RUN = RunSpec(exact_limits=True, write_through=True)
#: Of the most goodput: the lowest of the rates that have so much of it counts as its peak.
AS_GOOD = 0.99
#: Seconds until all workers have told their costs.
START = 60.0
#: Seeds of the traces by which it is sought: one of some seconds has sessions by chance, and is no turn's.
SEEKING = (0, -1, -2)
#: Share of the rate with the most goodput.
NEAR = 0.9
#: Where goodput still rises at the highest of a setting's rates, higher ones are tried, each so many times the last;
#: at most so many.
HIGHER, HIGHER_AT_MOST = 1.15, 12


class Interrupted(Exception):
    """Ctrl-C while a cluster served."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One trace through both, one part of it. live, simulated: its counted requests."""

    seed: int
    part: str
    rate: float
    live: Summary
    simulated: Summary
    gaps: list[Gap]
    load: Load
    late_sent: int
    notes: list[str]


class Found(msgspec.Struct, kw_only=True):
    """All about one setting so far. curve: (requests per second, goodput simulated)."""

    setting: str
    constants: Constants | None = None
    curve: list[tuple[float, float]] = []
    peak: float = 0.0
    turns: list[Turn] = []


class Comparison:
    """Of one setting. folder: for cost models and secrets. preferred: live parts and their client come before all else
    on this machine. found: grows; what there is can be reported at any time.
    """

    def __init__(self, setting: Setting, folder: Path, preferred: bool) -> None:
        self.setting = setting
        self.folder = folder
        self.preferred = preferred
        self.found = Found(setting=setting.name)
        self._spec: ClusterSpec | None = None
        self._parts: list[Part] = []

    def prepare(self) -> None:
        """Measures the constants on the live cluster, and seeks by simulation where goodput peaks.

        Nothing is promised meanwhile: a first token that is held for the second says nothing of the hand-off.
        """
        setting = self.setting
        nothing = dataclasses.replace(setting, slo=Slo())
        with self._serving(nothing) as server:
            live = find_backend(f"live:url={server.base}")
            first = said = live.cluster()
            assert said is not None and first is not None
            block_tokens = said.spec.block_tokens
            count, every, prompt, output = setting.single
            alone = singles(count, every, prompt, output, block_tokens)
            note(f"{setting.name}: {count} single requests")
            report = self._live(server, alone, said.spec)[0]
            if setting.learns:
                first = live.cluster()
                assert first is not None
                parts = parts_of(
                    [("learning", setting.rates[len(setting.rates) // 2])], 0.0, setting.seconds, setting.rest
                )
                note(f"{setting.name}: a trace for the workers to learn their costs by")
                with Told(live) as told:
                    self._live(server, made(parts, setting.kinds, 0, block_tokens), said.spec)
                said = told.between(parts[0].first, parts[0].last)
            if first.unmeasured:
                raise RuntimeError(f"{', '.join(first.unmeasured)} measured no costs: send more single requests")
        # Requests alone are told from the others by what steps cost while they were alone.
        plain = nothing.spec(first, self._scratch())
        constants = fit(report.records, plain.kv_bytes, lambda these: _simulated(alone, these.put(plain)).records)
        self.found.constants = constants
        self._spec = constants.put(setting.spec(said, self._scratch()))
        note(f"{setting.name}: {constants.text}")
        self._seek()

    def _seek(self) -> None:
        setting, spec, curve = self.setting, self._spec, self.found.curve
        assert spec is not None
        higher = itertools.accumulate(itertools.repeat(HIGHER, HIGHER_AT_MOST), lambda a, b: a * b)
        for rate in (*setting.rates, *(setting.rates[-1] * by for by in higher)):
            if len(curve) >= len(setting.rates) and not self._rises():
                break
            parts = parts_of([("", rate)], setting.warm, setting.seconds, setting.rest)
            goodput = 0.0
            for seed in SEEKING:
                report = _simulated(made(parts, setting.kinds, seed, spec.block_tokens), spec)
                goodput += summarize(_part(report, parts[0]), setting.slo).goodput / len(SEEKING)
            curve.append((rate, goodput))
            line("fidelity", f"{setting.name} simulated goodput at {rate:g}/s", goodput, "requests/s")
        most = max(goodput for _, goodput in curve)
        peak = self.found.peak = next(rate for rate, goodput in curve if goodput >= AS_GOOD * most)
        rates = [("low", setting.low * peak), ("near the peak", NEAR * peak)]
        self._parts = parts_of(rates, setting.warm, setting.seconds, setting.rest)

    def _rises(self) -> bool:
        """Whether the most goodput so far, or as good as that, is at one of the two highest rates."""
        goodput = [each for _, each in self.found.curve]
        return max(goodput[-2:]) >= AS_GOOD * max(goodput)

    def turn(self, seed: int) -> None:
        """One trace through both."""
        setting, spec = self.setting, self._spec
        assert spec is not None, "prepared"
        trace = made(self._parts, setting.kinds, seed, spec.block_tokens)
        note(f"{setting.name}: turn {seed}, {self._parts[-1].last + setting.rest:.0f} s")
        with self._serving(setting) as server, contextlib.ExitStack() as stack:
            told = stack.enter_context(Told(find_backend(f"live:url={server.base}"))) if setting.learns else None
            live, load = self._live(server, trace, spec)
        for part in self._parts:
            costs = self._as_told(told, part) if told is not None else spec
            simulated = _simulated(trace, costs)
            one, other = (summarize(_part(report, part), setting.slo) for report in (live, simulated))
            found = gaps(one, other)
            self.found.turns.append(
                Turn(
                    seed=seed,
                    part=part.name,
                    rate=part.rate,
                    live=one,
                    simulated=other,
                    gaps=found,
                    load=load,
                    late_sent=int(live.totals["late_sent"]),
                    notes=[*live.notes, *simulated.notes],
                )
            )
            for gap in found:
                if gap.name in setting.limits:
                    line(
                        "fidelity",
                        f"{setting.name} {part.name} turn {seed} {gap.name}",
                        float("nan") if gap.relative is None else 100 * gap.relative,
                        "%",
                        live=gap.live,
                        simulated=gap.simulated,
                    )

    @contextlib.contextmanager
    def _serving(self, setting: Setting) -> Iterator[Server]:
        server = setting.server(self.folder)
        began = time.monotonic()
        try:
            if self.preferred:
                hurry(True)
            server.start()
            if setting.pinned:
                self._pin(server)
            # Until then the conductor guesses, and no simulation does.
            count = setting.prefill + setting.decode
            server.wait_until(lambda: _measured(server) == count, START, "told of its costs by all workers")
            if self.preferred:
                hurry(False)
                prefer([os.getpid(), server.pid, *server.children().values()], -20)
            if setting.pinned:
                give_way([process for name, process in server.children().items() if _works(name)])
            note(f"{setting.name}: the cluster serves after {time.monotonic() - began:.0f} s")
            yield server
        finally:
            if self.preferred:
                prefer([os.getpid()], 0)
            server.stop()

    def _pin(self, server: Server) -> None:
        """Each worker has a core of its own, as far as there are cores; all else goes where it likes."""
        known, here = server.children(), cores()
        workers = sorted(filter(_works, known))
        for number, name in enumerate(workers):
            pin(known[name], here[number % len(here)])

    def _as_told(self, told: Told, part: Part) -> ClusterSpec:
        """The cluster, its steps as long as its workers said while this part's requests came."""
        assert self.found.constants is not None, "prepared"
        return self.found.constants.put(self.setting.spec(told.between(part.first, part.last), self._scratch()))

    def _scratch(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    def _live(self, server: Server, trace: Trace, spec: ClusterSpec) -> tuple[Report, Load]:
        """Raises Interrupted."""
        # A collection of all that this process has imported would be a gap of a tenth of a second.
        gc.collect()
        gc.freeze()
        with Watched(list(server.children().values())) as watched:
            task = Task(requests=trace, description=trace.description, cluster=spec, run=RUN)
            report = find_backend(f"live:url={server.base}").run(task)
        if not report.complete:
            raise Interrupted
        assert watched.load is not None
        return report, watched.load


def _simulated(trace: Trace, spec: ClusterSpec) -> Report:
    return find_backend("sim").run(Task(requests=trace, description=trace.description, cluster=spec, run=RUN))


def _works(name: str) -> bool:
    """Whether this part of a server is a worker."""
    return name.partition("-")[0] in ("prefill", "decode", "both")


def _measured(server: Server) -> int:
    """Workers that have said what their steps cost."""
    return sum(
        bool(value) for name, value in server.metrics().items() if name.startswith("pyengine_cost_samples_total")
    )


def _part(report: Report, part: Part) -> Report:
    """What came in its seconds that count."""
    records = report.records
    chosen = (records.arrival >= part.first) & (records.arrival < part.last)
    columns = {field.name: getattr(records, field.name) for field in dataclasses.fields(records)}
    tiers = {tier: tokens[chosen] for tier, tokens in columns.pop("tiers").items()}
    kept = {name: np.asarray(column)[chosen] for name, column in columns.items()}
    return dataclasses.replace(report, records=Records(**kept, tiers=tiers))


@contextlib.contextmanager
def comparisons(settings: list[Setting], preferred: bool) -> Iterator[list[Comparison]]:
    with tempfile.TemporaryDirectory(prefix="fidelity-") as scratch:
        made_here = []
        for setting in settings:
            folder = Path(scratch) / setting.name
            folder.mkdir()
            made_here.append(Comparison(setting, folder, preferred))
        yield made_here
