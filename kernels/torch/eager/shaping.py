"""What is done to logits before a token is chosen, and told of them: a few entries of each row, or one pass over it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import torch
from pyengine.kernels.inputs import Shapes


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
        # numpy takes bits apart ten times as fast as shifts do, and rows are written where they are.
        bits = np.unpackbits((~shapes.masks).astype("<u4", copy=False).view(np.uint8), axis=-1, bitorder="little")
        forbidden = torch.from_numpy(bits[:, :vocab].view(np.bool_))
        for row, theirs in zip(shapes.masked.tolist(), forbidden, strict=True):
            logits[row].masked_fill_(theirs, float("-inf"))
        return
    words = _on(shapes.masks.view(np.int32), logits).unsqueeze(-1)
    allowed = (words >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    rows = _on(shapes.masked, logits)
    logits[rows] = logits[rows].masked_fill(allowed.flatten(1)[:, :vocab] == 0, float("-inf"))


def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = tokens.clamp(min=0).unsqueeze(-1)
    largest = logits.amax(-1, keepdim=True)
    # Summed in float64, so that the result does not depend on an order of summation that depends on the batch.
    scale = largest + (logits - largest).exp().sum(-1, keepdim=True, dtype=torch.float64).log()
    chosen = logits.gather(-1, tokens)
    before = torch.arange(logits.shape[-1], device=logits.device) < tokens
    ranks = 1 + ((logits > chosen) | ((logits == chosen) & before)).sum(-1)
    ids = _likeliest(logits, count)
    return (chosen - scale).squeeze(-1).float(), ranks, ids, (logits.gather(-1, ids) - scale).float()


def _likeliest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` ids by rank. `topk` takes any of equal ones: so it gets integers of which none are equal, of
    the logit's order and then of the id's.
    """
    bits = (logits + 0.0).view(torch.int32)  # 0 and -0 are one
    order = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return ((order << 32) - ids).topk(count).indices


def _on(values: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device, non_blocking=True)
