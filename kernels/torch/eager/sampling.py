"""Sampling in float64: the kept tokens are a number of first ones by rank, so only logits are sorted, no ids."""

from __future__ import annotations

import numpy as np

import torch
from pyengine.kernels.inputs import Draws


def sample(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    largest, tokens = logits.max(dim=-1)  # a NaN counts as the largest
    drawn = np.flatnonzero(draws.temperature > 0.0)
    if len(drawn):
        rows = torch.from_numpy(drawn).to(logits.device)
        chosen = Draws(*(getattr(draws, name)[drawn] for name in Draws.__dataclass_fields__))
        tokens[rows] = _draw(logits[rows], chosen)
    return torch.where(largest.isfinite(), tokens, -1)


def _draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Rows of logits that are all drawn from -> ids [S]."""
    weights = _weights(logits, logits.amax(-1, keepdim=True), draws)
    if draws.min_p.any() or draws.top_k.any() or (draws.top_p < 1.0).any():
        weights = torch.where(_kept(logits, draws), weights, 0.0)
    masses = weights.cumsum(-1)
    total = masses[:, -1:]
    return torch.searchsorted(masses, _column(draws.uniform, logits) * total, right=True).squeeze(-1)


def _kept(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Which tokens may be drawn: bool [S, vocab]."""
    vocab = logits.shape[-1]
    widest = int(draws.top_k.max()) if (draws.top_k > 0).all() else vocab
    ranked = logits.topk(min(widest, vocab)).values  # [S, as many as may be kept], falling
    weights = _weights(ranked, ranked[:, :1], draws)
    count = (weights >= _column(draws.min_p, logits)).sum(-1, keepdim=True)
    top_k = _column(np.where(draws.top_k > 0, draws.top_k, vocab).astype(np.int64), logits)
    count = torch.minimum(count, top_k)
    position = torch.arange(ranked.shape[-1], device=logits.device)
    masses = torch.where(position < count, weights, 0.0).cumsum(-1)
    top_p = _column(draws.top_p, logits)
    enough = torch.searchsorted(masses, top_p * masses[:, -1:]) + 1
    count = torch.where(top_p < 1.0, torch.minimum(count, enough), count).clamp_(min=1)  # 0: a row of NaN
    # Of the tokens with the last kept logit, the first ones by id.
    least = ranked.gather(-1, count - 1)
    equal = logits == least
    wanted = count - (logits > least).sum(-1, keepdim=True)
    return (logits > least) | (equal & (equal.cumsum(-1) <= wanted))


def _weights(logits: torch.Tensor, largest: torch.Tensor, draws: Draws) -> torch.Tensor:
    return ((logits.double() - largest.double()) / _column(draws.temperature, logits)).exp_()


def _column(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], like: torch.Tensor) -> torch.Tensor:
    """[S] on the host -> [S, 1] beside the logits."""
    return torch.from_numpy(values).to(like.device).unsqueeze(-1)
