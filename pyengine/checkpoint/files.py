"""What processes share about files: digests that are remembered, and a lock."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path


def file_digest(path: Path, cache: Path) -> str:
    """BLAKE2b of a file's content, 16 bytes in hex; remembered in `cache` by path, size and modification time."""
    status = path.stat()
    location = str(path.resolve())
    known = [location, status.st_size, status.st_mtime_ns]
    memo = cache / "digests" / hashlib.blake2b(location.encode(), digest_size=16).hexdigest()
    with contextlib.suppress(FileNotFoundError, ValueError):
        *remembered, digest = json.loads(memo.read_text())
        if remembered == known:
            return str(digest)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    memo.parent.mkdir(parents=True, exist_ok=True)
    partial = memo.with_name(f"{memo.name}.{os.getpid()}")
    partial.write_text(json.dumps([*known, digest]))
    partial.rename(memo)
    return digest


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`, between processes; the kernel drops it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
