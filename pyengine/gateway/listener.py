"""The socket where clients knock. The launcher opens it and hands it to the gateway, so that a restarted gateway
finds the connections that came meanwhile.
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


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; the log warns of one that other machines reach, as the gateway asks nobody for a key.

    Raises ConfigError when the address cannot be had, with what to do.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Each connection inherits it: what a dropped client has left in its buffers is not sent for ever.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STALL))
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
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
    if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        log.warning(
            "host %s: whoever can reach this machine can use its models, for the gateway asks nobody for a key and "
            "speaks plain HTTP; put a proxy in front that does, or use --host 127.0.0.1",
            host,
        )
    return listener
