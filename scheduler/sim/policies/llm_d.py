"""llm-d's endpoint picker: scorers in [0, 1], weighted and added; the highest wins, by lot if several have it.

    prefix_i = cached blocks of the prompt / its blocks
    queue_i  = (max queue − queue_i) / (max queue − min queue),  1 for all if they are equal
    kv_i     = 1 − pages in use / pages
    score_i  = prefix·prefix_i + queue·queue_i + kv·kv_i

For the decode half of a pair the prefix is not scored.

Source: llm-d.ai/docs, "Request Scheduler" and its scorers; weights prefix : queue = 2 : 1 as in its first releases'
example, with the KV scorer beside the queue's. (Later releases ship 3 : 2 : 2.)
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...cluster import Bools, View
from ...cost import F64
from ...policies.base import Ask, Choice, lowest, pair


@dataclass(frozen=True, slots=True)
class LlmD:
    """prefix, queue, kv: weights of the scorers."""

    prefix: float = 2.0
    queue: float = 1.0
    kv: float = 1.0
    fetch: bool = False
    replicates: ClassVar[bool] = False

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        match = ask.prefix / max(-(-ask.prompt_tokens // view.block_tokens), 1)
        free = np.clip(view.free_pages / np.maximum(view.pages, 1), 0.0, 1.0)

        def load(mask: Bools) -> F64:
            waiting = view.queued_requests
            low, high = waiting[mask].min(), waiting[mask].max()
            queue = (high - waiting) / (high - low) if high > low else np.ones(len(waiting))
            return self.queue * queue + self.kv * free

        prefill, decode = pair(
            view,
            lambda mask: lowest(-(self.prefix * match + load(mask)), mask, rng),
            lambda mask: lowest(-load(mask), mask, rng),
        )
        return Choice(prefill, decode, self.fetch, {"prefix": match, "free": free})
