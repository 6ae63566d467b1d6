"""What is done to each token's row by itself: norm, rotation, activation."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    stream = x if residual is None else residual.add_(x)
    return F.rms_norm(stream, weight.shape, weight, eps), stream


def rope_write(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    slots: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:
    kv_heads = kv.shape[1]
    heads = qkv.shape[1] - 2 * kv_heads
    turned = qkv[:, :-kv_heads]
    if norms is not None:
        query_weight, key_weight, eps = norms
        turned = torch.cat(
            [rms_norm(turned[:, :heads], query_weight, eps)[0], rms_norm(turned[:, heads:], key_weight, eps)[0]], dim=1
        )
    turned = _rotate(turned, cosines.unsqueeze(1), sines.unsqueeze(1)).to(qkv.dtype)
    keys, values = turned[:, heads:], qkv[:, -kv_heads:]
    if bool((slots < 0).any()):
        written = slots >= 0
        slots, keys, values = slots[written], keys[written], values[written]
    flat = kv.flatten(2, 3)  # [2, K, P * B, D], a view
    flat[0].index_copy_(1, slots, keys.transpose(0, 1))
    flat[1].index_copy_(1, slots, values.transpose(0, 1))
    return turned[:, :heads]


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """heads: [T, heads, D]; cosine, sine: [T, 1, D / 2]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
