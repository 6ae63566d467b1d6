"""The socket where clients knock. The launcher opens it and hands it to the gateway, so that a restarted gateway
finds the connections that came meanwhile.
"""

from __future__ import annotations

import errno
import socket

from pyengine.config import ConfigError

#: Connections the kernel keeps while nobody accepts.
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError when the address cannot be had, with what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
    return listener
