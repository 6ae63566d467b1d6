"""The file of API keys: changed by `pyengine keys`, read by gateways while they run.

It is replaced as a whole, under a lock beside it, so that no reader sees half of it and no two writers lose one
another's change. Its mode is 0600, although it holds digests only: it says who the tenants are and what they may have.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from pyengine.config import ConfigError
from pyengine.tenants import MAX_ENTRIES, Book, BookError

#: In a state directory.
NAME = "keys.json"
#: Bytes. Twice what a book of as many keys and tenants as may be takes.
MAX_BYTES = MAX_ENTRIES * 1024

T = TypeVar("T")
#: What tells one state of a file from the next: device, inode, size, time of change (ns), of its mode too; None: it is
#: not there.
Mark: TypeAlias = tuple[int, int, int, int] | None


def mark(path: Path) -> Mark:
    """Raises OSError for what is worse than a file that is not there."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def read_book(path: Path) -> Book:
    """The book in this file; an empty one if there is no file. Raises ConfigError, with what to do."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigError(f"the file of API keys {path} is open to others: chmod 600 it")
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Book()
    except OSError as error:
        raise ConfigError(f"cannot read the API keys {path}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"the file of API keys {path} is larger than {MAX_BYTES} bytes: name the right one")
    try:
        book = msgspec.json.decode(data, type=Book)
        book.check()
    except (msgspec.DecodeError, UnicodeDecodeError, BookError) as error:
        text = f"{path} is no file of API keys: {error}; change it with `pyengine keys` only, or restore it"
        raise ConfigError(text) from error
    return book


def change(path: Path, how: Callable[[Book], tuple[Book, T]]) -> T:
    """Replaces the book in this file by what `how` makes of it; returns what else `how` returns.

    Raises ConfigError if the file cannot be read or written, and what `how` raises: then nothing has changed.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path):
            book, result = how(read_book(path))
            _replace(path, msgspec.json.format(msgspec.json.encode(book), indent=1) + b"\n")
    except OSError as error:
        text = f"cannot keep the API keys in {path}: {error.strerror}; name a file that can be written (--keys-file)"
        raise ConfigError(text) from error
    return result


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Not the file itself: that is another one after each change.
    with open(os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600), "rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _replace(path: Path, data: bytes) -> None:
    # Made with mode 0600. What a writer that dies leaves behind is a draft, never half a book.
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
