"""Goal: `make fidelity` compares what it says, ends with what there is, and says first what differs.

Method: constants are planted in a simulation that plays the live cluster; documents of made-up turns; and the whole on
four workers, stopped in its second turn.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from bench.fidelity import costs
from bench.fidelity.clusters import FAKE, REAL
from bench.fidelity.constants import Constants, fit
from bench.fidelity.costs import mean
from bench.fidelity.document import document
from bench.fidelity.machine import Load, Watched, pin
from bench.fidelity.runs import RUN, Found, Turn
from bench.fidelity.traces import made, parts_of, singles
from pyengine.scheduler.backends import Found as Told
from pyengine.scheduler.report.fidelity import Gap
from pyengine.scheduler.report.summary import summarize
from pyengine.scheduler.sim.cluster import simulate
from pyengine.scheduler.sim.compute import StepTime
from pyengine.scheduler.sim.report import Records
from pyengine.scheduler.sim.spec import ClusterSpec, WorkerSpec
from pyengine.scheduler.types import Role, Slo

from .backends.null import NullBackend
from .sim.worlds import BLOCK, KV_BYTES, cluster, model

ROOT = Path(__file__).parents[1]


def test_the_constants_of_a_cluster_are_found(tmp_path: Path) -> None:
    spec, trace = cluster(model(tmp_path)), singles(4, 1.0, (96, 64), 9, BLOCK)

    def simulated(constants: Constants) -> Records:
        return simulate(trace, constants.put(spec), RUN, description="").records

    planted = Constants(step_overhead=7e-4, message_delay=1.7e-3, handoff_delay=4e-3, handoff_rate=2e7)
    found = msgspec.structs.asdict(fit(simulated(planted), KV_BYTES, simulated))
    assert found == pytest.approx(msgspec.structs.asdict(planted), rel=1e-6)

    def slower(constants: Constants) -> Records:
        return simulated(msgspec.structs.replace(constants, step_overhead=constants.step_overhead + 1.0))

    # What is promised is held, and a gap that nobody sees tells nothing.
    held = simulate(trace, msgspec.structs.replace(planted.put(spec), slo=Slo(ttft=60.0, tbt=1.0)), RUN, description="")
    with pytest.raises(ValueError, match="nothing is promised"):
        fit(held.records, KV_BYTES, simulated)

    # A cluster that is faster than its model says has none below nothing.
    none = fit(simulated(Constants()), KV_BYTES, slower)
    assert (none.step_overhead, none.message_delay, none.handoff_delay) == (0.0, 0.0, 0.0)


def _told(*factors: float) -> list[Told]:
    """A worker's costs and loop, told several times."""
    worker = WorkerSpec(role=Role.BOTH, count=1, model="w")
    return [
        Told(
            ClusterSpec(workers=(msgspec.structs.replace(worker, step_overhead=factor),)),
            {"w": StepTime.from_fit("w", [factor * each for each in (1.0, 2.0, 3.0, 4.0, 5.0)], about="", source="")},
        )
        for factor in factors
    ]


class _Telling(NullBackend):
    """Tells something else each time."""

    def __init__(self, told: list[Told]) -> None:
        self.told = told
        self.all = threading.Event()

    def cluster(self) -> Told:
        if len(self.told) == 1:
            self.all.set()
        return self.told[0] if len(self.told) == 1 else self.told.pop(0)


def test_costs_are_the_mean_of_what_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = mean(_told(1.0, 2.0, 6.0))
    assert found.spec.workers[0].step_overhead == 3.0
    step, each = found.models["w"].decode_coefficients[:2]
    assert (step, each) == (3.0, 12.0), "predictions are linear in the coefficients"
    monkeypatch.setattr(costs, "EVERY", 1e-3)
    telling = _Telling(_told(8.0, 8.0, 8.0))
    with costs.Told(telling) as told:
        telling.all.wait(60.0)
    assert told.between(0.0, math.inf).spec.workers[0].step_overhead == 8.0
    with pytest.raises(RuntimeError, match="told of no costs between -2 and -1 s"):
        told.between(-2.0, -1.0)


