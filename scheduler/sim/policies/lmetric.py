"""LMetric: the tokens to compute if it is routed here, times the requests here. No weights, as a product needs none.

    score_i = (waiting_i + length − cached_i) · (requests_i + 1)                                       lowest wins

waiting: prompt tokens accepted at i and not computed yet. The one more is this request: an empty worker's product would
be zero whatever it must compute. For the decode part of a pair nothing is computed, so the fewest requests win.

Source: Zhang et al., "LMetric: Simple is Better - Multiplication May Be All You Need for LLM Request Scheduling"
(arXiv 2603.15202).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...cluster import View
from ...cost import F64
from ...policies.base import Ask, Choice, lowest, pair, requests


@dataclass(frozen=True, slots=True)
class Lmetric:
    """waiting: weight of the tokens that wait already; 0 counts this request's alone. The paper has no settings."""

    waiting: float = 1.0
    fetch: bool = False
    replicates: ClassVar[bool] = False

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        there = requests(view)
        own = ask.prompt_tokens - ask.prefix * view.block_tokens
        fresh: F64 = np.multiply(self.waiting, view.queued_tokens, dtype=np.float64) + own
        score: F64 = fresh * (there + 1)
        prefill, decode = pair(view, lambda mask: lowest(score, mask, rng), lambda mask: lowest(there, mask, rng))
        return Choice(prefill, decode, self.fetch, {"fresh": fresh, "requests": there, "score": score})
