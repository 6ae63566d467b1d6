"""From the host's view of a step to arrays of few sizes, so that few programs serve all steps. Numpy only."""

from __future__ import annotations

import numpy as np

from pyengine.kernels.inputs import Draws, Sequences, Shapes


def bucket(size: int, least: int = 1) -> int:
    """The next power of two, at least `least`: what is padded to it at most doubles."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def pad_sequences(sequences: Sequences, count: int, width: int, pages: int, page_tokens: int) -> Sequences:
    """`count` sequences with tables of `width` pages: those behind the given ones are not there.

    Raises ValueError if a sequence has too few pages, or names one that does not exist: kernels cannot.
    """
    sequences.check_pages(pages, page_tokens)
    more = count - len(sequences)
    assert more >= 0, f"{len(sequences)} sequences do not fit into {count}"
    tables = np.zeros((count, width), np.int32)
    kept = min(width, sequences.tables.shape[1])
    tables[: len(sequences), :kept] = sequences.tables[:, :kept]
    return Sequences(
        rows=np.pad(sequences.rows, (0, more), mode="edge"),
        lengths=np.pad(sequences.lengths, (0, more)),
        tables=tables,
    )


def pad_draws(draws: Draws, count: int) -> Draws:
    """`count` rows, those behind the given ones greedy; in the types that JAX computes with."""
    more = (0, count - len(draws))
    return Draws(
        temperature=np.pad(draws.temperature, more).astype(np.float32),
        min_p=np.pad(draws.min_p, more).astype(np.float32),
        top_k=np.pad(draws.top_k, more),
        top_p=np.pad(draws.top_p, more, constant_values=1.0).astype(np.float32),
        uniform=np.pad(draws.uniform, more).astype(np.float32),
    )


def pad_shapes(shapes: Shapes, count: int, entries: int) -> Shapes:
    """For `count` rows, with `entries` that are seen and as many to which something is added; those behind the given
    ones name no row, and neither do masks.
    """
    seen, ids, masks = (0, entries - len(shapes.seen)), (0, entries - len(shapes.ids)), (0, count - len(shapes.masked))
    return Shapes(
        seen_rows=np.pad(shapes.seen_rows, seen, constant_values=count),
        seen=np.pad(shapes.seen, seen),
        factors=np.pad(shapes.factors, seen, constant_values=1.0),
        rows=np.pad(shapes.rows, ids, constant_values=count),
        ids=np.pad(shapes.ids, ids),
        add=np.pad(shapes.add, ids),
        masked=np.pad(shapes.masked, masks, constant_values=count),
        masks=np.pad(shapes.masks, (masks, (0, 0))),
    )
