"""The socket where clients knock. The launcher opens it and hands it to the gateway, so that a restarted gateway
finds the connections that came meanwhile. Several gateways each open one of their own at an address that the launcher
keeps.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket

from pyengine.config import ConfigError

log = logging.getLogger(__name__)

#: Connections the kernel keeps while nobody accepts.
BACKLOG = 2048
#: Seconds in which a client that is sent something must have taken some of it; then it is dropped. Longer than a phone
#: takes from one cell to the next, and no more than a reader that has stopped should hold a worker's pages for.
STALL = 60.0


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket. shared: several of this user's processes listen there, and the kernel deals out connections.

    Raises ConfigError when the address cannot be had, with what to do.
    """
    listener = _bound(host, port, shared)
    listener.listen(BACKLOG)
    return listener


def reserve(host: str, port: int) -> socket.socket:
    """A socket by which an address is kept for those that will listen there with `shared`; it takes no connection.

    Raises ConfigError as `listen`, also if others listen there so already.
    """
    with _bound(host, port, False) as free:
        port = free.getsockname()[1]
    return _bound(host, port, True)


def _bound(host: str, port: int, shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # Each connection inherits it: what a dropped client has left in its buffers is not sent for ever.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STALL))
    try:
        listener.bind((host, port))
    except (socket.gaierror, UnicodeError) as error:
        listener.close()
        raise ConfigError(f"there is no host {host!r}: choose another --host (127.0.0.1: this machine only)") from error
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            text = f"this machine has no address {host}: choose another --host (0.0.0.0: all it has)"
            raise ConfigError(text) from error
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port, or end what holds this one"
        ) from error
    return listener


def check_reach(listener: socket.socket, asks: bool, encrypted: bool) -> None:
    """Whether such a gateway may listen there; the log warns of keys that cross a network in the clear.

    asks: for API keys. encrypted: it speaks TLS. Raises ConfigError for one that other machines reach and asks for
    none.
    """
    host = listener.getsockname()[0]
    if ipaddress.ip_address(host).is_loopback:
        return
    if not asks:
        raise ConfigError(
            f"host {host}: other machines reach it, and there are no API keys, so whoever can reach it could use it: "
            "add a key first (pyengine keys add TENANT), or use --host 127.0.0.1"
        )
    if not encrypted:
        log.warning(
            "host %s: keys, prompts and answers cross the network in the clear, for whoever listens there; name a "
            "certificate (--tls-cert, --tls-key), or put a proxy in front that has one",
            host,
        )
