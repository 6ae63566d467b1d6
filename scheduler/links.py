"""ZeroMQ sockets as this project uses them: a shell, shared by gateway, worker and conductor.

Within one host messages go over ipc in a directory that only the user may enter; over tcp every socket speaks CURVE
with key pairs derived from the session key, so who does not know the cluster secret cannot connect.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import stat
from pathlib import Path
from typing import Any, TypeVar

import zmq
from zmq.utils import z85

#: Messages queued per connection before the sender is told "would block": minutes of heartbeats, seconds of tokens.
HIGH_WATER = 10_000

S = TypeVar("S", bound="zmq.Socket[Any]")


class LinkError(ValueError):
    """An endpoint that cannot or must not be used; the text says what to do."""


def curve_pair(session_key: bytes, side: str) -> tuple[bytes, bytes]:
    """(public, secret) in Z85 for `side` "server" or "client"; everybody with the session key derives the same."""
    secret = hashlib.blake2b(side.encode(), key=session_key[:64], digest_size=32, person=b"pyengine-curve").digest()
    encoded: bytes = z85.encode(secret)
    return zmq.curve_public(encoded), encoded


def bind(socket: S, endpoint: str, session_key: bytes | None) -> S:
    """Binds a ROUTER. Raises LinkError: address in use, ipc directory open to others, no key beyond loopback."""
    _configure(socket)
    if endpoint.startswith("ipc://"):
        _check_directory(Path(endpoint.removeprefix("ipc://")).parent)
    elif endpoint.startswith("tcp://"):
        if session_key is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = curve_pair(session_key, "server")
        elif not _is_loopback(endpoint):
            raise LinkError(
                f"{endpoint} can be reached from other hosts: give a secret (--secret-file) or bind to 127.0.0.1"
            )
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        # Of a text that is no endpoint ZeroMQ's own says the arguments.
        odd = error.errno in (errno.EINVAL, errno.EPROTONOSUPPORT)
        what = "write ipc://PATH or tcp://HOST:PORT" if odd else f"{error.strerror}; is another instance running?"
        raise LinkError(f"cannot listen on {endpoint}: {what}") from error
    return socket


def dial(socket: S, endpoint: str, session_key: bytes | None) -> S:
    """Connects a DEALER; ZeroMQ goes on trying while nobody answers, so an absent server is no error.

    But once somebody answers who is no peer of ours (and has taken the port meanwhile, say), it ends the session for
    good and never tries again. So a link that has not stood for DEAD_AFTER must be dialled anew, with a new socket.
    """
    _configure(socket)
    socket.reconnect_ivl = 50
    socket.reconnect_ivl_max = 1000
    if endpoint.startswith("tcp://") and session_key is not None:
        socket.curve_serverkey, _ = curve_pair(session_key, "server")
        socket.curve_publickey, socket.curve_secretkey = curve_pair(session_key, "client")
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise LinkError(f"{endpoint} is not an endpoint: {error.strerror}") from error
    return socket


def monitor(socket: zmq.Socket[Any]) -> zmq.Socket[Any]:
    """A PAIR socket (asyncio if `socket` is) that tells when the connection of a DEALER comes and goes.

    Read it with zmq.utils.monitor.recv_monitor_message; `link_is_up` says what a message means.
    """
    watcher: zmq.Socket[Any] = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
    return watcher


def link_is_up(event: int) -> bool:
    """Meaning of a monitor message's "event": True the link stands, False it was lost."""
    return event == zmq.Event.HANDSHAKE_SUCCEEDED


def _configure(socket: zmq.Socket[Any]) -> None:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = HIGH_WATER


def _check_directory(directory: Path) -> None:
    try:
        status = directory.stat()
    except OSError as error:
        raise LinkError(f"the directory {directory} for ipc sockets cannot be used: {error.strerror}") from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise LinkError(f"others may enter {directory}: make it private (chmod 700) before it holds sockets")


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
