"""Objects across two nodes: what `bench/pool.py` prints for another node over tcp.

Two processes with a daemon each. remote put: a batch that the other node has, too, when the call returns. remote get:
a batch that only the other one has, copied into buffers here. Both against Mooncake Store (the same batch to and from
the memory of another process) and against our own transfer engine, which moves the same bytes between registered
memory, with checksums too. exists: a batch that only the other one has, against a bare round trip of as many bytes
over tcp.

Every round has names of its own, as what is there is not put again and what was got is here. The contenders take turns,
call by call (questions: by the hundred), after some of each that do not count.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from bench.common import line, median, note
from bench.peers.driver import Child, say
from bench.server import free_port
from pyengine import Pool, TransferEngine

ROOT = Path(__file__).parents[1]
COUNT, MIB = 32, 1 << 20
#: Of each pool: sixteen batches, so that from then on each call makes room for itself, as a pool in use does.
DRAM = "512MiB"
#: Calls of each contender that do not count: until the pools are full, and all memory has been written before.
WARM = 20
#: Rounds that count.
ROUNDS, QUICK_ROUNDS = 60, 15
#: Questions of one turn: what takes microseconds is compared with both sides awake.
CALLS = 100
#: Bytes of a question for 32 names and its answer, as ours are on the wire.
ASKED, TOLD = 32 * 16 + 48, 32 * 32 + 48

#: One call's seconds.
Contender: TypeAlias = Callable[[int], float]
Direction: TypeAlias = Literal["write", "read"]


def rows(arguments: Namespace) -> None:
    """Prints them. arguments: quick, only."""
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    with ExitStack() as stack:
        here, there = free_port(), free_port()
        other = stack.enter_context(Child([sys.executable, "-m", "bench.pool_remote", str(there), str(here)]))
        told = other.hear()
        pool = stack.enter_context(
            Pool.open(DRAM, listen=f"127.0.0.1:{here}", peers=[f"127.0.0.1:{there}"], transport="tcp")
        )
        other.ask({"op": "meet"})
        mooncake = start_mooncake(stack)
        bench = Bench(pool, other, Engine(stack, told), mooncake, bare(stack, told["echo"]), rounds)
        cases = {
            "remote put": bench.put,
            "remote get": bench.get,
            "remote views": bench.views,
            "remote exists": bench.exists,
        }
        for case, run in cases.items():
            if arguments.only in case:
                run(case)


class Bench:
    def __init__(
        self, pool: Pool, other: Child, engine: Engine, mooncake: Child | None, bare: Contender, rounds: int
    ) -> None:
        self.pool, self.other, self.engine, self.mooncake, self.bare = pool, other, engine, mooncake, bare
        self.rounds = rounds
        self.values = list(np.random.default_rng(0).integers(0, 256, (COUNT, MIB), np.uint8))
        self.targets = list(np.zeros((COUNT, MIB), np.uint8))

    def put(self, case: str) -> None:
        def ours(number: int) -> float:
            names = [f"{case} {number} {item}" for item in range(COUNT)]
            begun = time.perf_counter()
            stored = self.pool.batch_put(names, self.values, copies=2)
            spent = time.perf_counter() - begun
            assert all(stored) and self.pool.replicate(names, 2) == [2] * COUNT
            return spent

        self.report_rates(case, self.turns(ours, "write", "put"))

    def get(self, case: str) -> None:
        def copies(names: list[str]) -> list[int | None]:
            return self.pool.batch_get_into(names, self.targets)

        self.fetch(case, copies)

    def views(self, case: str) -> None:
        def views(names: list[str]) -> list[int | None]:
            return [None if view is None else len(view) for view in self.pool.batch_get(names)]

        self.fetch(case, views)

    def fetch(self, case: str, get: Callable[[list[str]], list[int | None]]) -> None:
        def ours(number: int) -> float:
            names = [f"{case} {number} {item}" for item in range(COUNT)]
            self.other.ask({"op": "put", "names": names})
            begun = time.perf_counter()
            lengths = get(names)
            spent = time.perf_counter() - begun
            assert lengths == [MIB] * COUNT
            return spent

        self.report_rates(case, self.turns(ours, "read", "get"))

    def exists(self, case: str) -> None:
        names = [f"{case} {item}" for item in range(COUNT)]
        self.other.ask({"op": "put", "names": names})

        def ours(_: int) -> float:
            begun = time.perf_counter()
            found = self.pool.batch_exists(names)
            spent = time.perf_counter() - begun
            assert all(found)
            return spent

        contenders: dict[str, Contender] = {"ours": ours, "bare": self.bare}
        if self.mooncake is not None:
            self.store("put", -1)
            contenders["mooncake"] = lambda _: self.store("exists", -1)
        result = {name: seconds * 1e6 for name, seconds in interleave(contenders, self.rounds, CALLS).items()}
        for name in contenders.keys() - {"ours"}:
            ratio = result[name] / result["ours"]
            line("pool", f"{case} x32", result["ours"], "us", against=name, ratio=ratio, theirs=result[name])

    def turns(self, ours: Contender, op: Direction, theirs: str) -> dict[str, float]:
        contenders: dict[str, Contender] = {"ours": ours, "engine": lambda number: self.engine.run(op, number)}
        if self.mooncake is not None:
            if theirs == "get":
                self.store("put", -1)
            contenders["mooncake"] = lambda number: self.store(theirs, number if theirs == "put" else -1)
        return interleave(contenders, self.rounds)

    def store(self, op: str, number: int) -> float:
        assert self.mooncake is not None
        return float(self.mooncake.ask({"op": op, "round": number}))

    def report_rates(self, case: str, seconds: dict[str, float]) -> None:
        rates = {name: COUNT * MIB / spent / 1e9 for name, spent in seconds.items()}
        for name in rates.keys() - {"ours"}:
            ratio = rates["ours"] / rates[name]
            line("pool", f"{case} 32x1MiB", rates["ours"], "GB/s", against=name, ratio=ratio, theirs=rates[name])


def interleave(contenders: dict[str, Contender], rounds: int, calls: int = 1) -> dict[str, float]:
    """Median seconds of each. calls: of each turn."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(WARM + rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            spent = [contenders[name](number) for _ in range(calls)]
            if number >= WARM:
                times[name] += spent
    return {name: median(measured) for name, measured in times.items()}


