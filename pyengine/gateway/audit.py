"""The audit log: who asked for what and when, one JSON object a line, and never a word of a prompt or an answer.

Lines are written by a thread, whole, to the end of the file (O_APPEND), so several gateways may share one and the loop
never waits for a disk. A full file is moved to FILE.1, that one to FILE.2 and so on; the oldest goes. What the disk
does not keep up with is dropped, and counted.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
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
        # Opened each time: whoever moves the file away, another gateway or logrotate, finds no more in it.
        try:
            file = self._open()
            try:
                os.write(file, b"".join(lines))
                full = os.fstat(file).st_size >= self._file_bytes
            finally:
                os.close(file)
            if full:
                self._rotate()
            self._failing = False
        except OSError as error:
            self.dropped += len(lines)
            if not self._failing:
                log.error("the audit log %s cannot be written: %s; lines are dropped", self._path, error.strerror)
            self._failing = True

    def _rotate(self) -> None:
        for number in range(OLDER_FILES, 0, -1):
            younger = Path(f"{self._path}.{number - 1}") if number > 1 else self._path
            if younger.exists():
                younger.replace(f"{self._path}.{number}")
