"""Decode steps as CUDA graphs: recorded once for each of few sizes, then each step is one launch.

A decode step of a small batch is hundreds of kernels of some microseconds each, which the host launches one by one: on
a GPU it is often bound by that. A graph is the launches, with their addresses: so what a step is told lies in `Inputs`,
in the same memory in every step, a batch is padded to the next size, and logits come to one place for each size. Rows
of padding have length 0 and slot -1: they see nothing and write nothing.

Source of the method: CUDA's stream capture, as `torch.cuda.CUDAGraph` has it. No GPU has run it yet. Tests run it with
a twin of `Recorder` that computes anew on a CPU (tests/model/graph_twin.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from pyengine.backends.torch.model import Model
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.torch.contract import DecodeTables, Tables
from pyengine.kernels.torch.upload import upload

logger = logging.getLogger(__name__)

#: Calls before a capture: in the first ones Triton compiles and tunes, and libraries make what they keep.
WARM_CALLS = 3
#: Tokens of a sequence while kernels are tuned, if one may be so long: with none there would be nothing to time.
TUNED_LENGTH = 2048

Replay = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Records what is launched, to launch it again. The twin of the one for CUDA is in tests/model/graph_twin.py."""

    def record(self, compute: Callable[[], torch.Tensor]) -> Replay:
        """compute: called some times, then once to be recorded. It may not look at numbers on the device, and all its
        tensors but what it makes itself must stay where they are.

        Returns what launches the same again and gives the tensor that `compute` gave, with what is in it then. It holds
        until the next replay of any recording. Raises whatever `compute` does, and RuntimeError where there is
        something in it that cannot be recorded.
        """
        ...

    def memory(self) -> int:
        """Bytes of the device that are free, to tell what recordings cost."""
        ...


class CudaRecorder:
    """CUDA's stream capture. All graphs have one pool of memory: a step's tensors are needed by one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], torch.Tensor]) -> Replay:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_CALLS):
                compute()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile, as long as this one does nothing forbidden.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def memory(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]


class Inputs:
    """What decode steps are told, on the device, for `sequences` of them at most with `width` pages each at most."""

    def __init__(self, sequences: int, width: int, device: torch.device) -> None:
        #: int64 [4, sequences]: tokens, positions, slots, lengths. One transfer brings them, with gaps between rows.
        self.numbers = torch.zeros((4, sequences), dtype=torch.int64, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.tables = torch.zeros((sequences, width), dtype=torch.int32, device=device)
        self.rows = torch.arange(sequences + 1, dtype=torch.int32, device=device)  # never changes
        self._device = device

    def fill(self, size: int, step: DecodeStep) -> None:
        """The first `size` rows: the step's sequences, then padding. Of the tables only what lengths ask for."""
        count, width = step.sequences.tables.shape
        numbers = np.zeros((4, size), np.int64)
        numbers[2] = -1
        numbers[0, :count] = step.tokens
        numbers[1, :count] = step.positions
        numbers[2, :count] = step.slots
        numbers[3, :count] = step.sequences.lengths
        self.numbers[:, :size] = upload(numbers, self._device)
        self.lengths[:size] = self.numbers[3, :size]
        self.tables[:count, :width] = upload(step.sequences.tables, self._device)

    def of(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Tables]:
        """tokens, positions, slots: int64 [size]; and what attention looks at."""
        tokens, positions, slots, _ = self.numbers[:, :size]
        return tokens, positions, slots, Tables(self.rows[: size + 1], self.lengths[:size], self.tables[:size])


class DecodeStep:
    """A decode step on the host: one token for each of S sequences. tokens, positions, slots: integers [S]."""

    def __init__(
        self,
        tokens: np.ndarray[tuple[int, ...], np.dtype[np.generic]],
        positions: np.ndarray[tuple[int, ...], np.dtype[np.generic]],
        slots: np.ndarray[tuple[int, ...], np.dtype[np.generic]],
        sequences: Sequences,
    ) -> None:
        assert len(tokens) == len(positions) == len(slots) == len(sequences), "one token for each sequence"
        self.tokens, self.positions, self.slots, self.sequences = tokens, positions, slots, sequences


class DecodeGraphs:
    """The graphs of one model over one page tensor."""

    def __init__(
        self, recorder: Recorder, model: Model, decode: DecodeTables, cache: torch.Tensor, sizes: list[int]
    ) -> None:
        """Records one for each size. cache: [layers, 2, K, P, B, D], whose pages nobody uses yet. Raises what
        `Recorder.record` does.
        """
        began, free = time.perf_counter(), recorder.memory()
        pages, page_tokens = cache.shape[3:5]
        self._sizes = sizes
        self._pages = int(pages), int(page_tokens)
        # A sequence has no more pages than there are, whatever the model could attend to.
        width = min(-(-model.config.max_positions // page_tokens), pages)
        self.inputs = Inputs(sizes[-1], width, cache.device)
        self._replays: dict[int, Replay] = {}
        # All read pages while kernels are tuned, as many as there are, and none of them the same if that is possible.
        length = min(width * page_tokens, model.config.max_positions, TUNED_LENGTH)
        tables = np.arange(sizes[-1] * -(-length // page_tokens)).reshape(sizes[-1], -1) % pages
        # The largest first: then the memory that it has is enough for all others.
        for size in reversed(sizes):
            zeros, nowhere = np.zeros(size, np.int64), np.full(size, -1)
            told = Sequences.of([1] * size, [length] * size, list(tables[:size].astype(np.int32)))
            self.inputs.fill(size, DecodeStep(zeros, zeros, nowhere, told))
            self._replays[size] = recorder.record(self._computing(model, decode, cache, size))
        cost, seconds = (free - recorder.memory()) / 2**20, time.perf_counter() - began
        logger.info(
            "decode: %d CUDA graphs, for 1 to %d sequences, captured in %.1f s, %.0f MiB of the device's memory",
            len(sizes), sizes[-1], seconds, cost,
        )  # fmt: skip

    def _computing(
        self, model: Model, decode: DecodeTables, cache: torch.Tensor, size: int
    ) -> Callable[[], torch.Tensor]:
        tokens, positions, slots, tables = self.inputs.of(size)

        def compute() -> torch.Tensor:
            attend = decode(tables, cache[0], model.config.window)
            return model.compute(tokens, positions, slots, attend, cache)

        return compute

    def holds(self, sequences: int) -> bool:
        """Whether there is a graph for so many."""
        return 0 < sequences <= self._sizes[-1]

    def run(self, step: DecodeStep, feed: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Queues a step that `holds`. Returns float32 logits [S, vocab], which the next step overwrites.

        feed: writes the tokens that are on the device only into the step's, int64 [S]. Raises ValueError for pages that
        do not exist.
        """
        step.sequences.check_pages(*self._pages)
        count = len(step.sequences)
        size = next(size for size in self._sizes if size >= count)
        self.inputs.fill(size, step)
        feed(self.inputs.numbers[0, :count])
        return self._replays[size]()[:count]


def sizes_up_to(sequences: int) -> list[int]:
    """For how many sequences there are graphs: 1, 2, 4, 8, 16, 24, ..., `sequences`.

    35 of them up to 256, and 16 for each doubling beyond: less than 8 rows, or than a 16th of them, is padding.
    """
    sizes, size = [1, 2, 4], 8
    while size < sequences:
        sizes.append(size)
        size += max(8, (1 << size.bit_length()) // 32)
    return [*(size for size in sizes if size < sequences), sequences]
