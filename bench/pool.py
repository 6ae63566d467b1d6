"""The pool of objects beside what the machine can do: copying memory, and a bare message there and back.

Prints one JSON object a line: bench, case, value, unit, against, ratio (above 1: we are better). Contenders take turns,
and the median of all rounds counts, so that a busy machine disturbs all of them. A batch is 32 objects.

local put: into a daemon in this process and into one in another, with checksums; against memcpy of the same bytes
local get: 32 views of 1 MiB; through the daemon against a bare round trip of as many bytes over a unix socket
exists:    the same, where nothing is pinned
remote put, get, exists: the same between two nodes, see bench/pool_remote.py
8 clients: eight processes put and get at once: the slow ones beside the usual one (bench/pool_clients.py)
fetch from two holders: see bench/pool_spread.py
books:     `bench/pool_books.py`
ssd, restart: bench/pool_ssd.py says it

A bare round trip: this process sends a request's bytes to another, which sends an answer's bytes back; both in Python,
one call to send and one to receive.
"""

from __future__ import annotations

import argparse
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from bench import pool_books, pool_clients, pool_remote, pool_spread, pool_ssd
from bench.common import end_on_sigterm, line, median, note
from pyengine import Pool

MIB = 1 << 20
BATCH = 32
#: As the messages of 32 keys are: 16 bytes a key and what a frame has around them; a pin is answered by where it is.
ASKED, PINNED, TOLD = 32 * 16 + 48, 32 * 8 + 48, 32 * 2 + 48
#: Seconds of each turn.
TURN, QUICK_TURN = 1.0, 0.3

_ECHO = """
import socket, struct, sys
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print("ready", flush=True)
    while True:
        peer, _ = listener.accept()
        with peer:
            asked, told = struct.unpack("II", peer.recv(8))
            buffer, answer = bytearray(asked), bytes(told)
            while peer.recv_into(buffer):
                peer.send(answer)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter turns: under a minute")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases that contain this, such as `local put`")
    arguments = parser.parse_args()
    end_on_sigterm()
    pool_books.rows(arguments)
    turns, seconds = (3, QUICK_TURN) if arguments.quick else (7, TURN)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pyengine-bench-"))
        pools = {"embedded": stack.enter_context(Pool.open("512MiB")), "daemon": daemon(stack, folder)}
        for case, bench in (("local put", puts), ("local get", gets), ("exists", exists)):
            if arguments.only in case:
                bench(case, pools, echo(stack, folder, case), turns, seconds)
    if arguments.only in "8 clients":
        pool_clients.rows(arguments)
    pool_spread.rows(arguments)
    pool_ssd.rows(arguments)
    pool_remote.rows(arguments)


def daemon(stack: ExitStack, folder: str) -> Pool:
    """One in another process, as workers have it."""
    path = f"{folder}/daemon.sock"
    command = [sys.executable, "-c", "import sys; from pyengine._transferd import main; main()"]
    flags = ["--node", "bench", "--dram-bytes", "512MiB", "--socket", path, "--die-with-parent", "--log", "warn"]
    process = stack.enter_context(subprocess.Popen([*command, *flags]))
    stack.callback(process.terminate)
    return stack.enter_context(Pool.connect(path, timeout=30.0))


def echo(stack: ExitStack, folder: str, name: str) -> Callable[[int, int], Callable[[], None]]:
    """(bytes of a request, bytes of an answer) -> a round trip."""
    path = f"{folder}/{name.replace(' ', '-')}.sock"
    process = stack.enter_context(subprocess.Popen([sys.executable, "-c", _ECHO, path], stdout=subprocess.PIPE))
    stack.callback(process.terminate)
    assert process.stdout is not None
    process.stdout.readline()

    def trip(asked: int, told: int) -> Callable[[], None]:
        peer = stack.enter_context(socket.socket(socket.AF_UNIX))
        peer.connect(path)
        peer.send(struct.pack("II", asked, told))
        request, buffer = bytes(asked), bytearray(told)

        def once() -> None:
            peer.send(request)
            peer.recv_into(buffer)

        return once

    return trip


def interleave(contenders: dict[str, Callable[[], Any]], turns: int, seconds: float) -> dict[str, float]:
    """Median seconds of one call, by contender.

    Each has its turn in each round, in changing order; a turn of no seconds is one call.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            until = time.perf_counter() + seconds
            while True:
                begun = time.perf_counter()
                # What a call has to prepare is not its time: it says what is.
                spent = contenders[name]()
                ended = time.perf_counter()
                times[name].append(ended - begun if spent is None else spent)
                if ended >= until:
                    break
    return {name: median(measured) for name, measured in times.items()}


