"""Between pages and canonical strips: one strided copy for each block, which reads and writes every byte once."""

from __future__ import annotations

import torch

ALL = slice(None)


def gather(
    cache: torch.Tensor, pages: torch.Tensor, strips: torch.Tensor, layers: slice = ALL, heads: slice = ALL
) -> None:
    blocks = _blocks(cache, pages, strips, layers, heads)
    for block, page in enumerate(pages.tolist()):
        strips[block].copy_(blocks[page])


def scatter(
    cache: torch.Tensor, pages: torch.Tensor, strips: torch.Tensor, layers: slice = ALL, heads: slice = ALL
) -> None:
    blocks = _blocks(cache, pages, strips, layers, heads)
    for block, page in enumerate(pages.tolist()):
        blocks[page].copy_(strips[block])


def _blocks(
    cache: torch.Tensor, pages: torch.Tensor, strips: torch.Tensor, layers: slice, heads: slice
) -> torch.Tensor:
    """The range of the page tensor as the strips have it: [P, layers, 2, heads, B, D]."""
    blocks = cache[layers, :, heads].permute(3, 0, 1, 2, 4, 5)
    if strips.shape != (len(pages), *blocks.shape[1:]) or strips.dtype != cache.dtype:
        raise ValueError(
            f"strips are {tuple(strips.shape)} {strips.dtype}, the range is {(len(pages), *blocks.shape[1:])}"
        )
    return blocks
