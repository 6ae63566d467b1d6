"""The pool as a key-value store: bytes and buffers by name, in the memory that a node's daemon keeps.

    with Pool.open("1GiB") as pool:                  # the daemon runs in this process
        pool.put("weights/0", array)                 # anything with the buffer protocol, or a tensor in host memory
        with pool.get("weights/0") as view:          # no copy: it lies in the pool, and stays while the view lives
            numpy.frombuffer(view, numpy.float32)

    pool = Pool.connect("/run/pyengine/node.sock")   # any process of the host
    pool = Pool.open("1GiB", ssd_dir="/var/lib/pool", ssd_bytes="100GiB")   # finds next time what it has now

An object is immutable until it is removed: `put` of a name that is there stores nothing and says so (False). So a view
never changes under its reader, copies of an object on several nodes can never differ, and of several that put one name
at once one wins. To replace one, remove it and put it anew; who has a view of the old one keeps it.

With `peers` the pools of several nodes are one: what is put at any of them is found at all, and only one of several
that put a name at once stores it. There is no master: each name has a home among the members, by its hash, which knows
who has it. While members cannot reach each other puts go on: should two store different values under one name then, one
of them stays when they meet, the same for all.

A pool is a cache: when room is needed, what was used longest ago and is not in use goes; from DRAM to the SSD if there
is one, from there for good. What is on the SSD outlives the process: all of it if the pool is closed or `flush` said
True; if the process is killed, most of it, and never a wrong value or a part of one. A miss is None or False, never an
exception. A value may be larger than DRAM if there is an SSD. Errors say what to do: RetryError (no room now, daemon
gone), GiveUpError (larger than the pool, wrong secret, an SSD directory that another pool uses), BugError (impossible
key, closed pool, buffer too short). Every call releases the GIL; use it from any thread.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

from pyengine import _native
from pyengine._native import BugError, View
from pyengine.config import check_ssd, parse_size
from pyengine.secret import claim_ssd, read_secret
from pyengine.transfer import _in_host_memory

__all__ = ["AsyncPool", "Entry", "Pool", "PoolStats", "View"]

#: 1 to 1024 bytes; text counts as UTF-8.
Key: TypeAlias = str | bytes

P = ParamSpec("P")
R = TypeVar("R")


class Entry(NamedTuple):
    """One object of a list."""

    key: bytes
    size: int


@dataclass(frozen=True)
class PoolStats:
    """Numbers of a pool.

    objects: that can be got. bytes: of the blocks they take in DRAM, with all that is kept beside the values. capacity:
    bytes that all blocks of the node may take there, those of KV included. ssd_objects, ssd_bytes, ssd_capacity: the
    same of the SSD, 0 if there is none; an object may be on both. hits, misses: names that all clients have asked for
    by `get` and `get_into` since the daemon's start.
    """

    objects: int
    bytes: int
    capacity: int
    ssd_objects: int
    ssd_bytes: int
    ssd_capacity: int
    hits: int
    misses: int


class Pool:
    """A pool of objects: `Pool.open` or `Pool.connect`. See the module's head. After a fork, make a new one."""

    def __init__(self, native: _native.ObjectPool, daemon: _native.Daemon | None = None) -> None:
        self._native = native
        self._daemon = daemon

    @classmethod
    def open(
        cls,
        dram: int | str = "1GiB",
        *,
        ssd_dir: str | Path | None = None,
        ssd_bytes: int | str = 0,
        socket: str | Path | None = None,
        secret_file: str | Path | None = None,
        node: str | None = None,
        listen: str | None = None,
        peers: Sequence[str] = (),
        transport: str = "auto",
        tls: bool = False,
    ) -> Pool:
        """Starts a daemon in this process, which ends with the pool.

        dram: bytes that all blocks may take, such as "8GiB"; memory is used when it is first written.
        ssd_dir, ssd_bytes: a directory on a disk, made if it is not there, whose objects the next pool finds that is
            opened with it and the same secret_file; and what it may take there. One pool at a time.
        socket: a path in a directory that only you can write, where other processes connect; None: they cannot.
        secret_file: the cluster's secret, which those who connect must know too; None: the socket's mode 0600 is all.
        node: the node's id, if it shall have one.
        listen, peers: "host:port" where other nodes reach this pool, and those of all who share objects, which may name
        this one too. Each is dialled until it answers. Beyond loopback they need a secret_file, the same for all.
        transport, tls: how objects travel to peers, see `TransferEngine`.
        Raises GiveUpError if that is impossible, with what to do; ConfigError if the directory cannot be used.
        """
        session_key, object_key = _keys(secret_file)
        size = parse_size(ssd_bytes)
        check_ssd("" if ssd_dir is None else str(ssd_dir), size)
        ssd_dirs = []
        if ssd_dir is not None:
            claim_ssd(Path(ssd_dir).absolute(), None if secret_file is None else Path(secret_file))
            ssd_dirs.append(str(Path(ssd_dir).absolute() / (node or "pool")))
        daemon = _native.Daemon(
            # Beside others it must be the only one of its name.
            node=node or f"pool-{os.getpid()}" + (f"-{secrets.token_hex(4)}" if listen else ""),
            dram_bytes=parse_size(dram),
            session_key=session_key,
            socket=None if socket is None else str(socket),
            ssd_dirs=ssd_dirs,
            ssd_bytes=size,
            listen=listen,
            peers=peers,
            transport=transport,
            tls=tls,
        )
        return cls(daemon.objects(object_key), daemon)

    @classmethod
    def connect(cls, socket: str | Path, *, secret_file: str | Path | None = None, timeout: float = 5.0) -> Pool:
        """Connects to the daemon of this host that listens at `socket`: a `Pool.open(socket=...)` or a `transferd`.

        Raises RetryError if none answers within `timeout` seconds, GiveUpError if the secrets differ.
        """
        session_key, object_key = _keys(secret_file)
        return cls(_native.ObjectPool.connect(str(socket), session_key, object_key, timeout))

    # -- one -------------------------------------------------------------------------------------------------------

    def put(self, key: Key, value: Any, copies: int = 1) -> bool:
        """Stores a value. False: there is one of this name already, and it stays as it is.

        value: contiguous, with the buffer protocol, or a tensor in host memory; it must not change until this returns.
        A value above 1 MiB may be larger than DRAM if there is an SSD: this waits for it then.
        copies: on how many nodes it is when this returns. With fewer members, or no room there, it is on fewer;
        `replicate` says on how many.
        Raises RetryError if all that could go has gone and there is no room, GiveUpError if there never will be.
        """
        return self.batch_put([key], [value], copies)[0]

    def get(self, key: Key) -> View | None:
        """The value; None: there is none.

        The view is a read-only buffer: `memoryview(view)`, `numpy.frombuffer(view, ...)`, `torch.frombuffer(view, ...)`
        copy nothing. Its bytes stay as long as the view, or a buffer made from it, lives. A value above 1 MiB lies in
        several pieces and is copied (and verified), which `get_into` does into memory of your own. What is on the SSD
        only is read into DRAM first; RetryError: there is no room, as other views are open.
        """
        return self._native.get([key])[0]

    def get_into(self, key: Key, buffer: Any) -> int | None:
        """Copies the value into a writable buffer, verified, and returns its length; None: there is none.

        Raises BugError if the buffer is too short. If None is returned the buffer may have been written.
        """
        return self._native.get_into([key], [_in_host_memory(buffer)])[0]

    def exists(self, key: Key) -> bool:
        """Whether there is such an object. It pins nothing, so it may be gone a moment later."""
        return self._native.exists([key])[0]

    def where(self, key: Key) -> str | None:
        """The faster one of the media that have it: "dram" or "ssd"; None: there is no such object. As `exists`."""
        return self._native.media([key])[0]

    def remove(self, key: Key) -> bool:
        """Forgets an object, on all nodes. False: there was none. Who has a view of it keeps it.

        Raises RetryError if a member could not be told: it is removed elsewhere, and that one is told when it comes
        back, as long as the name's home remembers it (65,536 removals). To be certain, ask again then.

        After a `flush` it is gone for good; if the process is killed before, the next one may find it again.
        """
        return self._native.remove([key])[0]

    def replicate(self, keys: Sequence[Key], copies: int) -> list[int]:
        """Sees to it that so many nodes have each of these objects; returns how many have it now (0: there is none).

        Copies are cache like the first one: each goes when its node needs the room.
        """
        return self._native.replicate(keys, _copies(copies))

    # -- many: one message each way --------------------------------------------------------------------------------

    def batch_put(self, keys: Sequence[Key], values: Sequence[Any], copies: int = 1) -> list[bool]:
        """As `put`, for each. If some cannot be stored the others are, and the error of the first is raised: the same
        call may then be made again, as what is there is not stored twice."""
        return self._native.put(keys, [_in_host_memory(value) for value in values], _copies(copies))

    def batch_get(self, keys: Sequence[Key]) -> list[View | None]:
        """As `get`, for each."""
        return self._native.get(keys)

    def batch_get_into(self, keys: Sequence[Key], buffers: Sequence[Any]) -> list[int | None]:
        """As `get_into`, for each."""
        return self._native.get_into(keys, [_in_host_memory(buffer) for buffer in buffers])

    def batch_exists(self, keys: Sequence[Key]) -> list[bool]:
        """As `exists`, for each."""
        return self._native.exists(keys)

    def batch_remove(self, keys: Sequence[Key]) -> list[bool]:
        """As `remove`, for each."""
        return self._native.remove(keys)

    # -- kept for a time ----------------------------------------------------------------------------------------------

    def pin(self, keys: Sequence[Key], ttl: float, by: str | None = None) -> list[bool]:
        """Keeps objects in memory for `ttl` seconds (at most a day), whoever needs room. Per key: whether there is one.

        That is this node's memory: what only other nodes have is copied here first. They stay pinned when this process
        ends, and not when the daemon does: pin them again then. by: in whose name, which `transferd pins` shows; None:
        this process. Pinning again in one name sets a new time. `remove` removes a pinned object all the same.
        Raises RetryError if there is no room for some, as at most half of the memory can be pinned; the others are.
        """
        outcomes = self._native.pin(keys, ttl, by or _me())
        if full := outcomes.count("full"):
            raise _native.RetryError(
                f"{full} of {len(keys)} objects could not be pinned: at most half of the memory can be, and nothing "
                "while a daemon drains; unpin some, or look at `transferd pins`"
            )
        return [outcome != "missing" for outcome in outcomes]

    def unpin(self, keys: Sequence[Key], by: str | None = None) -> list[bool]:
        """Ends pins of this name before their time. Per key: whether there was one."""
        return self._native.unpin(keys, by or _me())

    # -- all -------------------------------------------------------------------------------------------------------

    def list(self, prefix: Key = b"", limit: int | None = None) -> Iterator[Entry]:
        """Names that begin so, with the sizes of their values, at most `limit`, in no order.

        Names of what is on the SSD only are read from there, with their values (of large ones 1 MiB).
        One that comes or goes meanwhile may be among them or not; all others are, once.
        """
        cursor: tuple[int, bytes | None] | None = None
        left = limit
        while left is None or left > 0:
            entries, cursor = self._native.list(prefix, cursor, _PAGE if left is None else min(left, _PAGE))
            for entry in entries:
                yield Entry(*entry)
            if left is not None:
                left -= len(entries)
            if cursor is None:
                return

    def stats(self) -> PoolStats:
        """How full it is, and how it is used."""
        return PoolStats(**self._native.stats())

    def flush(self) -> bool:
        """Has all that can be got now written to the SSD, and what was removed removed there.

        True: so it is after whatever happens to this process or the machine. False: there is no SSD, or it fails.
        """
        return self._native.flush()

    def close(self) -> None:
        """Ends the connection, and the daemon that `open` has started. Idempotent. Views stay as they are.

        If there is an SSD, that daemon writes to it what is in DRAM only, for at most 3 s; `flush` takes its time.
        """
        self._native.close()
        if self._daemon is not None:
            self._daemon.stop()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncPool:
    """A pool whose methods are awaited: `await pool.put(...)`, `async for entry in pool.list()`.

    Each call runs on a thread of the event loop's executor. One whose task is cancelled goes on until it is done: so
    long its buffers are in use.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @classmethod
    async def open(
        cls,
        dram: int | str = "1GiB",
        *,
        ssd_dir: str | Path | None = None,
        ssd_bytes: int | str = 0,
        socket: str | Path | None = None,
        secret_file: str | Path | None = None,
        node: str | None = None,
        listen: str | None = None,
        peers: Sequence[str] = (),
        transport: str = "auto",
        tls: bool = False,
    ) -> AsyncPool:
        """As `Pool.open`."""
        return cls(
            await asyncio.to_thread(
                Pool.open,
                dram,
                ssd_dir=ssd_dir,
                ssd_bytes=ssd_bytes,
                socket=socket,
                secret_file=secret_file,
                node=node,
                listen=listen,
                peers=peers,
                transport=transport,
                tls=tls,
            )
        )

    @classmethod
    async def connect(
        cls, socket: str | Path, *, secret_file: str | Path | None = None, timeout: float = 5.0
    ) -> AsyncPool:
        """As `Pool.connect`."""
        return cls(await asyncio.to_thread(Pool.connect, socket, secret_file=secret_file, timeout=timeout))

    async def put(self, key: Key, value: Any, copies: int = 1) -> bool:
        """As `Pool.put`."""
        return await asyncio.to_thread(self._pool.put, key, value, copies)

    async def get(self, key: Key) -> View | None:
        """As `Pool.get`."""
        return await asyncio.to_thread(self._pool.get, key)

    async def get_into(self, key: Key, buffer: Any) -> int | None:
        """As `Pool.get_into`."""
        return await asyncio.to_thread(self._pool.get_into, key, buffer)

    async def exists(self, key: Key) -> bool:
        """As `Pool.exists`."""
        return await asyncio.to_thread(self._pool.exists, key)

    async def where(self, key: Key) -> str | None:
        """As `Pool.where`."""
        return await asyncio.to_thread(self._pool.where, key)

    async def remove(self, key: Key) -> bool:
        """As `Pool.remove`."""
        return await asyncio.to_thread(self._pool.remove, key)

    async def batch_put(self, keys: Sequence[Key], values: Sequence[Any], copies: int = 1) -> list[bool]:
        """As `Pool.batch_put`."""
        return await asyncio.to_thread(self._pool.batch_put, keys, values, copies)

    async def replicate(self, keys: Sequence[Key], copies: int) -> list[int]:
        """As `Pool.replicate`."""
        return await asyncio.to_thread(self._pool.replicate, keys, copies)

    async def batch_get(self, keys: Sequence[Key]) -> list[View | None]:
        """As `Pool.batch_get`."""
        return await asyncio.to_thread(self._pool.batch_get, keys)

    async def batch_get_into(self, keys: Sequence[Key], buffers: Sequence[Any]) -> list[int | None]:
        """As `Pool.batch_get_into`."""
        return await asyncio.to_thread(self._pool.batch_get_into, keys, buffers)

    async def batch_exists(self, keys: Sequence[Key]) -> list[bool]:
        """As `Pool.batch_exists`."""
        return await asyncio.to_thread(self._pool.batch_exists, keys)

    async def batch_remove(self, keys: Sequence[Key]) -> list[bool]:
        """As `Pool.batch_remove`."""
        return await asyncio.to_thread(self._pool.batch_remove, keys)

    async def pin(self, keys: Sequence[Key], ttl: float, by: str | None = None) -> list[bool]:
        """As `Pool.pin`."""
        return await asyncio.to_thread(self._pool.pin, keys, ttl, by)

    async def unpin(self, keys: Sequence[Key], by: str | None = None) -> list[bool]:
        """As `Pool.unpin`."""
        return await asyncio.to_thread(self._pool.unpin, keys, by)

    async def stats(self) -> PoolStats:
        """As `Pool.stats`."""
        return await asyncio.to_thread(self._pool.stats)

    async def flush(self) -> bool:
        """As `Pool.flush`."""
        return await asyncio.to_thread(self._pool.flush)

    async def close(self) -> None:
        """As `Pool.close`."""
        await asyncio.to_thread(self._pool.close)

    async def list(self, prefix: Key = b"", limit: int | None = None) -> AsyncIterator[Entry]:
        """As `Pool.list`."""
        entries = self._pool.list(prefix, limit)
        while (entry := await asyncio.to_thread(next, entries, None)) is not None:
            yield entry

    async def __aenter__(self) -> AsyncPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


#: Names of one part of a list: the most that the daemon gives at once.
_PAGE = 1024


def _me() -> str:
    """This process, as a keeper of objects."""
    return f"process {os.getpid()}"


def _copies(copies: int) -> int:
    if not 0 <= copies < 1 << 32:
        raise BugError(f"{copies} copies: give a number of nodes")
    return copies


def _keys(secret_file: str | Path | None) -> tuple[bytes, bytes]:
    """(session key, object-key key). Without a secret anybody who reaches the socket may connect."""
    if secret_file is None:
        return b"", _native.derive_key(b"", "object")
    secret = read_secret(Path(secret_file))
    return _native.derive_key(secret, "session"), _native.derive_key(secret, "object")
