"""What is done to each token's row by itself: norm, rotation, activation. All in place."""

from __future__ import annotations

import torch
from pyengine.kernels.torch.native.memory import is_half, kernels, page_tensor


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    half = is_half(x)
    if weight.shape != (width,) or weight.dtype is not x.dtype or not weight.is_contiguous():
        raise ValueError(f"the weight is {tuple(weight.shape)} {weight.dtype}, x {tuple(x.shape)} {x.dtype}")
    if residual is None:
        stream, out, ways = x, torch.empty_like(x), (0, 0)
    else:
        if residual.shape != x.shape or residual.dtype is not x.dtype:
            raise ValueError(f"the residual is {tuple(residual.shape)} {residual.dtype}, x {tuple(x.shape)} {x.dtype}")
        is_half(residual)
        stream, out, ways = residual, x, (residual.data_ptr(), residual.stride(0))
    kernels().rms_norm(
        (x.data_ptr(), x.stride(0)),
        ways,
        weight.data_ptr(),
        (out.data_ptr(), out.stride(0)),
        rows,
        width,
        eps,
        half,
    )
    return out, stream


def rope_write(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    slots: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:
    tokens, rows, head_dim = qkv.shape
    heads = rows - 2 * kv.shape[1]
    half, half_pages = is_half(qkv), is_half(kv)
    angles = (tokens, head_dim // 2)
    if kv.shape[-1] != head_dim or heads < 0 or slots.shape != (tokens,) or slots.dtype is not torch.int64:
        raise ValueError(f"qkv is {tuple(qkv.shape)}, kv {tuple(kv.shape)}, slots {tuple(slots.shape)} {slots.dtype}")
    if cosines.shape != angles or sines.shape != angles or is_half(cosines) or is_half(sines):
        raise ValueError(f"angles are float32 {angles}, not {tuple(cosines.shape)} and {tuple(sines.shape)}")
    weights = None
    if norms is not None:
        query, key, eps = norms
        if not query.shape == key.shape == (head_dim,) or not query.dtype == key.dtype == qkv.dtype:
            raise ValueError(f"norms of heads are {tuple(query.shape)} {query.dtype} and {tuple(key.shape)}")
        weights = (query.data_ptr(), key.data_ptr(), eps)
    kernels().rope_write(
        (qkv.data_ptr(), qkv.stride(0), qkv.stride(1)),
        tokens,
        heads,
        page_tensor(kv),
        (cosines.data_ptr(), cosines.stride(0)),
        (sines.data_ptr(), sines.stride(0)),
        slots.contiguous().data_ptr(),
        weights,
        half,
        half_pages,
    )
    return qkv[:, :heads]


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    kernels().swiglu((gate_up.data_ptr(), gate_up.stride(0)), rows, width, is_half(gate_up))
    return gate_up[:, :width]
