"""One replica in several processes: the worker's own is rank 0 and leads, the others are its children.

    rank 0 --- a socket pair each, messages answered in their order ---> rank 1 ... rank N - 1
       \\____________ collectives of the framework, in the same order ____________/

Ranks die with rank 0 (child.py), and rank 0 learns of a rank's death by an event: its process ends, which breaks its
socket and what the framework has open. A replica that has lost a rank computes nothing any more (WorkerBroken), and the
worker ends. So nobody here waits by the clock: who waits for a rank waits until it answers or is dead.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol, runtime_checkable

import msgspec

from pyengine import logs
from pyengine.backend import WorkerBroken
from pyengine.copier import Heads

#: Seconds in which ranks end that were told to; SIGKILL follows.
END_WITHIN = 5.0
#: Before each message: its size.
SIZE = struct.Struct("<Q")
#: Descriptors beside a message: of the arena, and of the link to the daemon.
DESCRIPTORS = 2


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Load this part of a model; answered. model: packed by the framework's backend, for itself.

    log_json: as the leader logs.
    """

    rank: int
    ranks: int
    model: bytes
    log_json: bool = False


class Join(msgspec.Struct, frozen=True, tag=True):
    """Meet the other ranks, by this file; answered."""

    file: str


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Make the page tensor; answered."""

    pages: int


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A `Slice`, of which a rank need not know how a token is drawn. tokens: uint32; pages: int32."""

    tokens: bytes
    start: int
    pages: bytes
    sampled: bool


class Compute(msgspec.Struct, frozen=True, tag=True):
    """One forward pass; not answered, as all ranks end it together."""

    rows: list[Row]


class SlotName(msgspec.Struct, frozen=True, array_like=True):
    """A slot of the arena, in one life."""

    slot: int
    generation: int


class Connect(msgspec.Struct, frozen=True, tag=True):
    """The node's arena, whose descriptors come beside this; answered."""

    arena_bytes: int
    slots: int


class Disconnect(msgspec.Struct, frozen=True, tag=True):
    """Write no slot any more; answered when that is so."""


class Store(msgspec.Struct, frozen=True, tag=True):
    """`Copier.store`; answered."""

    pages: list[int]
    tokens: list[int]
    slots: list[SlotName]


class CopyOut(msgspec.Struct, frozen=True, tag=True):
    """`Copier.copy_out`; not answered. number: by which the leader knows what was copied."""

    number: int
    pages: list[int]
    tokens: list[int]


class StoreCopied(msgspec.Struct, frozen=True, tag=True):
    """`Copier.store_copied`; answered."""

    number: int
    rows: list[int]
    slots: list[SlotName]


class Load(msgspec.Struct, frozen=True, tag=True):
    """`Copier.load`; answered by its result."""

    slots: list[SlotName]
    pages: list[int]


Message = Begin | Join | Allocate | Compute | Connect | Disconnect | Store | CopyOut | StoreCopied | Load


class Answer(msgspec.Struct, frozen=True):
    """value: what the call has returned, if that is a number. refused: why it cannot be done, for a person; memory: it
    lacks memory.
    """

    value: int = 0
    refused: str = ""
    memory: bool = False


class RankRefused(ValueError):
    """A rank cannot do its part of what was asked; the text says what to do."""


