"""The audit log: who asked for what and when, one JSON object a line, and never a word of a prompt or an answer.

Lines are written by a thread, whole, to the end of the file and under its lock, so several gateways may share one and
the loop never waits for a disk. A full file is moved to FILE.1, that one to FILE.2 and so on; the oldest goes. What the
disk does not keep up with is dropped, and counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pyengine.config import ConfigError

log = logging.getLogger("pyengine.gateway")

#: Bytes of one file, and files beside it: 1 GiB in all, five million requests.
FILE_BYTES = 64 << 20
OLDER_FILES = 15
#: Lines that wait for the disk: 10 s of a gateway that is very busy, some MB.
MAX_WAITING = 10_000


class AuditLog:
    """Raises ConfigError when it is made if the file cannot be written."""

    def __init__(self, path: Path, file_bytes: int = FILE_BYTES) -> None:
        self.dropped = 0
        self._path = path
        self._file_bytes = file_bytes
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING)
        self._encoder = msgspec.json.Encoder()
        self._failing = False
        try:
            os.close(self._open())
        except OSError as error:
            text = f"cannot write the audit log {path}: {error.strerror}; name a file that can be written (--audit-log)"
            raise ConfigError(text) from error
        self._thread = threading.Thread(target=self._write_for_ever, name="audit", daemon=True)
        self._thread.start()

    def put(self, line: dict[str, Any]) -> None:
        """Never blocks."""
        try:
            self._lines.put_nowait(self._encoder.encode(line) + b"\n")
        except queue.Full:
            self.dropped += 1

    def close(self, patience: float = 1.0) -> None:
        """Writes what waits, for at most `patience` seconds. Idempotent."""
        try:
            self._lines.put(None, timeout=patience)
        except queue.Full:
            return
        self._thread.join(patience)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._path, flags, 0o600)

    def _write_for_ever(self) -> None:
        over = False
        while not over:
            lines: list[bytes] = []
            line = self._lines.get()
            while line is not None:
                lines.append(line)
                try:
                    line = self._lines.get_nowait()
                except queue.Empty:
                    break
            over = line is None
            if lines:
                self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        try:
            with self._locked() as file:
                _append(file, lines)
                if os.fstat(file).st_size >= self._file_bytes:
                    self._rotate()
            self._failing = False
        except OSError as error:
            self.dropped += len(lines)
            if not self._failing:
                log.error("the audit log %s cannot be written: %s; lines are dropped", self._path, error.strerror)
            self._failing = True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, held against other gateways, so that one writes and one moves a full one away at a time."""
        # Opened each time: whoever moves the file away, another gateway or logrotate, finds no more in it.
        while True:
            file = self._open()
            try:
                # Not every file system of a network has locks: there it must do without.
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX)
                # It may have been moved while this one waited.
                if self._is_current(file):
                    yield file
                    return
            finally:
                os.close(file)

    def _is_current(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self._path.stat())
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        for number in range(OLDER_FILES, 0, -1):
            younger = Path(f"{self._path}.{number - 1}") if number > 1 else self._path
            if younger.exists():
                younger.replace(f"{self._path}.{number}")


def _append(file: int, lines: list[bytes]) -> None:
    """Takes from `lines` what it has written. Raises OSError; no half line is left in the file then."""
    data = memoryview(b"".join(lines))
    try:
        while data:
            # A disk that becomes full takes a part, and says so at the next call only.
            data = data[os.write(file, data) :]
        lines.clear()
    except OSError:
        written, count = sum(map(len, lines)) - len(data), 0
        while len(lines[count]) <= written:
            written -= len(lines[count])
            count += 1
        del lines[:count]
        if written:
            with contextlib.suppress(OSError):
                os.ftruncate(file, os.fstat(file).st_size - written)
        raise
