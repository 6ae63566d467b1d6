"""`Backend` on PyTorch in several processes, each with a part of every layer (tensor parallelism): the leader's side.

It is the backend of rank 0, which tells the other ranks before each step what to compute, and alone chooses tokens.
The other side: rank.py. What a rank has of the model, and how their results become one: part.py.
"""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path

import msgspec
import torch

from pyengine.backend import Readable, Slice, Written
from pyengine.backends.torch.backend import TorchBackend
from pyengine.backends.torch.part import Group, Part
from pyengine.checkpoint import Checkpoint, ModelError
from pyengine.checkpoint.room import check_room, free_memory
from pyengine.kernels.torch.choice import keeps
from pyengine.ranks import Allocate, Compute, Join, RankRefused, Ranks, Row, uninterrupted
from pyengine.scheduler.types import BLOCK_TOKENS

RANK = "pyengine.backends.torch.rank"


class Load(msgspec.Struct, frozen=True):
    """What a rank must know to load its part. threads: of each process."""

    checkpoint: Checkpoint
    block_tokens: int
    threads: int | None
    dtype: str


class ParallelTorchBackend(TorchBackend):
    """Rank 0, and the leader of the others. A rank that dies makes all it does raise WorkerBroken."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ranks: int,
        *,
        block_tokens: int = BLOCK_TOKENS,
        threads: int | None = None,
        dtype: str = "auto",
    ) -> None:
        """Starts the ranks, and loads the weights with them. threads: of all together. Raises ModelError also if the
        heads cannot be shared evenly.
        """
        part = Part(checkpoint.config, 0, ranks)
        if not torch.cuda.is_available():  # each has a device of its own there, and looks at that
            held = "float32" if dtype == "auto" else dtype
            if checkpoint.in_bfloat16 and keeps(torch.device("cpu"), getattr(torch, held), torch.bfloat16):
                held = "bfloat16"
            check_room(checkpoint.name, checkpoint.config, held, free_memory())
        each = max(1, (threads or torch.get_num_threads()) // ranks)
        self.heads = part.heads
        self.ranks = Ranks(ranks, RANK)
        try:
            # They read their weights while this one reads its own.
            self.ranks.begin(msgspec.msgpack.encode(Load(checkpoint, block_tokens, each, dtype), enc_hook=str))
            super().__init__(checkpoint, block_tokens=block_tokens, threads=each, dtype=dtype, part=part)
            self._hear()
            self._meet()
        except BaseException:
            self.ranks.close()
            raise
        # At the end of the process too: gloo's threads must not outlive the interpreter.
        self._end = weakref.finalize(self, _end, self._model.group, self.ranks)
        #: A step is begun by all ranks, when the leader waits for it.
        self.overlaps = False
        #: While a step runs the ranks hear of nothing else, such as layers to be copied.
        self.layerwise = False

    def _meet(self) -> None:
        with tempfile.TemporaryDirectory(prefix="pyengine-ranks-") as folder:
            file = str(Path(folder) / "store")
            self.ranks.tell(Join(file))
            try:
                self._model.group.meet(file)
            except RuntimeError as error:
                self.ranks.lost(error)
            self._hear()

    def _hear(self) -> None:
        try:
            self.ranks.hear()
        except RankRefused as error:
            raise ModelError(str(error)) from error

    def allocate(self, pages_wanted: int) -> None:
        self.ranks.tell(Allocate(pages_wanted))
        try:
            super().allocate(pages_wanted)
        finally:
            self.ranks.hear()

    def close(self) -> None:
        super().close()
        self._end()

    def _forward(
        self,
        slices: list[Slice],
        order: list[int],
        written: Written | None = None,
        readable: Readable | None = None,
    ) -> torch.Tensor:
        with uninterrupted():
            self.ranks.tell(Compute([self._row(slice_) for slice_ in slices]))
            try:
                return super()._forward(slices, order)
            except Exception as error:  # noqa: BLE001 (wherever it stopped, the others are elsewhere)
                self.ranks.lost(error)

    def _row(self, slice_: Slice) -> Row:
        assert slice_.after is None, "nothing is submitted behind a step that is not over"
        pages = -(-(slice_.start + len(slice_.tokens)) // self.namespace.kv.block_tokens)
        return Row(slice_.tokens.tobytes(), slice_.start, slice_.pages[:pages].tobytes(), slice_.sampling is not None)


def _end(group: Group, ranks: Ranks) -> None:
    group.close()
    ranks.close()
