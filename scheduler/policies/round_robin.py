"""Each in turn, whatever it holds and however long its queue."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..cluster import Bools, View
from .base import Ask, Choice, pair


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """fetch: what the worker's node lacks comes from whoever has it; false: it is computed."""

    fetch: bool = True
    replicates: ClassVar[bool] = False

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        def turn(mask: Bools) -> int:
            rows = np.flatnonzero(mask)
            return int(rows[view.turn % len(rows)])

        return Choice(*pair(view, turn, turn), self.fetch)
