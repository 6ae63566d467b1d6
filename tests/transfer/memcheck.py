"""Goal: the bindings hand memory to the engine, and take it back, without a byte read or written that is not theirs.
Method: `make memcheck` runs this under valgrind: every way in and out of the FFI once, with memory of the exact size,
so that one byte beyond it is found. No pytest and no numpy: under valgrind their imports alone take minutes."""

from __future__ import annotations

import asyncio
import ctypes

from pyengine._native import BugError, GiveUpError
from pyengine.transfer import Peer, RemoteRegion, TransferEngine

PATIENCE = 600.0
SIZE = 100_003


def move(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    """Writes and reads between all kinds of memory; copies of all sizes."""
    mine, theirs = bytearray(range(256)) * 391, bytearray(SIZE)
    del mine[SIZE:]
    raw = ctypes.create_string_buffer(SIZE)
    region, remote = a.register(mine), b.register(theirs)
    pointer, own = a.register((ctypes.addressof(raw), SIZE)), b.allocate(SIZE)
    source = a.register(bytes(mine), write=False)
    there, there_own = RemoteRegion(remote.handle), RemoteRegion(own.handle)
    a.submit(peer, "write", [(region, 0, there, 0, SIZE)], notify=b"all of it").wait(PATIENCE)
    assert theirs == mine and b.notifications(PATIENCE)[0].payload == b"all of it"
    copies = a.prepare([(source, i * 7, there_own, SIZE - 7 - i * 7, 7) for i in range(SIZE // 7)])
    for _ in range(2):
        a.submit(peer, "write", copies).wait(PATIENCE)
    a.submit(peer, "read", [(pointer, 0, there, 0, SIZE)], priority="urgent").wait(PATIENCE)
    assert raw.raw == mine
    tail = SIZE % 7
    assert all(
        bytes(own.memory[tail + i : tail + i + 7]) == bytes(mine[SIZE - tail - 7 - i :][:7]) for i in range(0, 70, 7)
    )
    a.submit(peer, "read", []).wait(PATIENCE)
    for each in (region, pointer, source, remote, own):
        each.unregister()


def refuse(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    """What ends early: cancelled, fenced, denied, forgotten."""
    region, gone = a.register(bytearray(SIZE)), b.register(bytearray(SIZE))
    there = RemoteRegion(gone.handle)
    for wrong in ([(region, 1, there, 0, SIZE)], [(region, 0, there, SIZE, 1)], [(region, -1, there, 0, 1)]):
        try:
            a.prepare(wrong)
        except (BugError, OverflowError):
            continue
        raise AssertionError(wrong)
    cancelled = [a.submit(peer, "write", [(region, 0, there, 0, SIZE)]) for _ in range(8)]
    for transfer in cancelled:
        transfer.cancel()
    gone.unregister()
    ended = [*cancelled, a.submit(peer, "write", [(region, 0, there, 0, SIZE)])]
    for transfer in ended:
        try:
            transfer.wait(PATIENCE)
        except GiveUpError:
            assert transfer.outcome in ("cancelled", "fenced"), transfer
    region.unregister()


async def await_it(a: TransferEngine, b: TransferEngine, peer: Peer) -> None:
    region, there = a.register(bytearray(SIZE)), RemoteRegion(b.register(bytearray(SIZE)).handle)
    await asyncio.gather(*[a.submit(peer, "read", [(region, 0, there, 0, SIZE)]) for _ in range(3)])


def main() -> None:
    """All of it, over tcp and shm."""
    for transport in ("tcp", "shm"):
        with TransferEngine("127.0.0.1:0", node="a") as a, TransferEngine("127.0.0.1:0", node="b") as b:
            peer = a.connect(b.address, transport=transport, timeout=PATIENCE)
            move(a, b, peer)
            refuse(a, b, peer)
            asyncio.run(await_it(a, b, peer))
            assert a.metrics() and repr(peer)
    print("memcheck: every way in and out, over tcp and shm")


if __name__ == "__main__":
    main()
