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
from pathlib import Path

from pyengine.limiter import Bucket, Usage


class SharedLedger:
    """The ledger of one of several gateways, a new life of which begins. folder: private to them; is made.

    gateways: how many there are; index: which this is. Raises OSError, as all its methods do.
    """

    def __init__(self, folder: Path, gateways: int, index: int) -> None:
        self._folder = folder
        self._index = index
        self._record = struct.Struct(f"<4d{gateways}I")
        self._own: dict[str, int] = {}
        folder.mkdir(mode=0o700, exist_ok=True)
        for file in folder.iterdir():
            with self._held(file) as usage:
                usage.own = 0

    @contextlib.contextmanager
    def usage(self, tenant: str) -> Iterator[Usage]:
        with self._held(self._folder / hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()) as usage:
            yield usage
        if usage.own:
            self._own[tenant] = usage.own
        else:
            self._own.pop(tenant, None)

    def own(self) -> dict[str, int]:
        return dict(self._own)

    def keep(self, names: set[str]) -> None:
        """Nothing is forgotten: another gateway may hold the file, which is small and gone when all have ended."""

    @contextlib.contextmanager
    def _held(self, file: Path) -> Iterator[Usage]:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
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
            os.close(descriptor)
