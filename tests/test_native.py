"""Goal: `pyengine._native` is what its stub says: every function once, with good and with bad input.

Method: daemons within this process and over real sockets, tiny blocks; the transferd command line in subprocesses.
Every wait is for an event, with a generous limit that only a failure reaches.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from pyengine import _native
from pyengine._native import (
    Arrived,
    BlockDump,
    BlocksChanged,
    BugError,
    Complete,
    Counters,
    Daemon,
    DaemonGone,
    DaemonHeartbeat,
    DaemonHello,
    DaemonReport,
    Disconnected,
    Fetched,
    Flushed,
    GiveUpError,
    Granted,
    Kept,
    Located,
    NodeAddress,
    Opened,
    PoolClient,
    PoolEvent,
    Pushed,
    Refused,
    Replicated,
    ReportEndpoint,
    RetryError,
    SharedSlots,
    Tag,
    TransferError,
)
from pyengine.scheduler.changes import CHANGE_BYTES, Change, unpack
from pyengine.scheduler.prefix_index import DRAM
from tests.open_things import open_things

KEY = _native.derive_key(b"a secret of some length", "session")
STRIPS, STRIP_BYTES = 4, 96
BLOCK_BYTES = STRIPS * STRIP_BYTES
HEAD = bytes(16)
PATIENCE = 60.0

Event = TypeVar("Event", bound=PoolEvent)
Report = TypeVar("Report", bound=DaemonReport)


def start(node: str, *, socket: Path | None = None, conductor: str | None = None, key: bytes = KEY) -> Daemon:
    return Daemon(
        node=node,
        dram_bytes=64 * 1024,
        session_key=key,
        listen="127.0.0.1:0",
        socket=str(socket) if socket else None,
        conductor=conductor,
    )


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    daemon = start("a")
    yield daemon
    daemon.stop()


@pytest.fixture
def peer() -> Iterator[Daemon]:
    daemon = start("b")
    yield daemon
    daemon.stop()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[PoolClient]:
    client = daemon.attach(1, STRIPS, STRIP_BYTES)
    yield client
    client.close()


class Inbox:
    """Events of one client, in order, none lost between two waits."""

    def __init__(self, client: PoolClient) -> None:
        self.client = client
        self.events: list[PoolEvent] = []

    def expect(self, kind: type[Event], accept: Callable[[Event], bool] = lambda _: True) -> Event:
        """The first waiting event of this kind that is accepted; it is taken out."""
        until = time.monotonic() + PATIENCE
        while True:
            for event in self.events:
                if isinstance(event, kind) and accept(event):
                    self.events.remove(event)
                    return event
            assert time.monotonic() < until, f"no {kind.__name__}; waiting: {self.events}"
            self.client.wait(0.5)
            self.events += self.client.events()


def keys_of(count: int, first: int = 1) -> bytes:
    return b"".join(bytes([first + i]) * 16 for i in range(count))


def content(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(BLOCK_BYTES)


def fill(inbox: Inbox, tag: Tag, keys: bytes, private: bool = False) -> Granted:
    inbox.client.grant(tag, keys, private, HEAD, 0, "wait")
    granted = inbox.expect(Granted, lambda event: event.tag == tag)
    for seed, slot in enumerate(granted.slots):
        inbox.client.store(slot.slot, slot.generation, content(seed))
    inbox.client.commit(tag, range(len(granted.slots)))
    return granted


# -- keys and values -----------------------------------------------------------------------------------------------


def test_keys_chain_and_take_any_buffer() -> None:
    hash_key = _native.derive_key(bytearray(b"secret"), "hash")
    assert len(hash_key) == 32
    assert hash_key != _native.derive_key(b"secret", "object") != _native.derive_key(b"secret", "curve:gateway")
    root = _native.root_key(b"namespace", b"", b"salt", hash_key)
    assert len(root) == _native.KEY_BYTES
    assert root != _native.root_key(b"namespac", b"e", b"salt", hash_key)
    tokens = np.arange(1, 38, dtype=np.uint32)
    keys = _native.block_keys(tokens, 16, root, hash_key)
    assert len(keys) == 2 * 16
    packed = struct.pack("<37I", *range(1, 38))
    assert keys == _native.block_keys(packed, 16, memoryview(root), hash_key)
    assert keys[16:] == _native.block_keys(packed[64:], 16, keys[:16], hash_key), "a chain goes on from any block"
    assert _native.block_keys(b"", 16, root, hash_key) == b""


@pytest.mark.parametrize(
    "call",
    [
        lambda: _native.derive_key(b"secret", "session "),
        lambda: _native.root_key(b"", b"", b"", b"short"),
        lambda: _native.block_keys(b"123", 16, HEAD, KEY),
        lambda: _native.block_keys(b"", 0, HEAD, KEY),
        lambda: _native.block_keys(b"", 16, HEAD[1:], KEY),
        lambda: _native.block_keys(np.zeros((8, 8), np.uint32)[:, ::2], 16, HEAD, KEY),
        lambda: Tag(2**63, 0, 0),
    ],
)
def test_bad_arguments_are_bugs(call: Callable[[], object]) -> None:
    with pytest.raises(BugError):
        call()


def test_values_compare_hash_and_print() -> None:
    tag = Tag(2**63 - 1, 2**32 - 1, 2**64 - 1)
    assert (tag.request, tag.attempt, tag.worker) == (2**63 - 1, 2**32 - 1, 2**64 - 1)
    assert {Tag(1, 2, 3): "x"}[Tag(1, 2, 3)] == "x"
    assert Tag(1, 2, 3) != Tag(1, 2, 4)
    assert repr(Tag(1, 2, 3)) == "Tag(1, 2, 3)"
    node = NodeAddress("n", "127.0.0.1:1", 5)
    assert (node.node, node.address, node.incarnation) == ("n", "127.0.0.1:1", 5)
    assert {node} == {NodeAddress("n", "127.0.0.1:1", 5)}
    assert "127.0.0.1:1" in repr(node)
    with pytest.raises(OverflowError):
        Tag(0, 2**32, 0)


def test_the_error_tree() -> None:
    for kind in (RetryError, GiveUpError, BugError):
        assert issubclass(kind, TransferError)
        assert kind.__module__ == "pyengine._native"
    assert _native.NOTE_LIMIT == 4096
    assert _native.__version__


# -- one pool ------------------------------------------------------------------------------------------------------


def test_store_commit_lookup_load(client: PoolClient) -> None:
    inbox = Inbox(client)
    keys = keys_of(3)
    fill(inbox, Tag(1, 0, 1), keys, private=True)
    client.lookup(Tag(2, 0, 1), keys + keys_of(1, first=77))
    located = inbox.expect(Located)
    assert located.tag == Tag(2, 0, 1)
    assert len(located.slots) == 3
    for seed, slot in enumerate(located.slots):
        into = np.zeros(BLOCK_BYTES // 4, dtype=np.float32)
        assert client.load(slot.slot, slot.generation, into)
        assert into.tobytes() == content(seed)
    part = bytearray(2 * STRIP_BYTES)
    slot = located.slots[1]
    assert client.load(slot.slot, slot.generation, part, first_strip=1)
    assert part == content(1)[STRIP_BYTES : 3 * STRIP_BYTES]
    assert not client.load(slot.slot, slot.generation + 1, part), "another life"
    client.end(Tag(1, 0, 1))
    client.end(Tag(2, 0, 1))
    client.end(Tag(2, 0, 1))
    client.request_counters()
    counters = inbox.expect(Counters).values
    assert counters['pyengine_pool_blocks{node="a",tier="dram",state="cached"}'] == 3
    assert all(isinstance(value, int) for value in counters.values())


def test_bad_requests_say_what_is_wrong(client: PoolClient) -> None:
    inbox = Inbox(client)
    slot = fill(inbox, Tag(1, 0, 1), keys_of(1)).slots[0]
    with pytest.raises(BugError, match="whole strips"):
        client.store(slot.slot, slot.generation, bytes(5))
    with pytest.raises(BugError, match="strip"):
        client.store(slot.slot, slot.generation, bytes(BLOCK_BYTES), first_strip=1)
    with pytest.raises(BugError, match="slot"):
        client.load(client.slots, 1, bytearray(BLOCK_BYTES))
    with pytest.raises(BugError, match="read-only"):
        client.load(slot.slot, slot.generation, bytes(BLOCK_BYTES))
    with pytest.raises(BugError, match="16-byte keys"):
        client.lookup(Tag(2, 0, 1), b"short")
    with pytest.raises(BugError, match="parent"):
        client.grant(Tag(2, 0, 1), b"", True, b"", 0, "wait")
    with pytest.raises(BugError, match="mode"):
        client.grant(Tag(2, 0, 1), b"", True, HEAD, 0, "perhaps")
    with pytest.raises(BugError, match="note"):
        client.push(Tag(1, 0, 1), Tag(1, 0, 1), [], note=bytes(_native.NOTE_LIMIT + 1))
    with pytest.raises(BugError, match="seconds"):
        client.open(Tag(2, 0, 1), client.node, float("nan"))
    with pytest.raises(TypeError):
        client.lookup("tag", b"")  # type: ignore[arg-type]
    client.commit(Tag(99, 0, 1), [0])
    assert inbox.expect(Refused).refusal == "protocol"


def test_grants_that_never_fit_or_do_not_fit_now(client: PoolClient) -> None:
    inbox = Inbox(client)
    many = b"".join(struct.pack("<16s", str(i).encode()) for i in range(client.slots + 1))
    client.grant(Tag(1, 0, 1), many, False, HEAD, 0, "wait")
    assert inbox.expect(Refused).refusal == "too_large"
    client.grant(Tag(2, 0, 1), many[: 16 * (client.slots - 2)], False, HEAD, 0, "now")
    inbox.expect(Granted, lambda event: event.tag == Tag(2, 0, 1))
    client.grant(Tag(3, 0, 1), keys_of(3), False, HEAD, 0, "now")
    assert inbox.expect(Refused, lambda event: event.tag == Tag(3, 0, 1)).refusal == "full"


def test_the_descriptor_is_readable_while_events_wait(client: PoolClient) -> None:
    client.request_counters()
    readable, _, _ = select.select([client.fileno()], [], [], PATIENCE)
    assert readable
    assert client.wait(0.0)
    assert isinstance(client.events()[0], Counters)
    assert select.select([client.fileno()], [], [], 0)[0] == []
    assert client.events() == []
    assert not client.wait(0.0)


def test_match_statements_take_events_apart(client: PoolClient) -> None:
    client.request_counters()
    client.wait(PATIENCE)
    match client.events()[0]:
        case Counters(values):
            assert values
        case other:
            pytest.fail(f"{other}")


def test_hand_off_within_one_arena(daemon: Daemon, client: PoolClient) -> None:
    decode = Inbox(daemon.attach(2, STRIPS, STRIP_BYTES))
    prefill = Inbox(client)
    tag = Tag(5, 0, 2)
    decode.client.grant(tag, keys_of(2), True, HEAD, 0, "wait")
    granted = decode.expect(Granted)
    client.open(tag, client.node, PATIENCE)
    opened = prefill.expect(Opened)
    assert opened.committed == [False, False, False]
    for seed, slot in enumerate(opened.slots):
        client.store(slot.slot, slot.generation, content(seed))
    client.push(tag, tag, [0, 1, 2], note=b"note")
    assert decode.expect(Complete).note == b"note"
    for seed, slot in enumerate(granted.slots):
        into = bytearray(BLOCK_BYTES)
        assert decode.client.load(slot.slot, slot.generation, into)
        assert into == content(seed)
    counters = daemon.counters()
    assert counters['pyengine_transfer_blocks_total{transport="arena",direction="out",node="a"}'] == 3
    assert counters['pyengine_transfer_bytes_total{transport="tcp",direction="out",node="a"}'] == 0


def test_a_corrupt_block_is_unpublished(daemon: Daemon, client: PoolClient) -> None:
    inbox = Inbox(client)
    fill(inbox, Tag(1, 0, 1), keys_of(2))
    client.corrupt(Tag(1, 0, 1), 1)
    client.lookup(Tag(2, 0, 1), keys_of(2))
    assert len(inbox.expect(Located).slots) == 1
    assert daemon.counters()['pyengine_checksum_failures_total{node="a",where="arena"}'] == 1


def test_flush_says_whether_what_is_published_is_durable(tmp_path: Path, client: PoolClient) -> None:
    inbox = Inbox(client)
    fill(inbox, Tag(1, 0, 1), keys_of(2))
    client.flush()
    assert not inbox.expect(Flushed).ok, "there is no SSD"
    (tmp_path / "ssd").mkdir(0o700)
    daemon = Daemon(
        node="s", dram_bytes=64 * 1024, session_key=KEY, ssd_dirs=[str(tmp_path / "ssd")], ssd_bytes=16 << 20
    )
    inbox = Inbox(daemon.attach(1, STRIPS, STRIP_BYTES))
    fill(inbox, Tag(1, 0, 1), keys_of(2))
    inbox.client.flush()
    match inbox.expect(Flushed):
        case Flushed(ok):
            assert ok
    assert daemon.counters()['pyengine_pool_blocks{node="s",tier="ssd",state="stored"}'] == 2
    daemon.stop()


def test_what_is_kept_has_an_account(daemon: Daemon, client: PoolClient) -> None:
    inbox = Inbox(client)
    fill(inbox, Tag(1, 0, 1), keys_of(2))
    client.end(Tag(1, 0, 1))
    client.keep(keys_of(3), 60.0, "a test")
    assert inbox.expect(Kept).outcomes == ["done", "done", "missing"]
    assert daemon.counters()['pyengine_pool_kept_blocks{node="a"}'] == 2
    client.unkeep(keys_of(1), "another test")
    assert inbox.expect(Kept).outcomes == ["missing"]
    client.unkeep(keys_of(2), "a test")
    match inbox.expect(Kept):
        case Kept(outcomes):
            assert outcomes == ["done", "done"]
    assert daemon.counters()['pyengine_pool_kept_blocks{node="a"}'] == 0
    for ttl, by in ((0.0, "x"), (1e6, "x"), (1.0, "")):
        with pytest.raises(GiveUpError):
            client.keep(keys_of(1), ttl, by)


# -- two nodes -----------------------------------------------------------------------------------------------------


def test_push_and_fetch_between_nodes(daemon: Daemon, peer: Daemon, client: PoolClient) -> None:
    prefill = Inbox(client)
    decode = Inbox(peer.attach(2, STRIPS, STRIP_BYTES))
    tag, local = Tag(5, 0, 2), Tag(5, 0, 1)
    decode.client.grant(tag, keys_of(2), True, HEAD, 0, "wait")
    granted = decode.expect(Granted)
    fill(prefill, local, keys_of(2), private=True)
    client.open(tag, peer.address, PATIENCE)
    opened = prefill.expect(Opened)
    assert opened.slots == []
    assert opened.committed == [False] * 3
    client.push(local, tag, [0, 1])
    arrived: list[int] = []
    while len(arrived) < 2:
        arrived += decode.expect(Arrived).indices
    assert sorted(arrived) == [0, 1]
    client.push(local, tag, [2], note=b"last")
    assert decode.expect(Complete).note == b"last"
    pushed: list[int] = []
    while True:
        event = prefill.expect(Pushed)
        pushed += event.indices
        if event.note:
            break
    assert sorted(pushed) == [0, 1, 2]
    for seed, slot in enumerate(granted.slots):
        into = bytearray(BLOCK_BYTES)
        assert decode.client.load(slot.slot, slot.generation, into)
        assert into == content(seed)

    fill(decode, Tag(6, 0, 2), keys_of(1, first=50))
    client.grant(Tag(7, 0, 1), keys_of(1, first=50) + keys_of(1, first=60), False, HEAD, 0, "wait")
    slot = prefill.expect(Granted).slots[0]
    client.fetch(Tag(7, 0, 1), [0, 1], [peer.address])
    fetched = {event.index: event.refusal for event in (prefill.expect(Fetched), prefill.expect(Fetched))}
    assert fetched == {0: None, 1: "missing"}
    into = bytearray(BLOCK_BYTES)
    assert client.load(slot.slot, slot.generation, into)
    assert into == content(0)


def test_an_unreachable_peer_is_refused(client: PoolClient) -> None:
    inbox = Inbox(client)
    client.open(Tag(1, 0, 1), NodeAddress("nobody", "127.0.0.1:1", 5), PATIENCE)
    assert inbox.expect(Refused).refusal == "unreachable"


# -- over the unix socket ------------------------------------------------------------------------------------------


def test_clients_over_the_socket_and_their_end(tmp_path: Path) -> None:
    socket = tmp_path / "d" / "a.sock"
    daemon = start("a", socket=socket)
    assert (socket.stat().st_mode & 0o777, socket.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    client = PoolClient.connect(str(socket), KEY, 1, STRIPS, STRIP_BYTES)
    assert client.node == daemon.address
    inbox = Inbox(client)
    fill(inbox, Tag(1, 0, 1), keys_of(2))
    other = Inbox(PoolClient.connect(str(socket), KEY, 2, STRIPS, STRIP_BYTES, timeout=PATIENCE))
    client.close()
    client.close()
    with pytest.raises(BugError, match="closed"):
        client.events()
    other.client.lookup(Tag(2, 0, 2), keys_of(2))
    assert len(other.expect(Located).slots) == 2, "what was committed outlives its client"
    daemon.stop()
    daemon.stop()
    assert "hung up" in other.expect(Disconnected).reason
    assert not socket.exists()
    with pytest.raises(RetryError, match="gone"):
        other.client.store(0, 1, bytes(BLOCK_BYTES))
    with pytest.raises(BugError):
        daemon.counters()


def test_several_write_one_block_and_let_go(tmp_path: Path) -> None:
    """Slots that a client shares are another's when all have let go: by whatever end."""
    socket = tmp_path / "d" / "a.sock"
    daemon = start("a", socket=socket)
    leader = Inbox(PoolClient.connect(str(socket), KEY, 1, STRIPS, STRIP_BYTES))
    descriptors, size, slots = leader.client.share()
    assert len(descriptors) == 2 and slots == leader.client.slots
    rank = SharedSlots(descriptors, size, slots, STRIPS, STRIP_BYTES)
    for number in range(1, slots + 1):
        leader.client.grant(Tag(number, 0, 1), number.to_bytes(16), False, HEAD, 0, "now")
    slot = leader.expect(Granted, lambda event: event.tag == Tag(1, 0, 1)).slots[0]
    leader.expect(Refused, lambda event: event.refusal == "full")
    at = slot.slot, slot.generation
    halves = [bytes([number]) * (2 * STRIP_BYTES) for number in (1, 2)]
    for client, first in ((leader.client, 0), (rank, 1)):
        client.store(*at, halves[first], first_strip=first, run=1, stride=2)
    leader.client.commit(Tag(1, 0, 1), [0])
    part, whole = bytearray(2 * STRIP_BYTES), bytearray(BLOCK_BYTES)
    for client, first in ((leader.client, 1), (rank, 0)):
        assert client.load(*at, part, first_strip=first, run=1, stride=2) and part == halves[first]
        assert client.load(*at, whole) and whole[::STRIP_BYTES] == bytes([1, 2, 1, 2])
    with pytest.raises(BugError, match="runs of 2 strips every 3"):
        rank.load(*at, whole, first_strip=1, run=2, stride=3)

    other = Inbox(PoolClient.connect(str(socket), KEY, 2, STRIPS, STRIP_BYTES, timeout=PATIENCE))
    other.client.grant(Tag(2, 0, 2), bytes(15) + b"\xff", False, HEAD, 0, "wait")
    leader.client.close()
    assert not other.client.wait(0.3), "the rank may still be writing"
    rank.store(*at, halves[0], first_strip=1, run=1, stride=2)
    rank.close()
    other.expect(Granted)
    with pytest.raises(BugError, match="closed"):
        rank.store(*at, bytes(BLOCK_BYTES))
    with pytest.raises(BugError, match="no descriptor"):
        SharedSlots([], size, slots, STRIPS, STRIP_BYTES)
    with pytest.raises(GiveUpError, match="not the daemon's arena"):
        SharedSlots([os.open("/dev/null", os.O_RDONLY)], size, slots, STRIPS, STRIP_BYTES)
    descriptors, _, _ = Inbox(daemon.attach(3, STRIPS, STRIP_BYTES)).client.share()
    assert len(descriptors) == 1, "there is no socket within a process"
    os.close(descriptors[0])
    daemon.stop()
    with pytest.raises(RetryError, match="the daemon is gone"):
        other.expect(Disconnected)
        other.client.share()


