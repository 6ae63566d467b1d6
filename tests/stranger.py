"""Something else on a port where a peer of ours was: it answers whoever dials, and not in our protocol."""

from __future__ import annotations

import errno
import socket
import threading
import time

#: Seconds, generous: an event that takes longer never comes.
PATIENCE = 30.0

#: What strangers say. ZeroMQ ends a session for good after each of them: with a message, or without a word.
GREETINGS = {
    "another mechanism": b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32),
    "another protocol": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
}


class Stranger:
    """Listens on a port of 127.0.0.1 and greets whoever comes, until `leave`."""

    def __init__(self, port: int, greeting: bytes) -> None:
        self._listener = _listen(port)
        self._greeting = greeting
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Returns when somebody has come and has hung up, and the port is free again."""
        assert self._left.wait(PATIENCE), "nobody came"
        # Shut down, not closed: that ends `accept`, too.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                guest, _ = self._listener.accept()
            except OSError:
                return
            with guest:
                guest.settimeout(PATIENCE)
                try:
                    guest.sendall(self._greeting)
                    while guest.recv(4096):
                        pass
                except OSError:
                    pass
            self._left.set()


def _listen(port: int) -> socket.socket:
    """As soon as the port is free: ZeroMQ closes its sockets a little after it was told to."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise
            time.sleep(0.01)
