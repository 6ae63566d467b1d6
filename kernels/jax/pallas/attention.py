"""Attention over paged KV for TPUs: a grid of tiles x KV heads x blocks of keys, one softmax through the blocks.

Pages come into VMEM by BlockSpecs that look their numbers up in the prefetched table, one for each page of a block, so
that Pallas fetches the next block's while this one is computed. Decode is the same kernel with tiles of one token. It
is not split over programs, as in Triton: a TensorCore runs one program at a time, and has a whole sequence in flight.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.jax.pallas import launch
from pyengine.kernels.jax.tiles import Tiles, decode_tiles, prefill_tiles

#: Keys of a block, if that needs no more than PARTS pages: 128 KiB of bfloat16 for keys of 128 dimensions.
BLOCK = 512
#: Pages of a block, each an operand of its own.
PARTS = 16
#: Tokens of a tile of prefill: with four query heads for each KV head 512 rows, and scores of 1 MiB.
ROWS = 128

Ref = Any


def prefill_attention(sequences: Sequences, rows: int, window: int | None = None) -> Flash:
    return Flash(prefill_tiles(sequences, rows, min(ROWS, max(rows, 1)), window), window)


def decode_attention(sequences: Sequences, rows: int, window: int | None = None) -> Flash:
    return Flash(decode_tiles(sequences, rows, window), window)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["tiles"], meta_fields=["window"])
@dataclass(frozen=True)
class Flash:
    """The plan."""

    tiles: Tiles
    window: int | None

    def __call__(self, query: jax.Array, cache: jax.Array, layer: jax.Array | int) -> jax.Array:
        if not len(query):
            return query
        queries = self.tiles.take(query, cache.shape[2])
        return self.tiles.give(_flash(queries, cache, layer, self.tiles, self.window), query.shape[1])


def _flash(queries: jax.Array, cache: jax.Array, layer: jax.Array | int, tiles: Tiles, window: int | None) -> jax.Array:
    """queries: [n, K, M * (H / K), D], so is the result."""
    _, _, kv_heads, pages, page_tokens, head_dim = cache.shape
    count, _, rows, _ = queries.shape
    parts = max(1, min(PARTS, BLOCK // page_tokens))
    keys = parts * page_tokens
    together = _heads_together(kv_heads, rows, keys, head_dim, cache.dtype.itemsize)
    positions = jnp.repeat(tiles.positions, rows // tiles.rows.shape[1], axis=1)[:, :, None]  # [n, rows, 1]
    scalars = (
        jnp.full(1, layer, jnp.int32),
        tiles.begins // keys,  # its first block
        jnp.maximum(tiles.ends - 1, 0) // page_tokens,  # its last page
        tiles.begins,
        tiles.ends,
        tiles.owners,
        jnp.clip(tiles.tables, 0, pages - 1),
    )

    def of_tile(size: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec(size, lambda tile, head, block, *_: (tile, head, 0, 0))

    def page(part: int) -> pl.BlockSpec:
        def index(tile: Any, head: Any, block: Any, layer: Ref, first: Ref, last: Ref, *rest: Ref) -> tuple[Any, ...]:
            _, _, owners, tables = rest
            wanted = jnp.minimum((first[tile] + block) * parts + part, last[tile])  # behind the last: fetched no more
            return (layer[0], 0, head, tables[owners[tile], wanted], 0, 0)

        return pl.BlockSpec((1, 2, together, 1, page_tokens, head_dim), index)

    result: jax.Array = pl.pallas_call(
        functools.partial(_kernel, parts=parts, window=window, scale=1.0 / math.sqrt(head_dim)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(count, kv_heads // together, pl.cdiv(tiles.tables.shape[1], parts)),
            in_specs=[
                of_tile((1, together, rows, head_dim)),
                pl.BlockSpec((1, rows, 1), lambda tile, head, block, *_: (tile, 0, 0)),
                *(page(part) for part in range(parts)),
            ],
            out_specs=of_tile((1, together, rows, head_dim)),
            scratch_shapes=[
                pltpu.VMEM((together, rows, 1), jnp.float32),
                pltpu.VMEM((together, rows, 1), jnp.float32),
                pltpu.VMEM((together, rows, head_dim), jnp.float32),
            ],
        ),
        out_shape=launch.result(queries.shape, queries.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=launch.interpreted(),
    )(*scalars, queries, positions, *(cache for _ in range(parts)))
    return result


def _heads_together(kv_heads: int, rows: int, keys: int, head_dim: int, itemsize: int) -> int:
    """KV heads of a step, a divisor of all: as many as fit into VMEM. Decode has too little to do with one."""
    lanes = -(-head_dim // launch.LANES) * launch.LANES
    padded = -(-rows // 16) * 16
    page_bytes = 2 * 2 * keys * lanes * itemsize  # k and v, two buffers
    row_bytes = padded * (2 * 2 * lanes * itemsize + lanes * 4 + 2 * launch.LANES * 4)  # queries, out; the state
    fit = max(1, launch.VMEM_BYTES // (page_bytes + row_bytes))
    return max(size for size in range(1, kv_heads + 1) if kv_heads % size == 0 and size <= fit)


def _kernel(
    layer: Ref,
    first: Ref,
    last: Ref,
    begins: Ref,
    ends: Ref,
    owners: Ref,
    tables: Ref,
    query: Ref,
    positions: Ref,
    *rest: Ref,
    parts: int,
    window: int | None,
    scale: float,
) -> None:
    """rest: the pages of a block; out; the largest score, the total and the sums of each row so far."""
    pages, (out, largest, total, sums) = rest[:parts], rest[parts:]
    tile, step = pl.program_id(0), pl.program_id(2)
    keys = parts * pages[0].shape[4]
    start = (first[tile] + step) * keys
    # Of float32 a TPU would multiply the first eight bits otherwise.
    precision = jax.lax.Precision.HIGHEST if query.dtype == jnp.float32 else jax.lax.Precision.DEFAULT

    @pl.when(step == 0)
    def _() -> None:
        largest[...] = jnp.full(largest.shape, -jnp.inf, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    @pl.when(start < ends[tile])
    def _() -> None:
        position = positions[0]  # [rows, 1]
        key = start + jax.lax.broadcasted_iota(jnp.int32, (1, keys), 1)
        seen = (key <= position) & (key < ends[tile]) & (key >= begins[tile])
        if window is not None:
            seen &= key > position - window
        down = start + jax.lax.broadcasted_iota(jnp.int32, (keys, 1), 0)
        there = (down < ends[tile]) & (down >= begins[tile])  # what is not may be NaN
        for head in range(query.shape[1]):
            all_keys = jnp.concatenate([page[0, 0, head, 0] for page in pages])
            values = jnp.concatenate([page[0, 1, head, 0] for page in pages])
            values = jnp.where(there, values, jnp.zeros((), values.dtype))
            scores = jax.lax.dot_general(
                query[0, head],
                all_keys,
                (((1,), (1,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            scores = jnp.where(seen, scores * scale, -jnp.inf)
            old = largest[head]
            new = jnp.maximum(old, scores.max(axis=-1, keepdims=True))
            base = jnp.where(new == -jnp.inf, 0.0, new)  # a row that has seen nothing so far
            weights = jnp.exp(scores - base)
            kept = jnp.exp(old - base)
            more = jax.lax.dot_general(
                weights.astype(values.dtype),
                values,
                (((1,), (0,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            largest[head] = new
            total[head] = total[head] * kept + weights.sum(axis=-1, keepdims=True)
            sums[head] = sums[head] * kept + more

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        everything = total[...]
        out[0] = (sums[...] / jnp.where(everything == 0.0, 1.0, everything)).astype(out.dtype)
