"""What is done to each token's row by itself (`rust/kernels`)."""

from __future__ import annotations

from typing import Any

import numpy as np

import jax
from pyengine.kernels.jax.ffi.calls import call, integers, like, shaped


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, residual: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    if residual is None:
        (normed,) = call("rms_norm", (like(x),))(x, weight, eps=np.float32(eps))
        return normed, x
    normed, stream = call("rms_norm", (like(x), like(x)), {2: 1})(x, weight, residual, eps=np.float32(eps))
    return normed, stream


def swiglu(gate_up: jax.Array) -> jax.Array:
    rows, width = gate_up.shape
    result: jax.Array = call("swiglu", shaped((rows, width // 2), gate_up.dtype))(gate_up)
    return result


def rope_write(
    qkv: jax.Array,
    cache: jax.Array,
    layer: jax.Array | int,
    cosines: jax.Array,
    sines: jax.Array,
    slots: jax.Array,
    norms: tuple[jax.Array, jax.Array, float] | None = None,
) -> tuple[jax.Array, jax.Array]:
    pages = jax.ShapeDtypeStruct(cache.shape, cache.dtype)  # type: ignore[no-untyped-call]
    weights: tuple[jax.Array, ...] = ()
    settings: dict[str, Any] = {}
    if norms is not None:
        weights, settings = norms[:2], {"eps": np.float32(norms[2])}
    write = call("rope_write", (like(qkv), pages), {0: 0, 1: 1})
    turned, cache = write(qkv, cache, integers(layer), cosines, sines, integers(slots), *weights, **settings)
    return turned[:, : qkv.shape[1] - 2 * cache.shape[2]], cache
