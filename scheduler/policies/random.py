"""Anybody: the baseline that every other policy must beat."""

from __future__ import annotations

import random

import numpy as np

from ..cluster import Bools, View
from .base import Ask, Choice, pair


class Random:
    replicates = False

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        def draw(mask: Bools) -> int:
            return int(rng.choice(np.flatnonzero(mask)))

        return Choice(*pair(view, draw, draw))
