"""RoPE, and KV into pages: a step of the grid for each token, in the order of slots.

The smallest part of a page that can be written is a tile of several tokens. So a page is read, one row of it replaced,
and written back; tokens of one page come one behind the other, and while they do it stays in VMEM.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from pyengine.kernels.jax.pallas import launch

Ref = Any


def rope_write(
    qkv: jax.Array,
    cache: jax.Array,
    layer: jax.Array | int,
    cosines: jax.Array,
    sines: jax.Array,
    slots: jax.Array,
    norms: tuple[jax.Array, jax.Array, float] | None = None,
) -> tuple[jax.Array, jax.Array]:
    tokens, all_heads, head_dim = qkv.shape
    kv_heads, page_tokens = cache.shape[2], cache.shape[4]
    heads = all_heads - 2 * kv_heads
    if not tokens:
        return qkv[:, :heads], cache
    order = jnp.argsort(slots).astype(jnp.int32)
    ordered = slots[order]
    # Those that are written nowhere come first, and look at the page of the first that is written.
    near = jnp.maximum(jnp.where(ordered < 0, ordered[jnp.argmax(ordered >= 0)], ordered), 0)
    scalars = (
        jnp.full(1, layer, jnp.int32),
        order,
        near // page_tokens,
        jnp.where(ordered < 0, -1, near % page_tokens),
    )

    def token(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, size, head_dim), lambda step, layer, order, page, offset: (order[step], 0, 0))

    page = pl.BlockSpec(
        (1, 2, kv_heads, 1, page_tokens, head_dim),
        lambda step, layer, order, page, offset: (layer[0], 0, 0, page[step], 0, 0),
    )
    weights = () if norms is None else (norms[0].reshape(1, -1), norms[1].reshape(1, -1))
    vector = pl.BlockSpec((1, head_dim), lambda step, layer, order, page, offset: (0, 0))
    # x * twice + (its halves exchanged) * turned is the rotation.
    twice = jnp.concatenate([cosines, cosines], axis=-1)[:, None, :]
    turned = jnp.concatenate([-sines, sines], axis=-1)[:, None, :]
    queries, cache = pl.pallas_call(
        functools.partial(_rope_write, heads=heads, kv_heads=kv_heads, eps=0.0 if norms is None else norms[2]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(tokens,),
            in_specs=[page, token(all_heads), token(1), token(1), *(vector for _ in weights)],
            out_specs=[token(heads), page],
        ),
        out_shape=[
            launch.result((tokens, heads, head_dim), qkv.dtype),
            launch.result(cache.shape, cache.dtype),
        ],
        input_output_aliases={4: 1},
        interpret=launch.interpreted(),
    )(*scalars, cache, qkv, twice, turned, *weights)
    return queries, cache


def _rope_write(
    layer: Ref,
    order: Ref,
    page: Ref,
    offset: Ref,
    old: Ref,
    qkv: Ref,
    twice: Ref,
    turned: Ref,
    *rest: Ref,
    heads: int,
    kv_heads: int,
    eps: float,
) -> None:
    """rest: query weight, key weight, or neither; queries; new, the page as it will be."""
    *weights, queries, new = rest
    step = pl.program_id(0)

    @pl.when((step == 0) | (page[step] != page[jnp.maximum(step - 1, 0)]))
    def _() -> None:
        new[...] = old[...]

    def rotated(x: jax.Array, weight: Ref | None) -> jax.Array:
        wide = x.astype(jnp.float32)
        if weight is not None:
            wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
            wide = (wide * weight[...].astype(jnp.float32)).astype(x.dtype).astype(jnp.float32)
        half = x.shape[-1] // 2
        exchanged = jnp.concatenate([wide[:, half:], wide[:, :half]], axis=-1)
        both: jax.Array = wide * twice[0] + exchanged * turned[0]
        return both.astype(x.dtype)

    rows = qkv[0]
    queries[0] = rotated(rows[:heads], weights[0] if weights else None)
    keys = rotated(rows[heads : heads + kv_heads], weights[1] if weights else None)
    values = rows[heads + kv_heads :]
    here = jax.lax.broadcasted_iota(jnp.int32, (kv_heads, *new.shape[4:]), 1) == offset[step]
    for which, written in enumerate((keys, values)):
        new[0, which, :, 0] = jnp.where(here, written[:, None, :], new[0, which, :, 0])
