"""Goal: whenever the daemon or a client is killed, nothing wrong is ever read, what was told to be durable is there, no
key is stuck, and the disk keeps its limit. Method: the real daemon over one directory, killed 50 times in the middle of
what three clients do; a count of their operations says when. Every block's bytes follow from its number, so every byte
that is read is verified. In one half of the lives all fits on the disk: then what was durable must be there; in the
other half it does not, and it may be gone.

The seed says what the clients ask for; when their threads run, nobody says.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from pyengine._native import RetryError
from tests.transfer.daemons import LENGTH, PATIENCE, Client, Gone, Shape, Transferd
from tests.waiting import until

SEED = 1
#: Large enough that not all blocks fit on the smallest disk there can be.
SHAPE = Shape(2, 64 << 10)
#: Some forty slots: three clients hold at most twelve.
DRAM = 44 * SHAPE.bytes
SMALL, LARGE = 16 << 20, 128 << 20
PREFIXES = range(60)
CLIENTS = 3
LIVES = 25


class Work:
    """What the clients of one life have done together."""

    def __init__(self, daemon: Transferd, operations: int) -> None:
        self.daemon, self.operations = daemon, operations
        self.done = itertools.count(1)
        self.durable: set[int] = set()
        self.seen: Counter[str] = Counter()

    def client(self, incarnation: int, seed: str) -> None:
        try:
            client = Client(self.daemon, SHAPE, incarnation, seed)
            try:
                while True:
                    if client.random.random() < 0.2:
                        self.durable |= client.take(client.random.choice(PREFIXES), durable=True)
                    else:
                        client.something(PREFIXES)
                    if next(self.done) == self.operations:
                        self.daemon.kill()
            finally:
                self.seen += client.seen
        except (Gone, RetryError):
            assert next(self.done) > self.operations, f"the daemon has ended by itself: {self.daemon.log()}"
        finally:
            # Also if a client has failed: the others are to end.
            self.daemon.kill()

    def run(self, life: int) -> None:
        names = [(1 + life * 1_000_000 + i * 1000, f"{SEED} {life} {i}") for i in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as clients:
            ends = [clients.submit(self.client, *name) for name in names]
        assert self.daemon.ended() == -9
        for end in ends:
            end.result()


@pytest.mark.parametrize("ssd", [LARGE, SMALL], ids=["all fits on the disk", "the disk is too small"])
def test_a_daemon_killed_at_any_moment(tmp_path: Path, ssd: int) -> None:
    random, durable, seen = Random(SEED), set[int](), Counter[str]()
    everything = len(PREFIXES) * LENGTH * SHAPE.bytes
    roomy = ssd > 2 * everything
    came_back = 0
    for life in range(LIVES):
        daemon = Transferd(tmp_path, "a", DRAM, ssd=ssd)
        assert daemon.disk_bytes() <= ssd
        # What was durable when the daemon was killed: a part of it each time, for there is not room for all in DRAM.
        with_client = Client(daemon, SHAPE, 10**9 + life, f"{SEED} {life}")
        for prefix in random.sample(PREFIXES, 6):
            wanted = {number for number in durable if number // LENGTH == prefix}
            there = with_client.take(prefix, compute=False)
            came_back += len(there & wanted)
            assert not roomy or wanted <= there, f"life {life}: {wanted - there} were durable and are gone"
        seen += with_client.seen
        with_client.pool.close()
        work = Work(daemon, random.randint(10, 200))
        work.run(life)
        durable |= work.durable
        seen += work.seen
        assert daemon.disk_bytes() <= ssd, f"life {life}: the disk's limit is broken"
    print(f"{came_back} durable blocks came back; {dict(seen)}")
    assert came_back > 0 and seen["ssd"] > 0 and seen["flushes"] > 0 and seen["deaths"] > 0
    # No key is stuck: each can be taken, computed if it must be, and found.
    daemon = Transferd(tmp_path, "a", DRAM, ssd=ssd)
    client = Client(daemon, SHAPE, 10**9 + LIVES, "the last")
    for prefix in PREFIXES:
        wanted = {number for number in durable if number // LENGTH == prefix}
        there = client.take(prefix, compute=False)
        assert not roomy or wanted <= there, f"{wanted - there} were durable and are gone"
        assert len(client.take(prefix)) == LENGTH
        assert client.find(prefix) == LENGTH
    assert [client.counter("pyengine_pool_blocks", f'state="{state}"') for state in ("reserved", "pinned")] == [0, 0]
    assert client.counter("pyengine_checksum_failures_total") == 0
    client.pool.close()
    daemon.stop()
    assert daemon.disk_bytes() <= ssd


@pytest.mark.parametrize("step", ["grant", "store", "commit"])
def test_a_client_process_killed_at_each_step(tmp_path: Path, step: str) -> None:
    """Its slots come back, its keys can be taken by others, and what it has published is right."""
    daemon = Transferd(tmp_path, "a", DRAM, ssd=SMALL)
    other = Client(daemon, SHAPE, 7, step)
    program = (
        "import os, signal, sys\n"
        "from types import SimpleNamespace\n"
        "from tests.transfer.daemons import Client, Shape\n"
        f"daemon = SimpleNamespace(socket={daemon.socket!r}, process=None)\n"
        f"shape = Shape({SHAPE.strips}, {SHAPE.strip_bytes})\n"
        "client = Client(daemon, shape, int(sys.argv[1]), '')\n"
        # In place of the end that it would come back from.
        "client.come_back = lambda: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"client.take(3, die_after={step!r})\n"
    )
    root = Path(__file__).parents[2]
    for life in ("1", "2", "3"):
        died = subprocess.run(
            [sys.executable, "-c", program, life],
            cwd=root,
            timeout=PATIENCE,
            check=False,
            capture_output=True,
            text=True,
        )
        assert died.returncode == -9, died.stderr
        # It may wait until the daemon knows that the process is dead; it never waits for ever.
        assert len(other.take(3)) == LENGTH and other.find(3) == LENGTH

    def held() -> int:
        states = ("reserved", "pinned")
        return sum(other.counter("pyengine_pool_blocks", "dram", f'state="{state}"') for state in states)

    # What is on its way to the SSD is pinned by the daemon itself.
    until(lambda: not held(), "nothing is held", PATIENCE)
    other.pool.close()
    daemon.stop()


def test_what_was_dropped_stays_so_after_a_kill(tmp_path: Path) -> None:
    """`transferd evict` and `clear` answer when the deletion is durable: a kill in that moment brings nothing back.

    It sees deletions that are not written. What was written and not synced survives a kill, as the kernel has it:
    losing power is for `rust/transfer/tests/whole`.
    """

    def keys(daemon: Transferd) -> list[str]:
        told = daemon.command("keys", "--json")
        assert told.returncode == 0, told.stderr
        return [json.loads(line)["key"] for line in told.stdout.splitlines()]

    for life, words in enumerate((["evict", "--all"], ["clear", "--namespace", "0"], ["evict"])):
        daemon = Transferd(tmp_path, "a", DRAM, ssd=SMALL)
        assert keys(daemon) == [], f"they came back before life {life}"
        client = Client(daemon, SHAPE, 1 + life, "")
        for prefix in range(8):
            assert len(client.take(prefix, durable=True)) == LENGTH
        # An answer: by now it holds nothing.
        client.counters()
        client.pool.close()
        assert len(keys(daemon)) >= 8 * LENGTH
        named = [SHAPE.key(number).hex() for number in range(8 * LENGTH)] if words == ["evict"] else []
        done = daemon.command(*words, *named)
        daemon.kill()
        assert done.returncode == 0, done.stderr
        daemon.ended()
    daemon = Transferd(tmp_path, "a", DRAM, ssd=SMALL)
    assert keys(daemon) == []
    daemon.stop()
