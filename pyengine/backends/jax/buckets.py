"""A step cut into calls of few shapes, as each shape is a program that XLA compiles. Numpy only.

    decode    1, 2, 4, .. rows, one for each sequence          all tokens that are computed alone
    prefill   16, 32, 64, .. rows of at most 8 sequences       all other tokens, one sequence after the other

How long sequences are, and how many pages they have, makes no program: tables are as wide as the longest sequence may
be, and attention's loops end where the lengths say. A step is one call of each kind, or more where it is larger than
the largest shape; a prompt's chunk may be cut between two calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyengine.backend import Shaping, Slice
from pyengine.kernels.inputs import Draws, Sequences
from pyengine.kernels.jax.padding import bucket, pad_draws, pad_sequences
from pyengine.sampling import draws
from pyengine.scheduler.types import SamplingParams

I32 = npt.NDArray[np.int32]

GREEDY = SamplingParams(temperature=0.0)
#: The fewest rows of prefill: a block. Fewer cost the same, as all weights are read anyway.
LEAST = 16
#: Sequences of a call of prefill. Each has logits of its last row: of 8, on a CPU, as dear as 4 more rows of SmolLM2.
TOGETHER = 8


@dataclass(frozen=True)
class Shape:
    """One program's: rows of tokens, and sequences."""

    decoding: bool
    rows: int
    sequences: int


@dataclass(frozen=True)
class Call:
    """What one program computes. Arrays as in `models.decoder.Batch`, in numpy. shapings: of its first sequences."""

    shape: Shape
    tokens: I32
    after: I32
    positions: I32
    slots: I32
    sequences: Sequences
    outputs: I32
    places: I32
    draws: Draws
    shapings: tuple[Shaping | None, ...] = ()


@dataclass(frozen=True)
class Buckets:
    """All shapes of one worker.

    tokens, sequences: what a step has at most; one of more tokens is cut. width: pages of the longest sequence;
    pages: that there are.
    """

    tokens: int
    sequences: int
    width: int
    pages: int
    block_tokens: int

    @property
    def slices(self) -> int:
        """Of one step at most: each has the place of its number where the chosen tokens are."""
        return bucket(self.sequences)

    @property
    def shapes(self) -> list[Shape]:
        """Every shape there is: so many programs are ever compiled."""
        rows = [1 << power for power in range(self.slices.bit_length())]
        prefill = [LEAST << power for power in range((bucket(self.tokens, LEAST) // LEAST).bit_length())]
        return [Shape(True, count, count) for count in rows] + [Shape(False, count, TOGETHER) for count in prefill]

    def calls(self, slices: list[Slice]) -> Iterator[Call]:
        """The calls of a step of at most `slices` slices, in the order in which they are to be computed."""
        single = [index for index, slice_ in enumerate(slices) if len(slice_.tokens) == 1]
        if single:
            count = bucket(len(single))
            yield self._call(Shape(True, count, count), slices, [(index, 0, 1) for index in single])
        pieces: list[tuple[int, int, int]] = []  # (slice, from, to)
        room = most = bucket(self.tokens, LEAST)
        for index, slice_ in enumerate(slices):
            done = 0 if len(slice_.tokens) != 1 else 1
            while done < len(slice_.tokens):
                if not room or len(pieces) == TOGETHER:
                    yield self._prefill(slices, pieces)
                    pieces, room = [], most
                end = min(len(slice_.tokens), done + room)
                pieces.append((index, done, end))
                room -= end - done
                done = end
        if pieces:
            yield self._prefill(slices, pieces)

    def empty(self, shape: Shape) -> Call:
        """A call of that shape that computes nothing for anybody."""
        rows, sequences = shape.rows, shape.sequences
        return Call(
            shape=shape,
            tokens=np.zeros(rows, np.int32),
            after=np.full(rows, -1, np.int32),
            positions=np.zeros(rows, np.int32),
            slots=np.full(rows, -1, np.int32),
            sequences=self._pad(Sequences.of([], [], []), sequences),
            outputs=np.zeros(sequences, np.int32),
            places=np.full(sequences, self.slices, np.int32),
            draws=pad_draws(draws([], []), sequences),
        )

    def _prefill(self, slices: list[Slice], pieces: list[tuple[int, int, int]]) -> Call:
        rows = bucket(sum(end - begin for _, begin, end in pieces), LEAST)
        return self._call(Shape(False, rows, TOGETHER), slices, pieces)

    def _call(self, shape: Shape, slices: list[Slice], pieces: list[tuple[int, int, int]]) -> Call:
        counts = [end - begin for _, begin, end in pieces]
        ends = [slices[index].start + end for index, _, end in pieces]
        positions = [np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)]
        used = [
            slices[index].pages[: -(-end // self.block_tokens)] for (index, *_), end in zip(pieces, ends, strict=True)
        ]
        slots = [
            pages[at // self.block_tokens] * self.block_tokens + at % self.block_tokens
            for pages, at in zip(used, positions, strict=True)
        ]
        sequences = Sequences.of(counts, ends, used)
        wanted = [slices[index].sampling if end == len(slices[index].tokens) else None for index, _, end in pieces]
        places = np.full(shape.sequences, self.slices, np.int32)
        for number, (index, *_) in enumerate(pieces):
            if wanted[number] is not None:
                places[number] = index
        padded = self._pad(sequences, shape.sequences)
        return Call(
            shape=shape,
            tokens=_padded([slices[index].tokens[begin:end] for index, begin, end in pieces], shape.rows),
            after=_padded([_after(slices[index], end - begin) for index, begin, end in pieces], shape.rows, -1),
            positions=_padded(positions, shape.rows),
            slots=_padded(slots, shape.rows, -1),
            sequences=padded,
            outputs=np.maximum(padded.rows[1:] - 1, 0).astype(np.int32),
            places=places,
            draws=pad_draws(draws([params or GREEDY for params in wanted], ends), shape.sequences),
            shapings=tuple(
                slices[index].shaping if params is not None else None
                for (index, *_), params in zip(pieces, wanted, strict=True)
            ),
        )

    def _pad(self, sequences: Sequences, count: int) -> Sequences:
        return pad_sequences(sequences, count, self.width, self.pages, self.block_tokens)


def _after(slice_: Slice, rows: int) -> I32:
    """Only a slice of one row may have it."""
    return np.full(rows, -1 if slice_.after is None else slice_.after, np.int32)


def _padded(parts: Sequence[npt.NDArray[np.integer]], size: int, fill: int = 0) -> I32:
    """One behind the other."""
    out = np.full(size, fill, np.int32)
    whole = np.concatenate(parts)
    out[: len(whole)] = whole
    return out
