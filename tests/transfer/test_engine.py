"""Goal: `TransferEngine` does what its docstrings say, and says clearly what it cannot do. Method: engines in this
process over loopback; memory is compared with what was meant; every wait is for an event."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pyengine import TransferEngine
from pyengine._native import BugError, GiveUpError, RetryError
from pyengine.transfer import Copies, Peer, RemoteRegion, Transfer
from tests.open_things import open_things

SECRET = b"sixteen bytes or more"
#: Generous: an event that takes longer never comes.
PATIENCE = 60.0


@pytest.fixture
def a() -> Iterator[TransferEngine]:
    with TransferEngine("127.0.0.1:0", secret=SECRET, node="a") as engine:
        yield engine


@pytest.fixture
def b() -> Iterator[TransferEngine]:
    with TransferEngine("127.0.0.1:0", secret=SECRET, node="b") as engine:
        yield engine


@pytest.fixture(params=["tcp", "shm"])
def peer(a: TransferEngine, b: TransferEngine, request: pytest.FixtureRequest) -> Peer:
    return a.connect(b.address, transport=request.param)


def finish(transfer: Transfer) -> Transfer:
    assert transfer.wait(PATIENCE), transfer
    assert transfer.outcome == "done" and transfer.done
    return transfer


# -- moving --------------------------------------------------------------------------------------------------------


def test_write_read_and_what_is_told_of_it(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    mine, theirs = np.arange(1000, dtype=np.float32), bytearray(4000)
    region = a.register(mine)
    b.register(theirs, name="cache")
    remote = peer.region("cache")
    assert (remote.node, remote.nbytes, remote.readable, remote.writable) == ("b", 4000, True, True)
    transfer = finish(a.submit(peer, "write", [(region, 0, remote, 0, 4000)]))
    assert theirs == mine.tobytes()
    (path,) = peer.transports
    assert (path.state, path.why, path.taken) == ("up", "", True)
    assert (transfer.progress, transfer.via, transfer.fell_back) == ((4000, 4000), path.transport, False)
    assert transfer.retries == 0
    theirs[:4] = b"\0\0\x80?"
    finish(a.submit(peer, "read", [(region, 396, remote, 0, 4)], priority="urgent"))
    assert mine[99] == 1.0
    assert peer.node == "b" and peer.address.address == b.address and peer.down is None
    assert "done, 4000 of 4000 bytes" in repr(transfer) and " up" in repr(peer)
    metrics = a.metrics()
    written = f'pyengine_engine_bytes_total{{node="a",peer="b",transport="{path.transport}",direction="written"}}'
    assert metrics[written] == 4000
    # The other side has counted the same.
    served = f'{{node="b",transport="{path.transport}",'
    counted = {name: value for name, value in b.metrics().items() if served in name and value}
    assert counted == {
        f'pyengine_engine_served_bytes_total{served}direction="written"}}': 4000,
        f'pyengine_engine_served_bytes_total{served}direction="read"}}': 4,
        f'pyengine_engine_served_copies_total{served}outcome="done"}}': 2,
    }
    region.unregister()
    assert not region.registered


def test_run_waits_and_raises(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    mine, theirs = np.zeros(200_000, np.uint8), np.arange(200_000, dtype=np.uint32).astype(np.uint8)
    region, exposed = a.register(mine), b.register(theirs, name="it")
    remote = peer.region("it")
    # One by one, each at once where the last one was left; then one that is too large for that.
    for at in range(0, 64_000, 640):
        assert a.run(peer, "read", [(region, at, remote, at, 640)]).outcome == "done"
    assert (mine[:64_000] == theirs[:64_000]).all() and not mine[64_000:].any()
    assert a.run(peer, "read", [(region, 0, remote, 0, 200_000)]).done
    assert (mine == theirs).all()
    with pytest.raises(BugError, match="an operation"):
        a.run(peer, "move", [])  # type: ignore[arg-type]
    exposed.unregister()
    with pytest.raises(GiveUpError, match="register it again"):
        a.run(peer, "write", [(region, 0, remote, 0, 640)])


def test_a_hundred_thousand_copies_are_one_call(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    count, size = 100_000, 64
    mine = np.random.default_rng(1).integers(0, 256, count * size, dtype=np.uint8)
    theirs = np.zeros_like(mine)
    region, remote = a.register(mine), RemoteRegion(b.register(theirs).handle)
    order = np.random.default_rng(2).permutation(count)
    copies = a.prepare([(region, np.arange(count) * size, remote, order * size, size)])
    assert (len(copies), copies.nbytes) == (count, count * size)
    finish(a.submit(peer, "write", copies))
    assert (theirs.reshape(count, size)[order] == mine.reshape(count, size)).all()
    theirs[:] = 0
    finish(a.submit(peer, "write", copies))
    assert (theirs.reshape(count, size)[order] == mine.reshape(count, size)).all()
    # The same as tuples, some entries being arrays.
    theirs[:] = 0
    tuples: list[Any] = [(region, i * size, remote, int(order[i]) * size, size) for i in range(count // 2)]
    rest = np.arange(count // 2, count, dtype=np.uint64)
    tuples.append((region, rest * size, remote, order[count // 2 :].astype(np.uint64) * size, np.full(len(rest), size)))
    finish(a.submit(peer, "write", tuples))
    assert (theirs.reshape(count, size)[order] == mine.reshape(count, size)).all()


def test_zero_lengths_and_empty_lists(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    region, remote = a.register(bytearray()), RemoteRegion(b.register(bytearray(3)).handle)
    finish(a.submit(peer, "write", [(region, 0, remote, 3, 0)]))
    finish(a.submit(peer, "read", []))
    with pytest.raises(BugError, match="outside its remote region"):
        a.prepare([(region, 0, remote, 4, 0)])


def test_memory_by_pointer_and_of_the_engine(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    raw = ctypes.create_string_buffer(b"raw memory")
    with a.register((ctypes.addressof(raw), 10)) as mine, b.allocate(10, name="own") as theirs:
        view = theirs.memory
        assert view.nbytes == 10 and not view.readonly and bytes(view) == bytes(10)
        finish(a.submit(peer, "write", [(mine, 0, peer.region("own"), 0, 10)]))
        assert bytes(view) == b"raw memory"
    assert bytes(view) == b"raw memory", "the view keeps the memory"
    with pytest.raises(BugError, match="pointer of 0"):
        a.register((0, 10))
    with pytest.raises(BugError, match="addresses"):
        a.register((1 << 63, 1 << 63))
    with pytest.raises(BufferError):
        assert a.register(bytearray(1)).memory


# -- what cannot be ------------------------------------------------------------------------------------------------


class Elsewhere:
    """A tensor that is not in host memory."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 7


