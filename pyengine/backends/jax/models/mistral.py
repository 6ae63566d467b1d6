"""Mistral: Llama with a sliding window, which `ModelConfig.window` tells attention. Source: Jiang et al., 2023."""

from __future__ import annotations

from pyengine.backends.jax.models.decoder import Decoder
from pyengine.backends.jax.models.llama import LlamaLayer
from pyengine.backends.jax.shards import Shards
from pyengine.kernels.jax.contract import Kernels


def mistral(shards: Shards, kernels: Kernels) -> Decoder:
    return Decoder(shards, kernels, LlamaLayer(shards, kernels))
