"""Llama 2 and 3, SmolLM2: attention with rotary embedding, SwiGLU. Sources: Touvron et al., 2023; Dubey et al., 2024.

Q, K and V are one product, gate and up another. What is added to the residual stream is added by the norm that follows.
"""

from __future__ import annotations

import jax
from flax import nnx

from pyengine.backends.jax.mesh import total
from pyengine.backends.jax.models.decoder import Decoder, Step
from pyengine.backends.jax.shards import Shards
from pyengine.kernels.jax.contract import Kernels


class LlamaLayer(nnx.Module):
    def __init__(self, shards: Shards, kernels: Kernels) -> None:
        self.config = shards.config
        self.kernels = kernels
        self.attention_norm = shards.vector("input_layernorm.weight")
        self.qkv = shards.columns("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
        self.output = shards.rows("self_attn.o_proj.weight")
        self.mlp_norm = shards.vector("post_attention_layernorm.weight")
        self.gate_up = shards.columns("mlp.gate_proj.weight", "mlp.up_proj.weight")
        self.down = shards.rows("mlp.down_proj.weight")

    def __call__(
        self, x: jax.Array, residual: jax.Array, cache: jax.Array, layer: jax.Array, step: Step
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        tokens, eps, kernels = len(x), self.config.norm_eps, self.kernels
        x, residual = kernels.rms_norm(x, self.attention_norm[...], eps, residual)
        qkv = self.qkv(x, layer).reshape(tokens, -1, self.config.head_dim)  # [T, H + 2K, D]
        queries, cache = kernels.rope_write(qkv, cache, layer, step.cosines, step.sines, step.slots)
        attended = step.attend(queries, cache, layer).reshape(tokens, -1)
        x = total(self.output(attended, layer))
        x, residual = kernels.rms_norm(x, self.mlp_norm[...], eps, residual)
        x = kernels.swiglu(self.gate_up(x, layer))
        return total(self.down(x, layer)), residual, cache


def llama(shards: Shards, kernels: Kernels) -> Decoder:
    return Decoder(shards, kernels, LlamaLayer(shards, kernels))
