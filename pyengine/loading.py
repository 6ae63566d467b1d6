"""KV on its way in while its step goes on: layers of a long prefix are in their pages just before they are computed.

Without it the first step of a sequence begins when all its reused blocks are in pages. With it that takes as long as
the first layers do, and the rest is copied beside the step. The step begins on KV that nobody has verified yet: each
layer waits until its strips are, a strip that is not intact fails the step, and `KvMover` has the sequence start anew
without that block. Nobody else is told of its blocks before the whole prefix is verified.

One thread copies, one prefix after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Run
from concurrent.futures import Future, ThreadPoolExecutor

from pyengine.copier import Copier, Slot, layers_at_once
from pyengine.scheduler.types import KvSpec

#: Bytes that are copied and verified at once, at least: they take 0.6 ms, several times what it costs to hand them from
#: one thread to another, and its calls. What has less than two such parts is loaded whole.
PART_BYTES = 4 << 20
#: Parts that a prefix is loaded in, at most: a part is a call for each block, and 15 parts of 2,048 tokens of SmolLM2
#: cost half as much again as copying them whole.
PARTS = 8


class Unreadable(Exception):
    """A prefix that a step needs is not there, or not intact."""


class Loading:
    """Blocks of one sequence on their way into its pages.

    good: how many leading ones are intact as far as is known; once `join` has returned, for all layers. seconds: that
    copying took.
    """

    def __init__(self, slots: Run[Slot], pages: Run[int], spec: KvSpec, first_block: int = 0) -> None:
        """first_block: which block of its sequence the first is."""
        self._slots = slots
        self._pages = pages
        self._spec = spec
        self._first_block = first_block
        self._error: Exception | None = None
        self._every = max(layers_at_once(spec, len(slots), PART_BYTES), -(-spec.layers // PARTS))
        self._moved = threading.Condition()
        self._layers = 0
        self._over = False
        self._cancelled = False
        self._copying: Future[None] | None = None
        self.good = len(slots)
        self.seconds = 0.0

    def start(self, thread: ThreadPoolExecutor, copier: Copier) -> None:
        self._copying = thread.submit(self._copy, copier)

    @property
    def over(self) -> bool:
        return self._over

    @property
    def whole(self) -> bool:
        """All of it is in the pages, intact."""
        return self._layers == self._spec.layers

    def wait(self, layer: int) -> None:
        """Returns when this layer is in the pages. Raises Unreadable: it will not be."""
        with self._moved:
            self._moved.wait_for(lambda: self._layers > layer or self._over)
        if self._layers > layer:
            return
        block = self._first_block + self.good
        if self._error is not None:
            raise Unreadable(f"a reused prefix could not be loaded from block {block} on") from self._error
        raise Unreadable(f"block {block} of a reused prefix is not intact")

    def join(self) -> None:
        """Returns when nothing is copied any more. Raises what copying has raised."""
        assert self._copying is not None, "it was started"
        self._copying.result()

    def cancel(self) -> None:
        """Nobody needs it any more: returns when nothing is copied, soon."""
        assert self._copying is not None, "it was started"
        self._cancelled = True
        if self._copying.cancel():  # it waited for another, and never begins
            self._end()
        else:
            self._copying.exception()

    def _copy(self, copier: Copier) -> None:
        """On the thread."""
        began = time.monotonic()
        try:
            for first in range(0, self._spec.layers, self._every):
                part = range(first, min(first + self._every, self._spec.layers))
                good = 0 if self._cancelled else copier.load(self._slots, self._pages, part)
                if good < len(self._slots):
                    self.good = good
                    return
                with self._moved:
                    self._layers = part.stop
                    self._moved.notify_all()
        except Exception as error:
            self.good = 0
            self._error = error
            raise
        finally:
            self.seconds = time.monotonic() - began
            self._end()

    def _end(self) -> None:
        with self._moved:
            self._over = True
            self._moved.notify_all()


class Loader:
    """Owned by one mover."""

    def __init__(self, copier: Copier, spec: KvSpec) -> None:
        self._copier = copier
        self._spec = spec
        self._thread: ThreadPoolExecutor | None = None

    def gains(self, blocks: int) -> bool:
        """So many blocks are enough to be loaded beside their step."""
        return blocks > 0 and layers_at_once(self._spec, blocks, PART_BYTES) < self._spec.layers

    def begin(self, slots: Run[Slot], pages: Run[int], first_block: int = 0) -> Loading:
        """Has blocks copied into pages, layer by layer; first_block: which of its sequence the first is. The slots stay
        as they are until `join` or `cancel`.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "loading")
        loading = Loading(slots, pages, self._spec, first_block)
        loading.start(self._thread, self._copier)
        return loading

    def close(self) -> None:
        """Ends the thread, which is made again when there is something to load. Nothing may be under way."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