def test_tensors_are_memory_where_they_lie(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    source, target = torch.arange(1000.0), torch.zeros(1000)
    region, exposed = a.register(source), b.register(target, name="it")
    a.run(peer, "write", [(region, 0, peer.region("it"), 0, exposed.nbytes)])
    assert torch.equal(source, target)
    with pytest.raises(BugError, match=r"device 7 of DLPack kind 2.*host memory only"):
        a.register(Elsewhere())
    with pytest.raises(BugError, match="a view of it as uint8"):
        a.register(torch.zeros(8, dtype=torch.bfloat16))
    a.register(torch.zeros(8, dtype=torch.bfloat16).view(torch.uint8)).unregister()
    with pytest.raises(BugError, match="contiguous"):
        a.register(torch.zeros(8, 8)[:, ::2])


def test_mistakes_are_sentences(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    region, remote = a.register(bytearray(100)), RemoteRegion(b.register(bytearray(100)).handle)
    wrong: list[tuple[Any, str]] = [
        ([(region, 0, remote, 0, 101)], "copy 0: 101 bytes at 0 are outside its local region of 100 bytes"),
        ([(region, 0, remote, 0, 1), (region, 0, remote, 100, 1)], "copy 1"),
        ([(region, -1, remote, 0, 1)], "between 0 and"),
        ([(region, 0, remote, 0, 1 << 64)], "between 0 and"),
        ([(region, 0.5, remote, 0, 1)], "integers or arrays"),
        ([(region, np.zeros(2), remote, 0, 1)], "int64 or uint64"),
        ([(region, np.zeros(2, np.int32), remote, 0, 1)], "int64 or uint64"),
        ([(region, np.array([0, -1]), remote, np.array([0, 1]), 1)], "negative"),
        ([(region, np.zeros(2, int), remote, np.zeros(3, int), 1)], "different lengths"),
        ([(remote, 0, region, 0, 1)], "a copy is"),
        ([(region, 0, remote, 0)], "a copy is"),
        ([(region, 0, remote, 0, 60), (region, 0, remote, 59, 2)], "copies 0 and 1 write into the same bytes"),
    ]
    for copies, says in wrong:
        with pytest.raises(BugError, match=says):
            a.submit(peer, "write", copies)
    good = a.prepare([(region, 0, remote, 0, 1)])
    odd: list[tuple[dict[str, Any], str]] = [
        ({"op": "copy"}, "write"),
        ({"priority": "high"}, "urgent"),
        ({"notify": bytes(65537)}, "65536"),
        ({"deadline": -1.0}, "seconds"),
        ({"wait": float("nan")}, "seconds"),
    ]
    for arguments, says in odd:
        with pytest.raises(BugError, match=says):
            a.submit(peer, **{"op": "write", "copies": good, **arguments})
    with pytest.raises(BugError, match="read-only"):
        a.register(b"constant")
    with pytest.raises(BugError, match="not contiguous"):
        a.register(np.zeros((4, 4))[:, 1])
    with pytest.raises(BugError, match='named "x"'):
        [a.register(bytearray(1), name="x") for _ in range(2)]
    constant = a.register(b"constant", write=False)
    finish(a.submit(peer, "write", [(constant, 0, remote, 0, 8)]))
    with pytest.raises(BugError, match="read-only"):
        a.submit(peer, "read", [(constant, 0, remote, 0, 8)])
    for handle in [b"", b"pyRH", bytes(40), os.urandom(100), region.handle[:-1], region.handle + b"x"]:
        with pytest.raises(GiveUpError, match="no region handle"):
            RemoteRegion(handle)
    assert RemoteRegion(region.handle).handle == region.handle
    region.unregister()
    with pytest.raises(BugError, match="unregistered"):
        a.submit(peer, "write", good)


def test_permissions(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    region = a.register(bytearray(10))
    readable = RemoteRegion(b.register(bytearray(b"read me..."), write=False).handle)
    writable = RemoteRegion(b.register(bytearray(10), read=False).handle)
    finish(a.submit(peer, "read", [(region, 0, readable, 0, 10)]))
    finish(a.submit(peer, "write", [(region, 0, writable, 0, 10)]))
    with pytest.raises(BugError, match="peers to write"):
        a.submit(peer, "write", [(region, 0, readable, 0, 10)])
    with pytest.raises(BugError, match="peers to read"):
        a.submit(peer, "read", [(region, 0, writable, 0, 10)])


def test_a_region_that_is_gone_is_fenced(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    region, gone = a.register(bytearray(b"x" * 10)), b.register(bytearray(10))
    copies = a.prepare([(region, 0, RemoteRegion(gone.handle), 0, 10)])
    gone.unregister()
    memory = bytearray(10)
    b.register(memory)
    transfer = a.submit(peer, "write", copies)
    with pytest.raises(GiveUpError, match="new handle"):
        transfer.wait(PATIENCE)
    assert transfer.outcome == "fenced" and transfer.via is None
    assert memory == bytes(10)
    assert b.metrics()['pyengine_engine_fenced_total{node="b"}'] >= 1
    refused = (
        f'pyengine_engine_served_copies_total{{node="b",transport="{peer.transports[0].transport}",outcome="fenced"}}'
    )
    assert b.metrics()[refused] >= 1


def test_a_region_freed_mid_transfer(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    """Either it was done before, or it is fenced; the memory can be resized as soon as `unregister` returns."""
    for side in (a, b):
        mine, theirs = bytearray(8 << 20), bytearray(8 << 20)
        region, target = a.register(mine), b.register(theirs)
        transfers = [
            a.submit(peer, "write", [(region, 0, RemoteRegion(target.handle), 0, len(mine))]) for _ in range(8)
        ]
        (region if side is a else target).unregister(PATIENCE)
        (mine if side is a else theirs).clear()
        for transfer in transfers:
            try:
                transfer.wait(PATIENCE)
            except GiveUpError:
                assert transfer.outcome == "fenced"


def test_who_may_connect_and_who_not(a: TransferEngine, b: TransferEngine) -> None:
    with (
        TransferEngine("127.0.0.1:0", secret=b"another secret, as long") as stranger,
        pytest.raises(GiveUpError, match="secret"),
    ):
        stranger.connect(a.address)
    with TransferEngine(secret=SECRET) as silent:
        assert silent.address == "" and silent.node.startswith("engine-")
        peer = silent.connect(a.address, transport="tcp")
        assert peer.node == "a" and peer.transports[0].state == "up"
        with pytest.raises(BugError, match="connected by tcp already"):
            silent.connect(a.address)
    with pytest.raises(RetryError, match="is its engine running"):
        a.connect("127.0.0.1:1")
    with pytest.raises(BugError, match="a transport is"):
        a.connect(b.address, transport="pigeon")  # type: ignore[arg-type]
    with pytest.raises(BugError, match="a transport is"):
        TransferEngine(transports=["pigeon"])  # type: ignore[list-item]
    with pytest.raises(GiveUpError, match="secret"):
        TransferEngine("0.0.0.0:0")
    with pytest.raises(GiveUpError, match="in use"):
        TransferEngine(a.address)
    with pytest.raises(GiveUpError, match="node id"):
        TransferEngine(node="a b")


def test_tls_is_for_both_or_neither(b: TransferEngine) -> None:
    with (
        TransferEngine("127.0.0.1:0", secret=SECRET, node="left", tls=True) as left,
        TransferEngine("127.0.0.1:0", secret=SECRET, node="right", tls=True) as right,
    ):
        mine, theirs = np.random.default_rng(5).bytes(64 << 20), bytearray(64 << 20)
        region, remote = left.register(mine, write=False), right.register(theirs)
        peer = left.connect(right.address, transport="tcp")
        finish(left.submit(peer, "write", [(region, 0, RemoteRegion(remote.handle), 0, len(mine))]))
        assert theirs == mine
        with pytest.raises(GiveUpError, match="start both with --tls or neither"):
            left.connect(b.address)
        with pytest.raises(GiveUpError, match="start both with --tls or neither"):
            b.connect(right.address)
        with pytest.raises(GiveUpError, match="not encrypted"):
            left.connect(right.address, transport="rdma")
        peer.close()
        paths = {path.transport: path for path in left.connect(right.address).transports}
        assert paths["shm"].state == "up" and "TLS is on" in paths["rdma"].why
    with pytest.raises(GiveUpError, match="not encrypted"):
        TransferEngine(tls=True, transports=["rdma", "tcp"])


def test_stranger_bytes_on_the_port(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    host, port = b.address.rsplit(":", 1)
    open_ones = []
    for noise in (b"GET / HTTP/1.0\r\n\r\n", os.urandom(1 << 16), b"pyEN", b"pyEN\x02\0\x01\0\xff\xff\xff\xff", b""):
        connection = socket.create_connection((host, int(port)))
        connection.sendall(noise)
        open_ones.append(connection)
    region, memory = a.register(bytearray(b"unharmed")), bytearray(8)
    finish(a.submit(peer, "write", [(region, 0, RemoteRegion(b.register(memory).handle), 0, 8)]))
    assert memory == b"unharmed"
    for connection in open_ones:
        connection.close()


# -- ends ----------------------------------------------------------------------------------------------------------


def test_cancel_deadline_and_close(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    mine = np.ones(64 << 20, np.uint8)
    region, remote = a.register(mine), RemoteRegion(b.register(np.zeros_like(mine)).handle)
    copies = a.prepare([(region, 0, remote, 0, mine.nbytes)])
    # 4 GiB: what is at their end is not begun for a while, even if this thread is held up.
    many = [a.submit(peer, "write", copies, priority="background") for _ in range(64)]
    late = a.submit(peer, "write", copies, priority="background", deadline=0.001)
    many[-1].cancel()
    with pytest.raises(GiveUpError, match="cancelled"):
        many[-1].wait(PATIENCE)
    with pytest.raises(RetryError, match="deadline"):
        late.wait(PATIENCE)
    assert (many[-1].outcome, late.outcome) == ("cancelled", "deadline")
    last = a.submit(peer, "write", copies, priority="background")
    a.close()
    a.close()
    with pytest.raises(RetryError, match="closed"):
        last.wait(PATIENCE)
    with pytest.raises(BugError, match="closed"):
        a.connect(b.address)
    region.unregister(0.0)


def test_waiting_releases_the_gil(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.extend(b.notifications(timeout=None)))
    thread.start()
    finish(peer.notify(b"hello"))
    thread.join(PATIENCE)
    assert [(note.node, note.incarnation, note.payload) for note in got] == [("a", a.incarnation, b"hello")]


def test_nothing_stays_open() -> None:
    before = open_things()
    for close in (True, False):
        one, other = TransferEngine("127.0.0.1:0"), TransferEngine("127.0.0.1:0")
        memory = bytearray(10)
        region, peer = one.register(memory), one.connect(other.address)
        finish(one.submit(peer, "write", [(region, 0, RemoteRegion(other.allocate(10).handle), 0, 10)], notify=b"x"))
        if close:
            region.unregister()
            memory.clear()
            one.close()
            other.close()
        del one, other, region, peer
        gc.collect()
        memory.clear()
    assert open_things() - before == set()


# -- notifications and asyncio -------------------------------------------------------------------------------------


async def test_await_and_async_for(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    memory = np.zeros(1 << 20, np.uint8)
    region, remote = a.register(np.ones_like(memory)), RemoteRegion(b.register(memory).handle)
    copies = a.prepare([(region, 0, remote, 0, memory.nbytes)])

    async def read() -> list[bytes]:
        payloads: list[bytes] = []
        async for note in b.notified():
            payloads.append(note.payload)
            if len(payloads) == 20:
                return payloads
        raise AssertionError("it never ends")

    reader = asyncio.create_task(read())
    transfers = [a.submit(peer, "write", copies, notify=str(i).encode()) for i in range(20)]
    await asyncio.wait_for(asyncio.gather(*transfers), PATIENCE)
    assert memory.all()
    assert sorted(await asyncio.wait_for(reader, PATIENCE), key=int) == [str(i).encode() for i in range(20)]
    await transfers[0]
    with pytest.raises(GiveUpError):
        await a.submit(peer, "write", [(region, 0, RemoteRegion(_gone(b)), 0, 1)])


def _gone(engine: TransferEngine) -> bytes:
    with engine.register(bytearray(1)) as region:
        return region.handle


async def test_a_cancelled_task_leaves_its_transfer(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    memory = np.zeros(32 << 20, np.uint8)
    region, remote = a.register(np.ones_like(memory)), RemoteRegion(b.register(memory).handle)

    async def wait() -> None:
        await transfer

    while True:
        transfer = a.submit(peer, "write", [(region, 0, remote, 0, memory.nbytes)])
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        if not task.done():
            break
        # This process was held up for so long that all was written: once more.
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await transfer
    assert memory.all()


# -- processes -----------------------------------------------------------------------------------------------------


def _in_child(engine: TransferEngine, peer: Peer, copies: Copies) -> None:
    wrong = 0
    for use in (
        engine.metrics,
        engine.close,
        lambda: engine.register(bytearray(1)),
        lambda: engine.submit(peer, "write", copies),
        lambda: peer.transports,
    ):
        try:
            use()
            wrong += 1
        except BugError as error:
            wrong += "fork" not in str(error)
    # A new one works.
    with TransferEngine("127.0.0.1:0"):
        pass
    os._exit(wrong)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_what_to_do(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    region, remote = a.register(bytearray(10)), RemoteRegion(b.register(bytearray(10)).handle)
    copies = a.prepare([(region, 0, remote, 0, 10)])
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(a, peer, copies))
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0
    finish(a.submit(peer, "write", copies))