#: A leader that has all slots, and shares them with a process that writes for ever.
LEADER = """
import subprocess, sys
from pyengine._native import PoolClient, SharedSlots, Tag
if sys.argv[1] == "lead":
    _, _, socket, key, strips, strip_bytes = sys.argv
    client = PoolClient.connect(socket, bytes.fromhex(key), 1, int(strips), int(strip_bytes))
    for number in range(1, client.slots + 1):
        client.grant(Tag(number, 0, 1), number.to_bytes(16), False, bytes(16), 0, "now")
    events = []
    while len(events) < client.slots:
        client.wait(1.0)
        events += client.events()
    slot = events[0].slots[0]
    descriptors, size, slots = client.share()
    told = [*descriptors, size, slots, strips, strip_bytes, slot.slot, slot.generation]
    subprocess.run([sys.executable, "-c", SCRIPT, "write", *map(str, told)], pass_fds=descriptors)
else:
    first, second, size, slots, strips, strip_bytes, slot, generation = map(int, sys.argv[2:])
    shared = SharedSlots([first, second], size, slots, strips, strip_bytes)
    while True:
        shared.store(slot, generation, bytes(strips * strip_bytes))
        print(end=".", flush=True)
"""


def test_a_killed_leader_gives_nothing_away_that_is_still_written(tmp_path: Path) -> None:
    socket = tmp_path / "d" / "a.sock"
    daemon = start("a", socket=socket)
    script = f"SCRIPT = {LEADER!r}\n{LEADER}"
    arguments = ["lead", str(socket), KEY.hex(), str(STRIPS), str(STRIP_BYTES)]
    leader = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE)
    assert leader.stdout is not None and leader.stdout.read(1) == b".", "it is being written"
    (writer,) = Path(f"/proc/{leader.pid}/task/{leader.pid}/children").read_text().split()
    try:
        other = Inbox(PoolClient.connect(str(socket), KEY, 2, STRIPS, STRIP_BYTES, timeout=PATIENCE))
        other.client.grant(Tag(2, 0, 2), bytes(15) + b"\xff", False, HEAD, 0, "wait")
        leader.kill()
        leader.wait()
        assert not other.client.wait(0.3), "the leader is dead, and its writer is not"
    finally:
        os.kill(int(writer), signal.SIGKILL)
    other.expect(Granted)
    leader.stdout.close()
    daemon.stop()


