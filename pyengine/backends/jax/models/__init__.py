"""Architectures in JAX: each is one file here and one row below."""

from __future__ import annotations

from collections.abc import Callable

from pyengine.backends.jax.models.decoder import Decoder
from pyengine.backends.jax.models.llama import llama
from pyengine.backends.jax.models.mistral import mistral
from pyengine.backends.jax.models.qwen2 import qwen2
from pyengine.backends.jax.models.qwen3 import qwen3
from pyengine.backends.jax.shards import Shards
from pyengine.kernels.jax.contract import Kernels

#: `ModelConfig.architecture` -> what makes the model of a checkpoint's tensors.
MODELS: dict[str, Callable[[Shards, Kernels], Decoder]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
}
