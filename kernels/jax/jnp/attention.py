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

#: Keys of a block, always as many: with 512, a step of 16 sequences of 40 tokens takes three times as long.
BLOCK = 128
#: Rows of a product, of all heads and tiles. For fewer XLA takes another loop, which sums in another order: with three
#: heads of 64 dimensions it did for 24, for 36 no more.
LEAST = 64
#: Rows of a tile of prefill.
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
    count, _, real, _ = queries.shape
    rows = max(real, -(-LEAST // (kv_heads * together)))
    width = max(1, BLOCK // page_tokens)  # pages of a block; of a narrow table too, as sums of fewer are other sums
    keys = width * page_tokens
    which, kv_head = jnp.arange(2).reshape(2, 1, 1, 1), jnp.arange(kv_heads).reshape(-1, 1, 1)
    scale = 1.0 / math.sqrt(head_dim)

    def padded(array: jax.Array, to: int, axis: int = 0, value: int = 0) -> jax.Array:
        more = [(0, 0)] * array.ndim
        more[axis] = (0, -array.shape[axis] % to)
        return jnp.pad(array, more, constant_values=value)

    tables = padded(padded(jnp.clip(tiles.tables, 0, pages - 1)[tiles.owners], width, 1), together)
    positions = jnp.repeat(padded(tiles.positions, together, value=-1), real // tiles.rows.shape[1], axis=1)
    positions = padded(positions, rows, 1, -1)
    begins, ends = padded(tiles.begins, together), padded(tiles.ends, together)
    queries = padded(padded(queries, together), rows, 2)

    def group(index: jax.Array, out: jax.Array) -> jax.Array:
        def own(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, index * together, together)

        query, table, position, begin, end = map(own, (queries, tables, positions, begins, ends))
        query = query.swapaxes(0, 1)  # [K, together, rows, D]

        def block(step: jax.Array, state: State) -> State:
            largest, total, sums = state
            page = jax.lax.dynamic_slice_in_dim(table, step * width, width, axis=1)
            # An index for every page of every head: they come in the order in which they are multiplied.
            gathered = from_pages(cache[layer, which, kv_head, page])  # [2, K, together, width, B, D]
            gathered = gathered.reshape(2, kv_heads, together, keys, head_dim)
            key = step * keys + jnp.arange(keys)
            there = (key >= begin[:, None]) & (key < end[:, None])  # what is not may be NaN
            values = jnp.where(there[..., None], gathered[1], jnp.zeros((), queries.dtype))
            scores = _product("krqd,krtd->krqt", query, gathered[0])
            seen = key <= position[:, :, None]
            if window is not None:
                seen &= key > position[:, :, None] - window
            scores = jnp.where(seen, scores * scale, -jnp.inf)
            new = jnp.maximum(largest, scores.max(axis=-1))
            base = jnp.where(new == -jnp.inf, 0.0, new)  # a row that has seen nothing so far
            weights = jnp.exp(scores - base[..., None])
            kept = jnp.exp(largest - base)
            more = _product("krqt,krtd->krqd", weights.astype(queries.dtype), values)
            return new, total * kept + weights.sum(axis=-1), sums * kept[..., None] + more

        shape = (kv_heads, together, rows)
        start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
        first = jnp.where(end > 0, begin, end.max()).min() // keys
        _, total, sums = jax.lax.fori_loop(first, -(-end.max() // keys), block, start)
        result = (sums / jnp.where(total == 0.0, 1.0, total)[..., None]).swapaxes(0, 1)
        return jax.lax.dynamic_update_slice_in_dim(out, result.astype(out.dtype), index * together, 0)

    groups = -(-tiles.count // together)
    result: jax.Array = jax.lax.fori_loop(0, groups, group, jnp.zeros_like(queries))
    return result[:count, :, :real]


def _product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """In float32. Of float32, all bits: accelerators take fewer unless they are told."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jnp.einsum(axes, a, b, precision=precision, preferred_element_type=jnp.float32)