def test_refused_clients_and_daemons(tmp_path: Path) -> None:
    socket = tmp_path / "d" / "a.sock"
    with pytest.raises(RetryError, match="no daemon answers"):
        PoolClient.connect(str(socket), KEY, 1, STRIPS, STRIP_BYTES, timeout=0.0)
    daemon = start("a", socket=socket)
    client = daemon.attach(1, STRIPS, STRIP_BYTES)
    with pytest.raises(GiveUpError, match="secret"):
        PoolClient.connect(str(socket), bytes(32), 1, STRIPS, STRIP_BYTES)
    with pytest.raises(BugError, match="32 bytes"):
        PoolClient.connect(str(socket), b"short", 1, STRIPS, STRIP_BYTES)
    with pytest.raises(GiveUpError, match="impossible"):
        daemon.attach(2, 0, STRIP_BYTES)
    with pytest.raises(GiveUpError, match="--dram-bytes"):
        daemon.attach(2, STRIPS, 1 << 20)
    with pytest.raises(GiveUpError, match="another daemon"):
        start("b", socket=socket)
    with pytest.raises(GiveUpError, match="in use"):
        Daemon(node="b", dram_bytes=1 << 16, session_key=KEY, listen=daemon.address.address)
    with pytest.raises(GiveUpError, match="memory"):
        Daemon(node="b", dram_bytes=1 << 60, session_key=KEY)
    with pytest.raises(GiveUpError, match="secret"):
        Daemon(node="b", dram_bytes=1 << 16, session_key=b"", listen="0.0.0.0:0")
    with pytest.raises(GiveUpError, match="shorter"):
        Daemon(node="b", dram_bytes=1 << 16, session_key=KEY, socket=str(tmp_path / ("x" * 120)))
    with pytest.raises(GiveUpError, match="node id"):
        Daemon(node='b"', dram_bytes=1 << 16, session_key=KEY)
    client.close()
    daemon.stop()


