"""The prefill worker with the shortest queue, the decode worker with the fewest sequences; blind to the cache."""

from __future__ import annotations

import random

from ..cluster import View
from .base import Ask, Choice, lowest, pair


class LeastLoaded:
    replicates = False

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        # A worker of role both is loaded by what it decodes, too.
        load = view.queue_seconds + view.both * view.running * view.tbt
        return Choice(
            *pair(view, lambda mask: lowest(load, mask, rng), lambda mask: lowest(view.running, mask, rng)),
        )
