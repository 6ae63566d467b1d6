"""The gateway's ZeroMQ links: one DEALER to the conductor, one to each worker, on asyncio's loop.

A link watches itself: a disconnect event means down at once, DEAD_AFTER of silence means down and dialled anew. ZeroMQ
reconnects by itself, but not for ever (`links.dial`): a link that stays down is dialled anew every DEAD_AFTER. Nothing
queued for an earlier life of the peer reaches a later one (ZMQ_IMMEDIATE).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from pyengine.scheduler import links
from pyengine.scheduler.messages import DEAD_AFTER, HEARTBEAT_EVERY, Codec, Message, ProtocolError

log = logging.getLogger("pyengine.gateway")

#: Seconds a first connection may take before what waits for it is told that the peer is down.
DIAL_PATIENCE = 1.0
#: Messages that may wait for the first connection.
MAX_WAITING = 1024


class Link:
    """A DEALER that knows whether its peer is there.

    on_messages: what came, in order. on_change: True when the peer answers the handshake, False when it is lost (also
    when a first connection took longer than DIAL_PATIENCE). greeting: sent first on every connection. beat: sent every
    HEARTBEAT_EVERY seconds.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        session_key: bytes,
        codec: Codec,
        *,
        on_messages: Callable[[list[Any]], None],
        on_change: Callable[[bool], None],
        greeting: Message,
        beat: Message,
    ) -> None:
        self.endpoint = endpoint
        self.up = False
        self._context = context
        self._session_key = session_key
        self._codec = codec
        self._on_messages = on_messages
        self._on_change = on_change
        self._greeting = greeting
        self._beat = beat
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Message] | None = []
        self._closed = False
        self._complained = False
        self._since = time.monotonic()
        self._dial(self._since)

    def send(self, messages: Sequence[Message]) -> bool:
        """False: the peer is down (or takes nothing any more); nothing was sent."""
        if self._closed:
            return False
        if self.up:
            return self._transmit(list(messages))
        if self._waiting is None or len(self._waiting) + len(messages) > MAX_WAITING:
            return False
        self._waiting.extend(messages)
        return True

    def tick(self, now: float) -> None:
        """Heartbeats, silence, and a first connection that does not come. To be called every 100 ms or so."""
        if self._closed:
            return
        if not self.up:
            if self._waiting is not None and now - self._since > DIAL_PATIENCE:
                self._waiting = None
                self._on_change(False)
            if now - self._trying > DEAD_AFTER:
                self._hang_up()
                self._dial(now)
            return
        if now - self._heard > DEAD_AFTER:
            # If it is this process that was held up, the peer's messages are waiting in the socket.
            self._drain()
        if self.up and now - self._heard > DEAD_AFTER:
            log.warning("%s has been silent for %.0f s: dialling anew", self.endpoint, DEAD_AFTER)
            self._hang_up()
            self._dial(now)
            self._lost()
        elif now - self._sent >= HEARTBEAT_EVERY:
            self._transmit([self._beat])

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.up = False
            self._hang_up()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _dial(self, now: float) -> None:
        self._trying = self._heard = self._sent = now
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.immediate = True
        self._socket = socket
        self._monitor = links.monitor(socket)
        links.dial(socket, self.endpoint, self._session_key)
        self._loop.add_reader(socket.fileno(), self._drain)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        # ZeroMQ's descriptors are edge-triggered: what came before the reader was added must be looked for.
        self._loop.call_soon(self._watch)

    def _hang_up(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _transmit(self, messages: list[Message]) -> bool:
        try:
            self._socket.send(self._codec.encode(messages), zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._sent = time.monotonic()
        # Sending may swallow the edge that announced something to read.
        self._loop.call_soon(self._drain)
        return True

    def _drain(self) -> None:
        socket = self._socket
        while not self._closed and socket is self._socket:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard = time.monotonic()
            try:
                messages = self._codec.decode(frame)
            except ProtocolError as error:
                if not self._complained:
                    log.error("%s: %s", self.endpoint, error)
                self._complained = True
                continue
            self._on_messages(messages)

    def _watch(self) -> None:
        watcher = self._monitor
        while not self._closed and watcher is self._monitor:
            try:
                event = recv_monitor_message(watcher, zmq.NOBLOCK)
            except zmq.Again:
                return
            if links.link_is_up(event["event"]):
                self.up = True
                self._heard = time.monotonic()
                waiting, self._waiting = self._waiting or [], None
                self._transmit([self._greeting, *waiting])
                self._on_change(True)
            elif self.up:
                self._lost()

    def _lost(self) -> None:
        self.up = False
        self._trying = time.monotonic()
        self._on_change(False)
