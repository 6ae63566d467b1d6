"""How urgent a sequence is: where it stands in line, and when it is too late for it, as the worker predicts."""

from __future__ import annotations

import math

from .cost import StepCost, context_of
from .order import PATIENCE, PATIENCE_TTFTS, Place
from .sequence import Sequence


class Urgency:
    """Of the sequences of one worker, whose steps cost what `cost` says and compute `max_tokens` at most."""

    def __init__(self, cost: StepCost, max_tokens: int) -> None:
        self._cost = cost
        self._max_tokens = max_tokens

    def place(self, sequence: Sequence) -> Place:
        """By what it was promised, and the time that computing the rest of its prompt alone is predicted to take.

        It is as urgent as the most urgent of those that wait for its blocks.
        """
        have = max(sequence.computed, sequence.available)
        seconds = self._seconds(have, len(sequence.tokens)) if self._cost.measured else 0.0
        latest = -math.inf if sequence.handed_off else sequence.arrived + sequence.ttft - seconds
        patience = PATIENCE if sequence.ttft == math.inf else max(PATIENCE, PATIENCE_TTFTS * sequence.ttft)
        priority = sequence.priority
        if sequence.lent_priority is not None:
            priority, latest = max(priority, sequence.lent_priority), min(latest, sequence.lent_latest)
            seconds = min(seconds, sequence.lent_seconds)
        return Place(
            sequence.arrival, sequence.arrived, latest, patience, priority, sequence.tenant, sequence.preempted, seconds
        )

    def last_chance(self, sequence: Sequence) -> float:
        """When the rest of its prompt must be begun, or its deadline cannot be met. The usual error of predictions is
        taken off: only who is surely late is given up.
        """
        if not sequence.owed or not self._cost.measured:
            return sequence.deadline
        have = max(sequence.computed, sequence.available)
        sure = max(1.0 - self._cost.error, 0.0)
        return sequence.deadline - sure * self._seconds(have, sequence.prompt_tokens)

    def _seconds(self, start: int, end: int) -> float:
        """Predicted, for positions `start` to `end` computed alone."""
        step, token, context, _, _ = self._cost.fit().coefficients
        count = end - start
        return -(-count // self._max_tokens) * step + count * token + context_of(start, end) * context
