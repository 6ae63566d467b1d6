"""What is done to logits before a token is chosen, and told of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from pyengine.kernels.inputs import Shapes
from pyengine.kernels.jax.jnp.sampling import sum_of_blocks


def shape_logits(logits: jax.Array, shapes: Shapes) -> jax.Array:
    rows, vocab = logits.shape
    if 0 in logits.shape:
        return logits
    at = shapes.seen_rows, shapes.seen
    values = logits.at[at].get(mode="fill", fill_value=0.0)
    factors = jnp.asarray(shapes.factors)
    logits = logits.at[at].set(jnp.where(values > 0.0, values / factors, values * factors), mode="drop")
    logits = logits.at[shapes.rows, shapes.ids].add(shapes.add, mode="drop")
    # Words are few, so rows without a mask have one that allows all.
    every = jnp.full((rows, shapes.masks.shape[-1]), 0xFFFFFFFF, jnp.uint32)
    words = every.at[shapes.masked].set(shapes.masks, mode="drop")
    allowed = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.where(allowed.reshape(rows, -1)[:, :vocab] == 1, logits, -jnp.inf)


def logprobs(logits: jax.Array, tokens: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    rows, vocab = logits.shape
    if not rows:
        none = jnp.zeros((0, count))
        return none.sum(axis=-1), jnp.zeros(0, jnp.int32), none.astype(jnp.int32), none
    column = jnp.maximum(tokens, 0)[:, None]
    largest = logits.max(axis=-1, keepdims=True)
    scale = jnp.log(sum_of_blocks(jnp.exp(logits - largest)))[:, None]
    chosen = jnp.take_along_axis(logits, column, axis=-1)
    before = jnp.arange(vocab) < column
    ranks = 1 + ((logits > chosen) | ((logits == chosen) & before)).sum(axis=-1)
    # Of equal ones it takes the first, and would take 0 for larger than -0.
    _, ids = jax.lax.top_k(jnp.where(logits == 0.0, 0.0, logits), count)
    values = jnp.take_along_axis(logits, ids, axis=-1)
    return (chosen - largest - scale)[:, 0], ranks.astype(jnp.int32), ids, values - largest - scale
