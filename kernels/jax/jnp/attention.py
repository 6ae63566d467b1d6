"""Attention over paged KV in loops of XLA: blocks of keys are gathered, and folded into a softmax that is never whole.

Trip counts are traced: work follows the lengths, not the padding, and no [T, T] is made. Every sequence's keys are cut
into blocks at the same positions, whatever else is in the batch, and blocks that a row does not see change nothing.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.jax.pages import from_pages
from pyengine.kernels.jax.tiles import Tiles, decode_tiles, prefill_tiles

#: Keys of a block, and rows of a tile of prefill: scores of nine heads are 2.4 MB of float32.
BLOCK = 512
ROWS = 128
#: Sequences that are decoded at once, while the longest of them has keys: neighbours should be of similar length.
DECODED = 8

State = tuple[jax.Array, jax.Array, jax.Array]


def prefill_attention(sequences: Sequences, rows: int, window: int | None = None) -> Flash:
    return Flash(prefill_tiles(sequences, rows, min(ROWS, max(rows, 1)), window), 1, window)


def decode_attention(sequences: Sequences, rows: int, window: int | None = None) -> Flash:
    return Flash(decode_tiles(sequences, rows, window), min(DECODED, max(len(sequences), 1)), window)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tiles"], meta_fields=["together", "window"])
@dataclass(frozen=True)
class Flash:
    """The plan: together is how many tiles are computed at once."""

    tiles: Tiles
    together: int
    window: int | None

    def __call__(self, query: jax.Array, cache: jax.Array, layer: jax.Array | int) -> jax.Array:
        if not len(query):
            return query
        queries = self.tiles.take(query, cache.shape[2])
        return self.tiles.give(_flash(queries, cache, layer, self.tiles, self.together, self.window), query.shape[1])


def _flash(
    queries: jax.Array, cache: jax.Array, layer: jax.Array | int, tiles: Tiles, together: int, window: int | None
) -> jax.Array:
    """queries: [n, K, M * (H / K), D], so is the result."""
    _, _, kv_heads, pages, page_tokens, head_dim = cache.shape
    count, _, rows, _ = queries.shape
    width = max(1, min(BLOCK // page_tokens, tiles.tables.shape[1]))  # pages of a block
    keys = width * page_tokens
    precision = jax.lax.Precision.HIGHEST if queries.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    scale = 1.0 / math.sqrt(head_dim)

    def padded(array: jax.Array, to: int, axis: int = 0, value: int = 0) -> jax.Array:
        more = [(0, 0)] * array.ndim
        more[axis] = (0, -array.shape[axis] % to)
        return jnp.pad(array, more, constant_values=value)

    tables = padded(padded(jnp.clip(tiles.tables, 0, pages - 1), width, 1), together)
    positions = jnp.repeat(padded(tiles.positions, together, value=-1), rows // tiles.rows.shape[1], axis=1)
    begins, ends = padded(tiles.begins, together), padded(tiles.ends, together)
    queries = padded(queries, together)

    def group(index: jax.Array, out: jax.Array) -> jax.Array:
        def own(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, index * together, together)

        query, table, position, begin, end = map(own, (queries, tables, positions, begins, ends))

        def block(step: jax.Array, state: State) -> State:
            largest, total, sums = state
            page = jax.lax.dynamic_slice_in_dim(table, step * width, width, axis=1)
            gathered = from_pages(cache[layer, :, :, page])  # [together, width, 2, K, B, D]
            gathered = gathered.transpose(2, 0, 3, 1, 4, 5).reshape(2, together, kv_heads, keys, head_dim)
            key = step * keys + jnp.arange(keys)
            there = (key >= begin[:, None]) & (key < end[:, None])  # what is not may be NaN
            values = jnp.where(there[:, None, :, None], gathered[1], jnp.zeros((), queries.dtype))
            scores = jnp.einsum(
                "rkqd,rktd->rkqt", query, gathered[0], precision=precision, preferred_element_type=jnp.float32
            )
            seen = key <= position[:, :, None]
            if window is not None:
                seen &= key > position[:, :, None] - window
            scores = jnp.where(seen[:, None], scores * scale, -jnp.inf)
            new = jnp.maximum(largest, scores.max(axis=-1))
            base = jnp.where(new == -jnp.inf, 0.0, new)  # a row that has seen nothing so far
            weights = jnp.exp(scores - base[..., None])
            kept = jnp.exp(largest - base)
            total = total * kept + weights.sum(axis=-1)
            more = jnp.einsum(
                "rkqt,rktd->rkqd",
                weights.astype(queries.dtype),
                values,
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            return new, total, sums * kept[..., None] + more

        shape = (together, kv_heads, rows)
        start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
        first = jnp.where(end > 0, begin, end.max()).min() // keys
        _, total, sums = jax.lax.fori_loop(first, -(-end.max() // keys), block, start)
        result = sums / jnp.where(total == 0.0, 1.0, total)[..., None]
        return jax.lax.dynamic_update_slice_in_dim(out, result.astype(out.dtype), index * together, 0)

    groups = -(-tiles.count // together)
    result: jax.Array = jax.lax.fori_loop(0, groups, group, jnp.zeros_like(queries))
    return result[:count]