def test_parts_are_apart_and_the_same_each_time() -> None:
    parts = parts_of([("low", 3.0), ("high", 6.0)], warm=2.0, seconds=10.0, rest=3.0)
    requests, again = list(made(parts, FAKE.kinds, 7, BLOCK)), list(made(parts, FAKE.kinds, 7, BLOCK))
    assert requests == again
    arrivals = [request.arrival for request in requests]
    assert arrivals == sorted(arrivals)
    first = [request for request in requests if request.arrival < parts[0].last]
    second = [request for request in requests if request.arrival >= parts[1].start]
    assert first and second and len(first) + len(second) == len(requests)
    assert not {key for request in first for key in request.blocks} & {key for r in second for key in r.blocks}


def _found(name: str, factor: float, folder: Path) -> Found:
    """One turn, in which all that is judged was simulated to be `factor` times as long, or much."""
    trace = singles(3, 1.0, (100,), 9, BLOCK)
    summary = summarize(simulate(trace, cluster(model(folder)), RUN, description=""), Slo(ttft=1.0, tbt=1.0))
    turn = Turn(
        seed=1,
        part="low",
        rate=1.0,
        live=summary,
        simulated=summary,
        gaps=[Gap(figure, 1.0, factor, factor - 1.0) for figure in FAKE.limits],
        load=Load(seconds=1.0, own=0.5, others=0.0, cores=2, late_p50=1e-4, late_p99=1e-3, late_max=1e-2),
        late_sent=0,
        notes=[],
    )
    return Found(setting=name, constants=Constants(), curve=[(1.0, 0.9)], peak=1.0, turns=[turn])


def test_what_differs_is_said_first(tmp_path: Path) -> None:
    within = document([FAKE], [_found("fake", 1.04, tmp_path)], complete=True)
    assert "**Nothing differs**" in within and "**differs**" not in within
    without = document([FAKE], [_found("fake", 1.2, tmp_path)], complete=False)
    assert without.index("PARTIAL") < without.index("fake, low: ttft p50 by +20.0 % (limit 10%)") < without.index("##")
    assert "**differs**" in without
    assert "No turn was over" in document([FAKE, REAL], [Found(setting="fake"), Found(setting="real")], complete=False)


def test_a_process_that_is_watched() -> None:
    # It begins when it is watched: what it takes before that is nobody's business.
    code = (
        "import time\ninput()\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass\nprint()\ninput()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as busy:
        assert busy.stdin is not None and busy.stdout is not None
        with Watched([busy.pid]) as watched:
            busy.stdin.write(b"\n")
            busy.stdin.flush()
            busy.stdout.readline()
            pin(busy.pid, min(os.sched_getaffinity(0)))
            assert os.sched_getaffinity(busy.pid) == {min(os.sched_getaffinity(0))}
        busy.stdin.close()
    load = watched.load
    assert load is not None
    assert load.own * load.seconds >= 0.45
    assert 0.0 <= load.late_p50 <= load.late_p99 <= load.late_max


def test_four_workers_from_end_to_end_until_it_is_stopped(tmp_path: Path) -> None:
    out = tmp_path / "fidelity.md"
    command = [sys.executable, "-m", "bench.fidelity", "--quick", "--only", "fake", "--turns", "2", "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with process:
        assert process.stderr is not None
        said = []
        for text in process.stderr:
            said.append(text)
            if "turn 2" in text:
                process.send_signal(signal.SIGINT)
                break
        said.append(process.stderr.read())
        assert process.wait() == 130, "".join(said)
    text = out.read_text()
    assert "**PARTIAL**" in text and "### Low" in text and "### Near the peak" in text
    served = next(line for line in text.splitlines() if line.startswith("Done, turn by turn"))
    live, _, simulated = served.removeprefix("Done, turn by turn: ").partition(" live; ")
    done, _, asked = live.partition(" of ")
    assert int(done) == int(asked) > 0, text
    assert simulated.startswith(live), text
    assert "| hit |" in text


def test_wishes_that_cannot_be() -> None:
    for wish, words in ((("--turns", "0"), "at least 1"), (("--json", "/nowhere/x"), "there is no folder /nowhere")):
        told = subprocess.run(
            [sys.executable, "-m", "bench.fidelity", *wish], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert told.returncode == 2 and words in told.stderr
