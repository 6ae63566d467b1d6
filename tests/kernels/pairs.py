"""Cases that have every pair of values of two axes somewhere, instead of every combination of all."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

#: Set to anything: every combination, which takes hours in the interpreter.
ALL_COMBINATIONS = "PYENGINE_TEST_ALL_KERNEL_CASES"


def cover(axes: Mapping[str, Sequence[Any]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Combinations of the axes' values, such that every two values of two axes are together in one; the same each time.

    Greedy: each begins with a pair that is still wanted; the other axes take, in random order, the value that has most
    wanted pairs with what is chosen.
    """
    names = list(axes)
    if ALL_COMBINATIONS in os.environ:
        for values in itertools.product(*axes.values()):
            yield dict(zip(names, values, strict=True))
        return
    random = np.random.default_rng(seed)
    wanted = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(axes[names[a]]))
        for j in range(len(axes[names[b]]))
    }
    while wanted:
        first, second = min(wanted)
        chosen = dict([first, second])
        for axis in random.permutation([axis for axis in range(len(names)) if axis not in chosen]).tolist():
            values = random.permutation(len(axes[names[axis]])).tolist()
            gains = [
                sum(tuple(sorted([(axis, value), other])) in wanted for other in chosen.items()) for value in values
            ]
            chosen[axis] = values[int(np.argmax(gains))]
        wanted -= set(itertools.combinations(sorted(chosen.items()), 2))
        yield {name: axes[name][chosen[axis]] for axis, name in enumerate(names)}


def few(cases: Sequence[Mapping[str, Any]], times: int) -> list[int]:
    """Which of the cases have every value of every axis in at least `times` of them, if it is in so many: greedy."""
    if ALL_COMBINATIONS in os.environ:
        return list(range(len(cases)))
    seen: Counter[tuple[str, str]] = Counter()
    taken = []
    for index, case in enumerate(cases):
        values = [(axis, repr(value)) for axis, value in case.items()]
        if any(seen[value] < times for value in values):
            seen.update(values)
            taken.append(index)
    return taken
