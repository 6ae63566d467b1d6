"""What is done to each token's row by itself: blocks of rows go through VMEM once."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from pyengine.kernels.jax.pallas import launch

Ref = Any


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, residual: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    tokens, width = x.shape
    if not tokens:
        return x, x
    size = launch.rows_of(tokens, 2 * 4 * width * x.dtype.itemsize)  # two buffers of x, residual, normed and stream
    rows = pl.BlockSpec((size, width), lambda block: (block, 0))
    vector = pl.BlockSpec((1, width), lambda block: (0, 0))
    like = launch.result(x.shape, x.dtype)
    operands = [weight.reshape(1, -1), x] + ([] if residual is None else [residual])
    outputs = [like] if residual is None else [like, like]
    results = pl.pallas_call(
        functools.partial(_rms_norm, eps=eps),
        grid=(pl.cdiv(tokens, size),),
        in_specs=[vector] + [rows] * (len(operands) - 1),
        out_specs=[rows] * len(outputs),
        out_shape=outputs,
        input_output_aliases={} if residual is None else {2: 1},
        interpret=launch.interpreted(),
    )(*operands)
    return results[0], x if residual is None else results[1]


def _rms_norm(weight: Ref, x: Ref, *rest: Ref, eps: float) -> None:
    """rest: normed; or residual, normed, stream."""
    stream = x[...]
    if len(rest) > 1:
        stream = (rest[0][...].astype(jnp.float32) + stream.astype(jnp.float32)).astype(stream.dtype)
        rest[2][...] = stream
    normed = rest[0] if len(rest) == 1 else rest[1]
    wide = stream.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    normed[...] = (wide * scale * weight[...].astype(jnp.float32)).astype(normed.dtype)


def swiglu(gate_up: jax.Array) -> jax.Array:
    tokens, both = gate_up.shape
    width = both // 2
    if not tokens:
        return gate_up[:, :width]
    aligned = width % launch.LANES == 0
    # The widest cut of a row that leaves room for 16 of them; up is the same array, some cuts further on.
    cut = width
    while aligned and cut % (2 * launch.LANES) == 0 and 16 * 2 * 3 * cut * gate_up.dtype.itemsize > launch.VMEM_BYTES:
        cut //= 2
    operands = (gate_up, gate_up) if aligned else tuple(jnp.split(gate_up, 2, axis=-1))
    further = width // cut if aligned else 0
    size = launch.rows_of(tokens, 2 * 3 * cut * gate_up.dtype.itemsize)
    result: jax.Array = pl.pallas_call(
        _swiglu,
        grid=(pl.cdiv(tokens, size), width // cut),
        in_specs=[
            pl.BlockSpec((size, cut), lambda row, column: (row, column)),
            pl.BlockSpec((size, cut), lambda row, column: (row, column + further)),
        ],
        out_specs=pl.BlockSpec((size, cut), lambda row, column: (row, column)),
        out_shape=launch.result((tokens, width), gate_up.dtype),
        interpret=launch.interpreted(),
    )(*operands)
    return result


def _swiglu(gate: Ref, up: Ref, out: Ref) -> None:
    wide = gate[...].astype(jnp.float32)
    out[...] = (wide / (1.0 + jnp.exp(-wide)) * up[...].astype(jnp.float32)).astype(out.dtype)
