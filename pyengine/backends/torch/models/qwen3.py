"""Qwen3 (dense): Llama's layer, in which each head of queries and keys is normed before it is turned."""

from __future__ import annotations

import torch

from pyengine.backends.torch.layer import Step
from pyengine.backends.torch.weights import Reader
from pyengine.checkpoint import ModelConfig


class Qwen3Layer:
    def __init__(self, read: Reader, config: ModelConfig) -> None:
        self.config = config
        self.attention_norm = read.tensor("input_layernorm.weight")
        self.qkv = read.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.head_norms = (
            read.tensor("self_attn.q_norm.weight"),
            read.tensor("self_attn.k_norm.weight"),
            config.norm_eps,
        )
        self.output = read.linear("self_attn.o_proj")
        self.mlp_norm = read.tensor("post_attention_layernorm.weight")
        self.gate_up = read.linear("mlp.gate_proj", "mlp.up_proj")
        self.down = read.linear("mlp.down_proj")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kernels, eps, head_dim = step.kernels, self.config.norm_eps, self.config.head_dim
        x, residual = kernels.rms_norm(x, self.attention_norm, eps, residual)
        qkv = self.qkv(x).view(len(x), -1, head_dim)  # [T, H + 2 K, D]
        queries = kernels.rope_write(qkv, kv, step.cosines, step.sines, step.slots, self.head_norms)
        x = self.output(step.attend(queries, kv).flatten(1))
        x, residual = kernels.rms_norm(x, self.mlp_norm, eps, residual)
        return self.down(kernels.swiglu(self.gate_up(x))), residual
