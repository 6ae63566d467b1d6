"""`make soak`: two real daemons, with an SSD and without, at full churn for SECONDS (600), over links that are cut now
and then.

Goal: for as long as one likes nothing grows, nothing is stuck and nothing is wrong. Method: clients of both nodes take
prefixes by chance, from DRAM, SSD and the other node, hint, abort, die and come back, over more blocks than the SSD has
room for; every byte they are given is verified. Memory, descriptors, threads and disk use are sampled each second. At
the end nothing may be held, and the counters must agree with what the clients have seen.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

from pyengine._native import NodeAddress
from tests.transfer.daemons import PATIENCE, Client, Shape, Transferd
from tests.transfer.links import Link

SHAPE = Shape(2, 16 << 10)
#: 120 slots on each node, 500 blocks on the SSD, 1200 in all.
DRAM = 128 * SHAPE.bytes
SSD = 16 << 20
PREFIXES = range(300)
CLIENTS = 2
#: Memory and descriptors may still move so far in the last third of the time: the allocator's pools, a link that is
#: being dialled. What leaks a little each operation has thousands of them by then.
SLACK_SHARE = 0.05
SLACK_BYTES = 4 << 20
SLACK_COUNT = 8


@dataclass
class Samples:
    """Of one daemon, one a second."""

    rss: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    disk: list[int] = field(default_factory=list)

    def take(self, daemon: Transferd) -> None:
        process = Path("/proc") / str(daemon.process.pid)
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
        self.rss.append(int(status["VmRSS"].split()[0]) << 10)
        self.threads.append(int(status["Threads"]))
        self.descriptors.append(len(list((process / "fd").iterdir())))
        self.disk.append(daemon.disk_bytes())

    def check(self, node: str) -> None:
        """The last third is as the middle one."""
        for name, values, share, slack in (
            ("bytes of memory", self.rss, SLACK_SHARE, SLACK_BYTES),
            ("descriptors", self.descriptors, 0.0, SLACK_COUNT),
            ("threads", self.threads, 0.0, SLACK_COUNT),
        ):
            third = len(values) // 3
            middle, last = median(values[third : 2 * third]), median(values[2 * third :])
            assert last <= middle * (1 + share) + slack, f"{node}: {name} grew from {middle:.0f} to {last:.0f}"
        assert max(self.disk) <= SSD, f"{node}: {max(self.disk)} bytes on disk, the limit is {SSD}"


class Churn:
    """All that runs at once."""

    def __init__(self, daemons: dict[str, Transferd], links: dict[str, Link], seed: int) -> None:
        self.daemons, self.links, self.seed = daemons, links, seed
        self.over = threading.Event()
        self.operations = 0
        self.seen: dict[str, Counter[str]] = {node: Counter() for node in daemons}
        self.samples = {node: Samples() for node in daemons}
        self._lock = threading.Lock()

    def _client(self, node: str, number: int) -> None:
        sources: list[NodeAddress] = [daemon.address for name, daemon in self.daemons.items() if name != node]
        client = Client(self.daemons[node], SHAPE, number * 10**9, f"{self.seed} {node} {number}")
        operations = 0
        try:
            while not self.over.is_set():
                client.something(PREFIXES, sources if client.random.random() < 0.8 else ())
                operations += 1
        finally:
            # The first that fails ends it for all.
            self.over.set()
            client.pool.close()
            with self._lock:
                self.operations += operations
                self.seen[node] += client.seen

    def run(self, seconds: float) -> None:
        numbers = [(node, number) for node in self.daemons for number in range(1, CLIENTS + 1)]
        clients = ThreadPoolExecutor(len(numbers))
        ends = [clients.submit(self._client, *each) for each in numbers]
        random, until = Random(self.seed), time.monotonic() + seconds
        cut: Link | None = None
        while (left := until - time.monotonic()) > 0 and not self.over.wait(min(1.0, left)):
            for node, daemon in self.daemons.items():
                self.samples[node].take(daemon)
            if cut:
                cut.mend()
                cut = None
            elif random.random() < 0.2:
                cut = self.links[random.choice(sorted(self.links))]
                cut.cut()
        self.over.set()
        for link in self.links.values():
            link.mend()
        for end in ends:
            end.result(2 * PATIENCE)
        clients.shutdown()


def settle(client: Client) -> dict[str, int]:
    """The counters of a daemon with which nobody does anything, once nothing is held or on its way to the SSD there."""
    until = time.monotonic() + PATIENCE
    while True:
        counters = client.counters()
        states = {key.split('state="')[1].split('"')[0]: n for key, n in counters.items() if "_pool_blocks{" in key}
        held = [states[state] for state in ("reserved", "pinned", "quarantine")]
        unfinished = ("pyengine_pool_grants{", "pyengine_tier_waiting_bytes{")
        held += [n for key, n in counters.items() if key.startswith(unfinished)]
        if not any(held):
            return counters
        assert time.monotonic() < until, f"{client.daemon.node} still holds something: {counters}"
        # No event tells: hints are worked off, and copies come to their end.
        client.pool.wait(0.05)


def total(counters: dict[str, int], name: str, *labels: str) -> int:
    return sum(n for key, n in counters.items() if key.startswith(name + "{") and all(label in key for label in labels))


def agree(node: str, counters: dict[str, int], seen: Counter[str]) -> None:
    """The daemon's counters against what its clients have seen, and against each other."""
    assert total(counters, "pyengine_checksum_failures_total") == 0, counters
    if total(counters, "pyengine_tier_limit_bytes"):
        assert total(counters, "pyengine_pool_hits_total", "ssd") >= seen["ssd"]
        for name in ("promot", "demot"):
            blocks, size = (total(counters, f"pyengine_pool_{name}{end}") for end in ("ions_total", "ed_bytes_total"))
            assert size == blocks * SHAPE.bytes and blocks > 0, f"{node}: {name}ions: {blocks} blocks, {size} bytes"
        assert total(counters, "pyengine_tier_used_bytes") <= SSD
        assert total(counters, "pyengine_tier_trouble") == 0
    assert total(counters, "pyengine_pool_hits_total", "dram") >= seen["dram"]
    peers = seen["peer_dram"] + seen["peer_ssd"]
    assert total(counters, "pyengine_transfer_blocks_total", "tcp", "in") >= peers > 0


