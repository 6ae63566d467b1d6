"""The shell around the conductor: sockets and reports become events, actions become frames. One thread, one loop.

gateways, workers --ZeroMQ ROUTER-->  events  --Conductor.on-->  actions  --> frames to gateways
daemons --sessions (ReportEndpoint)-->                                    --> orders to daemons
"""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path

import zmq

from pyengine import _native

from .conductor import Conductor
from .events import (
    Action,
    BlockDump,
    BlocksChanged,
    Cleared,
    DaemonGone,
    DaemonHeartbeat,
    DaemonHello,
    DaemonReport,
    Event,
    FromGateway,
    FromWorker,
    GatewayLost,
    OrderClear,
    OrderDump,
    OrderForget,
    OrderMembers,
    OrderReplicate,
    Replicated,
    SendToGateway,
    SendToWorker,
    TellMoved,
    Tick,
    WorkerLost,
)
from .links import bind
from .messages import (
    Clear,
    Codec,
    Explain,
    FindHot,
    GatewayAlive,
    GatewayHello,
    Message,
    OrderRole,
    PagesChanged,
    ProtocolError,
    Route,
    RouteEnded,
    ToConductor,
    WorkerAlive,
    WorkerHello,
    WorkerLeaving,
)
from .sharing import stranger
from .types import Node

logger = logging.getLogger(__name__)

#: Seconds between ticks: how much later than promised a silence may be noticed.
TICK_EVERY = 0.25
#: Frames taken in before answers go out.
FRAMES_AT_ONCE = 256


