"""Eight clients at once: how much longer the slow puts and gets take than the usual one.

Eight processes share a daemon in a ninth. Each puts objects of 64 KiB under names of its own and gets one of its last
ones, by chance, as a view that it lets go of; the next follows at once. So on two cores all wait for each other, and
p99 shows who waits for long.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

import numpy as np

from bench.common import line, percentile
from pyengine import Pool

CLIENTS = 8
VALUE = 64 << 10
#: Of each client's puts so many can be got: all of them fit beside what is written meanwhile.
KEPT = 200
DRAM = "512MiB"
#: Seconds of measuring; before it all memory has been written once.
SECONDS, QUICK_SECONDS = 20.0, 5.0

_CLIENT = "import sys; from bench.pool_clients import client; client(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))"


def rows(arguments: argparse.Namespace) -> None:
    seconds = QUICK_SECONDS if arguments.quick else SECONDS
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pyengine-bench-"))
        path = f"{folder}/daemon.sock"
        command = [sys.executable, "-c", "import sys; from pyengine._transferd import main; main()"]
        flags = ["--node", "bench", "--dram-bytes", DRAM, "--socket", path, "--die-with-parent", "--log", "warn"]
        daemon = stack.enter_context(subprocess.Popen([*command, *flags]))
        stack.callback(daemon.terminate)
        Pool.connect(path, timeout=30.0).close()
        clients = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _CLIENT, path, str(number), str(seconds)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
            for number in range(CLIENTS)
        ]
        for each in clients:
            assert each.stdout is not None and each.stdout.readline() == b"ready\n", "a client did not get there"
        for each in clients:
            assert each.stdin is not None
            each.stdin.write(b"go\n")
            each.stdin.flush()
        told = [np.frombuffer(each.communicate()[0], np.float64) for each in clients]
    # Each tells how many puts it has measured, then their times, then those of its gets.
    puts = np.concatenate([times[1 : 1 + int(times[0])] for times in told])
    gets = np.concatenate([times[1 + int(times[0]) :] for times in told])
    for name, times in (("put", puts), ("get", gets)):
        usual, slow = (percentile(times.tolist(), share) * 1e6 for share in (50, 99))
        case, ratio = f"{name} p99 8 clients 64KiB", usual / slow
        line("pool", case, slow, "us", against="p50", ratio=ratio, theirs=usual, rate=len(times) / seconds)


def client(path: str, number: int, seconds: float) -> None:
    """One of the eight. Fills its share of the memory, waits for the word, measures, and tells its times."""
    chance = random.Random(number)
    value = np.random.default_rng(number).integers(0, 256, VALUE, dtype=np.uint8)
    puts: list[float] = []
    gets: list[float] = []
    with Pool.connect(path) as pool:
        made = 0

        def put() -> float:
            nonlocal made
            name = f"{number} {made}"
            begun = time.perf_counter()
            stored = pool.put(name, value)
            spent = time.perf_counter() - begun
            assert stored
            made += 1
            return spent

        def get() -> float:
            """One that is still there: which objects make room is not the question here."""
            while True:
                name = f"{number} {made - 1 - chance.randrange(KEPT)}"
                begun = time.perf_counter()
                view = pool.get(name)
                if view is not None:
                    view.close()
                    return time.perf_counter() - begun

        for _ in range(1200):
            put()
        print("ready", flush=True)
        sys.stdin.readline()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            if chance.random() < 0.5:
                puts.append(put())
            else:
                gets.append(get())
    sys.stdout.buffer.write(np.array([len(puts), *puts, *gets], np.float64).tobytes())
    sys.stdout.flush()
