"""How every transfer engine is driven, ours and others', so that all do the same work on the same buffers.

A contender is two processes: an initiator that measures, and a target whose memory it writes and reads. This file is
both, around an `Engine` of four methods. It needs numpy alone, for it runs in the virtual environments of the engines
that it drives.

The work: a batch of blocks, scattered (block i of the one side is block `order[i]` of the other, as the blocks of a KV
cache are), one batch at a time. Every batch takes the next set of a pool that is far larger than a core's own caches,
so neither end is warm. What can be prepared (descriptor lists) is, outside the measurement.

```
bench/transfer.py --stdin--> initiator --stdin--> target       one JSON object a line, each way
        {"op": "write", "block": 4096, "batch": 1024, "seconds": 1}  ->  {"gbps": ..., "p50_us": ..., ...}
```
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import IO, Any, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

Memory = NDArray[np.uint8]
Offsets = NDArray[np.uint64]
#: Bytes of each end's memory; the bare limit (rust/transferd/examples/bare.rs) has the same.
POOL_BYTES = 128 << 20
#: Engines print what they like to stdout; what is meant for us begins like this.
MARK = "@ "


class Engine(Protocol):
    """What is measured: started with its role and options, it registers POOL_BYTES of memory, once."""

    memory: Memory

    def __init__(self, role: str, options: list[str]) -> None: ...
    def address(self) -> Any:
        """Of a target: what an initiator needs to know, as JSON."""

    def connect(self, address: Any) -> None:
        """Of an initiator: to that target."""

    def prepare(self, op: str, local: Offsets, remote: Offsets, block: int) -> Any:
        """Of an initiator: a batch of `block` bytes each, from (write) or to (read) its own memory at `local`."""

    def run(self, batch: Any) -> None:
        """Does a prepared batch and returns when it is done; raises if it fails."""


def main(engine: type[Engine]) -> None:
    """The whole program: `python -m MODULE initiator|target [option ...]`; ends when its standard input does."""
    role, *options = sys.argv[1:]
    module = sys.modules["__main__"].__spec__
    ours = engine(role, options)
    np.copyto(ours.memory, np.random.default_rng(len(role)).integers(0, 256, POOL_BYTES, np.uint8))
    if role == "target":
        say(sys.stdout, ours.address())
        for line in sys.stdin:
            say(sys.stdout, answer(ours, json.loads(line)))
        return
    assert module is not None, "start it with -m"
    with Child([sys.executable, "-m", module.name, "target", *options]) as target:
        ours.connect(target.hear())
        say(sys.stdout, "ready")
        for line in sys.stdin:
            question = json.loads(line)
            call = question.pop("call", None)
            say(sys.stdout, getattr(ours, call)(target, **question) if call else measure(ours, target, **question))


def answer(engine: Engine, question: dict[str, Any]) -> Any:
    """Of a target: the CPU seconds used so far, the digest of a set, or what a method of this engine alone returns."""
    if "digest" in question:
        return digest(engine.memory, np.array(question["digest"], np.uint64), question["block"])
    if "call" in question:
        return getattr(engine, question.pop("call"))(**question)
    return cpu_seconds()


def plain_memory() -> Memory:
    """As any program has it: private, in huge pages where the machine has them (numpy asks for those)."""
    return np.zeros(POOL_BYTES, np.uint8)


def measure(engine: Engine, target: Child, op: str, block: int, batch: int, seconds: float) -> Any:
    """Batches of one shape, one after the other, for so long."""
    memory = engine.memory
    order = shuffled(batch)
    sets = max(2, min(64, POOL_BYTES // (block * batch)))
    assert sets * batch * block <= POOL_BYTES
    plain = np.arange(batch, dtype=np.uint64) * np.uint64(block)
    base = np.arange(sets, dtype=np.uint64) * np.uint64(block * batch)
    batches = [engine.prepare(op, at + plain, at + plain[order], block) for at in base]
    # Once around: connections, windows and page tables are made. And what was moved must be there.
    for prepared in batches:
        engine.run(prepared)
    place = base[-1] + plain
    there = target.ask({"digest": place[order].tolist(), "block": block})
    if digest(memory, place, block) != there:
        raise SystemExit(f"{op} of {batch} x {block} bytes: other bytes arrived than were sent")
    used = np.add(cpu_seconds(), target.ask({}))
    times: list[float] = []
    start = now = time.perf_counter()
    while now - start < seconds:
        engine.run(batches[len(times) % sets])
        before, now = now, time.perf_counter()
        times.append(now - before)
    user, system = np.add(cpu_seconds(), target.ask({})) - used
    moved = len(times) * batch * block
    times.sort()
    return {
        "gbps": moved / (now - start) / 1e9,
        "p50_us": times[len(times) // 2] * 1e6,
        "p99_us": times[len(times) * 99 // 100] * 1e6,
        "cpu_s_per_gb": (user + system) / moved * 1e9,
        "system_s_per_gb": system / moved * 1e9,
        "batches": len(times),
    }


def cpu_seconds() -> tuple[float, float]:
    """What all threads of this process have used so far: in its own code, and in the kernel."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


def shuffled(batch: int) -> Offsets:
    """Multiplication by a number that has no factor in common with `batch`: the order of the far end."""
    step = next(step for step in range(max(1, int(batch * 0.618)), 2 * batch + 1) if math.gcd(step, batch) == 1)
    return np.arange(batch, dtype=np.uint64) * np.uint64(step) % np.uint64(batch)


def digest(memory: Memory, offsets: Offsets, block: int) -> int:
    """Of blocks, in this order."""
    total = 0
    for offset in offsets:
        total = zlib.crc32(memory[int(offset) : int(offset) + block].data, total)
    return total


class Child:
    """A process that is spoken with line by line, and ends with its standard input.

    polls: it and its own children keep cores busy while nobody asks anything (threads that poll), so they are stopped
    between questions: else whoever else is measured would have these cores no more.
    """

    def __init__(
        self,
        command: list[str],
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        log: IO[str] | None = None,
        polls: bool = False,
    ) -> None:
        self.process = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stderr=log,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=polls,
        )
        self.polls = polls
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self.name = " ".join(command)

    def ask(self, question: Any) -> Any:
        """Waits for the answer."""
        self.signal(signal.SIGCONT)
        self.input.write(json.dumps(question) + "\n")
        self.input.flush()
        answer = self.hear()
        self.signal(signal.SIGSTOP)
        return answer

    def signal(self, number: signal.Signals) -> None:
        """To it and its children, if they are stopped between questions."""
        if self.polls and self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def hear(self) -> Any:
        """The next thing it says to us; EOFError if it ends instead."""
        for line in self.output:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        raise EOFError(f"ended with status {self.process.wait()}: {self.name}")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGCONT)
        self.input.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def say(stream: TextIO, what: Any) -> None:
    stream.write(MARK + json.dumps(what) + "\n")
    stream.flush()