class Service:
    """Serves from construction to `close`, while `run` runs.

    Args:
        conductor: decides; only `run` touches it.
        listen: ZeroMQ endpoint for gateways and workers ("ipc://…", "tcp://127.0.0.1:*").
        daemons: "host:port" for daemons, port 0 for any.
        session_key: 32 bytes; who cannot prove it cannot connect over tcp, as gateway, worker or daemon.
        tls: daemons report over TLS.
    Raises LinkError or GiveUpError if it cannot listen.
    """

    def __init__(
        self, conductor: Conductor, listen: str, daemons: str, session_key: bytes, *, tls: bool = False
    ) -> None:
        self._conductor = conductor
        self._codec = Codec(ToConductor)
        self._empty = self._codec.encode([])
        self._gateways: dict[bytes, str] = {}
        self._identity: dict[str, bytes] = {}
        self._workers: dict[str, bytes] = {}
        self._outgoing: dict[str, list[Message]] = {}
        #: Link of which was said that it is ignored: once, and not with each heartbeat.
        self._stale = b""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        # Without it, a frame to a gateway that is gone would vanish.
        self._router.router_mandatory = True
        try:
            bind(self._router, listen, session_key)
            self._reports = _native.ReportEndpoint(daemons, session_key, tls=tls)
        except Exception:
            self._close_sockets()
            raise

    @property
    def endpoint(self) -> str:
        """Where gateways and workers dial in."""
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def daemons(self) -> str:
        """ "host:port" where daemons dial in."""
        return self._reports.address

    def run(self) -> None:
        """Serves until `stop`."""
        poller = zmq.Poller()
        for descriptor in (self._router, self._reports.fileno(), self._wake):
            poller.register(descriptor, zmq.POLLIN)
        due = time.monotonic()
        while not self._stopping:
            poller.poll(math.ceil(max(due - time.monotonic(), 0.0) * 1000))
            self._receive_frames()
            for report in self._reports.events():
                self._on(_report(report))
            now = time.monotonic()
            if now >= due:
                due = now + TICK_EVERY
                self._probe()
                self._on(Tick())
            self._flush()

    def stop(self) -> None:
        """Ends `run` soon. May be called from a signal handler or another thread."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Frees sockets and ports; after `run` has returned."""
        endpoint = self.endpoint
        self._reports.close()
        self._close_sockets()
        if endpoint.startswith("ipc://"):
            # ZeroMQ leaves the socket's file behind.
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def _close_sockets(self) -> None:
        self._router.close(linger=0)
        self._context.term()
        os.close(self._wake)

    # -- in --------------------------------------------------------------------------------------------------------

    def _receive_frames(self) -> None:
        for _ in range(FRAMES_AT_ONCE):
            try:
                identity, *rest = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                messages = self._codec.decode(rest[0] if rest else b"")
            except ProtocolError as error:
                logger.warning("refused a frame: %s", error)
                continue
            for message in messages:
                self._receive(identity, message)

    def _receive(self, identity: bytes, message: Message) -> None:
        match message:
            case WorkerHello():
                self._workers[message.info.worker] = identity
                self._on(FromWorker(message))
                if (reason := stranger(message.info, self._conductor.cluster.live())) is not None:
                    logger.warning("%s", reason)
            case WorkerAlive() | PagesChanged() | WorkerLeaving():
                if self._workers.get(message.worker, identity) != identity:
                    # These name no life: what an earlier one still says, or a second one of that name, is not its own.
                    self._of_another_life(message.worker, identity)
                    return
                if isinstance(message, WorkerLeaving):
                    self._workers.pop(message.worker, None)
                self._on(FromWorker(message))
            case GatewayHello():
                # A gateway that dials in anew has another identity: the old one is forgotten.
                self._gateways.pop(self._identity.get(message.gateway, b""), None)
                self._gateways[identity] = message.gateway
                self._identity[message.gateway] = identity
                self._on(FromGateway(message.gateway, message))
            case GatewayAlive() | Route() | RouteEnded() | Clear() | OrderRole() | Explain() | FindHot():
                gateway = self._gateways.get(identity)
                if gateway is not None:
                    self._on(FromGateway(gateway, message))

    def _of_another_life(self, worker: str, identity: bytes) -> None:
        if self._stale != identity:
            self._stale = identity
            logger.warning("worker %s has dialled in anew: what an earlier link says of it is ignored", worker)

    # -- out -------------------------------------------------------------------------------------------------------

    def _on(self, event: Event) -> None:
        for action in self._conductor.on(event, time.monotonic()):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        try:
            match action:
                case SendToGateway(gateway, message):
                    self._outgoing.setdefault(gateway, []).append(message)
                case SendToWorker(worker, message):
                    self._send_to_worker(worker, message)
                case OrderDump(node):
                    logger.info("asking %s for all its blocks", node)
                    self._reports.order_dump(node)
                case OrderMembers(node, members):
                    self._reports.order_members(node, [_address(member) for member in members])
                case OrderReplicate():
                    self._reports.order_replicate(
                        action.node, action.order, action.keys, action.parent, action.position, _address(action.source)
                    )
                case TellMoved(node, blocks, left):
                    self._reports.order_moved(node, blocks, left)
                case OrderClear(node, order, namespace, tenant):
                    logger.info("asking %s to clear %s", node, _whose(namespace, tenant))
                    self._reports.order_clear(node, order, namespace, tenant)
                case OrderForget(node, keys):
                    self._reports.order_forget(node, keys)
        except _native.RetryError as error:
            # The daemon has gone meanwhile; its DaemonGone is on the way.
            logger.info("an order could not be given: %s", error)

    def _send_to_worker(self, worker: str, message: Message) -> None:
        identity = self._workers.get(worker)
        if identity is not None:
            try:
                self._router.send_multipart([identity, self._codec.encode([message])], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                # If it is gone, `_probe` will say so; what it was to do is then nobody's.
                logger.warning("worker %s could not be told: %s", worker, error.strerror)

    def _probe(self) -> None:
        """Notices links that are gone. A ROUTER hears of no disconnect, but refuses to send to a peer that has left."""
        for worker, identity in list(self._workers.items()):
            try:
                self._router.send_multipart([identity, self._empty], zmq.NOBLOCK)
            except zmq.Again:
                pass  # it is there and does not read: its heartbeats tell how it is
            except zmq.ZMQError as error:
                logger.warning("worker %s is gone: %s", worker, error.strerror)
                del self._workers[worker]
                self._on(WorkerLost(worker))

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for gateway, messages in outgoing.items():
            identity = self._identity.get(gateway)
            if identity is None:
                continue
            try:
                self._router.send_multipart([identity, self._codec.encode(messages)], zmq.NOBLOCK)
            except zmq.Again:
                logger.warning("gateway %s does not read: %d messages dropped", gateway, len(messages))
            except zmq.ZMQError as error:
                logger.warning("gateway %s is gone: %s", gateway, error.strerror)
                del self._identity[gateway]
                self._gateways.pop(identity, None)
                self._on(GatewayLost(gateway))


def _address(node: Node) -> _native.NodeAddress:
    return _native.NodeAddress(node.node, node.address, node.incarnation)


def _whose(namespace: int | None, tenant: int | None) -> str:
    return f"tenant {tenant:016x}" if namespace is None else f"namespace {namespace:016x}"


def _report(report: _native.DaemonReport) -> DaemonReport:
    """The same report as plain data."""
    node = Node(report.node.node, report.node.address, report.node.incarnation)
    match report:
        case _native.DaemonHello():
            return DaemonHello(node, report.next_sequence)
        case _native.BlocksChanged():
            return BlocksChanged(node, report.sequence, report.changes)
        case _native.BlockDump():
            return BlockDump(node, report.sequence, report.part, report.blocks, report.last)
        case _native.DaemonHeartbeat():
            return DaemonHeartbeat(
                node, report.next_sequence, report.count, report.xor, report.counters, report.draining
            )
        case _native.Replicated():
            return Replicated(node, report.order, report.stored, report.missing)
        case _native.Cleared():
            return Cleared(node, report.order, report.dropped, report.held, report.durable)
        case _native.DaemonGone():
            return DaemonGone(node)
