"""The Llama architecture in PyTorch, over paged KV. One file, no framework around it.

The shapes, once: T input tokens of a whole step (all sequences one after the other), H query heads, K KV heads, D
head_dim. Q, K and V are one matrix product, gate and up another. What is added to the residual stream is added by the
norm that follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pyengine.backends.torch.weights import as_tensor
from pyengine.checkpoint import Checkpoint, Weights, inverse_frequencies
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.torch.choice import choose
from pyengine.kernels.torch.contract import Attend
from pyengine.kernels.torch.linear import Linear


@dataclass(frozen=True)
class StepInput:
    """What one forward pass computes.

    tokens, positions, slots: int64 [T]; outputs: int64 [samples], the rows whose logits are wanted. The first rows are
    those of `decodes`, all others those of `prefills`.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    outputs: torch.Tensor
    decodes: Sequences
    prefills: Sequences


@dataclass(frozen=True)
class Layer:
    """Weights of one layer."""

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """Weights and forward pass. Holds no KV: the page tensor is an argument."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        """Maps the checkpoint's files: weights in the dtype they have there are shared by all processes."""
        self.config = config = checkpoint.config
        self.dtype = dtype
        self.device = device
        self.kernels = choose(device, dtype, config.head_dim)
        weights = Weights(checkpoint)

        def weight(name: str) -> torch.Tensor:
            return as_tensor(weights.get(name), weights.dtype(name)).to(device, dtype)

        def linear(*names: str) -> Linear:
            return Linear(*(weight(name) for name in names))

        self.embedding = weight("model.embed_tokens.weight")
        self.norm = weight("model.norm.weight")
        self.head = Linear(self.embedding) if config.tied_head else linear("lm_head.weight")
        self.layers = []
        for index in range(config.layers):
            name = f"model.layers.{index}."
            self.layers.append(
                Layer(
                    attention_norm=weight(name + "input_layernorm.weight"),
                    qkv=linear(*(f"{name}self_attn.{part}_proj.weight" for part in "qkv")),
                    output=linear(name + "self_attn.o_proj.weight"),
                    mlp_norm=weight(name + "post_attention_layernorm.weight"),
                    gate_up=linear(name + "mlp.gate_proj.weight", name + "mlp.up_proj.weight"),
                    down=linear(name + "mlp.down_proj.weight"),
                )
            )
        factors = weight("rope_factors.weight").float().cpu().numpy() if "rope_factors.weight" in weights else None
        angles = torch.outer(
            torch.arange(config.max_positions, dtype=torch.float32),
            torch.from_numpy(inverse_frequencies(config, factors)),
        )
        # Weights may be rounded, angles not: at position 8000 half of bf16's eight bits would be gone.
        self.cosines = angles.cos().to(device)
        self.sines = angles.sin().to(device)

    def forward(self, step: StepInput, cache: torch.Tensor) -> torch.Tensor:
        """Computes one step, writing KV into `cache`. Returns float32 logits [samples, vocab]."""
        config, kernels = self.config, self.kernels
        heads = config.heads + 2 * config.kv_heads
        eps = config.norm_eps
        cosines, sines = self.cosines[step.positions], self.sines[step.positions]  # [T, D / 2]
        attend = self._plan_attention(step, cache[0])
        x: torch.Tensor = F.embedding(step.tokens, self.embedding)  # [T, hidden]
        residual = None
        for index, layer in enumerate(self.layers):
            kv = cache[index]
            x, residual = kernels.rms_norm(x, layer.attention_norm, eps, residual)
            qkv = layer.qkv(x).view(-1, heads, config.head_dim)
            queries = kernels.rope_write(qkv, kv, cosines, sines, step.slots)
            x = layer.output(attend(queries, kv).reshape(len(x), -1))
            x, residual = kernels.rms_norm(x, layer.mlp_norm, eps, residual)
            x = layer.down(kernels.swiglu(layer.gate_up(x)))
        assert residual is not None, "a model has layers"
        x, _ = kernels.rms_norm(x[step.outputs], self.norm, eps, residual[step.outputs])
        return self.head(x).float()

    def _plan_attention(self, step: StepInput, kv: torch.Tensor) -> Attend:
        """Decode for the first rows, prefill for the others."""
        decodes = len(step.decodes)
        if not len(step.prefills):
            return self.kernels.decode_attention(step.decodes, kv)
        prefill = self.kernels.prefill_attention(step.prefills, kv)
        if not decodes:
            return prefill
        decode = self.kernels.decode_attention(step.decodes, kv)

        def attend(query: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return torch.cat((decode(query[:decodes], kv), prefill(query[decodes:], kv)))

        return attend
