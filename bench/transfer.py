"""The transfer engine beside the machine's limit and beside others, between two processes of one machine.

Prints one JSON object a line: bench, case, value, unit, against, ratio (above 1: we are better). All contenders move
the same blocks between the same kind of buffers (bench/peers/driver.py says how), take turns of a second, and the
median turn counts, so that a busy machine disturbs all of them.

limit:    sockets with no protocol (rust/transferd/examples/bare.rs), in the best of the settings that were tried
memcpy:   as many threads as there are cores, in one process; shm is compared with it
mooncake, nixl, nixl-auto: where `make peers` could install them. nixl is told to use tcp, nixl-auto what it likes
iperf3:   where it is installed
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common import end_on_sigterm, line, median, note
from bench.peers.driver import Child
from bench.server import free_port

ROOT = Path(__file__).parents[1]
CORES = len(os.sched_getaffinity(0))
KIB, MIB = 1 << 10, 1 << 20
#: Blocks of a batch, bytes of a block.
SHAPES = ((64, MIB), (512, 64 * KIB), (1024, 4 * KIB))
PING = (1, 4 * KIB)
#: Streams and kernel buffers (0: autotuned) that the limit is sought among.
STREAMS = sorted({1, 2, CORES, 2 * CORES})
BUFFERS = (0, 256 * KIB, 512 * KIB, MIB)
#: The two that have won most often, for `--quick`.
QUICK_BUFFERS = (512 * KIB, MIB)

#: CPU time of both processes, and what of it was spent in the kernel.
CPU = ("cpu_s_per_gb", "system_s_per_gb")

#: Something that can be measured: (op, blocks, bytes, seconds) -> what the contender's driver says.
Measure = Callable[[str, int, int, float], dict[str, float]]


@dataclass
class Turns:
    """What the contenders of one case have shown, turn by turn."""

    results: dict[str, list[dict[str, float]]] = field(default_factory=dict)

    def value(self, name: str, what: str) -> float:
        """The median turn."""
        return median([result[what] for result in self.results.get(name, [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns: a minute or two")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases that contain this, such as `shm read`")
    parser.add_argument("--alone", action="store_true", help="only pyengine and the limit")
    arguments = parser.parse_args()
    end_on_sigterm()
    turns, seconds = (3, 0.3) if arguments.quick else (5, 1.0)
    with ExitStack() as stack:
        buffers = QUICK_BUFFERS if arguments.quick else BUFFERS
        bench = Bench(stack, turns, seconds, arguments.only, build_limit(), buffers)
        for transport in ("tcp", "shm"):
            if not bench.start_ours(transport):
                continue
            if not arguments.alone:
                bench.start_others(transport)
            bench.copies(transport)
            bench.rest(transport, arguments.quick)
            bench.end()


class Bench:
    def __init__(
        self, stack: ExitStack, turns: int, seconds: float, only: str, limit: Path, buffers: Sequence[int]
    ) -> None:
        self.stack, self.turns, self.seconds, self.only, self.limit = stack, turns, seconds, only, limit
        self.buffers = buffers
        self.children: dict[str, Child] = {}
        self.iperf3 = False

    # -- contenders ----------------------------------------------------------------------------------------------------

    def start_ours(self, transport: str) -> bool:
        """With checksums and without; false if that transport is not to be had."""
        started = self.start("ours", [sys.executable, "-m", "bench.peers.ours", "initiator", transport])
        if started:
            command = [sys.executable, "-m", "bench.peers.ours", "initiator", transport, "unchecked"]
            self.start("unchecked", command)
        if started and transport == "shm":
            self.start("private", [sys.executable, "-m", "bench.peers.ours", "initiator", "shm", "private"])
        return started

    def start_others(self, transport: str) -> None:
        environments = ROOT / ".venv-peers"
        if transport == "tcp":
            self.start(
                "mooncake", [environments / "mooncake/bin/python", "-m", "bench.peers.mooncake_tcp", "initiator"]
            )
            self.start(
                "nixl", [environments / "nixl/bin/python", "-m", "bench.peers.nixl_ucx", "initiator"], UCX_TLS="tcp"
            )
            self.iperf3 = have("iperf3")
            if not self.iperf3:
                note("iperf3: left out: it is not installed (apt-get install iperf3)")
        else:
            self.start("nixl-auto", [environments / "nixl/bin/python", "-m", "bench.peers.nixl_ucx", "initiator"])

    def start(self, name: str, command: list[Any], **env: str) -> bool:
        """Starts a contender; one that does not start is left out, and says why on stderr."""
        if not Path(command[0]).exists():
            note(f"{name}: left out: {command[0]} is not there (`make peers`)")
            return False
        # Ours is heard; others say much, which is kept where it can be looked up.
        other = command[0] != sys.executable
        log = (ROOT / ".venv-peers" / f"{name}.log").open("w") if other else None
        child = Child([str(word) for word in command], {**os.environ, **env}, cwd=ROOT, log=log, polls=other)
        try:
            child.hear()
            child.signal(signal.SIGSTOP)
        except EOFError as error:
            note(f"{name}: left out: {error}" + (f" (see {log.name})" if log else ""))
            child.__exit__()
            return False
        self.children[name] = self.stack.enter_context(child)
        return True

    def end(self) -> None:
        for child in self.children.values():
            child.__exit__()
        self.children.clear()

    def bare(self, what: str, op: str, batch: int, block: int, seconds: float, *more: object) -> dict[str, float]:
        words = [what, "--op", op, "--batch", batch, "--block", block, "--seconds", seconds, *more]
        command = [str(word) for word in [self.limit, *words]]
        result: dict[str, float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        return result

    def seek(self, transport: str, op: str, batch: int, block: int, *memory: str) -> Measure:
        """The limit in its best setting for this case, in this kind of memory."""
        settings: Iterator[tuple[object, ...]]
        what = {"tcp": "tcp", "shm": "memcpy"}[transport]
        if batch == 1:
            what, settings = "ping", iter([()])
        elif transport == "shm":
            settings = (("--streams", streams, *memory) for streams in (1, CORES))
        else:
            settings = (("--streams", streams, "--buffer", buffer) for streams in STREAMS for buffer in self.buffers)
        tried = [(self.bare(what, op, batch, block, 0.2, *setting)["gbps"], setting) for setting in settings]
        best = max(tried)[1]
        note(f"{transport} {op} {batch}x{name_of(block)}: limit {what} with {' '.join(map(str, best)) or 'defaults'}")
        return lambda op, batch, block, seconds: self.bare(what, op, batch, block, seconds, *best)

    # -- cases ---------------------------------------------------------------------------------------------------------

    def copies(self, transport: str) -> None:
        """The table: all shapes, both ways, and one small copy."""
        for batch, block in (*SHAPES, PING):
            for op in ("write", "read"):
                case = f"{transport} {op} {batch}x{name_of(block)}"
                if self.only not in case:
                    continue
                measures: dict[str, Measure] = {
                    name: lambda op, batch, block, seconds, child=child: child.ask(  # type: ignore[misc]
                        {"op": op, "batch": batch, "block": block, "seconds": seconds}
                    )
                    for name, child in self.children.items()
                }
                # One small copy is compared with a ping-pong over a socket, whichever way it goes.
                if transport == "shm" and batch > 1:
                    measures["memcpy"] = self.seek(transport, op, batch, block, "--shared")
                    measures["memcpy-private"] = self.seek(transport, op, batch, block)
                else:
                    measures["limit"] = self.seek(transport, op, batch, block)
                if transport == "tcp" and (batch, block) == SHAPES[0] and self.iperf3:
                    measures["iperf3"] = iperf3
                self.report(case, batch, self.interleave(case, measures, op, batch, block))

    def interleave(self, case: str, measures: dict[str, Measure], op: str, batch: int, block: int) -> Turns:
        turns = Turns()
        for _ in range(self.turns):
            for name in list(measures):
                try:
                    turns.results.setdefault(name, []).append(measures[name](op, batch, block, self.seconds))
                except (EOFError, subprocess.CalledProcessError) as error:
                    note(f"{case}: {name} is left out from here on: {error}")
                    del measures[name]
                    self.children.pop(name, None)
                    turns.results.pop(name, None)
        return turns

    def report(self, case: str, batch: int, turns: Turns) -> None:
        """One line for each thing compared with; a small copy is measured by its time, a batch by its rate."""
        others = [name for name in turns.results if name not in ("ours", "unchecked", "private")]
        for ours in ("ours", "unchecked", "private"):
            if ours not in turns.results:
                continue
            suffix = "" if ours == "ours" else f" {ours}"
            what, unit = ("p50_us", "us") if batch == 1 else ("gbps", "GB/s")
            value = turns.value(ours, what)
            # Others check nothing above TCP, so our figure without them is for the limit alone. Memory is copied as
            # fast as its pages allow, so each kind is compared with its own.
            limits = {"limit", "memcpy-private" if ours == "private" else "memcpy"}
            peers = {"mooncake", "nixl", "nixl-auto", "iperf3"} if ours != "unchecked" else set()
            wanted = [name for name in others if name in limits | peers]
            compared: list[str | None] = [*wanted] or [None]
            for other in compared:
                more: dict[str, Any] = {name: turns.value(ours, name) for name in CPU} | {"turns": self.turns}
                if other is None:
                    line("transfer", case + suffix, value, unit, **more)
                    continue
                theirs = turns.value(other, what)
                ratio = theirs / value if batch == 1 else value / theirs
                more |= {"theirs": theirs} | {f"their_{name}": turns.value(other, name) for name in CPU}
                line("transfer", case + suffix, value, unit, against=other, ratio=ratio, **more)
        if "ours" in turns.results and "unchecked" in turns.results and batch > 1:
            cost = turns.value("ours", "cpu_s_per_gb") - turns.value("unchecked", "cpu_s_per_gb")
            line("transfer", f"{case} checksum cost", cost, "CPU s/GB")

    def rest(self, transport: str, quick: bool) -> None:
        """What is measured of ours alone."""
        child = self.children["ours"]
        for count in (1, 8, 64):
            if self.only in (case := f"{transport} write 64KiB to {count} peers"):
                call = {"call": "with_peers", "count": count, "block": 64 * KIB, "seconds": self.seconds}
                rates = [child.ask(call)["gbps"] for _ in range(self.turns)]
                line("transfer", case, median(rates), "GB/s", turns=self.turns)
        if self.only in (case := f"{transport} cancel to quiescence"):
            times = child.ask({"call": "cancel", "times": 20 if quick else 200})
            line("transfer", case, times["p50_us"], "us", max_us=times["max_us"])


def build_limit() -> Path:
    """The program that has no protocol, built if it is not yet."""
    command = ["cargo", "build", "--quiet", "--release", "--package", "transferd", "--example", "bare"]
    subprocess.run(command, cwd=ROOT, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return target / "release/examples/bare"


def iperf3(op: str, batch: int, block: int, seconds: float) -> dict[str, float]:
    """Two streams, from this machine to itself, for whole seconds."""
    port = str(free_port())
    server = ["iperf3", "--server", "--one-off", "--bind", "127.0.0.1", "--port", port, "--forceflush"]
    client = ["iperf3", "--client", "127.0.0.1", "--port", port, "--parallel", "2", "--length", "1M", "--json"]
    client += [*(["--reverse"] if op == "read" else []), "--time", str(max(1, round(seconds)))]
    with subprocess.Popen(server, stdout=subprocess.PIPE) as serving:
        assert serving.stdout is not None
        try:
            # It says when it listens.
            while b"listening" not in (heard := serving.stdout.readline()):
                if not heard:
                    raise EOFError("its server ended")
            result = subprocess.run(client, stdout=subprocess.PIPE, check=True)
        finally:
            serving.terminate()
    end = json.loads(result.stdout)["end"]
    cpu = end["cpu_utilization_percent"]
    rate = end["sum_received"]["bits_per_second"] / 8e9
    used, system = ((cpu[f"host_{kind}"] + cpu[f"remote_{kind}"]) / 100 for kind in ("total", "system"))
    return {"gbps": rate, "cpu_s_per_gb": used / rate, "system_s_per_gb": system / rate, "p50_us": float("nan")}


def have(program: str) -> bool:
    return any((Path(folder) / program).exists() for folder in os.get_exec_path())


def name_of(size: int) -> str:
    return f"{size // MIB}MiB" if size >= MIB else f"{size // KIB}KiB"


if __name__ == "__main__":
    main()
