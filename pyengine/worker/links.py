"""A worker's sockets, on a thread of their own: heartbeats go on while the loop computes a long step.

Work and aborts come in through `take`, tokens go out through `send`; both are queues with an eventfd beside them, so
either side can sleep. The thread knows which gateway sent which attempt, the loop does not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from pyengine.scheduler.links import bind, dial, link_is_up, monitor
from pyengine.scheduler.messages import (
    DEAD_AFTER,
    HEARTBEAT_EVERY,
    Abort,
    Codec,
    ConductorToWorker,
    Failed,
    GatewayPing,
    GatewayToWorker,
    Message,
    PagesChanged,
    ProtocolError,
    SetRole,
    Work,
    WorkerAlive,
    WorkerHello,
    WorkerLeaving,
    WorkerPing,
)
from pyengine.scheduler.types import WorkerInfo

logger = logging.getLogger(__name__)

Attempt = tuple[int, int]

#: Work that may wait for the loop, which takes it between two steps; more is refused here.
INBOX = 8192


class WorkerLinks(threading.Thread):
    """Binds info.work for gateways and dials the conductor.

    failed: what ended the thread, if it ended by an error; the worker is useless then.

    Args:
        info: sent to the conductor whenever the link to it stands anew.
        alive: makes the heartbeat; called on this thread twice a second.
    Raises LinkError from the constructor if the endpoint cannot be bound.
    """

    def __init__(self, info: WorkerInfo, conductor: str, session_key: bytes, alive: Callable[[], WorkerAlive]) -> None:
        super().__init__(name="links", daemon=True)
        self.info = info
        self.arrived = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._alive = alive
        self._in: deque[Work | Abort | SetRole] = deque()
        self._out: deque[Message] = deque()
        self._over: deque[Attempt] = deque()
        self._hello = False
        self._told: deque[PagesChanged] = deque()
        #: The conductor knows nothing of this worker's pages: a link stands anew, or did not take what was said.
        self._pages_unknown = False
        self._stopping = False
        self.failed: Exception | None = None
        self._gateways: dict[bytes, float] = {}
        self._owner: dict[Attempt, bytes] = {}
        self._codec = Codec(GatewayToWorker)
        self._orders = Codec(ConductorToWorker)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        router = context.socket(zmq.ROUTER)
        router.router_mandatory = True
        self._router = bind(router, info.work, session_key)
        self._context = context
        self._conductor_at = conductor
        self._session_key = session_key
        self._dial_conductor()

    # -- the loop's side ------------------------------------------------------------------------------------------

    def take(self) -> list[Work | Abort | SetRole]:
        """What has come from gateways and the conductor, in order. Never blocks; poll `arrived` to wait."""
        _drain(self.arrived)
        return [self._in.popleft() for _ in range(len(self._in))]

    def send(self, messages: list[Message], over: list[Attempt]) -> None:
        """To the gateways that own the attempts. over: attempts of which nothing will be said after these messages."""
        if messages or over:
            self._out.extend(messages)
            self._over.extend(over)
            os.eventfd_write(self._wake, 1)

    def take_unknown(self) -> bool:
        """Whether the conductor has to be told of all pages; once for each time that it has."""
        unknown, self._pages_unknown = self._pages_unknown, False
        return unknown

    def tell(self, changes: list[PagesChanged]) -> None:
        """To the conductor, after its WorkerHello. What cannot be said makes `take_unknown` true."""
        self._told.extend(changes)
        os.eventfd_write(self._wake, 1)

    def wake(self) -> None:
        """Makes `arrived` readable."""
        os.eventfd_write(self.arrived, 1)

    def announce(self, info: WorkerInfo) -> None:
        """The worker has changed (a new daemon, a new role): tells the conductor."""
        self.info = info
        self._hello = True
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Says goodbye to the conductor, closes all sockets, ends the thread."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self.join(DEAD_AFTER)

    # -- the thread -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            logger.exception("the links of %s have failed", self.info.worker)
            self.failed = error
            self.wake()
        finally:
            # The goodbye may still be in the socket's queue; a process that ends waits this long for it, at most.
            self._router.close(linger=200)
            self._close_conductor(linger=200)

    def _dial_conductor(self) -> None:
        dealer = self._context.socket(zmq.DEALER)
        self._watch = monitor(dealer)
        self._conductor = dial(dealer, self._conductor_at, self._session_key)
        self._conductor_up = False
        #: When it was dialled or lost: from then on it is tried.
        self._trying = time.monotonic()

    def _serve(self) -> None:
        poller = zmq.Poller()
        for socket in (self._router, self._conductor, self._watch, self._wake):
            poller.register(socket, select.POLLIN)
        due = time.monotonic()
        while not self._stopping:
            poller.poll(int(max(due - time.monotonic(), 0) * 1000))
            _drain(self._wake)
            self._watch_conductor()
            self._redial_conductor(poller)
            self._receive()
            self._send_out()
            self._tell_pages()
            if time.monotonic() >= due:
                due = time.monotonic() + HEARTBEAT_EVERY
                self._beat()
        self._tell_conductor(WorkerLeaving(worker=self.info.worker))

    def _watch_conductor(self) -> None:
        while self._watch.poll(0):
            self._conductor_up = link_is_up(recv_monitor_message(self._watch)["event"])
            self._trying = time.monotonic()
            if self._conductor_up:
                self._hello = True
        if self._hello and self._conductor_up:
            self._hello = False
            self._tell_conductor(WorkerHello(info=self.info))
            self._pages_unknown = True
            self.wake()
        while self._conductor.poll(0):
            frame = self._conductor.recv(zmq.NOBLOCK)
            try:
                # Every message is an order. There are few, but who sends many is not to fill the memory.
                self._in.extend(order for order in self._orders.decode(frame) if len(self._in) < INBOX)  # type: ignore[misc]
            except ProtocolError as error:
                logger.warning("the conductor sent what this worker cannot read: %s", error)
            self.wake()

    def _redial_conductor(self, poller: zmq.Poller) -> None:
        """A link that has not stood for DEAD_AFTER may be dead for good (`dial`): another socket tries afresh."""
        if self._conductor_up or time.monotonic() - self._trying <= DEAD_AFTER:
            return
        for socket in (self._conductor, self._watch):
            poller.unregister(socket)
        self._close_conductor(linger=0)
        self._dial_conductor()
        for socket in (self._conductor, self._watch):
            poller.register(socket, select.POLLIN)

    def _close_conductor(self, linger: int) -> None:
        self._conductor.disable_monitor()
        self._conductor.close(linger)
        self._watch.close()

    def _receive(self) -> None:
        while self._router.poll(0):
            identity, frame = self._router.recv_multipart(zmq.NOBLOCK)[:2]
            try:
                messages = self._codec.decode(frame)
            except ProtocolError as error:
                logger.warning("a gateway sent what this worker cannot read: %s", error)
                continue
            if identity not in self._gateways:
                self._gateways[identity] = time.monotonic()
                self._tell_gateway(identity, [self._ping()])
            self._gateways[identity] = time.monotonic()
            for message in messages:
                match message:
                    case Work() if len(self._in) >= INBOX:
                        reason = f"{INBOX} messages wait for the worker: try again later"
                        refused = Failed(
                            request=message.request,
                            attempt=message.attempt,
                            worker=self.info.worker,
                            kind="retry",
                            reason=reason,
                        )
                        self._tell_gateway(identity, [refused])
                    case Work():
                        self._owner[message.request, message.attempt] = identity
                        self._in.append(message)
                    case Abort():
                        self._owner.pop((message.request, message.attempt), None)
                        self._in.append(message)
                    case GatewayPing():
                        pass
        if self._in:
            self.wake()

    def _send_out(self) -> None:
        batches: dict[bytes, list[Message]] = {}
        # Taken first: what is said of an attempt was queued before its end.
        over = [self._over.popleft() for _ in range(len(self._over))]
        while self._out:
            message = self._out.popleft()
            identity = self._owner.get((message.request, message.attempt))  # type: ignore[attr-defined]
            if identity is not None:  # else it was aborted, or its gateway is gone
                batches.setdefault(identity, []).append(message)
        for attempt in over:
            self._owner.pop(attempt, None)
        for identity, messages in batches.items():
            self._tell_gateway(identity, messages)

    def _beat(self) -> None:
        now = time.monotonic()
        for identity, heard in list(self._gateways.items()):
            if now - heard > DEAD_AFTER:
                self._gateway_gone(identity, "silent")
            else:
                self._tell_gateway(identity, [self._ping()])
        self._tell_conductor(self._alive())

    def _ping(self) -> WorkerPing:
        return WorkerPing(worker=self.info.worker, incarnation=self.info.incarnation)

    def _tell_gateway(self, identity: bytes, messages: Sequence[Message]) -> None:
        try:
            self._router.send_multipart([identity, self._codec.encode(list(messages))], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # EHOSTUNREACH: disconnected. EAGAIN: it has not read ten thousand frames; tokens cannot be skipped.
            self._gateway_gone(identity, error.strerror)

    def _gateway_gone(self, identity: bytes, why: str) -> None:
        if self._gateways.pop(identity, None) is None:
            return
        lost = [attempt for attempt, owner in self._owner.items() if owner == identity]
        if lost:
            logger.warning("a gateway is gone (%s): aborting its %d requests", why, len(lost))
        for request, attempt in lost:
            del self._owner[request, attempt]
            self._in.append(Abort(request=request, attempt=attempt))
        self.wake()

    def _tell_pages(self) -> None:
        while self._told:
            if not self._tell_conductor(self._told.popleft()):
                # Whatever follows would be about what it does not know.
                self._told.clear()
                self._pages_unknown = True

    def _tell_conductor(self, message: Message) -> bool:
        """False: it was not said."""
        if not self._conductor_up:
            return False
        try:
            self._conductor.send(self._codec.encode([message]), zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("the conductor does not read: a message was dropped")
            return False
        return True


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(descriptor)
