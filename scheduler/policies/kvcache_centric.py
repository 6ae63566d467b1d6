"""Mooncake's Algorithm 1: where the first token comes soonest, counting what must be moved and what must be computed.

    for each prefill instance i:
        if best_len / i.prefix_len > threshold:  prefix = best_len,      transfer = time to move the difference
        else:                                    prefix = i.prefix_len,  transfer = 0
        TTFT_i = load_i + transfer + queue_i + prefill(length, prefix)
    p = argmin TTFT;  d = the decode instance with the lowest load
    p fetches the longer prefix if best_len / p.prefix_len > threshold

Ours are: load, the time to read what i has on its SSD only; and what "load" of a decode instance is, which the paper
does not say: the predicted gap between tokens, after whom has pages for the prompt. Fetching leaves a copy at p: hot
blocks replicate, without a forecast of their use. Rejecting is the admission's part.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..cluster import View
from .base import Ask, Choice, decode_load, lowest, pair, ttft


@dataclass(frozen=True, slots=True)
class KvCacheCentric:
    """threshold: the paper sets it by hand and does not say to what; on its traces 1 to 3 hardly differ.

    1 fetches whenever anybody holds more, so a prefix is computed once in the whole cluster. replicates: hot prefixes
    are copied ahead of requests, too; the algorithm as printed does not.
    """

    threshold: float = 1.0
    replicates: bool = True

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        # best / 0 is infinite: written as a product, it needs no special case.
        fetch = ask.best > self.threshold * ask.prefix
        seconds = ttft(view, ask, fetch)
        load = decode_load(view, ask)
        prefill, decode = pair(view, lambda mask: lowest(seconds, mask, rng), lambda mask: lowest(load, mask, rng))
        return Choice(prefill, decode, bool(fetch[prefill]), {"ttft": seconds, "gap": load})
