"""Goal: between hosts the engine keeps its promises while a link is cut, slow or mended. Method: hosts are network
namespaces of this kernel, joined by pairs of virtual interfaces (`ip`); links are cut by taking one end down and slowed
by a token bucket (`tc`). Each engine is used from a thread that lives in its host; so do the threads that it starts.
Verdicts are about bytes and outcomes; times are limits only, and generous.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import pytest

from pyengine import TransferEngine
from pyengine._native import GiveUpError, RetryError
from pyengine.transfer import Peer, Priority, RemoteRegion, Transfer

P = ParamSpec("P")
R = TypeVar("R")

SECRET = b"sixteen bytes or more"
PATIENCE = 120.0
PIECE = 256 << 10
MIB = 1 << 20
CLONE_NEWNET = 0x40000000
#: Of links and addresses, so that no two of a process are alike.
NUMBERS = itertools.count(1)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    name = f"pyengine-{os.getpid()}-probe"
    try:
        run("ip", "netns", "add", name)
    except (AssertionError, FileNotFoundError) as error:
        pytest.skip(f"no network namespaces here: needs root and `ip` of iproute2: {error}")
    try:
        run("ip", "-netns", name, "link", "add", "left", "type", "veth", "peer", "name", "right")
        run("tc", "-netns", name, "qdisc", "add", "dev", "left", "root", "tbf", *bucket(1))
    except AssertionError as error:
        pytest.skip(f"this kernel has no virtual interfaces (veth) or no token buckets (tbf): {error}")
    finally:
        run("ip", "netns", "delete", name)


def bucket(megabit: int) -> list[str]:
    """For tbf: a link of this rate whose queue drops nothing of what the engine has under way."""
    return ["rate", f"{megabit}mbit", "burst", "256kb", "limit", "8mb"]


class Host:
    """A network namespace with one engine. What is done with the engine is done by `call`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.netns = f"pyengine-{os.getpid()}-{name}"
        run("ip", "netns", "add", self.netns)
        self.ip("link", "set", "lo", "up")
        self.thread = ThreadPoolExecutor(1, initializer=self._enter)
        self.engine: TransferEngine

    def _enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", self.netns).open() as namespace:
            assert libc.setns(namespace.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())

    def ip(self, *arguments: str) -> None:
        run("ip", "-netns", self.netns, *arguments)

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self.thread.submit(function, *args, **kwargs).result(PATIENCE)

    def listen(self, address: str | None, node: str) -> None:
        self.engine = self.call(TransferEngine, address, secret=SECRET, node=node)

    def write(
        self, peer: Peer, what: np.ndarray, remote: RemoteRegion, priority: Priority = "normal", retries: int = 3
    ) -> Transfer:
        """Begins to write all of it to the region's begin."""

        def begin() -> Transfer:
            copies = [(self.engine.register(what), 0, remote, 0, what.nbytes)]
            return self.engine.submit(peer, "write", copies, priority=priority, retries=retries)

        return self.call(begin)

    def close(self) -> None:
        if hasattr(self, "engine"):
            self.call(self.engine.close)
        self.thread.shutdown()
        run("ip", "netns", "delete", self.netns)


class Link:
    """A cable between two hosts."""

    def __init__(self, left: Host, right: Host) -> None:
        number = next(NUMBERS)
        self.ends = [(left, f"py{number}l"), (right, f"py{number}r")]
        (_, mine), (_, other) = self.ends
        left.ip("link", "add", mine, "type", "veth", "peer", "name", other, "netns", right.netns)
        self.ipv4, self.ipv6 = [], []
        for last, (host, end) in enumerate(self.ends, 1):
            self.ipv4.append(f"10.99.{number}.{last}")
            self.ipv6.append(f"fd99:{number:x}::{last}")
            host.ip("address", "add", f"{self.ipv4[-1]}/24", "dev", end)
            host.ip("address", "add", f"{self.ipv6[-1]}/64", "dev", end, "nodad")
            host.ip("link", "set", end, "up")

    def cut(self) -> None:
        host, end = self.ends[1]
        host.ip("link", "set", end, "down")

    def mend(self) -> None:
        host, end = self.ends[1]
        host.ip("link", "set", end, "up")

    def limit(self, megabit: int) -> None:
        """How fast the left host sends."""
        host, end = self.ends[0]
        run("tc", "-netns", host.netns, "qdisc", "replace", "dev", end, "root", "tbf", *bucket(megabit))


@pytest.fixture
def hosts() -> Iterator[Callable[[str], Host]]:
    made: list[Host] = []

    def make(name: str) -> Host:
        made.append(Host(name))
        return made[-1]

    yield make
    for host in made:
        host.close()


@pytest.fixture
def pair(hosts: Callable[[str], Host]) -> tuple[Host, Host, Link]:
    a, b = hosts("a"), hosts("b")
    link = Link(a, b)
    a.listen(f"{link.ipv4[0]}:0", "a")
    b.listen(f"{link.ipv4[1]}:0", "b")
    return a, b, link


def connect(a: Host, b: Host) -> Peer:
    return a.call(a.engine.connect, b.engine.address, timeout=PATIENCE)


