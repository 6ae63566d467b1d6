"""Goal: whatever the link between two daemons does, what their clients are told is right: a block that is called
readable holds its bytes, a push that is called done has arrived, and all else is an honest failure. When the link
is whole again all goes on, and in the end nothing is held. Method: two real daemons, each behind a relay that is
cut, stalls and flips bits by chance, while clients of both fetch from each other and push to each other. Every byte
is verified.

The seed says what is asked for and what the link does; when, nobody says.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from pyengine._native import Complete, Granted, Opened, Pushed, Refused
from tests.transfer.daemons import HEAD, LENGTH, PATIENCE, Client, Shape, Transferd
from tests.transfer.links import Link

SEED = 3
SHAPE = Shape(2, 16 << 10)
#: 60 slots on each node, of 160 blocks in all.
DRAM = 64 * SHAPE.bytes
PREFIXES = range(40)
#: Faults of the link. A stalled one ends its sessions after 3 s, if it is stalled for so long.
FAULTS = 40
NODES = ("a", "b")


class Net:
    """Two daemons, and the links to each."""

    def __init__(self, place: Path) -> None:
        # An address of this process alone within 127/8: what is free there stays free.
        host = f"127.{os.getpid() >> 16 & 0xFF}.{os.getpid() >> 8 & 0xFF}.{os.getpid() & 0xFF or 1}"
        self.links: dict[str, Link] = {}
        self.daemons: dict[str, Transferd] = {}
        for number, node in enumerate(NODES):
            real, shown = (host, 22000 + number), (host, 23000 + number)
            self.links[node] = Link(shown, real)
            way = ("--listen", f"{host}:{real[1]}", "--advertise", f"{host}:{shown[1]}", "--transport", "tcp")
            self.daemons[node] = Transferd(place, node, DRAM, *way)

    def mend(self) -> None:
        for link in self.links.values():
            link.mend()

    def close(self) -> None:
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.ended()
        for link in self.links.values():
            link.close()


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    net = Net(tmp_path)
    yield net
    net.close()


def push(holder: Client, pusher: Client, prefix: int) -> bool:
    """`pusher` sends a prefix into a grant of `holder`. True: it has arrived, and is right."""
    first, tag, note = prefix * LENGTH, holder.tag(), b"note %d" % prefix
    local = pusher.tag()
    tags = [(holder, tag), (pusher, tag), (pusher, local)]
    try:
        holder.pool.grant(tag, SHAPE.keys(prefix), False, HEAD, 0, "wait")
        pusher.pool.open(tag, holder.daemon.address, PATIENCE)
        pusher.pool.grant(local, SHAPE.keys(prefix), False, HEAD, 0, "wait")
        granted = pusher.expect(Granted, tag=local)
        for i, slot in enumerate(granted.slots):
            if not slot.committed:
                pusher.pool.store(slot.slot, slot.generation, SHAPE.content(first + i))
        pusher.pool.commit(local, [i for i, slot in enumerate(granted.slots) if not slot.committed])
        slots = holder.expect(Granted, tag=tag).slots
        opened = pusher.expect(Opened, Refused, tag=tag)
        if isinstance(opened, Refused):
            pusher.seen[f"open: {opened.refusal}"] += 1
            return False
        # In two parts: a link may break between them.
        pusher.pool.push(local, tag, [0, 1])
        pusher.pool.push(local, tag, list(range(2, LENGTH)), note=note)
        while True:
            told = pusher.expect(Pushed, Refused, tag=tag)
            if isinstance(told, Refused):
                pusher.seen[f"push: {told.refusal}"] += 1
                return False
            assert isinstance(told, Pushed)
            if told.note:
                break
        # It was told that all has arrived: then the holder knows it, or will.
        assert holder.expect(Complete, tag=tag).note == note
        for i, slot in enumerate(slots):
            holder.verify(slot, first + i)
        pusher.seen["pushed"] += 1
        return True
    finally:
        for client, each in tags:
            client.pool.end(each)
            client._events = [event for event in client._events if getattr(event, "tag", None) != each]


class Churn:
    """What goes on while the link is unkind."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.over = threading.Event()
        self.seen: Counter[str] = Counter()
        self.done = itertools.count(1)
        self.moved = threading.Condition()
        self.operations = 0

    def _count(self) -> None:
        with self.moved:
            self.operations += 1
            self.moved.notify_all()

    def fetching(self, node: str, number: int) -> None:
        other = self.net.daemons[NODES[node == "a"]]
        client = Client(self.net.daemons[node], SHAPE, number, f"{SEED} {number}")
        with self._ended(client):
            while not self.over.is_set():
                client.something(PREFIXES, [other.address])
                self._count()

    def pushing(self, node: str, number: int) -> None:
        other = self.net.daemons[NODES[node == "a"]]
        pusher = Client(self.net.daemons[node], SHAPE, number, f"{SEED} {number}")
        holder = Client(other, SHAPE, number + 1, "")
        with self._ended(pusher, holder):
            while not self.over.is_set():
                push(holder, pusher, pusher.random.choice(PREFIXES))
                self._count()

    @contextlib.contextmanager
    def _ended(self, *clients: Client) -> Iterator[None]:
        try:
            yield
        finally:
            # The first that fails ends it for all.
            self.over.set()
            with self.moved:
                for client in clients:
                    self.seen += client.seen
            for client in clients:
                client.pool.close()

    def wait_for(self, operations: int, within: float) -> None:
        """So many more, or as long as that."""
        with self.moved:
            until = self.operations + operations
            self.moved.wait_for(lambda: self.operations >= until or self.over.is_set(), within)

    def run(self) -> None:
        random = Random(SEED)
        all_work = [
            (self.fetching, "a", 1000),
            (self.fetching, "b", 2000),
            (self.pushing, "a", 3000),
            (self.pushing, "b", 4000),
        ]
        with ThreadPoolExecutor(len(all_work)) as clients:
            ends = [clients.submit(work, node, number) for work, node, number in all_work]
            for _ in range(FAULTS):
                self.wait_for(random.randint(1, 40), PATIENCE)
                link = self.net.links[random.choice(NODES)]
                fault = random.choice([link.cut, link.stall, link.flip])
                fault()
                if fault == link.stall and random.random() < 0.3:
                    # Until its sessions end.
                    self.over.wait(4.0)
                else:
                    self.wait_for(random.randint(1, 20), PATIENCE)
                link.mend()
            self.wait_for(40, PATIENCE)
            self.over.set()
            for end in ends:
                end.result(2 * PATIENCE)


