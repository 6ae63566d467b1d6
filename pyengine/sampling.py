"""Choosing the next token from logits, with counter-based randomness: nothing but (seed, position) decides the draw."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pyengine.scheduler.types import SamplingParams


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of one position of one request. Source: Philox 4x64 (Salmon et al., 2011)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position << 64)).random())


def sample(logits: npt.NDArray[np.float32], params: SamplingParams, position: int) -> int:
    """The token id at `position`, chosen from logits [vocab]; greedy at temperature 0.

    Temperature first, then the `top_k` likeliest, then the smallest set of likeliest tokens whose probability reaches
    `top_p`; equal logits are taken in id order. `seed` None counts as 0: who wants variety draws one per request.
    """
    if params.temperature == 0.0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / params.temperature
    candidates = np.arange(len(scaled))
    if 0 < params.top_k < len(scaled):
        threshold = np.partition(scaled, -params.top_k)[-params.top_k]
        candidates = np.flatnonzero(scaled >= threshold)
        candidates = candidates[np.argsort(-scaled[candidates], kind="stable")[: params.top_k]]
    weights = np.exp(scaled[candidates] - scaled[candidates].max())
    if params.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        cumulative = np.cumsum(weights[order])
        kept = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
        candidates, weights = candidates[order[:kept]], weights[order[:kept]]
    cumulative = np.cumsum(weights)
    drawn = np.searchsorted(cumulative, uniform(params.seed or 0, position) * cumulative[-1], side="right")
    return int(candidates[min(int(drawn), len(candidates) - 1)])
