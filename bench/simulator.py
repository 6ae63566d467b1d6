"""The simulator's speed: the paper's conversation hour on 16 nodes, exact to the token, and how it grows with nodes.

Prints one JSON object a line: bench, case, value, unit, and for times against "limit" (the target of 30 s with
fast-forward, of 90 s without; one core). Each run has a process of its own, for its peak of memory. With more nodes the
trace comes as much faster, so that each node has the same load. Without --trace sessions are generated, as many and
at the same rate.

--quick: the first 1000 requests only; no target is said then.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from bench.common import line, note
from pyengine.scheduler.sim.cluster import Simulation
from pyengine.scheduler.sim.sessions import AGENT, CHAT, sessions
from pyengine.scheduler.sim.spec import ClusterSpec, RunSpec, WorkerSpec
from pyengine.scheduler.sim.trace import Trace
from pyengine.scheduler.sim.traces import read_trace
from pyengine.scheduler.types import Role, Slo

#: Nodes of the paper's clusters; and the requests and seconds of its conversation trace.
NODES, REQUESTS, SECONDS = 16, 12_031, 3_537.0
#: Seconds it may take on one core.
TARGETS = {True: 30.0, False: 90.0}
#: Requests of a quick run.
QUICK = 1_000


def trace_of(path: Path | None, nodes: int, quick: bool) -> Trace:
    """The trace at the load of so many nodes."""
    if path is not None:
        trace = read_trace(path)
    else:
        trace = sessions((CHAT, AGENT), rate=REQUESTS / SECONDS, seed=1, block_tokens=512).limit(REQUESTS)
    trace = trace.limit(QUICK) if quick else trace
    return trace.speed(nodes / NODES) if nodes != NODES else trace


def run(trace: Trace, nodes: int, fast_forward: bool) -> dict[str, float | str]:
    """One simulation, here and now."""
    half = nodes // 2
    spec = ClusterSpec(
        workers=(WorkerSpec(role=Role.PREFILL, count=half), WorkerSpec(role=Role.DECODE, count=nodes - half)),
        slo=Slo(ttft=30.0, tbt=0.1),
    )
    requests = list(trace)
    began = time.perf_counter()
    simulation = Simulation(requests, spec, RunSpec(fast_forward=fast_forward))
    simulation.run()
    seconds = time.perf_counter() - began
    simulation.check()
    report = simulation.measure.report(trace.description)
    return {
        "seconds": seconds,
        "requests": len(requests),
        "events": simulation.loop.events,
        "steps": report.totals["steps"],
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "digest": report.digest,
        "trace": trace.description,
    }


def apart(path: Path | None, nodes: int, fast_forward: bool, quick: bool) -> dict[str, float | str]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "bench.simulator", "--one", str(nodes), str(int(fast_forward))]
    command += ["--trace", str(path)] if path is not None else []
    command += ["--quick"] if quick else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float | str] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a trace file; default: generated sessions")
    parser.add_argument("--nodes", type=int, nargs="*", default=[64, 256], help="also with so many nodes")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("NODES", "FAST"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        nodes, fast = map(int, arguments.one)
        print(json.dumps(run(trace_of(arguments.trace, nodes, arguments.quick), nodes, bool(fast))))
        return
    digests = set()
    for nodes, fast in [(NODES, True), (NODES, False), *((nodes, True) for nodes in arguments.nodes)]:
        found = apart(arguments.trace, nodes, fast, arguments.quick)
        if nodes == NODES:
            note(f"{found['trace']}: digest {found['digest']}")
            digests.add(found["digest"])
        case = f"{nodes} nodes {'fast-forward' if fast else 'step by step'}"
        seconds = float(found["seconds"])
        target = None if arguments.quick or nodes != NODES else TARGETS[fast]
        line(
            "simulator",
            case,
            seconds,
            "s",
            against=None if target is None else "limit",
            ratio=None if target is None else target / seconds,
            trace=found["trace"],
            digest=found["digest"],
        )
        for what in ("requests", "events", "steps"):
            line("simulator", f"{case} {what}", float(found[what]) / seconds, f"{what}/s", count=found[what])
        line("simulator", f"{case} memory", float(found["memory"]), "MiB")
    if len(digests) != 1:
        raise SystemExit(f"step by step and fast-forward differ: digests {sorted(digests)}")


if __name__ == "__main__":
    main()
