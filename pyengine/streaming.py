"""KV on its way out while its step goes on: strips of a layer leave when the layer is computed.

Without it the blocks of a chunk are copied out and sent when the whole step is over, and what the last chunk's take
stands between the first token and the second. With it only the last layers' strips are left then.

One thread copies: the framework computes without the GIL, and so does the copying. A step's blocks and slots are fixed
before it begins; `KvMover` chooses them, and commits them when the step has succeeded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Run
from concurrent.futures import Future, ThreadPoolExecutor

from pyengine._native import Slot, Tag
from pyengine.backend import Written
from pyengine.copier import Copier, layers_at_once
from pyengine.scheduler.types import KvSpec

#: Bytes that are copied and sent at once, at least: at 2 GB/s they take 0.5 ms, several times what it costs to hand
#: them to the thread and to tell the daemon of 32 blocks (0.1 ms). A chunk of less than two such parts leaves whole.
PART_BYTES = 1 << 20


@dataclasses.dataclass
class Stream:
    """Blocks of one sequence that one step completes, and where they go.

    end: tokens of the sequence that are computed then. Parallel: blocks (their number in the sequence), pages, tokens
    (positions that will be filled), slots, tags (of the grant of each slot in the own pool; none where the slots are
    the decode worker's own). to: the decode worker's grant, if the strips are to be pushed. layers: so many are stored.
    """

    end: int
    blocks: list[int]
    pages: list[int]
    tokens: list[int]
    slots: list[Slot]
    tags: list[Tag]
    to: Tag | None = None
    layers: int = 0


#: Sends some strips of a stream's blocks, `[first, end)` of each: called when they are in their slots.
Send = Callable[[Stream, int, int], None]


class Streamer:
    """Owned by one mover. Streams one step at a time."""

    def __init__(self, copier: Copier, spec: KvSpec, send: Send) -> None:
        self._copier = copier
        self._spec = spec
        self._send = send
        self._streams: Run[Stream] = ()
        self._every = 1
        self._told = 0
        self._copies: list[Future[None]] = []
        self._thread: ThreadPoolExecutor | None = None

    @property
    def streaming(self) -> bool:
        """Something of a step is still copied, or may be."""
        return bool(self._streams or self._copies)

    def parts(self, blocks: int) -> int:
        """In how many parts so many blocks would leave."""
        return self._spec.layers // self._layers(blocks)

    def begin(self, streams: Run[Stream]) -> Written:
        """Before a step. Returns what the backend tells of each layer, see `Backend.submit`."""
        assert not self._copies, "one step is streamed at a time"
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "streaming")
        self._streams = streams
        self._every = self._layers(sum(len(stream.blocks) for stream in streams))
        self._told = 0
        return self._written

    def join(self) -> None:
        """The step is over, well or not: returns when nothing is copied any more. Raises what copying has raised."""
        copies, self._copies, self._streams = self._copies, [], ()
        failed = [error for copy in copies if (error := copy.exception()) is not None]
        if failed:
            raise failed[0]

    def finish(self, stream: Stream) -> None:
        """Copies and sends what of a stream is left. Raises RetryError: the daemon is gone."""
        self._copy(stream, self._spec.layers)

    def close(self) -> None:
        """Ends the thread, which is made again when there is something to stream."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _layers(self, blocks: int) -> int:
        """How many layers of so many blocks are a part."""
        return layers_at_once(self._spec, blocks, PART_BYTES)

    def _written(self, layer: int) -> None:
        """On the backend's thread. The last layers are left to `finish`: they would be waited for at once."""
        assert self._thread is not None, "begin was called"
        layers = layer + 1
        if layers - self._told >= self._every and layers < self._spec.layers:
            self._told = layers
            self._copies.append(self._thread.submit(self._copy_all, self._streams, layers))

    def _copy_all(self, streams: Run[Stream], layers: int) -> None:
        for stream in streams:
            self._copy(stream, layers)

    def _copy(self, stream: Stream, layers: int) -> None:
        """Up to this layer."""
        if stream.layers < layers:
            part = range(stream.layers, layers)
            self._copier.store(stream.pages, stream.tokens, stream.slots, part)
            strips = self._spec.strips_of(part)
            self._send(stream, strips.start, strips.stop)
            stream.layers = layers