def test_nothing_stays_open() -> None:
    """Descriptors and threads of daemons, clients and endpoints are gone when they are stopped or forgotten."""
    before = open_things()
    for stop in (True, False):
        endpoint = ReportEndpoint("127.0.0.1:0", KEY)
        daemon = start("a", conductor=endpoint.address)
        client = daemon.attach(1, STRIPS, STRIP_BYTES)
        if stop:
            client.close()
            daemon.stop()
            endpoint.close()
        del client, daemon, endpoint
        gc.collect()
    assert open_things() - before == set()


def _in_child(client: PoolClient) -> None:
    try:
        client.request_counters()
    except BugError as error:
        os._exit(7 if "fork" in str(error) else 8)
    os._exit(9)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_what_to_do(client: PoolClient) -> None:
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(client,))
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 7
    client.request_counters()
    Inbox(client).expect(Counters)


# -- the conductor's endpoint --------------------------------------------------------------------------------------


class Desk:
    """Reports of one endpoint."""

    def __init__(self, endpoint: ReportEndpoint) -> None:
        self.endpoint = endpoint
        self.reports: list[DaemonReport] = []

    def expect(self, kind: type[Report], accept: Callable[[Report], bool] = lambda _: True) -> Report:
        until = time.monotonic() + PATIENCE
        while True:
            for report in self.reports:
                if isinstance(report, kind) and accept(report):
                    self.reports.remove(report)
                    return report
            assert time.monotonic() < until, f"no {kind.__name__}; waiting: {self.reports}"
            select.select([self.endpoint.fileno()], [], [], 0.5)
            self.reports += self.endpoint.events()


