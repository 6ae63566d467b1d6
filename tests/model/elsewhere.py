"""A backend in a process of its own: for what a process can be once, such as a CPU of several devices for JAX."""

from __future__ import annotations

import contextlib
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from pyengine.backend import U8, Deferred, Pending, Readable, Slice, Written
from pyengine.backends import load_backend
from pyengine.scheduler.types import Logprobs, Namespace

DESCRIPTION = (
    "model",
    "tokenizer",
    "namespace",
    "vocab_size",
    "max_positions",
    "eos_token_ids",
    "overlaps",
    "layerwise",
)


class Elsewhere:
    """Implements `pyengine.backend.Backend` by one in a child, which ends when it is closed or its parent is gone."""

    model: str
    tokenizer: str
    namespace: Namespace
    vocab_size: int
    max_positions: int
    eos_token_ids: frozenset[int]
    overlaps: bool
    layerwise: bool

    def __init__(self, name: str, model: str, cache: Path, tp: int) -> None:
        """Loads it, on one thread for each device. Raises what `load_backend` does."""
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, model, cache, tp), daemon=True)
        self._process.start()
        theirs.close()
        self.__dict__ |= self._hear()
        assert not self.layerwise, "no layer is told of across processes"

    def allocate(self, pages: int) -> None:
        self._ask("allocate", pages)

    def warm_up(self, max_tokens: int, max_sequences: int) -> None:
        self._ask("warm_up", max_tokens, max_sequences)

    def execute(self, slices: list[Slice]) -> list[int]:
        chosen: list[int] = self._ask("execute", slices)
        return chosen

    def submit(self, slices: list[Slice], written: Written | None = None, readable: Readable | None = None) -> Pending:
        number = self._ask("submit", slices)
        return Deferred(lambda: self._ask("tokens", number), lambda: self._ask("logprobs", number))

    def logits(self, slices: list[Slice]) -> Any:
        """float32 [sampled slices, vocab], for tests."""
        return self._ask("logits", slices)

    def read_pages(self, pages: list[int], out: U8, layers: range | None = None) -> None:
        out[:] = self._ask("read_pages", pages, out.shape, layers)

    def write_pages(self, pages: list[int], strips: U8, layers: range | None = None) -> None:
        self._ask("write_pages", pages, strips, layers)

    def close(self) -> None:
        self._pipe.close()
        self._process.join()

    def _ask(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        return self._hear()

    def _hear(self) -> Any:
        result = self._pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result


class Server:
    """The child's side of what cannot be passed on as it is."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._pending: list[Pending] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def submit(self, slices: list[Slice]) -> int:
        self._pending.append(self._backend.submit(slices, _never, _never))
        return len(self._pending) - 1

    def tokens(self, number: int) -> list[int]:
        return self._pending[number].tokens()

    def logprobs(self, number: int) -> list[Logprobs | None]:
        return self._pending[number].logprobs()

    def read_pages(self, pages: list[int], shape: tuple[int, ...], layers: range | None) -> U8:
        out = np.full(shape, 0xAB, np.uint8)
        self._backend.read_pages(pages, out, layers)
        return out


def _never(layer: int) -> None:
    raise AssertionError(f"it is not layerwise, and tells of layer {layer}")


def _serve(pipe: Connection, name: str, model: str, cache: Path, tp: int) -> None:
    try:
        backend = load_backend(name, model, cache=cache, threads=tp, tp=tp)
    except Exception as error:  # noqa: BLE001 (for the parent)
        pipe.send(error)
        return
    server = Server(backend)
    pipe.send({name: getattr(backend, name) for name in DESCRIPTION})
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = pipe.recv()
            try:
                pipe.send(getattr(server, name)(*arguments))
            except Exception as error:  # noqa: BLE001 (for the parent)
                pipe.send(error)
    backend.close()
