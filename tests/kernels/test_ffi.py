"""Goal: what XLA calls of ours is right, and a call that does not fit is an error of the program's, not of the process.

Method: products of several layers beside float64; programs whose shapes, layers, pages or aliases are wrong, and after
each one that is right. The contracts themselves: test_conformance.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs the jax extra")

import jax.numpy as jnp  # noqa: E402 - not before it is known to be there
import ml_dtypes  # noqa: E402

from pyengine.kernels.inputs import Sequences  # noqa: E402
from pyengine.kernels.jax import ffi  # noqa: E402
from pyengine.kernels.jax.ffi.calls import call, integers, like  # noqa: E402

LAYERS = 3
Array = np.ndarray[Any, Any]


def matrices(outputs: list[int], inputs: int, dtype: Any) -> list[Array]:
    """Parts of one product, of all layers: [layers, out, in] each."""
    random = np.random.default_rng([inputs, *outputs])
    return [random.standard_normal((LAYERS, size, inputs)).astype(dtype) for size in outputs]


def packed(parts: list[Array], half: bool) -> Array:
    outputs = sum(part.shape[1] for part in parts)
    shape = (LAYERS, *ffi.packed_shape(outputs, parts[0].shape[2], half))
    values = np.empty(shape, np.uint32 if half else np.float32)
    for layer in range(LAYERS):
        ffi.pack([part[layer] for part in parts], values[layer])
    return values


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("outputs", "inputs"), [([7], 5), ([33, 1, 40], 64), ([130, 62], 401)], ids=str)
def test_each_layer_has_its_product(outputs: list[int], inputs: int, dtype: Any) -> None:
    parts = matrices(outputs, inputs, dtype)
    weights = packed(parts, dtype is not np.float32)
    multiply: Any = jax.jit(ffi.multiply, static_argnums=(3, 4))
    for rows in (1, 2, 17):
        x = np.random.default_rng(rows).standard_normal((rows, inputs)).astype(np.float32)
        for layer in range(LAYERS):
            right = x.astype(np.float64) @ np.concatenate([part[layer] for part in parts]).astype(np.float64).T
            found = np.asarray(multiply(x, weights, layer, sum(outputs), True))
            np.testing.assert_allclose(found, right, rtol=0, atol=2e-6 * inputs)


def good() -> Array:
    parts = matrices([40], 64, np.float32)
    return np.asarray(ffi.multiply(jnp.ones((2, 64)), jnp.asarray(packed(parts, False)), 1, 40))


def misshapen() -> Any:
    return ffi.multiply(jnp.ones((2, 63)), jnp.asarray(packed(matrices([40], 64, np.float32), False)), 0, 40)


def beyond_the_last_layer() -> Any:
    return ffi.multiply(jnp.ones((2, 64)), jnp.asarray(packed(matrices([40], 64, np.float32), False)), LAYERS, 40)


def of_another_type() -> Any:
    return ffi.multiply(jnp.ones((2, 64)), jnp.zeros((LAYERS, 2, 64, 32), jnp.int32), 0, 40)


def beyond_the_pages() -> Any:
    cache = jnp.zeros((1, 2, 1, 4, 16, 8))
    angles = jnp.zeros((1, 4))
    return ffi.rope_write(jnp.ones((1, 3, 8)), cache, 0, angles, angles, jnp.array([4 * 16]))


def into_a_copy() -> Any:
    array = jnp.ones((1, 4))
    return call("rms_norm", (like(array), like(array)))(array, jnp.ones(4), array, eps=np.float32(1e-5))


def a_stream_of_another_type() -> Any:
    """In place, as it has to be: twice as much would be written as there is."""
    function: Any = jax.jit(
        lambda x, weight, residual: call("rms_norm", (like(x), like(residual)), {2: 1})(
            x, weight, residual, eps=np.float32(1e-5)
        )
    )
    return function(jnp.ones((4, 8)), jnp.ones(8), jnp.ones((4, 8), jnp.bfloat16))


def more_tokens_than_positions() -> Any:
    sequences = Sequences(np.array([0, 3], np.int32), np.array([2], np.int32), np.zeros((1, 1), np.int32))
    return ffi.prefill_attention(sequences, 3)(jnp.ones((3, 1, 8)), jnp.zeros((1, 2, 1, 4, 16, 8)), 0)


def without_its_setting() -> Any:
    array = jnp.ones((1, 4))
    return call("rms_norm", (like(array),))(array, jnp.ones(4))


def without_its_arguments() -> Any:
    array = jnp.ones((1, 4))
    return call("attend", like(array))(array, integers(0))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (misshapen, r"\[2, 63\]"),
        (beyond_the_last_layer, r"layer \[3\] of 3"),
        (of_another_type, "I32"),
        (beyond_the_pages, "slot 64 is in none of 4 pages"),
        (into_a_copy, "input_output_aliases"),
        (a_stream_of_another_type, "stream is Bf16"),
        (more_tokens_than_positions, "no sequences of 3 rows"),
        (without_its_setting, "no setting"),
        (without_its_arguments, "query and pages are"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_so(wrong: Callable[[], Any], said: str) -> None:
    right = good()
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=said):
        jax.block_until_ready(wrong())
    np.testing.assert_array_equal(good(), right)
