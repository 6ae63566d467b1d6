"""Between pages and canonical strips: a page's heads of one layer go through VMEM, one launch for all."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from pyengine.kernels.jax.jnp.strips import check_strips
from pyengine.kernels.jax.pallas import launch

ALL = slice(None)
Ref = Any


def gather(cache: jax.Array, pages: jax.Array, layers: slice = ALL, heads: slice = ALL) -> jax.Array:
    layer, head = range(cache.shape[0])[layers], range(cache.shape[2])[heads]
    shape = (len(pages), len(layer), 2, len(head), *cache.shape[4:])
    if 0 in shape:
        return jnp.zeros(shape, cache.dtype)
    grid, of_pages, of_strips = _blocks(cache, len(pages), layer, head)
    strips: jax.Array = pl.pallas_call(
        _to_strips,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=grid, in_specs=[of_pages], out_specs=of_strips
        ),
        out_shape=launch.result(shape, cache.dtype),
        interpret=launch.interpreted(),
    )(jnp.maximum(pages, 0), jnp.arange(len(pages), dtype=jnp.int32), cache)
    return strips


def scatter(
    cache: jax.Array, pages: jax.Array, strips: jax.Array, layers: slice = ALL, heads: slice = ALL
) -> jax.Array:
    check_strips(cache, pages, strips, layers, heads)
    if 0 in strips.shape:
        return cache
    grid, of_pages, of_strips = _blocks(cache, len(pages), range(cache.shape[0])[layers], range(cache.shape[2])[heads])
    # A block that goes nowhere is another one once more: the same bytes to the same place.
    first = jnp.argmax(pages >= 0).astype(jnp.int32)
    sources = jnp.where(pages < 0, first, jnp.arange(len(pages), dtype=jnp.int32))

    def write(cache: jax.Array) -> jax.Array:
        written: jax.Array = pl.pallas_call(
            _to_pages,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=grid,
                in_specs=[of_strips, pl.BlockSpec(memory_space=pl.ANY)],
                out_specs=of_pages,
            ),
            out_shape=launch.result(cache.shape, cache.dtype),
            input_output_aliases={3: 0},
            interpret=launch.interpreted(),
        )(pages[sources], sources, strips, cache)
        return written

    result: jax.Array = jax.lax.cond((pages >= 0).any(), write, lambda cache: cache, cache)
    return result


def _blocks(
    cache: jax.Array, pages: int, layer: range, head: range
) -> tuple[tuple[int, int, int], pl.BlockSpec, pl.BlockSpec]:
    """The grid, layers x parts of the heads x blocks, and what a step of it sees of page tensor and strips."""
    size = math.gcd(head.start, len(head))  # the most heads at once for which the range begins and ends at a part
    _, _, _, _, page_tokens, head_dim = cache.shape
    return (
        (len(layer), len(head) // size, pages),
        pl.BlockSpec(
            (1, 2, size, 1, page_tokens, head_dim),
            lambda i, j, block, page, source: (layer.start + i, 0, head.start // size + j, page[block], 0, 0),
        ),
        pl.BlockSpec(
            (1, 1, 2, size, page_tokens, head_dim), lambda i, j, block, page, source: (source[block], i, 0, j, 0, 0)
        ),
    )


def _to_strips(page: Ref, source: Ref, pages: Ref, strips: Ref) -> None:
    strips[0, 0] = pages[0, :, :, 0]


def _to_pages(page: Ref, source: Ref, strips: Ref, cache: Ref, pages: Ref) -> None:
    pages[0, :, :, 0] = strips[0, 0]
