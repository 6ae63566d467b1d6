"""Goal: what is interpreted here can also be lowered for a TPU: its operations exist there, its blocks fit its tiles.

Method: JAX lowers every kernel to Mosaic for a TPU, which needs none. Mosaic's own compiler comes with a TPU's library:
whether it takes what it is given, and what the kernels then do, nobody has seen yet.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="needs the jax extra")

import jax.numpy as jnp  # noqa: E402 - not before it is known to be there

from pyengine.kernels.inputs import Sequences  # noqa: E402
from pyengine.kernels.jax import pallas  # noqa: E402
from pyengine.kernels.jax.choice import choose  # noqa: E402
from pyengine.kernels.jax.contract import CONTRACTS  # noqa: E402
from pyengine.kernels.jax.pallas import launch  # noqa: E402

#: Query heads, KV heads, head_dim, tokens of a page, width of an MLP: Llama 3 8B, SmolLM2, and what divides nothing.
MODELS = ((32, 8, 128, 16, 14336), (9, 3, 64, 16, 1536), (5, 1, 80, 256, 5000))
TOKENS, SEQUENCES, WIDTH = 300, 24, 200
#: What is done to logits is jax.numpy's on TPUs too.
OF_PALLAS = [name for name in CONTRACTS if ".pallas." in getattr(pallas, name).__module__]


def arguments(contract: str, model: tuple[int, int, int, int, int], dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """A function of arrays, and their shapes."""
    heads, kv_heads, head_dim, page_tokens, width = model

    def array(*shape: int, dtype: str = dtype) -> Any:
        return launch.result(shape, jnp.dtype(dtype))

    def ids(*shape: int) -> Any:
        return array(*shape, dtype="int32")

    function = getattr(pallas, contract)
    cache = array(4, 2, kv_heads, 256, page_tokens, head_dim)
    strips = array(8, 3, 2, 1, page_tokens, head_dim)
    angles = array(TOKENS, head_dim // 2, dtype="float32")
    part = (slice(1, 4), slice(0, 1))
    if contract.endswith("_attention"):
        rows = SEQUENCES if contract == "decode_attention" else TOKENS
        sequences = Sequences(ids(SEQUENCES + 1), ids(SEQUENCES), ids(SEQUENCES, WIDTH))
        return (
            lambda sequences, query, cache, layer: function(sequences, rows, 1000)(query, cache, layer),
            (sequences, array(rows, heads, head_dim), cache, ids()),
        )
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "rms_norm": (
            lambda x, weight, residual: function(x, weight, 1e-5, residual),
            (array(TOKENS, width), array(width), array(TOKENS, width)),
        ),
        "swiglu": (function, (array(TOKENS, 2 * width),)),
        "rope_write": (
            lambda qkv, cache, layer, cosines, sines, slots, q, k: function(
                qkv, cache, layer, cosines, sines, slots, (q, k, 1e-6)
            ),
            (
                array(TOKENS, heads + 2 * kv_heads, head_dim),
                cache,
                ids(),
                angles,
                angles,
                ids(TOKENS),
                array(head_dim),
                array(head_dim),
            ),
        ),
        "gather": (lambda cache, pages: function(cache, pages, *part), (cache, ids(8))),
        "scatter": (lambda cache, pages, strips: function(cache, pages, strips, *part), (cache, ids(8), strips)),
    }
    return calls[contract]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("contract", OF_PALLAS)
def test_lowers_for_a_tpu(
    contract: str, model: tuple[int, int, int, int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    function, shapes = arguments(contract, model, dtype)
    lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == 1


class Device:
    """What a choice of kernels looks at."""

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self.device_kind = f"a {platform}"


@pytest.mark.parametrize(
    ("platform", "dtype", "head_dim", "chosen", "level", "said"),
    [
        ("cpu", "float32", 64, "ffi", "INFO", "ours by XLA's FFI, float32"),
        ("cpu", "bfloat16", 128, "ffi", "INFO", "ours by XLA's FFI, bfloat16"),
        ("cpu", "float16", 64, "jnp", "WARNING", "float16"),
        ("cpu", "float32", 320, "jnp", "WARNING", "head_dim 320"),
        ("gpu", "bfloat16", 128, "jnp", "INFO", "Pallas' are for TPUs"),
        ("tpu", "bfloat16", 128, "pallas", "INFO", "Pallas, sampling in jax.numpy"),
        ("tpu", "float16", 128, "jnp", "WARNING", "float16"),
        ("tpu", "bfloat16", 72, "jnp", "WARNING", "head_dim 72"),
    ],
)
def test_a_tpu_has_pallas_or_a_warning_that_says_why_not(
    platform: str, dtype: str, head_dim: int, chosen: str, level: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    device: Any = Device(platform)
    with caplog.at_level(logging.INFO):
        kernels: Any = choose(device, dtype, head_dim)
    assert kernels.__name__ == f"pyengine.kernels.jax.{chosen}"
    (record,) = caplog.records
    assert record.levelname == level and said in record.getMessage() and f"a {platform}" in record.getMessage()