def pattern(nbytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def offer(host: Host, nbytes: int) -> tuple[np.ndarray, RemoteRegion]:
    """Memory for peers to write."""
    memory = np.zeros(nbytes, dtype=np.uint8)
    return memory, RemoteRegion(host.call(host.engine.register, memory).handle)


def under_way(host: Host, transfer: Transfer, at_least: int = 1) -> int:
    """Returns when so many bytes have arrived, and how many have."""
    while (done := host.call(lambda: transfer.progress[0])) < at_least:
        assert not host.call(transfer.wait, 0.01), "it was over too soon"
    return done


def test_hosts_are_told_apart(pair: tuple[Host, Host, Link]) -> None:
    """One kernel, two networks: the engines are not on one host, whatever else they share. `auto` says so, takes tcp,
    and that is no fall-back."""
    a, b, _ = pair
    theirs, remote = offer(b, MIB)
    peer = connect(a, b)
    transfer = a.write(peer, pattern(MIB), remote)
    assert a.call(transfer.wait, PATIENCE) and (transfer.via, transfer.fell_back) == ("tcp", False)
    assert (theirs == pattern(MIB)).all()
    paths = {path.transport: path for path in a.call(lambda: peer.transports)}
    assert (paths["shm"].state, paths["shm"].why) == ("down", "b is not on this host")
    assert paths["tcp"].taken
    with pytest.raises(RetryError, match="shm: b is not on this host"):
        a.call(peer.close)
        a.call(a.engine.connect, b.engine.address, transport="shm", timeout=10.0)


def test_ipv6(hosts: Callable[[str], Host]) -> None:
    a, b = hosts("a"), hosts("b")
    link = Link(a, b)
    a.listen(f"[{link.ipv6[0]}]:0", "a")
    b.listen(f"[{link.ipv6[1]}]:0", "b")
    theirs, remote = offer(b, 8 * MIB)
    transfer = a.write(connect(a, b), pattern(8 * MIB), remote)
    assert a.call(transfer.wait, PATIENCE) and (theirs == pattern(8 * MIB)).all()


@pytest.mark.parametrize("long", [False, True], ids=["for a moment", "until it fails"])
def test_a_link_that_is_cut_and_mended(pair: tuple[Host, Host, Link], long: bool) -> None:
    """A cut of a moment: the transfer ends right. A longer one: it ends, and says why. In both cases the next one is
    right, whole, and nothing of the earlier one comes late."""
    a, b, link = pair
    theirs, remote = offer(b, 16 * MIB)
    peer = connect(a, b)
    link.limit(200)
    transfer = a.write(peer, pattern(16 * MIB), remote)
    under_way(a, transfer, MIB)
    link.cut()
    if long:
        # Paths fail after 3 s of silence, and are made again four times.
        with pytest.raises(RetryError, match="cannot be reached"):
            a.call(transfer.wait, PATIENCE)
        assert transfer.outcome == "unreachable" and a.call(lambda: transfer.progress[0]) < 16 * MIB
        link.mend()
    else:
        link.mend()
        assert a.call(transfer.wait, PATIENCE)
        assert (theirs == pattern(16 * MIB)).all()
    again = a.write(peer, pattern(16 * MIB, 2), remote, retries=100)
    assert a.call(again.wait, PATIENCE) and (theirs == pattern(16 * MIB, 2)).all()
    # What a lane of before had still in its sockets would come now.
    back = a.write(peer, pattern(MIB, 3), remote)
    assert a.call(back.wait, PATIENCE)
    assert (theirs[:MIB] == pattern(MIB, 3)).all() and (theirs[MIB:] == pattern(16 * MIB, 2)[MIB:]).all()


def test_urgent_copies_and_cancels_on_a_slow_link(pair: tuple[Host, Host, Link]) -> None:
    """On a slow link few bytes are under way, so that an urgent copy has few before it, and a cancelled transfer comes
    to rest after few."""
    a, b, link = pair
    _, remote = offer(b, 32 * MIB)
    urgent, remote_urgent = offer(b, 4096)
    peer = connect(a, b)
    link.limit(50)
    big = a.write(peer, pattern(32 * MIB), remote)
    # By then the engine knows the link.
    under_way(a, big, 4 * MIB)
    for seed in range(5):
        before = under_way(a, big)
        small = a.write(peer, pattern(4096, seed), remote_urgent, "urgent")
        assert a.call(small.wait, PATIENCE)
        passed = a.call(lambda: big.progress[0]) - before
        assert (urgent == pattern(4096, seed)).all()
        assert passed <= 6 * PIECE, f"{passed} bytes went before 4 KiB that were urgent"
    before = under_way(a, big)
    a.call(big.cancel)
    with pytest.raises(GiveUpError, match="cancelled"):
        a.call(big.wait, PATIENCE)
    after = a.call(lambda: big.progress[0]) - before
    assert after <= 6 * PIECE, f"{after} bytes went after the cancel"


def test_a_slow_peer_slows_nobody_else(hosts: Callable[[str], Host]) -> None:
    """While a little goes to a slow peer, much goes to another one."""
    a, slow, quick = hosts("a"), hosts("slow"), hosts("quick")
    narrow, wide = Link(a, slow), Link(a, quick)
    a.listen(None, "a")
    slow.listen(f"{narrow.ipv4[1]}:0", "slow")
    quick.listen(f"{wide.ipv4[1]}:0", "quick")
    _, remote_slow = offer(slow, 64 * MIB)
    theirs, remote = offer(quick, 64 * MIB)
    to_slow, to_quick = connect(a, slow), connect(a, quick)
    narrow.limit(10)
    stuck = [a.write(to_slow, pattern(64 * MIB), remote_slow) for _ in range(8)]
    under_way(a, stuck[0])

    def moved() -> int:
        return sum(transfer.progress[0] for transfer in stuck)

    before = a.call(moved)
    for seed in range(4):
        transfer = a.write(to_quick, pattern(64 * MIB, seed), remote)
        assert a.call(transfer.wait, PATIENCE) and (theirs == pattern(64 * MIB, seed)).all()
    went = a.call(moved) - before
    assert went < 64 * MIB, f"{went} bytes went to the slow one meanwhile"
    for transfer in stuck:
        a.call(transfer.cancel)
    for transfer in stuck:
        with pytest.raises(GiveUpError, match="cancelled"):
            a.call(transfer.wait, PATIENCE)
