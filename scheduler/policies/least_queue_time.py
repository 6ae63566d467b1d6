"""The prefill worker whose queue is over first, the decode worker with the shortest gap between tokens.

It knows how long the work takes, and nothing of the cache: what the paper compares with as load balancing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from ..cluster import View
from .base import Ask, Choice, decode_load, lowest, pair


@dataclass(frozen=True, slots=True)
class LeastQueueTime:
    """fetch: what the worker's node lacks comes from whoever has it; false: it is computed, as in the paper."""

    fetch: bool = True
    replicates: ClassVar[bool] = False

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        gap = decode_load(view, ask)
        return Choice(
            *pair(view, lambda mask: lowest(view.queue_seconds, mask, rng), lambda mask: lowest(gap, mask, rng)),
            self.fetch,
            {"queue": view.queue_seconds, "gap": gap},
        )
