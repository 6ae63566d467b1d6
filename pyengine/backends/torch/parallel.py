"""`Backend` on PyTorch in several processes, each with a part of every layer (tensor parallelism): the leader's side.

It is the backend of rank 0, which tells the other ranks before each step what to compute, and alone chooses tokens.
The other side: rank.py. What a rank has of the model, and how their results become one: part.py.
"""

from __future__ import annotations

import tempfile
import weakref
from pathlib import Path

import msgspec
import numpy as np
import torch

from pyengine.backend import Readable, Slice, Written
from pyengine.backends.torch.backend import TorchBackend
from pyengine.backends.torch.part import Group, Part
from pyengine.checkpoint import Checkpoint, ModelError
from pyengine.checkpoint.room import check_room, free_memory
from pyengine.kernels.inputs import Sequences
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
        self._check_once()  # what fails at the leader alone must fail before the ranks are told
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
        slices = [self._known(slice_) for slice_ in slices]
        self._check_pages(slices)
        with uninterrupted():
            self.ranks.tell(Compute([self._row(slice_) for slice_ in slices]))
            try:
                return super()._forward(slices, order)
            except Exception as error:  # noqa: BLE001 (wherever it stopped, the others are elsewhere)
                self.ranks.lost(error)

    def _known(self, slice_: Slice) -> Slice:
        """With the token that the step before has chosen for it: that one is over, and only the leader knows it."""
        if slice_.after is None:
            return slice_
        token = self._chosen[[slice_.after]].clamp(min=0)  # a step that has failed chose -1
        return msgspec.structs.replace(slice_, tokens=token.numpy(force=True).astype(np.uint32), after=None)

    def _check_pages(self, slices: list[Slice]) -> None:
        """Raises ValueError for pages that do not exist: what a rank finds wrong ends it, and with it the replica."""
        for slice_ in slices:
            told = Sequences.of([len(slice_.tokens)], [slice_.start + len(slice_.tokens)], [slice_.pages])
            told.check_pages(self._pages.shape[3], self.namespace.kv.block_tokens)

    def _row(self, slice_: Slice) -> Row:
        pages = -(-(slice_.start + len(slice_.tokens)) // self.namespace.kv.block_tokens)
        return Row(slice_.tokens.tobytes(), slice_.start, slice_.pages[:pages].tobytes(), slice_.sampling is not None)


def _end(group: Group, ranks: Ranks) -> None:
    group.close()
    ranks.close()
