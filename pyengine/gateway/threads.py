"""Work that would hold up every stream, done beside the loop: long bodies parsed, long texts tokenized.

`tokenizers` releases the interpreter's lock; templates and JSON do not, but a thread that holds it gives it back every
few milliseconds. Short work stays on the loop: to hand it over can cost more than it takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pyengine.gateway.request import ErrorKind, RequestError

T = TypeVar("T")

#: Work of this size or less stays on the loop. Tokenizers make 1 to 4 MB/s of one thread: below 2 ms.
SHORT = 4096
#: Threads: one more than a long text needs, so that a short one need not wait for it.
THREADS = 2
#: What may wait or be under way: so many characters or bytes (four of the largest bodies), and so many pieces.
MAX_SIZE, MAX_PIECES = 64 << 20, 1024


class Threads:
    """A few threads with a bounded queue. Used from one loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="gateway-text")
        self._size = self._pieces = 0

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, which is as much as `size` characters or bytes. Raises RequestError when full."""
        if size <= SHORT:
            return work()
        if self._pieces and (self._size + size > MAX_SIZE or self._pieces >= MAX_PIECES):
            raise RequestError(ErrorKind.BUSY, "this gateway has more text to tokenize than it can hold", 1.0)
        self._size += size
        self._pieces += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        # Who waits may go; what has begun holds its place until it is over.
        future.add_done_callback(lambda _: self._over(size))
        return await asyncio.shield(future)

    def _over(self, size: int) -> None:
        self._size -= size
        self._pieces -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
