"""The transfer engine: moves memory between processes and hosts, and says the truth about how it went.

    with TransferEngine(listen="127.0.0.1:0") as engine:
        region = engine.register(array)
        peer = engine.connect("10.0.0.2:7000")
        transfer = engine.submit(peer, "write", [(region, 0, peer.region("cache"), 0, array.nbytes)])
        transfer.wait()          # or: await transfer

A transfer that is done was applied at its destination and verified there. However it ends, this process's memory is not
touched by it any more. Every wait releases the GIL. Errors say what to do: RetryError, GiveUpError, BugError.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from pyengine import _native
from pyengine._native import Copies, Notification, Region, RemoteRegion

__all__ = [
    "Copies",
    "Notification",
    "PathState",
    "Peer",
    "Region",
    "RemoteRegion",
    "Transfer",
    "TransferEngine",
]

Transport: TypeAlias = Literal["shm", "rdma", "tcp"]
Operation: TypeAlias = Literal["write", "read"]
Priority: TypeAlias = Literal["urgent", "normal", "background"]
Outcome: TypeAlias = Literal["pending", "done", "cancelled", "deadline", "fenced", "denied", "corrupt", "unreachable"]
#: One number for all copies of an entry, or an int64 or uint64 array with one each.
Number: TypeAlias = Any
#: (local region, offset, remote region, offset, length)
Copy: TypeAlias = tuple[Region, Number, RemoteRegion, Number, Number]


@dataclass(frozen=True)
class PathState:
    """One way to a peer. `taken`: the last copy went this way. `why` says why it does not stand, if it does not."""

    transport: str
    state: Literal["up", "connecting", "down", "none"]
    why: str
    taken: bool


class Peer:
    """A connection to another engine. It ends when this object and all its transfers are gone, or by `close`.

    It outlives broken sockets and restarts of the other side; handles of a life that is over do not: transfers that
    name them are fenced.
    """

    def __init__(self, native: _native.Peer, engine: TransferEngine) -> None:
        self._native = native
        self._engine = engine

    @property
    def node(self) -> str:
        """Its node id."""
        return self._native.address.node

    @property
    def address(self) -> _native.NodeAddress:
        """Where it was reached, and the latest life of it that answered."""
        return self._native.address

    @property
    def transports(self) -> list[PathState]:
        """The paths to it, the preferred first: which one is taken, and why not the others."""
        return [PathState(*path) for path in self._native.paths()]

    @property
    def down(self) -> str | None:
        """Why its engine does not answer now; None if it does."""
        return self._native.down()

    def region(self, which: str | bytes, timeout: float = 10.0) -> RemoteRegion:
        """A region of this peer: by the name it was registered with, or by its handle.

        Raises RetryError if it has no region of that name (yet), or does not answer in time.
        """
        return self._native.find(which, timeout) if isinstance(which, str) else RemoteRegion(which)

    def notify(self, payload: bytes, *, deadline: float | None = None) -> Transfer:
        """Sends at most 64 KiB to the peer's `notifications`. It is done when they are in its queue."""
        return self._engine.submit(self, "write", [], notify=payload, deadline=deadline)

    def close(self) -> None:
        """Ends the connection; its transfers fail."""
        self._native.close()

    def __repr__(self) -> str:
        paths = ", ".join(f"{path.transport} {path.state}" for path in self.transports)
        return f"<Peer {self.node} at {self.address.address}: {paths}>"


class Transfer:
    """A transfer that was submitted. Forgetting it does not cancel it. `await` it, or `wait` for it."""

    def __init__(self, native: _native.Transfer, engine: TransferEngine) -> None:
        self._native = native
        self._engine = engine

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is done. False: not yet, after so many seconds (it goes on, and its memory stays in use).

        Raises what went wrong: RetryError (unreachable, corrupt, deadline), GiveUpError (fenced, cancelled), BugError
        (denied).
        """
        if not self._native.wait(timeout):
            return False
        self._native.result()
        return True

    def __await__(self) -> Generator[Any, None, None]:
        """Waits in an event loop; raises as `wait` does. Cancelling the task does not cancel the transfer."""
        if not self._native.done:
            yield from self._engine._watch(self._native).__await__()
        self._native.result()

    def cancel(self) -> None:
        """Asks it to end early. It ends as cancelled once this side's memory is quiet, at most about 3 s later."""
        self._native.cancel()

    @property
    def number(self) -> int:
        """As the log names it."""
        return self._native.number

    @property
    def done(self) -> bool:
        """True if it has ended, in whatever way."""
        return self._native.done

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        return self._native.outcome()[0]

    @property
    def via(self) -> str | None:
        """The transport that carried it (its last copy); None if it is not done."""
        return self._native.outcome()[1]

    @property
    def fell_back(self) -> bool:
        """True if copies went by another path because a better one, which had stood before, was broken."""
        return self._native.outcome()[2]

    @property
    def retries(self) -> int:
        """How many of its pieces were sent again."""
        return self._native.outcome()[3]

    @property
    def progress(self) -> tuple[int, int]:
        """(bytes applied and verified, all its bytes)."""
        return self._native.progress()

    def __repr__(self) -> str:
        done, total = self.progress
        return f"<Transfer {self.number}: {self.outcome}, {done} of {total} bytes>"


