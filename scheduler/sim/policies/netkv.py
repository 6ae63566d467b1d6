"""NetKV: the decode worker that has the prompt's KV soonest, and decodes it soon, whatever lies between.

    d = argmin over decode instances of  transfer(p, d) + queue(d) + step(d)

transfer: by the link's rate and who else uses it (its "network cost oracle"). queue: until prompts that wait at d are
computed, nothing at a pure decode worker; workers without pages for the prompt come last. step: gap between tokens with
one sequence more. It says nothing of prefill, which goes where the first token comes soonest from the node's own cache.

Source: Ojewale, "NetKV: Network-Aware Decode Instance Selection for Disaggregated LLM Inference" (arXiv 2606.03910).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...cluster import Bools, View
from ...policies.base import Ask, Choice, lacks_pages, lowest, ttft


@dataclass(frozen=True, slots=True)
class NetKv:
    """network: weight of the transfer; 0 is its baseline that knows of load alone."""

    network: float = 1.0
    fetch: bool = False
    replicates: ClassVar[bool] = False

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        seconds = ttft(view, ask, np.full(len(view.workers), self.fetch))
        prefill = lowest(seconds, view.prefills, rng)
        transfer = self.network * ask.handoff_seconds(prefill)
        total = transfer + view.queue_seconds + view.tbt
        terms = {"ttft": seconds, "transfer": transfer, "total": total}
        if view.both[prefill]:
            return Choice(prefill, prefill, self.fetch, terms)
        roomy: Bools = view.decodes & ~lacks_pages(view, ask)
        return Choice(prefill, lowest(total, roomy if roomy.any() else view.decodes, rng), self.fetch, terms)
