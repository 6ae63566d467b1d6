"""Anybody: the baseline that every other policy must beat."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..cluster import Bools, View
from .base import Ask, Choice, pair


@dataclass(frozen=True, slots=True)
class Random:
    """fetch: what the worker's node lacks comes from whoever has it; false: it is computed, as in the paper."""

    fetch: bool = True
    replicates: ClassVar[bool] = False

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        def draw(mask: Bools) -> int:
            return int(rng.choice(np.flatnonzero(mask)))

        return Choice(*pair(view, draw, draw), self.fetch)
