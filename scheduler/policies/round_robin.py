"""Each in turn, whatever it holds and however long its queue."""

from __future__ import annotations

import random

import numpy as np

from ..cluster import Bools, View
from .base import Ask, Choice, pair


class RoundRobin:
    replicates = False

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        def turn(mask: Bools) -> int:
            rows = np.flatnonzero(mask)
            return int(rows[view.turn % len(rows)])

        return Choice(*pair(view, turn, turn))
