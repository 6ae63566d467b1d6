"""NVIDIA Dynamo's KV router as of 2026: the fewest blocks to compute and to keep, credited by tier.

    cost_i = prefill_scale · max(waiting_i + length − credit_i, 0) / block + decode_blocks_i          lowest wins
    credit_i = device·(blocks in i's pages) + host·(further ones in its DRAM) + disk·(further ones on its SSD)

waiting: prompt tokens accepted at i and not computed yet. Equal costs go to the smaller cache, then by lot. With a
temperature the choice is drawn, by softmax over the costs scaled to [0, 1]. With prefill and decode apart, its prefill
router counts no decode blocks, and its decode router nothing but these.

Source: docs.nvidia.com/dynamo, "Routing Concepts", "Configuration and Tuning" and "Disaggregated Serving" (v1.2 and
later), and the crate dynamo-kv-router for the softmax and the ties.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...cluster import Bools, View
from ...cost import F64
from ...policies.base import Ask, Choice, lowest, pair


@dataclass(frozen=True, slots=True)
class Dynamo:
    """device, host, disk: credit for a block in that tier (router-kv-overlap-score-credit,
    router-host-cache-hit-weight, router-disk-cache-hit-weight). prefill_scale: weight of what is to be computed
    (router-prefill-load-scale). temperature: 0 takes the lowest cost (router-temperature).
    """

    device: float = 1.0
    host: float = 0.75
    disk: float = 0.25
    prefill_scale: float = 1.0
    temperature: float = 0.0
    fetch: bool = False
    replicates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError("temperature must be at least 0")

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        beyond = np.maximum(ask.prefix - ask.device, 0)
        disk = np.minimum(ask.ssd, beyond)
        credit = self.device * ask.device + self.host * (beyond - disk) + self.disk * disk
        tokens = view.queued_tokens + ask.prompt_tokens
        compute = self.prefill_scale * np.maximum(tokens / view.block_tokens - credit, 0.0)
        keep = (view.running_context + ask.prompt_tokens) / view.block_tokens
        cost = compute + view.both * keep
        prefill, decode = pair(
            view, lambda mask: self._pick(cost, view, mask, rng), lambda mask: self._pick(keep, view, mask, rng)
        )
        return Choice(prefill, decode, self.fetch, {"compute": compute, "keep": keep})

    def _pick(self, cost: F64, view: View, mask: Bools, rng: random.Random) -> int:
        rows = np.flatnonzero(mask)
        low, high = np.fmin.reduce(cost[rows]), cost[rows].max()
        if self.temperature and low < high < math.inf:
            weights = np.exp((low - cost[rows]) / ((high - low) * self.temperature))
            return int(rng.choices(rows, weights.tolist())[0])
        equal = mask & (cost == low)
        return lowest(view.cached_blocks, equal if equal.any() else mask, rng)