#: DLPack's numbers for host memory: plain, and pinned for CUDA.
_HOST_DEVICES = (1, 3)


def _in_host_memory(memory: Any) -> Any:
    """A tensor as something with the buffer protocol; all else as it is."""
    if isinstance(memory, np.ndarray) or not hasattr(memory, "__dlpack_device__"):
        return memory
    kind, number = memory.__dlpack_device__()
    if kind not in _HOST_DEVICES:
        raise _native.BugError(
            f"this tensor lies on device {number} of DLPack kind {int(kind)}, and the engine moves host memory only: "
            "copy it to the host first, into pinned memory if that is done often"
        )
    try:
        return np.from_dlpack(memory)
    except (BufferError, RuntimeError, TypeError) as error:
        why = f"this tensor's memory cannot be shared ({error}): register a view of it as uint8"
        raise _native.BugError(why) from error


class TransferEngine:
    """The transfer engine of this process. Use it from any thread; after a fork, make a new one in the child.

    listen: "host:port" where peers connect (port 0: any), or None: this engine connects to others, and nobody to it.
    secret: the cluster's secret; whoever connects must know it. Without one only loopback can be listened at.
    node: an id that is unique among all engines that meet (random if not given).
    advertise: "host:port" that peers dial, where it is not what `listen` says.
    transports: "auto" (all that are built in), or which: "tcp", ["shm", "tcp"].
    checksums: copies carry checksums that are verified where they land.
    inbox: notifications that may wait in `notifications`; beyond, peers wait.
    tls: what travels by TCP is encrypted (TLS 1.3); both engines must want it. shm does not leave the host; rdma cannot
        be encrypted and is not used then. With a `secret` nobody on the way can read, change or impersonate; without
        one TLS protects from listeners only.
    """

    def __init__(
        self,
        listen: str | None = None,
        *,
        secret: bytes = b"",
        node: str | None = None,
        advertise: str | None = None,
        transports: Literal["auto"] | Transport | Sequence[Transport] = "auto",
        checksums: bool = True,
        inbox: int = 1024,
        tls: bool = False,
    ) -> None:
        names: list[str] | None = [transports] if isinstance(transports, str) else list(transports)
        self._native = _native.Endpoint(
            session_key=_native.derive_key(secret, "session") if secret else b"",
            node=node,
            listen=listen,
            advertise=advertise,
            transports=None if transports == "auto" else names,
            checksums=checksums,
            inbox=inbox,
            tls=tls,
        )
        self._watches: WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = WeakKeyDictionary()

    @property
    def address(self) -> str:
        """Where it listens; empty if it does not."""
        return self._native.address.address

    @property
    def node(self) -> str:
        """Its node id."""
        return self._native.address.node

    @property
    def incarnation(self) -> int:
        """Its life: handles are of one of them."""
        return self._native.address.incarnation

    # -- memory ----------------------------------------------------------------------------------------------------

    def register(self, memory: Any, *, read: bool = True, write: bool = True, name: str | None = None) -> Region:
        """Makes memory nameable: anything with the buffer protocol, a tensor in host memory (of any library
        that exports DLPack), or (pointer, length) of writable memory.

        It stays registered until its `unregister` (or the end of its `with` block) or until the engine is closed. So
        long a buffer's export is held; memory behind a pointer must be kept by the caller. `read` and `write` say what
        peers may do. A `name` is what peers can ask for (`peer.region`); otherwise give them its `handle`.
        """
        return self._native.register(_in_host_memory(memory), read=read, write=write, name=name)

    def allocate(self, length: int, *, read: bool = True, write: bool = True, name: str | None = None) -> Region:
        """Registers zeroed memory of the engine's own, which shares best: `region.memory`."""
        return self._native.allocate(length, read=read, write=write, name=name)

    # -- peers -----------------------------------------------------------------------------------------------------

    def connect(self, address: str, *, transport: Literal["auto"] | Transport = "auto", timeout: float = 10.0) -> Peer:
        """Reaches the engine that listens at "host:port"; returns when copies would get through.

        transport: one that must be used, or "auto": the best that stands. `peer.transports` says which one is, and why.
        Raises RetryError if it does not answer, or no path stands; GiveUpError if the secrets differ, or only one side
        has TLS. It waits: in an event loop call it by `asyncio.to_thread`.
        """
        native = self._native.connect(address, transport=None if transport == "auto" else transport, timeout=timeout)
        return Peer(native, self)

    # -- transfers -------------------------------------------------------------------------------------------------

    def prepare(self, copies: Iterable[Copy]) -> Copies:
        """Checks a list of copies, to be submitted as often as one likes, at no cost per copy.

        Each entry is (region, offset, remote region, offset, length). Offsets and lengths may be int64 or uint64 arrays
        instead of numbers: then the entry stands for as many copies. All remote regions are of one peer.
        """
        return Copies(copies)

    def submit(
        self,
        peer: Peer,
        op: Operation,
        copies: Copies | Iterable[Copy],
        *,
        priority: Priority = "normal",
        deadline: float | None = None,
        retries: int | None = None,
        notify: bytes | None = None,
        wait: float = 0.0,
    ) -> Transfer:
        """Begins to "write" local memory into the peer's, or to "read" the peer's into the local one.

        deadline: seconds from now after which it is given up. retries: how often a piece that was lost or corrupted is
        sent again. notify: at most 64 KiB for the peer's `notifications`, after all copies were applied there. wait:
        for room in the queues, before RetryError is raised. No order is promised between copies of a transfer, nor
        between transfers: wait for one, then submit the next.
        """
        prepared = copies if isinstance(copies, Copies) else Copies(copies)
        native = self._native.submit(
            peer._native,
            op,
            prepared,
            priority=priority,
            deadline=deadline,
            retries=retries,
            notify=notify,
            wait=wait,
        )
        return Transfer(native, self)

    def run(
        self,
        peer: Peer,
        op: Operation,
        copies: Copies | Iterable[Copy],
        *,
        priority: Priority = "normal",
        deadline: float | None = None,
        retries: int | None = None,
        notify: bytes | None = None,
        wait: float = 0.0,
    ) -> Transfer:
        """As `submit` and then `wait`, and raises as both do: the quickest way for a small copy, as this thread itself
        takes the answer, and no other has to be woken for it."""
        prepared = copies if isinstance(copies, Copies) else Copies(copies)
        native = self._native.submit(
            peer._native,
            op,
            prepared,
            priority=priority,
            deadline=deadline,
            retries=retries,
            notify=notify,
            wait=wait,
            attend=True,
        )
        transfer = Transfer(native, self)
        transfer.wait()
        return transfer

    def _watch(self, transfer: _native.Transfer) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        watch = self._watches.get(loop)
        if watch is None:
            watch = self._watches[loop] = _Watch()
        return watch.future(loop, transfer)

    # -- notifications ---------------------------------------------------------------------------------------------

    def notifications(self, timeout: float | None = 0.0, at_most: int = 1024) -> list[Notification]:
        """Takes what peers have sent: at once if something waits, else after at most `timeout` seconds (None: ever)."""
        if timeout is None or timeout > 0:
            self._native.wait_notification(timeout)
        return self._native.notifications(at_most)

    async def notified(self) -> AsyncIterator[Notification]:
        """Notifications as they come, for `async for`. One reader per engine."""
        loop = asyncio.get_running_loop()
        while True:
            waiting = self._native.notifications(1)
            if not waiting:
                readable = loop.create_future()
                loop.add_reader(self._native.fileno(), _resolve, readable)
                try:
                    await readable
                finally:
                    loop.remove_reader(self._native.fileno())
            for notification in waiting:
                yield notification

    # -- the rest --------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, int]:
        """All counters by Prometheus sample name (`name{label="…"}`).

        What this engine has moved is told by peer and transport: `pyengine_engine_bytes_total`, `..._copies_total`.
        What peers have moved into and out of its memory is told by transport: `pyengine_engine_served_bytes_total`
        (direction "written", "read"), `pyengine_engine_served_copies_total` (outcome "done", "corrupt", "fenced",
        "denied").
        """
        return self._native.counters()

    def close(self) -> None:
        """Ends all transfers and connections; when it returns no memory is touched any more. Idempotent."""
        self._native.close()

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<TransferEngine {self.node} at {self.address or 'no address'}>"


class _Watch:
    """Transfers that one event loop awaits. The loop looks at the descriptor only while there are some."""

    def __init__(self) -> None:
        self._watcher = _native.Watcher()
        self._futures: dict[int, asyncio.Future[None]] = {}
        self._last = 0

    def future(self, loop: asyncio.AbstractEventLoop, transfer: _native.Transfer) -> asyncio.Future[None]:
        if not self._futures:
            loop.add_reader(self._watcher.fileno(), self._resolve_ended, loop)
        self._last += 1
        future = self._futures[self._last] = loop.create_future()
        transfer.watch(self._watcher, self._last)
        return future

    def _resolve_ended(self, loop: asyncio.AbstractEventLoop) -> None:
        for token in self._watcher.take():
            future = self._futures.pop(token, None)
            if future is not None:
                _resolve(future)
        if not self._futures:
            loop.remove_reader(self._watcher.fileno())


def _resolve(future: asyncio.Future[None]) -> None:
    # Its task may have been cancelled.
    if not future.done():
        future.set_result(None)
