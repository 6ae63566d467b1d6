"""What is done to each token's row by itself: norm, rotation, activation. XLA makes one loop of each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from pyengine.kernels.jax.pages import to_pages


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, residual: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    stream = x if residual is None else residual + x
    wide = stream.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps) * weight.astype(jnp.float32)
    return normed.astype(x.dtype), stream


def rope_write(
    qkv: jax.Array,
    cache: jax.Array,
    layer: jax.Array | int,
    cosines: jax.Array,
    sines: jax.Array,
    slots: jax.Array,
    norms: tuple[jax.Array, jax.Array, float] | None = None,
) -> tuple[jax.Array, jax.Array]:
    kv_heads, pages, page_tokens = cache.shape[2:5]
    heads = qkv.shape[1] - 2 * kv_heads
    queries, keys, values = jnp.split(qkv, [heads, heads + kv_heads], axis=1)
    if norms is not None:
        queries, keys = rms_norm(queries, norms[0], norms[2])[0], rms_norm(keys, norms[1], norms[2])[0]
    queries, keys = _rotate(queries, cosines, sines), _rotate(keys, cosines, sines)
    written = to_pages(jnp.stack([keys, values], axis=1), cache)  # [T, 2, K, D]
    page = jnp.where(slots < 0, pages, slots // page_tokens)  # a page that does not exist: dropped
    cache = cache.at[layer, :, :, page, slots % page_tokens].set(written, mode="drop", unique_indices=True)
    return queries, cache


def swiglu(gate_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def _rotate(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosines[:, None, :], sines[:, None, :]
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)
