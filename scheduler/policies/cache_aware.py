"""Where the first token comes soonest if every worker has only what its own node holds: nothing is fetched.

    TTFT_i = load_i + queue_i + prefill(length, i.prefix_len);  p = argmin TTFT;  d = the decode worker with least load

The paper's "local cache-aware" baseline: Algorithm 1 without its second half, so nothing replicates.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..cluster import View
from .base import Ask, Choice, decode_load, lowest, pair, ttft


@dataclass(frozen=True, slots=True)
class CacheAware:
    replicates: ClassVar[bool] = False

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        seconds = ttft(view, ask, np.zeros(len(view.workers), dtype=bool))
        gap = decode_load(view, ask)
        return Choice(
            *pair(view, lambda mask: lowest(seconds, mask, rng), lambda mask: lowest(gap, mask, rng)),
            fetch=False,
            terms={"ttft": seconds, "gap": gap},
        )
