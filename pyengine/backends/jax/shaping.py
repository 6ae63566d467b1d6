"""Shaping cut into calls of few shapes, and what is told of choices on its way to the host.

A call takes so many entries for each row of logits that one is enough for most steps; more are several calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from pyengine.backend import Shaping
from pyengine.kernels.inputs import Shapes
from pyengine.kernels.jax.padding import pad_shapes
from pyengine.scheduler.types import Logprobs

#: For each row of logits: the different tokens of an answer, or of a prompt of a page or two of text. A thousand rows
#: of padding cost what a thousandth of the logits of one would.
ENTRIES = 512

AS_IT_IS = Shaping()
NONE = slice(0, 0)


def shape_calls(shapings: Sequence[Shaping | None], rows: int, vocab: int) -> Iterator[Shapes]:
    """What is to be done to `rows` rows of logits, in this order. shapings: of the first rows."""
    shapes = Shapes.of([shaping or AS_IT_IS for shaping in shapings], vocab)
    most = ENTRIES * rows
    if not (len(shapes.seen) or len(shapes.ids) or len(shapes.masked)):
        return
    seen, ids = _cut(len(shapes.seen), most), _cut(len(shapes.ids), most)
    # All that is seen before anything is added; masks with all, as nothing that is added allows a token again.
    for part in seen[:-1]:
        yield _part(shapes, rows, part, NONE)
    yield _part(shapes, rows, seen[-1], ids[0])
    for part in ids[1:]:
        yield _part(shapes, rows, NONE, part)


def _cut(count: int, most: int) -> list[slice]:
    """At least one, maybe of nothing."""
    return [slice(first, first + most) for first in range(0, max(count, 1), most)]


def nothing_to_shape(rows: int, vocab: int) -> Shapes:
    """For a call that shapes nothing for anybody."""
    return _part(Shapes.of([], vocab), rows, NONE, NONE)


def _part(shapes: Shapes, rows: int, seen: slice, ids: slice) -> Shapes:
    own = replace(
        shapes,
        seen_rows=shapes.seen_rows[seen],
        seen=shapes.seen[seen],
        factors=shapes.factors[seen],
        rows=shapes.rows[ids],
        ids=shapes.ids[ids],
        add=shapes.add[ids],
    )
    return pad_shapes(own, rows, ENTRIES * rows)


class Told(NamedTuple):
    """Logprobs of the rows of one call, on their device. counts: by number of the slice, its row and how many of the
    likeliest it wants.
    """

    counts: dict[int, tuple[int, int]]
    arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array]

    def read(self) -> dict[int, Logprobs]:
        """By number of the slice."""
        chosen, ranks, ids, values = (np.asarray(array).tolist() for array in self.arrays)
        return {
            number: Logprobs(chosen[row], ranks[row], tuple(zip(ids[row][:count], values[row][:count], strict=True)))
            for number, (row, count) in self.counts.items()
        }
