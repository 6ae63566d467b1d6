"""Sampling in float64: the kept tokens are a number of first ones by rank, so only logits are sorted, no ids."""

from __future__ import annotations

import numpy as np

import torch
from pyengine.kernels.inputs import Draws

#: Up to this top_k, only the likeliest tokens of a row are looked at: a tenth of the time of a vocabulary of 49,152.
SHORT = 1024


def sample(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    largest, tokens = logits.max(dim=-1)  # a NaN counts as the largest
    short = (draws.top_k > 0) & (draws.top_k <= min(SHORT, logits.shape[-1] - 1))
    filtered = short | (draws.top_k > 0) | (draws.min_p > 0.0) | (draws.top_p < 1.0)
    drawn = draws.temperature > 0.0
    for members, draw in ((short, _draw_short), (filtered & ~short, _draw_filtered), (~filtered, _draw)):
        if len(rows := np.flatnonzero(members & drawn)):
            index = torch.from_numpy(rows).to(logits.device)
            theirs = Draws(*(getattr(draws, name)[rows] for name in Draws.__dataclass_fields__))
            tokens[index] = draw(logits[index], theirs)
    return torch.where(largest.isfinite(), tokens, -1)


def _draw_short(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Rows that all have a small top_k: the others of their tokens are left out first."""
    likeliest, ids = logits.topk(int(draws.top_k.max()))
    if bool(((logits >= likeliest[:, -1:]).sum(-1) != ids.shape[-1]).any()):
        return _draw_filtered(logits, draws)  # equal ones at the end: topk takes any of them
    ids = ids.sort(-1).values
    return ids.gather(-1, _draw_filtered(logits.gather(-1, ids), draws).unsqueeze(-1)).squeeze(-1)


def _draw_filtered(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    return _draw(torch.where(_kept(logits, draws), logits, float("-inf")), draws)


def _draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Rows of logits, all of whose tokens may be drawn -> ids [S]."""
    masses = _weights(logits, logits.amax(-1, keepdim=True), draws).cumsum(-1)
    total = masses[:, -1:]
    return torch.searchsorted(masses, _column(draws.uniform, logits) * total, right=True).squeeze(-1)


def _kept(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Which tokens may be drawn: bool [S, vocab]."""
    vocab = logits.shape[-1]
    ranked = logits.sort(-1, descending=True).values
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
