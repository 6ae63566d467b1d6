"""A network that is unkind when told: a relay between two processes' sockets that cuts, stalls and flips bits."""

from __future__ import annotations

import selectors
import socket
import threading

from tests.transfer.daemons import PATIENCE


class Link:
    """A TCP link to one address that can be cut: connections end, and new ones end at once until it is mended. It can
    stall, too: connections stand, and nothing passes until it is mended.
    """

    def __init__(self, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(listen)
        self._whole = threading.Event()
        self._whole.set()
        self._passing = threading.Event()
        self._passing.set()
        self._flips = 0
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            self._whole.clear()
            self.cuts += 1
            for each in self._open:
                # Its thread wakes up and closes it.
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue
        self._passing.set()

    def stall(self) -> None:
        self._passing.clear()

    def flip(self) -> None:
        """A bit of what passes next."""
        self._flips += 1

    def mend(self) -> None:
        self._whole.set()
        self._passing.set()

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near:
            try:
                far = socket.create_connection(self._target, timeout=PATIENCE)
            except OSError:
                return
            with far:
                with self._lock:
                    if not self._whole.is_set():
                        return
                    self._open |= {near, far}
                try:
                    self._forward(near, far)
                except OSError:
                    pass
                finally:
                    with self._lock:
                        self._open -= {near, far}

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        for each in (near, far):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with selectors.DefaultSelector() as selector:
            selector.register(near, selectors.EVENT_READ, far)
            selector.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in selector.select():
                    source, sink = key.fileobj, key.data
                    assert isinstance(source, socket.socket)
                    data = source.recv(1 << 18)
                    if not data:
                        return
                    self._passing.wait()
                    sink.sendall(self._spoilt(data))

    def _spoilt(self, data: bytes) -> bytes:
        with self._lock:
            if not self._flips:
                return data
            self._flips -= 1
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
