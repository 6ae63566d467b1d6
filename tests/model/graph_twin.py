"""The twin of `CudaRecorder` on a CPU: it computes anew what a graph would launch again.

What a graph would not have, it does not have either: every tensor that a recording makes is filled with garbage when it
is over, and again before each replay, as the memory belongs to all graphs; the result is overwritten by the next
replay of any of them; and a look at numbers on the device while something is recorded is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyengine.backend import Backend
from pyengine.backends.torch import TorchBackend
from pyengine.backends.torch.graphs import WARM_CALLS, Replay
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.torch.contract import Attend, Tables

#: Neither a token, a position nor a page, and no number that goes unnoticed in a sum.
GARBAGE = 2**30
#: What waits for the device to see numbers there.
LOOKS = tuple(
    getattr(torch.ops.aten, name).default for name in ("_local_scalar_dense", "item", "is_nonzero", "nonzero")
)


class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What PyTorch does inside is as it would be captured. made: the memory of all that came out of it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mask = func is torch.ops.aten.index.Tensor and any(
            getattr(index, "dtype", None) is torch.bool for index in args[1]
        )
        if func in LOOKS or mask:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        taken = {storage.data_ptr() for storage in storages_in((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for storage in storages_in(result):
            if storage.data_ptr() not in taken:  # neither a view nor written in place
                self.made.append(weakref.ref(storage))
        return result


def storages_in(value: Any) -> list[torch.UntypedStorage]:
    if isinstance(value, torch.UntypedStorage):
        return [value]
    if isinstance(value, torch.Tensor):
        return [value.untyped_storage()]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [storage for each in value for storage in storages_in(each)]


class GraphTwin:
    """A `Recorder`. inputs: tensors that every step fills before its replay; they are garbage after it."""

    def __init__(self) -> None:
        self.inputs: list[torch.Tensor] = []
        self.recordings = 0
        self.replays = 0
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        self._results: list[torch.Tensor] = []

    def record(self, compute: Callable[[], torch.Tensor]) -> Replay:
        for _ in range(WARM_CALLS):
            compute()
        with Watched() as watched:
            result = compute()
        self._made += watched.made
        result = result.clone()
        self._results.append(result)
        self.recordings += 1
        self._forget()

        def replay() -> torch.Tensor:
            self._forget()
            with Watched() as watched:
                computed = compute()
            result.copy_(computed)
            self._made += watched.made
            self.replays += 1
            for tensor in self.inputs:
                tensor.fill_(GARBAGE)
            return result

        return replay

    def memory(self) -> int:
        return 0

    def _forget(self) -> None:
        for reference in self._made:
            storage = reference()
            if storage is not None:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)
        self._made.clear()
        for tensor in self._results:
            tensor.fill_(torch.nan)


class Replayable:
    """Kernels whose plans the host makes, as if they could be captured: the host reads the tables at every layer."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def decode_tables(self, tables: Tables, kv: torch.Tensor, window: int | None = None) -> Attend:
        def attend(query: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            told = Sequences(*(tensor.numpy().copy() for tensor in (tables.rows, tables.lengths, tables.tables)))
            attend: Attend = self._kernels.decode_attention(told, kv, window)
            return attend(query, kv)

        return attend


def with_graphs(backend: Backend, sequences: int) -> GraphTwin:
    """Makes a backend on a CPU, which has its pages, decode through graphs of so many sequences at most."""
    assert isinstance(backend, TorchBackend)
    twin = GraphTwin()
    backend.recorder = twin
    if not hasattr(backend._model.kernels, "decode_tables"):
        backend._model.kernels = Replayable(backend._model.kernels)
    backend.warm_up(sequences, sequences)
    assert backend._graphs is not None and twin.recordings, "the twin records everything"
    told = backend._graphs.inputs
    twin.inputs = [told.numbers, told.lengths, told.tables]
    return twin
