"""Between pages and canonical strips, as many blocks as there are in one launch."""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

import torch

ALL = slice(None)
#: Elements that one program copies: 16 bytes for each of 128 threads in bf16.
BLOCK = 1024


def gather(
    cache: torch.Tensor, pages: torch.Tensor, strips: torch.Tensor, layers: slice = ALL, heads: slice = ALL
) -> None:
    _launch(cache[layers, :, heads], pages, strips, to_strips=True)


def scatter(
    cache: torch.Tensor, pages: torch.Tensor, strips: torch.Tensor, layers: slice = ALL, heads: slice = ALL
) -> None:
    _launch(cache[layers, :, heads], pages, strips, to_strips=False)


def _launch(part: torch.Tensor, pages: torch.Tensor, strips: torch.Tensor, *, to_strips: bool) -> None:
    layers, two, heads, _, page_tokens, head_dim = part.shape
    expected = (len(pages), layers, two, heads, page_tokens, head_dim)
    if strips.shape != expected or strips.dtype != part.dtype or strips.device != part.device:
        raise ValueError(f"strips are {tuple(strips.shape)} {strips.dtype} on {strips.device}, the range is {expected}")
    for name, tensor in (("cache", part), ("strips", strips)):
        if tensor.numel() and tensor.stride()[-2:] != (head_dim, 1):
            raise ValueError(f"{name} must be dense in its last two axes, strides are {tensor.stride()}")
    if not strips.numel():
        return
    bits = {2: torch.int16, 4: torch.int32}[part.element_size()]  # no float is touched: every NaN stays what it is
    elements = page_tokens * head_dim
    _copy[(len(pages) * layers * two * heads, triton.cdiv(elements, BLOCK))](
        part.view(bits),
        strips.view(bits),
        pages,
        *part.stride()[:4],
        *strips.stride()[:4],
        LAYERS=layers,
        HEADS=heads,
        ELEMENTS=elements,
        TO_STRIPS=to_strips,
        BLOCK=BLOCK,
    )


@triton.jit
def _copy(
    cache,
    strips,
    pages,
    layer_stride,
    kv_stride,
    head_stride,
    page_stride,
    strips_block_stride,
    strips_layer_stride,
    strips_kv_stride,
    strips_head_stride,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    TO_STRIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    strip = tl.program_id(0)
    head = (strip % HEADS).to(tl.int64)
    kv = (strip // HEADS % 2).to(tl.int64)
    layer = (strip // (HEADS * 2) % LAYERS).to(tl.int64)
    block = (strip // (HEADS * 2 * LAYERS)).to(tl.int64)
    page = tl.load(pages + block)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = element < ELEMENTS
    in_cache = cache + (layer * layer_stride + kv * kv_stride + head * head_stride + page * page_stride) + element
    in_strips = (
        strips
        + (
            block * strips_block_stride
            + layer * strips_layer_stride
            + kv * strips_kv_stride
            + head * strips_head_stride
        )
        + element
    )
    if TO_STRIPS:
        tl.store(in_strips, tl.load(in_cache, mask=there), mask=there)
    else:
        tl.store(in_cache, tl.load(in_strips, mask=there), mask=there)
