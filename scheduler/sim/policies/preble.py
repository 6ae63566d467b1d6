"""Preble's E2: exploit a cache that has most of the prompt, else explore, where it costs all requests least.

    cached more than missing:  the worker with the longest match (exploit)
    else:                      argmin of load_i + eviction_i + prefill_i (explore)
    load_i     = seconds of prefill and decode given to i in the last 3 minutes
    eviction_i = seconds to compute again what makes room, by how much of i's prompts of late was found in its cache
    prefill_i  = seconds to compute what i lacks of this prompt

If the chosen worker has the highest load, and more than `balance` times the lowest, the one with the lowest gets it.
Which blocks would go is not asked: all are taken to be worth what prompts reused on average. For the decode part of a
pair, which it does not know, the least load wins.

Source: Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving" (ICLR 2025).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...cluster import Bools, View
from ...policies.base import Ask, Choice, lowest, pair


@dataclass(frozen=True, slots=True)
class Preble:
    """exploit: share of the prompt above which its cache decides. balance: times the lowest load (1.5 in its code)."""

    exploit: float = 0.5
    balance: float = 1.5
    fetch: bool = False
    replicates: ClassVar[bool] = False

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        load = view.recent_computed * view.token_seconds + view.recent_output * view.tbt
        missing = -(-ask.prompt_tokens // view.block_tokens) - ask.prefix
        goes = np.clip(view.cached_blocks + missing - view.pool_slots, 0, np.maximum(missing, 0))
        reused = 1.0 - view.recent_computed / np.maximum(view.recent_prompt, 1)
        reused = np.where(view.recent_prompt > 0, np.maximum(reused, 0.0), 0.0)
        eviction = goes * view.block_tokens * view.token_seconds * reused
        prefill = view.prefill_seconds(ask.prompt_tokens, ask.prefix * view.block_tokens)

        def pick(mask: Bools) -> int:
            matched = int(ask.prefix[mask].max())
            if matched * view.block_tokens > self.exploit * ask.prompt_tokens:
                row = lowest(load, mask & (ask.prefix == matched), rng)
            else:
                row = lowest(load + eviction + prefill, mask, rng)
            low, high = load[mask].min(), load[mask].max()
            return lowest(load, mask, rng) if load[row] == high and high > self.balance * low else row

        first, second = pair(view, pick, lambda mask: lowest(load, mask, rng))
        return Choice(first, second, self.fetch, {"load": load, "eviction": eviction, "prefill": prefill})
