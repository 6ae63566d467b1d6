"""Between pages and canonical strips, by layer and head range."""

from __future__ import annotations

import jax
import jax.numpy as jnp

ALL = slice(None)


def gather(cache: jax.Array, pages: jax.Array, layers: slice = ALL, heads: slice = ALL) -> jax.Array:
    return cache[layers, :, heads].at[:, :, :, pages].get(mode="clip").transpose(3, 0, 1, 2, 4, 5)


def scatter(
    cache: jax.Array, pages: jax.Array, strips: jax.Array, layers: slice = ALL, heads: slice = ALL
) -> jax.Array:
    check_strips(cache, pages, strips, layers, heads)
    page = jnp.where(pages < 0, cache.shape[3], pages)  # a page that does not exist: dropped
    blocks = strips.transpose(1, 2, 3, 0, 4, 5)
    return cache.at[layers, :, heads, page].set(blocks, mode="drop", unique_indices=True)


def check_strips(cache: jax.Array, pages: jax.Array, strips: jax.Array, layers: slice, heads: slice) -> None:
    """Raises ValueError if the strips are not of that range of the page tensor."""
    sizes = (len(range(*part.indices(size))) for part, size in ((layers, cache.shape[0]), (heads, cache.shape[2])))
    layer_count, head_count = sizes
    shape = (len(pages), layer_count, 2, head_count, *cache.shape[4:])
    if strips.shape != shape or strips.dtype != cache.dtype:
        raise ValueError(f"strips are {strips.shape} {strips.dtype}, the range is {shape} {cache.dtype}")
