"""The prefill worker with the shortest queue, the decode worker with the fewest sequences; blind to the cache."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from ..cluster import View
from .base import Ask, Choice, lowest, pair


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """fetch: what the worker's node lacks comes from whoever has it; false: it is computed."""

    fetch: bool = True
    replicates: ClassVar[bool] = False

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        # A worker of role both is loaded by what it decodes, too.
        load = view.queue_seconds + view.both * view.running * view.tbt
        return Choice(
            *pair(view, lambda mask: lowest(load, mask, rng), lambda mask: lowest(view.running, mask, rng)),
            self.fetch,
            {"queue": load},
        )
