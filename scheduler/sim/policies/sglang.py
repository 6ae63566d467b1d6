"""SGLang's cache-aware router: the best match while loads are even, the shortest queue when they are not.

    if max load − min load > imbalance  and  max load > ratio_imbalance · min load:   the fewest requests
    else if best match / length > ratio:                                               the best match
    else:                                                                              the smallest cache

load: requests at the worker. For decode, its guide for prefill and decode apart pairs this with the better of two drawn
workers; the one with the fewest requests, taken here, is never worse balanced.

Source: docs of sgl-router ("Router for Data Parallelism", cache-aware load balancing), defaults as of its gateway 0.3.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from ...cluster import Bools, View
from ...policies.base import Ask, Choice, lowest, pair, requests


@dataclass(frozen=True, slots=True)
class Sglang:
    """ratio: share of the prompt that must be cached (cache-threshold). imbalance: requests (balance-abs-threshold).
    ratio_imbalance: times the least load (balance-rel-threshold).
    """

    ratio: float = 0.3
    imbalance: float = 64.0
    ratio_imbalance: float = 1.5
    fetch: bool = False
    replicates: ClassVar[bool] = False

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        load = requests(view)

        def pick(mask: Bools) -> int:
            low, high = int(load[mask].min()), int(load[mask].max())
            if high - low > self.imbalance and high > self.ratio_imbalance * low:
                return lowest(load, mask, rng)
            if int(ask.prefix[mask].max()) * view.block_tokens > self.ratio * ask.prompt_tokens:
                return lowest(-ask.prefix, mask, rng)
            return lowest(view.cached_blocks, mask, rng)

        prefill, decode = pair(view, pick, lambda mask: lowest(load, mask, rng))
        return Choice(prefill, decode, self.fetch, {"load": load, "cached": view.cached_blocks})
