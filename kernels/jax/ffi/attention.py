"""Attention over pages as they lie (`rust/kernels`). Decode is the prefill of one token."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

import jax
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.jax.ffi.calls import call, integers, like


def prefill_attention(sequences: Sequences, rows: int, window: int | None = None) -> Paged:
    return Paged(integers(sequences.rows), integers(sequences.lengths), integers(sequences.tables), window or 0)


decode_attention = prefill_attention


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rows", "lengths", "tables"], meta_fields=["window"])
@dataclass(frozen=True)
class Paged:
    """The plan: what the host told. Blocks of rows and segments of keys are cut in each call, in some microseconds."""

    rows: jax.Array
    lengths: jax.Array
    tables: jax.Array
    window: int

    def __call__(self, query: jax.Array, cache: jax.Array, layer: jax.Array | int) -> jax.Array:
        attend = call("attend", like(query))
        attended: jax.Array = attend(
            query, cache, integers(layer), self.rows, self.lengths, self.tables, window=np.int64(self.window)
        )
        return attended