class Channel:
    """One end of a socket pair: whole messages in their order, with descriptors beside them."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: Message | Answer, descriptors: Sequence[int] = ()) -> None:
        """Raises OSError: the other side is gone."""
        data = msgspec.msgpack.encode(message)
        data = SIZE.pack(len(data)) + data
        if descriptors:
            sent = socket.send_fds(self._socket, [data], list(descriptors))
            data = data[sent:]
        self._socket.sendall(data)

    def receive(self, kind: Any) -> tuple[Any, list[int]]:
        """The next message, of this type, and the descriptors that came with it. EOFError: the other side is gone."""
        head, descriptors = self._take(SIZE.size)
        data, _ = self._take(SIZE.unpack(head)[0])
        return msgspec.msgpack.decode(data, type=kind), descriptors

    def _take(self, size: int) -> tuple[bytearray, list[int]]:
        data, descriptors = bytearray(), []
        while len(data) < size:
            try:
                part, came, _, _ = socket.recv_fds(self._socket, size - len(data), DESCRIPTORS)
            except ConnectionError as error:
                raise EOFError from error
            if not part:
                raise EOFError
            data += part
            descriptors += came
        return data, descriptors

    def close(self) -> None:
        self._socket.close()


class Ranks:
    """The leader's side. Used from one thread.

    broken: why nothing can be computed any more. wake: a descriptor that is readable then.
    """

    def __init__(self, count: int, module: str) -> None:
        """Starts ranks 1 to count - 1: processes that run `main` of `module` with the descriptor of their socket."""
        self.count = count
        self.broken: str | None = None
        self.wake = os.eventfd(0)
        self._closing = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._channels: list[Channel] = []
        self._minders: list[threading.Thread] = []
        try:
            for rank in range(1, count):
                self._start(rank, module)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of ranks 1, 2, ..."""
        return [process.pid for _, process in sorted(self._processes.items())]

    def _start(self, rank: int, module: str) -> None:
        ours, theirs = socket.socketpair()
        started = threading.Event()
        failed: list[OSError] = []

        def mind() -> None:
            # A child is tied to the thread that forks it: so one that lives as long as the child does.
            name = f"rank {rank} of {os.getpid()}"
            tied = ("-P", "-m", "pyengine.child", "--parent", str(os.getpid()), "--name", name)
            try:
                process = self._processes[rank] = subprocess.Popen(
                    [sys.executable, *tied, module, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    # Ctrl-C is for the leader.
                    process_group=0,
                )
            except OSError as error:
                failed.append(error)
                started.set()
                return
            started.set()
            status = process.wait()
            if not self._closing:
                self._break(f"rank {rank} {_how(status)}")

        minder = threading.Thread(target=mind, name=f"rank-{rank}", daemon=True)
        minder.start()
        started.wait()
        theirs.close()
        self._channels.append(Channel(ours))
        if failed:
            raise failed[0]
        self._minders.append(minder)

    def _break(self, reason: str) -> None:
        if self.broken is None:
            self.broken = f"the model is spread over {self.count} processes, and {reason}"
            os.eventfd_write(self.wake, 1)

    def lost(self, error: BaseException | None = None) -> NoReturn:
        """Raises WorkerBroken: the ranks are not at the same place any more, or one is dead. error: how that showed."""
        for minder in self._minders:
            # Whoever breaks a connection by dying is dead in a moment; to know which and how is worth that.
            minder.join(0.2)
        self._break(f"its leader has failed: {error}")
        raise WorkerBroken(self.broken) from error

    def check(self) -> None:
        """Raises WorkerBroken if a rank is lost."""
        if self.broken is not None:
            raise WorkerBroken(self.broken)

    def tell(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Sends it to all ranks."""
        self.check()
        try:
            for channel in self._channels:
                channel.send(message, descriptors)
        except OSError as error:
            self.lost(error)

    def hear(self) -> list[int]:
        """The next answer of each rank. Raises what a rank says: MemoryError, RankRefused."""
        try:
            answers = [channel.receive(Answer)[0] for channel in self._channels]
        except EOFError as error:
            self.lost(error)
        for rank, answer in enumerate(answers, 1):
            if answer.refused:
                raise (MemoryError if answer.memory else RankRefused)(f"rank {rank}: {answer.refused}")
        return [answer.value for answer in answers]

    def begin(self, model: bytes) -> None:
        """Has each rank load its part of the model; `hear` then."""
        try:
            for rank, channel in enumerate(self._channels, 1):
                channel.send(Begin(rank, self.count, model, logs.is_json()))
        except OSError as error:
            self.lost(error)

    def close(self) -> None:
        """Ends all ranks; returns when they are gone. Idempotent."""
        self._closing = True
        for channel in self._channels:
            channel.close()
        for minder in self._minders:
            minder.join(END_WITHIN)
        for process in self._processes.values():
            process.kill()
        for minder in self._minders:
            minder.join()
        self._channels.clear()
        if self.wake >= 0:
            os.close(self.wake)
            self.wake = -1


def _how(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"has ended with status {status}"


@runtime_checkable
class Ranked(Protocol):
    """A backend whose model is spread over several processes. heads: what its own pages hold."""

    ranks: Ranks
    heads: Heads


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C is raised at the end of the block and not within, where the ranks are not at the same place."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)
