"""Usage of tenants that several gateways of one machine count together: one small file for each tenant, locked for the
microseconds in which one of them looks and counts.

    requests.missing, requests.at, tokens.missing, tokens.at (float64)   answers under way, of each gateway (uint32)

All see one clock, the machine's monotonic one. A gateway that dies holds no lock (the kernel lets go of it) and leaves
no file half written (one `write` of a hundred bytes); what it had under way counts until its next life begins, which
takes it back. Not for a directory on a network.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyengine.limiter import Bucket, Usage


@dataclass
class _Open:
    """A tenant's file, and its answers under way here."""

    descriptor: int
    answers: int = 0


class SharedLedger:
    """The ledger of one of several gateways, a new life of which begins. folder: private to them; is made.

    gateways: how many there are; index: which this is. Raises OSError, as all its methods do.
    """

    def __init__(self, folder: Path, gateways: int, index: int) -> None:
        self._folder = folder
        self._index = index
        self._record = struct.Struct(f"<4d{gateways}I")
        #: Tenants with answers under way here. That one has ended is counted though no file can be opened any more.
        self._own: dict[str, _Open] = {}
        folder.mkdir(mode=0o700, exist_ok=True)
        for file in folder.iterdir():
            descriptor = _opened(file)
            try:
                with self._locked(descriptor) as usage:
                    usage.own = 0
            finally:
                os.close(descriptor)

    @contextlib.contextmanager
    def usage(self, tenant: str) -> Iterator[Usage]:
        name = hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()
        file = self._own.pop(tenant, None) or _Open(_opened(self._folder / name))
        try:
            with self._locked(file.descriptor) as usage:
                yield usage
            file.answers = usage.own
        finally:
            if file.answers:
                self._own[tenant] = file
            else:
                os.close(file.descriptor)

    def own(self) -> dict[str, int]:
        return {name: file.answers for name, file in self._own.items()}

    def keep(self, names: set[str]) -> None:
        """Nothing is forgotten: another gateway may hold the file, which is small and gone when all have ended."""

    def close(self) -> None:
        """What is under way is never ended here; the next life takes it back."""
        while self._own:
            os.close(self._own.popitem()[1].descriptor)

    @contextlib.contextmanager
    def _locked(self, descriptor: int) -> Iterator[Usage]:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            usage, counts = Usage(), [0] * ((self._record.size - 32) // 4)
            # One of another length is of another number of gateways, which are gone.
            if len(data := os.pread(descriptor, self._record.size + 1, 0)) == self._record.size:
                requests, requests_at, tokens, tokens_at, *counts = self._record.unpack(data)
                usage.requests, usage.tokens = Bucket(requests, requests_at), Bucket(tokens, tokens_at)
                usage.own = counts[self._index]
                usage.others = sum(counts) - usage.own
            yield usage
            counts[self._index] = usage.own
            rates = (usage.requests.missing, usage.requests.at, usage.tokens.missing, usage.tokens.at)
            os.pwrite(descriptor, self._record.pack(*rates, *counts), 0)
            os.ftruncate(descriptor, self._record.size)
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _opened(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
