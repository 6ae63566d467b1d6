"""What is done to logits before a token is chosen, and told of them: a few entries of each row, or one pass over it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import torch
import torch.nn.functional as F
from pyengine.kernels.inputs import Shapes

#: float32 [256, 8]: what the bits of a byte, the lowest first, let through: all, or nothing.
LIMITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=-1, bitorder="little"), np.inf, -np.inf
).astype(np.float32)
#: Ids beside each other that are summed first, and of which the largest is looked at first.
BLOCK = 64


def shape_logits(logits: torch.Tensor, shapes: Shapes) -> None:
    if len(shapes.seen):
        at = _on(shapes.seen_rows, logits), _on(shapes.seen, logits)
        values, factors = logits[at], _on(shapes.factors, logits)
        logits[at] = torch.where(values > 0.0, values / factors, values * factors)
    if len(shapes.ids):
        at = _on(shapes.rows, logits), _on(shapes.ids, logits)
        logits[at] += _on(shapes.add, logits)
    if len(shapes.masked):
        _forbid(logits, shapes)


def _forbid(logits: torch.Tensor, shapes: Shapes) -> None:
    vocab = logits.shape[-1]
    if logits.device.type == "cpu":
        # A twentieth of the time of shifts and a fill, whose branches nobody can predict.
        octets = shapes.masks.astype("<u4", copy=False).view(np.uint8)
        limits = torch.from_numpy(LIMITS.take(octets, axis=0).reshape(len(octets), -1)[:, :vocab])
        for row, limit in zip(shapes.masked.tolist(), limits, strict=True):
            torch.minimum(logits[row], limit, out=logits[row])
        return
    words = _on(shapes.masks.view(np.int32), logits).unsqueeze(-1)
    allowed = (words >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    rows = _on(shapes.masked, logits)
    logits[rows] = logits[rows].masked_fill(allowed.flatten(1)[:, :vocab] == 0, float("-inf"))


def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = tokens.clamp(min=0).unsqueeze(-1)
    padded = F.pad(logits, (0, -logits.shape[-1] % BLOCK), value=float("-inf"))
    blocks = padded.reshape(len(padded), padded.shape[-1] // BLOCK, BLOCK)
    tops = blocks.amax(-1)
    largest = tops.amax(-1, keepdim=True)
    # Blocks, then over them in float64: in one order, which a whole row's would be only for some sizes of the batch.
    masses = (blocks - largest.unsqueeze(-1)).exp_().sum(-1)
    scale = largest + masses.sum(-1, keepdim=True, dtype=torch.float64).log()
    chosen = logits.gather(-1, tokens)
    before = torch.arange(logits.shape[-1], device=logits.device) < tokens
    ranks = 1 + ((logits > chosen) | ((logits == chosen) & before)).sum(-1)
    ids = _likeliest(blocks, tops, count)
    return (chosen - scale).squeeze(-1).float(), ranks, ids, (logits.gather(-1, ids) - scale).float()


def _likeliest(blocks: torch.Tensor, tops: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` ids by rank: they are in the first `count` blocks, by the rank of each one's first."""
    numbers = torch.arange(blocks.shape[1], device=blocks.device)
    first = _ranked(tops, numbers).topk(min(count, len(numbers))).indices
    ids = (first.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=blocks.device)).flatten(1)
    values = blocks.gather(1, first.unsqueeze(-1).expand(-1, -1, BLOCK)).flatten(1)
    return ids.gather(1, _ranked(values, ids).topk(count).indices)


def _ranked(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64, of the order of logits and then of ids: of equal ones `topk` takes any."""
    bits = (logits + 0.0).view(torch.int32)  # 0 and -0 are one
    return (torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long() << 32) - ids


def _on(values: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device, non_blocking=True)
