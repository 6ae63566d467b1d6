"""Products with packed weights (`rust/linear`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import jax
import jax.numpy as jnp
from pyengine._native import PANEL, LinearThreads, pack_linear
from pyengine.kernels.jax.ffi.calls import call, integers, shaped

Array = npt.NDArray[Any]


def packed_shape(outputs: int, inputs: int, half: bool) -> tuple[int, int, int]:
    """Of one matrix. half: weights are bfloat16, two in a number."""
    return -(-outputs // PANEL), -(-inputs // 2) if half else inputs, PANEL


def pack(parts: Sequence[Array], out: Array) -> None:
    """parts: [out, in] each, float32 or bfloat16, one above the other; out: float32, or uint32 for bfloat16, which the
    parts are rounded to. Its shape is `packed_shape`.
    """
    inputs = parts[0].shape[1]
    numbers = [np.ascontiguousarray(part) for part in parts]
    bits = [(part if part.dtype == np.float32 else part.view(np.uint16), len(part)) for part in numbers]
    pack_linear(bits, inputs, "float32" if out.dtype == np.float32 else "bfloat16", out, LinearThreads(1))


def multiply(x: jax.Array, weights: jax.Array, layer: jax.Array | int, outputs: int, wide: bool = False) -> jax.Array:
    """weights: those of all layers, as `pack` made them. A part of them would be copied for the call."""
    product = call("multiply_layer", shaped((len(x), outputs), np.float32))
    result: jax.Array = product(x.astype(jnp.float32), weights, integers(layer))
    return result if wide else result.astype(x.dtype)