def data() -> tuple[list[str], list[np.ndarray[Any, Any]]]:
    random = np.random.default_rng(0)
    return [f"object {number}" for number in range(BATCH)], [
        random.integers(0, 256, MIB, dtype=np.uint8) for _ in range(BATCH)
    ]


def puts(case: str, pools: dict[str, Pool], _: Any, turns: int, seconds: float) -> None:
    """Into memory that has been written before, as a pool's is once it is full."""
    keys, values = data()
    # As many destinations as the pools have room for, so that neither side finds them in cache.
    targets = [np.full(MIB, 1, np.uint8) for _ in range(10 * BATCH)]
    at = 0

    def memcpy() -> None:
        nonlocal at
        for value in values:
            np.copyto(targets[at], value)
            at = (at + 1) % len(targets)

    def put(pool: Pool) -> Callable[[], float]:
        number = 0

        def once() -> float:
            nonlocal number
            number += 1
            names = [f"{key} {number}" for key in keys]
            begun = time.perf_counter()
            stored = pool.batch_put(names, values)
            spent = time.perf_counter() - begun
            assert all(stored)
            return spent

        return once

    for pool in pools.values():
        fill = put(pool)
        for _turn in range(20):
            fill()
    contenders: dict[str, Callable[[], Any]] = {"memcpy": memcpy}
    contenders |= {name: put(pool) for name, pool in pools.items()}
    # Call by call, so that caches are as full of others' bytes for each.
    result = interleave(contenders, int(turns * seconds * 40), 0.0)
    for name in pools:
        rate = BATCH * MIB / result[name] / 1e9
        line("pool", f"{case} {name} 32x1MiB", rate, "GB/s", against="memcpy", ratio=result["memcpy"] / result[name])


def gets(case: str, pools: dict[str, Pool], trip: Any, turns: int, seconds: float) -> None:
    """Views are made and let go of again, which counts."""
    keys, values = data()

    def get(pool: Pool) -> Callable[[], None]:
        pool.batch_put(keys, values)

        def once() -> None:
            # No `all(...)` over them: the caller's own work is not the pool's.
            pool.batch_get(keys)

        assert None not in pool.batch_get(keys)
        return once

    report(case, {name: get(pool) for name, pool in pools.items()}, trip(ASKED, PINNED), 20.0, turns, seconds)


def exists(case: str, pools: dict[str, Pool], trip: Any, turns: int, seconds: float) -> None:
    keys, values = data()

    def ask(pool: Pool) -> Callable[[], None]:
        pool.batch_put(keys, values)
        assert all(pool.batch_exists(keys))

        def once() -> None:
            pool.batch_exists(keys)

        return once

    report(case, {name: ask(pool) for name, pool in pools.items()}, trip(ASKED, TOLD), 15.0, turns, seconds)


def report(
    case: str, ours: dict[str, Callable[[], None]], bare: Callable[[], None], limit: float, turns: int, seconds: float
) -> None:
    """The embedded one beside a number of microseconds, the daemon beside a bare round trip."""
    result = interleave({"bare": bare, **ours}, turns, seconds)
    micros = {name: spent * 1e6 for name, spent in result.items()}
    line("pool", f"{case} embedded x32", micros["embedded"], "us", against="limit", ratio=limit / micros["embedded"])
    ratio = micros["bare"] / micros["daemon"]
    line("pool", f"{case} daemon x32", micros["daemon"], "us", against="bare", ratio=ratio, theirs=micros["bare"])


if __name__ == "__main__":
    if len(os.sched_getaffinity(0)) < 2:
        note("one core: both ends of every round trip share it")
    main()