def test_daemons_report_and_obey() -> None:
    endpoint = ReportEndpoint("127.0.0.1:0", KEY)
    desk = Desk(endpoint)
    a, b = (start(node, conductor=endpoint.address) for node in ("a", "b"))
    hellos = {hello.node.node: hello for hello in (desk.expect(DaemonHello), desk.expect(DaemonHello))}
    assert {node: hello.node for node, hello in hellos.items()} == {"a": a.address, "b": b.address}
    assert hellos["a"].socket == ""
    inbox = Inbox(a.attach(1, STRIPS, STRIP_BYTES))
    b.attach(2, STRIPS, STRIP_BYTES)
    keys = keys_of(2)
    fill(inbox, Tag(1, 0, 1), keys)
    # In one batch or in two, as they come.
    batches = [desk.expect(BlocksChanged)]
    if len(batches[0].changes) == CHANGE_BYTES:
        batches.append(desk.expect(BlocksChanged))
        assert batches[1].sequence == batches[0].sequence + 1
    packed = b"".join(batch.changes for batch in batches)
    stored = [Change(False, DRAM, keys[:16], HEAD, 0), Change(False, DRAM, keys[16:], keys[:16], 1)]
    assert list(unpack(packed)) == stored
    assert batches[0].node == a.address

    endpoint.order_replicate("b", 42, keys, HEAD, 0, a.address)
    replicated = desk.expect(Replicated)
    assert (replicated.node, replicated.order, replicated.stored, replicated.missing) == (b.address, 42, 2, 0)
    endpoint.order_dump("b")
    dump = desk.expect(BlockDump, lambda report: report.last)
    assert sorted(unpack(dump.blocks), key=lambda change: change.position) == stored
    beat = desk.expect(DaemonHeartbeat, lambda beat: beat.node.node == "b" and beat.count == 2)
    assert beat.xor == bytes(x ^ y for x, y in zip(keys[:16], keys[16:], strict=True))
    assert beat.next_sequence == dump.sequence
    assert 'pyengine_pool_blocks{node="b",tier="dram",state="cached"}' in beat.counters

    inbox.client.corrupt(Tag(1, 0, 1), 0)
    removed = desk.expect(BlocksChanged, lambda report: report.node == a.address)
    assert list(unpack(removed.changes)) == [Change(True, DRAM, keys[:16])]
    a.stop()
    assert desk.expect(DaemonGone).node == a.address
    with pytest.raises(RetryError, match="not connected"):
        endpoint.order_dump("a")
    with pytest.raises(BugError, match="16-byte keys"):
        endpoint.order_replicate("b", 1, b"short", HEAD, 0, a.address)
    with pytest.raises(GiveUpError, match="in use"):
        ReportEndpoint(endpoint.address, KEY)
    endpoint.close()
    endpoint.close()
    with pytest.raises(BugError, match="closed"):
        endpoint.events()
    b.stop()


