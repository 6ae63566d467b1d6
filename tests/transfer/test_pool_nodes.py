"""Objects of several nodes: real daemons in processes of their own, found by each other's addresses.

Goal: what is put at one node is found at all, removals reach all, and a node that dies or is missing costs a miss or a
clear word. Method: daemons by `transferd --peers`, clients by `Pool.connect`; waits are for what is to come, never for
a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.server import free_port
from pyengine import Pool
from pyengine._native import Daemon, GiveUpError, ReportEndpoint, RetryError, derive_key

from ..waiting import until
from .daemons import KEY, PATIENCE, SECRET, Transferd

DRAM = 64 << 20
MIB = 1 << 20


class Nodes:
    """Daemons that list each other, and a client of each."""

    def __init__(self, stack: ExitStack, place: Path, count: int) -> None:
        self.stack, self.place = stack, place
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        self.daemons = [self.start(number) for number in range(count)]
        self.pools = [self.connect(number) for number in range(count)]
        self.meet()

    def start(self, number: int) -> Transferd:
        peers = ",".join(self.addresses)
        daemon = Transferd(self.place, f"node-{number}", DRAM, "--listen", self.addresses[number], "--peers", peers)
        self.stack.callback(daemon.kill)
        return daemon

    def connect(self, number: int) -> Pool:
        pool = Pool.connect(self.daemons[number].socket, secret_file=self.place / "secret", timeout=PATIENCE)
        return self.stack.enter_context(pool)

    def meet(self) -> None:
        """Until all are members: then a value can be everywhere, from everywhere."""
        count = len(self.pools)
        for number, pool in enumerate(self.pools):
            name = f"meeting {number} {time.monotonic_ns()}"
            assert pool.put(name, b"")
            wait(partial(everywhere, pool, name, count))
            wait(partial(nowhere, self.pools, name))

    def restart(self, number: int) -> None:
        self.daemons[number] = self.start(number)
        self.pools[number] = self.connect(number)
        self.meet()


def everywhere(pool: Pool, name: str, count: int) -> bool:
    return pool.replicate([name], count) == [count]


def nowhere(pools: list[Pool], name: str) -> bool:
    """Removed by each, none of whom misses anybody."""
    try:
        return not any(pool.remove(name) for pool in pools)
    except RetryError:
        return False


def has_all(pool: Pool, names: list[str]) -> bool:
    return all(pool.batch_exists(names))


def content(view: Any) -> bytes | None:
    """Of a view, if there is one. (The stubs know no buffers but those they name.)"""
    return None if view is None else bytes(view)


wait = partial(until, what="what the nodes tell each other", patience=PATIENCE)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def three(stack: ExitStack, tmp_path: Path) -> Nodes:
    return Nodes(stack, tmp_path, 3)


def test_what_one_node_puts_all_find(three: Nodes) -> None:
    values = {"small": b"one", "page": bytes(range(256)) * 16, "block": b"\xab" * MIB, "large": b"xyz" * MIB}
    for number, (name, value) in enumerate(values.items()):
        pools = three.pools[number % 3 :] + three.pools[: number % 3]
        assert pools[0].put(name, value)
        assert [pool.exists(name) for pool in pools] == [True] * 3
        assert [pool.put(name, b"other") for pool in pools] == [False] * 3
        view = pools[1].get(name)
        assert view is not None and content(view) == value and view.pinned == (len(value) <= MIB)
        buffer = bytearray(len(value))
        assert pools[2].get_into(name, buffer) == len(value) and buffer == value
        # The view is of a copy here, which the removal does not take from who looks at it.
        assert pools[2].remove(name)
        assert [pool.get(name) for pool in pools] == [None] * 3 and content(view) == value
        assert not any(pool.exists(name) for pool in pools)
    names = [f"many {number}" for number in range(100)]
    assert all(three.pools[0].batch_put(names, [name.encode() for name in names]))
    assert three.pools[1].batch_exists([*names, "none"]) == [True] * 100 + [False]
    views = three.pools[2].batch_get([*names, "none"])
    assert [content(view) for view in views] == [*(name.encode() for name in names), None]


def test_copies_survive_their_node(three: Nodes) -> None:
    names = [f"copied {number}" for number in range(8)]
    assert all(three.pools[0].batch_put(names, [b"v" * 5000] * 8, copies=2))
    assert three.pools[1].replicate([*names, "none"], 2) == [2] * 8 + [0]
    assert three.pools[2].put("large", b"l" * (3 * MIB), copies=3)
    three.daemons[0].kill()
    three.daemons[0].ended()
    for pool in three.pools[1:]:
        wait(partial(has_all, pool, names))
        assert [content(view) for view in pool.batch_get(names)] == [b"v" * 5000] * 8
        assert content(pool.get("large")) == b"l" * (3 * MIB)


def test_who_is_away_is_named_by_a_removal(three: Nodes) -> None:
    assert three.pools[0].put("gone", b"value", copies=2)
    three.daemons[2].kill()
    three.daemons[2].ended()

    def told() -> bool:
        with pytest.raises(RetryError, match="node-2"):
            three.pools[0].remove("gone")
        return not three.pools[1].exists("gone")

    wait(told)
    three.restart(2)
    assert not three.pools[0].remove("gone") and not three.pools[2].exists("gone")
    assert three.pools[2].put("gone", b"another") and content(three.pools[0].get("gone")) == b"another"


def test_a_node_that_drains_gives_its_objects_to_others(three: Nodes) -> None:
    names = [f"leaves {number}" for number in range(20)]
    assert all(three.pools[1].batch_put(names, [b"v"] * 20))
    said = three.daemons[1].command("drain")
    assert said.returncode == 0 and "20 objects moved" in said.stdout, said
    three.daemons[1].stop()
    wait(lambda: all(three.pools[0].batch_exists(names)))
    assert [content(view) for view in three.pools[2].batch_get(names)] == [b"v"] * 20


def test_pools_within_processes_are_members_too(stack: ExitStack, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(SECRET.hex())
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    first, second = (
        stack.enter_context(Pool.open("64MiB", secret_file=secret, listen=address, peers=addresses))
        for address in addresses
    )
    assert first.put("name", b"value")
    wait(lambda: second.exists("name"))
    assert content(second.get("name")) == b"value"
    # One that does not know the secret is no member.
    stranger = stack.enter_context(Pool.open("64MiB", listen="127.0.0.1:0", peers=addresses))
    assert stranger.get("name") is None and stranger.put("name", b"its own")
    with pytest.raises(GiveUpError, match="listen"):
        Pool.open("64MiB", peers=addresses)
    with pytest.raises(GiveUpError, match="host:port"):
        Pool.open("64MiB", listen="127.0.0.1:0", peers=["nonsense"])
    with pytest.raises(RetryError, match=addresses[0]):
        stranger.remove("name")


def test_a_conductor_names_the_members(stack: ExitStack) -> None:
    endpoint = ReportEndpoint("127.0.0.1:0", KEY)
    stack.callback(endpoint.close)
    daemons = [
        Daemon(node=f"n{number}", dram_bytes=DRAM, session_key=KEY, listen="127.0.0.1:0", conductor=endpoint.address)
        for number in range(2)
    ]
    for daemon in daemons:
        stack.callback(daemon.stop)
    pools = [daemon.objects(derive_key(SECRET, "object")) for daemon in daemons]
    assert pools[0].put(["name"], [b"value"]) == [True] and pools[1].exists(["name"]) == [False]

    def ordered() -> bool:
        try:
            for daemon in daemons:
                endpoint.order_members(daemon.address.node, [daemon.address for daemon in daemons])
        except RetryError:  # it has not dialled in yet
            return False
        return True

    wait(ordered)
    wait(lambda: pools[1].exists(["name"]) == [True])
    assert pools[1].put(["name"], [b"other"]) == [False]
