"""What is done to each token's row by itself: norm, rotation, activation. All of it waits for memory: one pass each."""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

import torch
from pyengine.kernels.torch.triton.launch import dense

#: Elements that one program of SwiGLU computes: eight for each of 128 threads, 16 bytes a load in bf16.
SWIGLU_BLOCK = 1024
#: Elements of heads that one program rotates.
ROPE_BLOCK = 2048


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    dense(x=x, weight=weight, residual=residual)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    stream = x if residual is None else residual
    if x.numel():
        block = triton.next_power_of_2(x.shape[1])
        _rms_norm[(x.shape[0],)](
            x,
            stream,
            weight,
            normed,
            x.stride(0),
            stream.stride(0),
            normed.stride(0),
            x.shape[1],
            eps,
            ADDED=residual is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
    return normed, stream


@triton.jit
def _rms_norm(
    x,
    stream,
    weight,
    normed,
    x_stride,
    stream_stride,
    normed_stride,
    width,
    eps,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < width
    value = tl.load(x + row * x_stride + column, mask=there, other=0.0).to(tl.float32)
    if ADDED:
        target = stream + row * stream_stride + column
        value += tl.load(target, mask=there, other=0.0).to(tl.float32)
        rounded = value.to(stream.dtype.element_ty)
        tl.store(target, rounded, mask=there)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    factor = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    tl.store(normed + row * normed_stride + column, (value * scale * factor).to(normed.dtype.element_ty), mask=there)


def rope_write(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    slots: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:
    dense(qkv=qkv, kv=kv, cosines=cosines, sines=sines, slots=slots)
    tokens, all_heads, head_dim = qkv.shape
    kv_heads, page_tokens = kv.shape[1], kv.shape[3]
    heads = all_heads - 2 * kv_heads
    queries = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return queries
    query_weight, key_weight, eps = norms if norms is not None else (cosines, cosines, 0.0)  # not read without norms
    padded = triton.next_power_of_2(head_dim // 2)
    block = min(triton.next_power_of_2(all_heads), max(1, ROPE_BLOCK // (2 * padded)))
    _rope_write[(tokens, triton.cdiv(all_heads, block))](
        qkv,
        queries,
        kv,
        cosines,
        sines,
        slots,
        query_weight,
        key_weight,
        eps,
        *qkv.stride()[:2],
        *kv.stride()[:4],
        cosines.stride(0),
        sines.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        PAGE_TOKENS=page_tokens,
        HALF=head_dim // 2,
        PADDED_HALF=padded,
        NORMED=norms is not None,
        BLOCK=block,
    )
    return queries


@triton.jit
def _rope_write(
    qkv,
    queries,
    kv,
    cosines,
    sines,
    slots,
    query_weight,
    key_weight,
    eps,
    qkv_token_stride,
    qkv_head_stride,
    kv_stride,
    head_stride,
    page_stride,
    token_stride,
    cosine_stride,
    sine_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, PADDED_HALF)
    in_half = dims < HALF
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    there = (head < HEADS + 2 * KV_HEADS)[:, None] & in_half[None, :]
    source = qkv + token * qkv_token_stride + head[:, None] * qkv_head_stride + dims[None, :]
    first = tl.load(source, mask=there, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)

    turned_first = first
    turned_second = second
    if NORMED:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
        for_query = tl.load(query_weight + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
        for_key = tl.load(key_weight + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
        turned_first *= scale * tl.where(is_query[:, None], for_query, for_key)
        for_query = tl.load(query_weight + HALF + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
        for_key = tl.load(key_weight + HALF + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
        turned_second *= scale * tl.where(is_query[:, None], for_query, for_key)
    cosine = tl.load(cosines + token * cosine_stride + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + token * sine_stride + dims, mask=in_half, other=0.0).to(tl.float32)[None, :]
    first = tl.where(is_value[:, None], first, turned_first * cosine - turned_second * sine)
    second = tl.where(is_value[:, None], second, turned_second * cosine + turned_first * sine)

    first = first.to(queries.dtype.element_ty)
    second = second.to(queries.dtype.element_ty)
    target = queries + (token * HEADS + head[:, None]) * (2 * HALF) + dims[None, :]
    tl.store(target, first, mask=there & is_query[:, None])
    tl.store(target + HALF, second, mask=there & is_query[:, None])

    slot = tl.load(slots + token)
    kv_head = (head - HEADS) % KV_HEADS
    offset = is_value.to(tl.int64) * kv_stride + kv_head.to(tl.int64) * head_stride
    offset += slot // PAGE_TOKENS * page_stride + slot % PAGE_TOKENS * token_stride
    target = kv + offset[:, None] + dims[None, :]
    written = there & (head >= tl.where(slot >= 0, HEADS, HEADS + 2 * KV_HEADS))[:, None]
    tl.store(target, first, mask=written)
    tl.store(target + HALF, second, mask=written)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    dense(gate_up=gate_up)
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid = (tokens, triton.cdiv(width, SWIGLU_BLOCK))
        _swiglu[grid](gate_up, out, gate_up.stride(0), out.stride(0), width, BLOCK=SWIGLU_BLOCK)
    return out


@triton.jit
def _swiglu(gate_up, out, source_stride, target_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    source = gate_up + row * source_stride + column
    gate = tl.load(source, mask=there, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=there, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * target_stride + column, value.to(out.dtype.element_ty), mask=there)