# -- the command line ----------------------------------------------------------------------------------------------


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pyengine._transferd", *arguments]


def test_neither_the_extension_nor_transferd_loads_torch_or_jax() -> None:
    program = (
        "import sys\nimport pyengine._native\nfrom pyengine._transferd import main\n"
        "sys.argv = ['transferd', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "heavy = {'torch', 'jax', 'numpy', 'zmq'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "--secret-file" in result.stdout


def test_transferd_serves_and_stops(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0f" * 32 + "\n")
    secret.chmod(0o600)
    socket = tmp_path / "d" / "a.sock"
    config = tmp_path / "transferd.toml"
    config.write_text(
        'node = "from-file"\ndram_bytes = "1MiB"\nlisten = "127.0.0.1:0"\n'
        f'socket = "{socket}"\nsecret_file = "{secret}"\n'
    )
    ready, ready_in = os.pipe()
    arguments = command("--config", str(config), "--node", "n7", "--ready-fd", str(ready_in), "--die-with-parent")
    with subprocess.Popen(arguments, pass_fds=[ready_in], stderr=subprocess.PIPE, text=True) as process:
        os.close(ready_in)
        with os.fdopen(ready) as pipe:
            line = json.loads(pipe.readline())
            assert pipe.read() == ""
        assert line["node"] == "n7"
        assert line["socket"] == str(socket)
        key = _native.derive_key(b"\x0f" * 32, "session")
        client = PoolClient.connect(str(socket), key, 1, STRIPS, STRIP_BYTES)
        assert client.node == NodeAddress("n7", line["address"], line["incarnation"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        Inbox(client).expect(Disconnected)
    assert not socket.exists()


def test_transferd_dies_with_its_parent(tmp_path: Path) -> None:
    ready, ready_in = os.pipe()
    ended, ended_in = os.pipe()
    arguments = command(
        *("--node", "a", "--dram-bytes", "1MiB", "--socket", str(tmp_path / "d" / "a.sock")),
        *("--ready-fd", str(ready_in), "--die-with-parent"),
    )
    program = (
        f"import os, subprocess\nsubprocess.Popen({arguments!r}, pass_fds=[{ready_in}, {ended_in}])\n"
        f"os.close({ready_in})\nos.read({ready}, 1)\nos._exit(0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], pass_fds=[ready, ready_in, ended_in])
    for descriptor in (ready, ready_in, ended_in):
        os.close(descriptor)
    assert parent.wait(PATIENCE) == 0
    # transferd alone still holds the other end of this pipe.
    readable, _, _ = select.select([ended], [], [], PATIENCE)
    assert readable
    assert os.read(ended, 1) == b""
    os.close(ended)
    assert not (tmp_path / "d" / "a.sock").exists(), "it stopped cleanly"


@pytest.mark.parametrize(
    ("arguments", "text", "says"),
    [
        ([], "nod = 1", "secret_file"),
        ([], 'node = "a"', "--dram-bytes"),
        (["--dram-bytes", "lots"], 'node = "a"', "2GiB"),
        (["--dram-bytes", "1MiB"], 'node = "a"', "--socket"),
        (["--dram-bytes", "1MiB", "--listen", "0.0.0.0:0"], 'node = "a"', "secret"),
        (["--secret-file", "{secret}", "--dram-bytes", "1MiB"], 'node = "a"', "chmod 600"),
        (["--node"], "", "--node"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path: Path, arguments: list[str], text: str, says: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0f" * 32)
    secret.chmod(0o644)
    config = tmp_path / "transferd.toml"
    config.write_text(text)
    filled = [argument.format(secret=secret) for argument in arguments]
    result = subprocess.run(
        command("--config", str(config), *filled), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert result.returncode == 2
    assert says in result.stderr
