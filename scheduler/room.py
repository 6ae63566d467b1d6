"""How much of prompts a step may compute beside what decodes in it, which was promised its next token in time."""

from __future__ import annotations

import math

from .cost import StepCost, StepWork, context_of

#: Whatever was promised, prompts get this part of a step's tokens: they go on, if slowly.
LEAST = 1 / 16


class Room:
    """Of one step.

    work: what decodes in it. strictest: the shortest gap between tokens that any of it was promised, inf: none was.
    max_tokens: of any step. Without measurements nothing is held back: a guess is no reason to let prompts wait.
    """

    def __init__(self, cost: StepCost, work: StepWork, strictest: float, max_tokens: int) -> None:
        self._seconds = strictest - cost.seconds(work) if strictest < math.inf and cost.measured else math.inf
        _, self._token, self._context, _, _ = cost.fit().coefficients
        self._least = max(int(max_tokens * LEAST), 1)

    def take(self, start: int, most: int) -> int:
        """How many tokens of a prompt, from position `start` on, fit, of at most `most`. They are taken."""
        if self._seconds == math.inf:
            return most
        # The count for which token·count + context·(start + 1 + … + start + count) is what is left.
        seconds = max(self._seconds, 0.0)
        linear = self._token + self._context * (start + 0.5)
        divisor = linear + math.sqrt(linear * linear + 2 * self._context * seconds)
        fits = int(2 * seconds / divisor) if divisor else most
        count = min(most, max(fits, self._least))
        self._least = max(self._least - count, 0)
        self._seconds -= self._token * count + self._context * context_of(start, start + count)
        return count