class Engine:
    """Our transfer engine, between the same two processes, with so much memory that no side is in cache."""

    SETS = 8

    def __init__(self, stack: ExitStack, told: Any) -> None:
        self.engine = stack.enter_context(TransferEngine("127.0.0.1:0", node="here"))
        memory = np.full(self.SETS * COUNT * MIB, 1, np.uint8)
        region = self.engine.register(memory)
        peer = self.engine.connect(told["engine"], transport="tcp")
        remote = peer.region("pool")
        self.peer = peer
        self.batches = [
            self.engine.prepare([(region, base + at * MIB, remote, base + at * MIB, MIB) for at in range(COUNT)])
            for base in range(0, self.SETS * COUNT * MIB, COUNT * MIB)
        ]

    def run(self, op: Direction, number: int) -> float:
        begun = time.perf_counter()
        self.engine.run(self.peer, op, self.batches[number % self.SETS])
        return time.perf_counter() - begun


def start_mooncake(stack: ExitStack) -> Child | None:
    """Left out, with its reason, where `make peers` could not install it."""
    python = ROOT / ".venv-peers/mooncake/bin/python"
    if not python.exists():
        note(f"mooncake: left out: {python} is not there (`make peers`)")
        return None
    ports = [str(free_port()) for _ in range(5)]
    log = stack.enter_context((ROOT / ".venv-peers" / "mooncake-store.log").open("w"))
    child = Child([str(python), "-m", "bench.peers.mooncake_store", *ports], cwd=ROOT, log=log, polls=True)
    stack.enter_context(child)
    try:
        child.hear()
    except EOFError as error:
        note(f"mooncake: left out: {error} (see {log.name})")
        return None
    return child


def bare(stack: ExitStack, port: int) -> Contender:
    """A round trip of as many bytes."""
    peer = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request, buffer = bytes(ASKED), bytearray(TOLD)

    def once(_: int) -> float:
        begun = time.perf_counter()
        peer.send(request)
        peer.recv_into(buffer, TOLD, socket.MSG_WAITALL)
        return time.perf_counter() - begun

    return once


# -- the other process -----------------------------------------------------------------------------------------------


def main(here: str, there: str) -> None:
    """Has a pool, memory for the engine, and somebody who answers; does as it is told until its standard input ends."""
    with (
        Pool.open(DRAM, listen=f"127.0.0.1:{here}", peers=[f"127.0.0.1:{there}"], transport="tcp") as pool,
        TransferEngine("127.0.0.1:0", node="there") as engine,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        engine.register(np.full(Engine.SETS * COUNT * MIB, 2, np.uint8), name="pool")
        threading.Thread(target=echo, args=[listener], daemon=True).start()
        say(sys.stdout, {"engine": engine.address, "echo": listener.getsockname()[1]})
        values = list(np.random.default_rng(1).integers(0, 256, (COUNT, MIB), np.uint8))
        for text in sys.stdin:
            question = json.loads(text)
            if question["op"] == "meet":
                meet(pool)
            else:
                assert all(pool.batch_put(question["names"], values))
            say(sys.stdout, "done")
    # The echo's thread may still wait for its peer.
    os._exit(0)


def meet(pool: Pool) -> None:
    """Waits until both are members."""
    name = f"meeting {os.getpid()}"
    pool.put(name, b"here")
    until = time.monotonic() + 30.0
    while pool.replicate([name], 2) != [2]:
        if time.monotonic() > until:
            raise SystemExit("the two pools do not meet")
        time.sleep(0.01)


def echo(listener: socket.socket) -> None:
    peer, _ = listener.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer, answer = bytearray(ASKED), bytes(TOLD)
    while peer.recv_into(buffer, ASKED, socket.MSG_WAITALL):
        peer.send(answer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