def soak(seconds: float, seed: int) -> str:
    """Runs it, and returns the table. Raises AssertionError for whatever is wrong."""
    place = Path(tempfile.mkdtemp(prefix="pyengine-soak-"))
    daemons: dict[str, Transferd] = {}
    links: dict[str, Link] = {}
    try:
        # An address of this process alone within 127/8: what is free there stays free.
        host = f"127.{os.getpid() >> 16 & 0xFF}.{os.getpid() >> 8 & 0xFF}.{os.getpid() & 0xFF or 1}"
        for number, (node, ssd) in enumerate((("a", SSD), ("b", 0))):
            real, shown = (host, 20000 + number), (host, 21000 + number)
            links[node] = Link(shown, real)
            way = ["--listen", f"{host}:{real[1]}", "--advertise", f"{host}:{shown[1]}", "--transport", "tcp"]
            daemons[node] = Transferd(place, node, DRAM, *way, ssd=ssd)
        churn = Churn(daemons, links, seed)
        churn.run(seconds)
        ends = {}
        for node, daemon in daemons.items():
            client = Client(daemon, SHAPE, 10**12, "")
            counters = ends[node] = settle(client)
            agree(node, counters, churn.seen[node])
            churn.samples[node].check(node)
            client.pool.close()
        for daemon in daemons.values():
            daemon.stop()
            assert daemon.disk_bytes() <= SSD
        return table(churn, seconds)
    finally:
        for daemon in daemons.values():
            if daemon.process.poll() is None:
                daemon.kill()
                daemon.ended()
        for link in links.values():
            link.close()
        shutil.rmtree(place, ignore_errors=True)


def table(churn: Churn, seconds: float) -> str:
    lines = [
        f"{churn.operations} operations in {seconds:.0f} s, {sum(link.cuts for link in churn.links.values())} cuts"
    ]
    lines.append(f"{'':28}" + "".join(f"{node:>12}" for node in churn.daemons))
    rows: dict[str, list[str]] = {}
    names = sorted({name for seen in churn.seen.values() for name in seen})
    for name in names:
        rows["blocks from " + name if name in ("dram", "ssd", "peer_dram", "peer_ssd") else name] = [
            str(seen[name]) for seen in churn.seen.values()
        ]
    rows["MB verified"] = [f"{seen['verified'] * SHAPE.bytes / 1e6:.0f}" for seen in churn.seen.values()]
    samples = churn.samples.values()
    rows["max RSS, MB"] = [f"{max(each.rss) / 1e6:.1f}" for each in samples]
    rows["max descriptors"] = [str(max(each.descriptors)) for each in samples]
    rows["max threads"] = [str(max(each.threads)) for each in samples]
    rows["max SSD, MB (limit 16.8)"] = [f"{max(each.disk) / 1e6:.1f}" for each in samples]
    lines += [f"{name:28}" + "".join(f"{value:>12}" for value in values) for name, values in rows.items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Two daemons at full churn.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"repeat with: python -m tests.soak --seconds {arguments.seconds:.0f} --seed {arguments.seed}", flush=True)
    print(soak(arguments.seconds, arguments.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
