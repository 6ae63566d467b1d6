"""The seam between the engine loop and a framework: what a model must be able to do.

Implementations: `backends/torch`, `backends/jax`, and `backends/fake`, their twin for tests. All pass
tests/model/test_backend_conformance.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from pyengine.kernels.inputs import Shaping as Shaping
from pyengine.scheduler.types import Logprobs, Namespace, SamplingParams

#: In place of a token where a slice's shaping has left none to choose.
NOTHING_LEFT = -2

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]


class Slice(msgspec.Struct, frozen=True):
    """What one sequence computes in one step.

    tokens: uint32 [n], the input ids; start: position of the first; pages: int32, the sequence's pages in order, enough
    for start + n tokens. sampling: how to choose the next token after the last input, or None to choose none. KV of
    positions < start is in the pages, or written by the step before; KV of the n inputs is written by the step.
    after: the one input is what this row of the step before chooses, and `tokens` [1] only holds its place.
    shaping: what is done to the logits before, and told of them after the choice; None: nothing.
    """

    tokens: U32
    start: int
    pages: I32
    sampling: SamplingParams | None
    after: int | None = None
    shaping: Shaping | None = None


class WorkerBroken(RuntimeError):
    """The backend computes nothing any more: the process must end, so that its requests are retried elsewhere and a
    fresh one takes its place.
    """


#: Told of a layer whose KV of a step can be read, see `Backend.submit`.
Written = Callable[[int], None]
#: Asked before a step touches a layer's pages, see `Backend.submit`.
Readable = Callable[[int], None]


class Pending(Protocol):
    """A step that was submitted."""

    def tokens(self) -> list[int]:
        """Waits for the step and returns what `execute` does. Called once for each step, in the order of submission.

        Raises what went wrong in the step. What was submitted behind it has no meaning then.
        """
        ...

    def logprobs(self) -> list[Logprobs | None]:
        """After `tokens`: parallel to the slices, None for those that did not ask; may be empty if none did."""
        ...


class Deferred:
    """The step of a backend that does not overlap: it is computed when it is waited for.

    logprobs: of `Pending`; asked after `compute`.
    """

    def __init__(self, compute: Callable[[], list[int]], logprobs: Callable[[], list[Logprobs | None]] = list) -> None:
        self.tokens = compute
        self.logprobs = logprobs


class Backend(Protocol):
    """One loaded model and its pages. Not thread-safe: the worker's loop owns it.

    model: the name that clients ask for. tokenizer: argument of text.Tokenizer.load that fits it.
    overlaps: a submitted step goes on while the host does something else. Where both need the same cores it is False.
    layerwise: it asks for each layer before it computes it, and tells of it then, see `submit`.
    """

    model: str
    tokenizer: str
    namespace: Namespace
    vocab_size: int
    max_positions: int
    eos_token_ids: frozenset[int]
    overlaps: bool
    layerwise: bool

    def allocate(self, pages: int) -> None:
        """Makes the page tensor, once. Raises MemoryError saying how much was needed."""
        ...

    def warm_up(self, max_tokens: int, max_sequences: int) -> None:
        """Makes ready for steps of so many tokens and sequences at most: compiles what it would compile for them.

        May be left out, then the first steps pay. Called after `allocate`, while nobody has pages.
        """
        ...

    def execute(self, slices: list[Slice]) -> list[int]:
        """Runs one step over all slices; returns one token id per slice, -1 where `sampling` is None, NOTHING_LEFT
        where `shaping` forbids every token.

        The same tokens at the same positions give the same result whatever else is in the batch. Slices of one step
        never share a page that one of them writes, but for single tokens of one sequence behind each other, in order:
        each reads what those before it write. Sampling is greedy at temperature 0, else a counter-based draw from
        (seed, position of the new token). It is `submit(slices).tokens()`.
        """
        ...

    def submit(self, slices: list[Slice], written: Written | None = None, readable: Readable | None = None) -> Pending:
        """Begins a step, or takes it in: it is computed behind those before it, at the latest when it is waited for.

        Behind a step that nobody has waited for yet there is one other at most. Raises what it finds wrong at once; the
        rest `Pending.tokens` raises.

        written: called by a `layerwise` backend with 0, 1, ... when that layer's KV of the step can be read, on any
        thread; it returns at once. Others never call it.

        readable: called by a `layerwise` backend with 0, 1, ... before it reads or writes that layer's pages; it
        returns when they hold what they should. What it raises, the step raises. Not to be given to others.
        """
        ...

    def read_pages(self, pages: list[int], out: U8, layers: range | None = None) -> None:
        """Copies whole pages, or these layers of them, into canonical strips.

        out: uint8 [len(pages), strips, strip_bytes], the strips of these layers only; and of its own heads only, where
        each of several processes moves its own (`ranks.Ranked`, whose others group_copier.py asks).

        A step under way may read them, but writes none of them, but for layers that it has told of. Then it may be
        called on another thread than the loop's.
        """
        ...

    def write_pages(self, pages: list[int], strips: U8, layers: range | None = None) -> None:
        """Copies canonical strips into whole pages, or into these layers of them, which only a `layerwise` backend can.

        strips: uint8 [len(pages), strips, strip_bytes], as for `read_pages`.

        No step under way uses them, but for layers that it still has to ask for. With layers it may be called on
        another thread than the loop's.
        """
        ...

    def close(self) -> None:
        """Frees what it holds. A step under way is over then."""
        ...
