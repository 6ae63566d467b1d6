"""Memory of pages before they are used: the kernel hands it out on a thread, ahead of whoever computes and copies.

The page tensor is memory that the kernel gives when it is first written (`pages.allocate`), and that costs more than
what is written: 94 MB, the KV of 2,048 tokens of SmolLM2, were copied into pages used before in 15 ms and into fresh
ones in 70, of which 50 in 23,000 page faults. It stood between the first token and the second of a hand-off.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

import torch

I32 = npt.NDArray[np.int32]

#: Bytes of pages that are ready beyond the last one used: KV of several thousand tokens, got in a tenth of a second.
#: The batcher hands fresh pages out in ascending order, so a worker has no more memory than it has used, and this.
AHEAD_BYTES = 256 << 20
#: madvise's MADV_POPULATE_WRITE (Linux 5.14): as if each page was written, but it keeps what others write meanwhile.
POPULATE_WRITE = 23

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Ahead:
    """Owned by one backend on a CPU.

    ready: pages below this one have their memory when `join` returns. A kernel that cannot give it ahead gives it at
    the first use, as it would without this.
    """

    def __init__(self, cache: torch.Tensor, ahead_bytes: int = AHEAD_BYTES) -> None:
        """cache: a page tensor, see `pages.allocate`."""
        self._cache = cache
        self._pages = cache.shape[3]
        page_bytes = cache.nbytes // self._pages
        self._ahead = max(ahead_bytes // page_bytes, 1)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.ready = 0
        self.used(())

    def used(self, tables: Iterable[I32]) -> None:
        """The pages in these are used from now on. Returns at once. On any thread."""
        with self._lock:
            self._used(tables)

    def _used(self, tables: Iterable[I32]) -> None:
        if self.ready == self._pages or (self._thread is not None and self._thread.is_alive()):
            return
        used = max((int(table.max(initial=-1)) for table in tables), default=-1)
        if self.ready - used <= self._ahead // 2:
            first, self.ready = self.ready, min(used + 1 + self._ahead, self._pages)
            self._thread = threading.Thread(target=self._get, args=(first, self.ready), name="pages", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Returns when no memory is asked for."""
        if self._thread is not None:
            self._thread.join()

    def _get(self, first: int, end: int) -> None:
        """A KV page lies in one place for each layer, for keys and values, and for each head."""
        for strips in self._cache.flatten(0, 2):  # [pages, block_tokens, head_dim]
            part = strips[first:end]
            begin = part.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            if _madvise(begin, part.data_ptr() + part.nbytes - begin, POPULATE_WRITE):
                return