def test_a_link_that_is_cut_stalls_and_corrupts(net: Net) -> None:
    churn = Churn(net)
    churn.run()
    print(dict(churn.seen))
    assert churn.seen["peer_dram"] > 0 and churn.seen["pushed"] > 0
    failures = sum(count for what, count in churn.seen.items() if what.startswith(("open: ", "push: ")))
    assert failures > 0, "the link was never in anybody's way"
    # All is as if nothing had been: each can fetch from the other and push to it.
    net.mend()
    clients = {node: Client(daemon, SHAPE, 10**9 + i, node) for i, (node, daemon) in enumerate(net.daemons.items())}
    for node, client in clients.items():
        other = clients[NODES[node == "a"]]
        assert net.daemons[node].command("evict", "--all").returncode == 0
        assert len(other.take(7)) == LENGTH
        assert len(client.take(7, sources=[other.daemon.address], compute=False)) == LENGTH
        assert client.seen["peer_dram"] == LENGTH
        assert push(other, client, 8)
    for client in clients.values():
        client.counters()
        client.pool.close()
    for daemon in net.daemons.values():
        # It waits until nothing is held: what was abandoned on a link that died is no more.
        drained = daemon.command("drain", "--json")
        assert drained.returncode == 0, drained.stderr
        assert not any(json.loads(drained.stdout)["held"].values())
        assert not any(json.loads(daemon.command("status", "--json").stdout)["held"].values())
        daemon.stop()
