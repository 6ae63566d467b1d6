"""The Llama architecture in PyTorch, over paged KV. One file, no framework around it.

The shapes, once: T input tokens of a whole step (all sequences one after the other), H query heads, K KV heads, D
head_dim. Q, K and V are one matrix product, gate and up another.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open

from pyengine.checkpoint import Checkpoint, inverse_frequencies
from pyengine.kernels.torch import attention, pages
from pyengine.kernels.torch.linear import Linear


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences of similar length with one new token each: input rows first..last of the step.

    table: int64 [sequences * pages], padded with each one's first page; length: keys to attend to; mask: see
    `attention.decode_attention`.
    """

    first: int
    last: int
    table: torch.Tensor
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class PrefillRun:
    """Several new tokens of one sequence: input rows first..last of the step.

    table: int64 [pages], None when nothing precedes them; length: prefix and new tokens; mask: see
    `attention.prefill_attention`.
    """

    first: int
    last: int
    table: torch.Tensor | None
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class StepInput:
    """What one forward pass computes.

    tokens, positions, slots: int64 [T]; outputs: int64 [samples], the rows whose logits are wanted. Groups and runs
    cover all rows, in order.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    outputs: torch.Tensor
    groups: list[DecodeGroup]
    runs: list[PrefillRun]


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
        files: dict[Path, Any] = {path: safe_open(path, framework="pt") for path in checkpoint.files}

        def weight(name: str) -> torch.Tensor:
            tensor: torch.Tensor = files[checkpoint.weights[name]].get_tensor(name)
            return tensor.to(device, dtype)

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
        factors = (
            weight("rope_factors.weight").float().cpu().numpy() if "rope_factors.weight" in checkpoint.weights else None
        )
        angles = torch.outer(
            torch.arange(config.max_positions, dtype=torch.float32),
            torch.from_numpy(inverse_frequencies(config, factors)),
        )
        self.cosines = angles.cos().to(device, dtype)
        self.sines = angles.sin().to(device, dtype)

    def forward(self, step: StepInput, cache: torch.Tensor) -> torch.Tensor:
        """Computes one step, writing KV into `cache`. Returns float32 logits [samples, vocab]."""
        config = self.config
        query_width = config.heads * config.head_dim
        rotated = config.heads + config.kv_heads
        cosine = self.cosines[step.positions].unsqueeze(1)  # [T, 1, D / 2]
        sine = self.sines[step.positions].unsqueeze(1)
        hidden = F.embedding(step.tokens, self.embedding)  # [T, hidden]
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(self._rms_norm(hidden, layer.attention_norm))
            heads = qkv.view(-1, rotated + config.kv_heads, config.head_dim)
            queries_keys = _rotate(heads[:, :rotated], cosine, sine)
            queries, keys, values = queries_keys[:, : config.heads], queries_keys[:, config.heads :], heads[:, rotated:]
            pages.write_tokens(cache[index], keys, values, step.slots)
            attended = self._attend(step, cache[index], queries, keys, values)
            hidden += layer.output(attended.reshape(-1, query_width))
            gate, up = layer.gate_up(self._rms_norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden += layer.down(F.silu(gate).mul_(up))
        last = self._rms_norm(hidden[step.outputs], self.norm)
        return self.head(last).float()

    def _rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (self.config.hidden_size,), weight, self.config.norm_eps)

    def _attend(
        self, step: StepInput, cache: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """queries [T, H, D], keys and values [T, K, D] of this step, cache [2, K, pages, block, D] -> [T, H, D]."""
        parts = []
        for group in step.groups:
            sequences = group.last - group.first
            kv = pages.gather(cache, group.table).view(2, self.config.kv_heads, sequences, -1, self.config.head_dim)
            kv = kv[..., : group.length, :]
            parts.append(attention.decode_attention(queries[group.first : group.last], kv[0], kv[1], group.mask))
        for run in step.runs:
            rows = slice(run.first, run.last)
            if run.table is None:
                run_keys, run_values = keys[rows].transpose(0, 1), values[rows].transpose(0, 1)
            else:
                run_keys, run_values = pages.gather(cache, run.table).flatten(2, 3)[:, :, : run.length]
            parts.append(attention.prefill_attention(queries[rows], run_keys, run_values, run.mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, dimension i with i + D / 2. heads: [T, heads, D]; cosine, sine: [T, 1, D / 2]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
