"""Between pages and canonical strips: runs of memory, shared out to threads by block and layer."""

from __future__ import annotations

import torch
from pyengine.kernels.torch.native.memory import is_dense, kernels

ALL = slice(None)


def gather(
    cache: torch.Tensor, pages: torch.Tensor, strips: torch.Tensor, layers: slice = ALL, heads: slice = ALL
) -> None:
    _copy(cache, pages, strips, layers, heads, scatter=False)


def scatter(
    cache: torch.Tensor, pages: torch.Tensor, strips: torch.Tensor, layers: slice = ALL, heads: slice = ALL
) -> None:
    _copy(cache, pages, strips, layers, heads, scatter=True)


def _copy(
    cache: torch.Tensor, pages: torch.Tensor, strips: torch.Tensor, layers: slice, heads: slice, scatter: bool
) -> None:
    part = cache[layers, :, heads]
    many, two, few, there, page_tokens, head_dim = part.shape
    shape = (len(pages), many, two, few, page_tokens, head_dim)
    if strips.shape != shape or strips.dtype != cache.dtype:
        raise ValueError(f"strips are {tuple(strips.shape)} {strips.dtype}, the range is {shape} {cache.dtype}")
    if not is_dense(part) or not is_dense(strips):
        raise ValueError("tensors must be dense in their last axis")
    named = pages.tolist()
    if named and not 0 <= min(named) <= max(named) < there:
        raise ValueError(f"pages {min(named)}..{max(named)} are named, there are 0..{there - 1}")
    size = cache.element_size()
    kernels().copy_pages(
        part.data_ptr(),
        [way * size for way in part.stride()[:5]],
        strips.data_ptr(),
        [way * size for way in strips.stride()[:5]],
        (many, few, page_tokens, head_dim * size),
        named,
        scatter,
    )
