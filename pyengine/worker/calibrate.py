"""A short run of the backend at start-up, so that the first request already meets a fitted cost model.

Prompts of several lengths, and batches that decode behind them, are computed in the worker's own pages before anybody
else uses them. No page gets a key, so what is written there is never found.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from pyengine.backend import Backend, Slice
from pyengine.scheduler.cost import StepCost, StepWork, context_of
from pyengine.scheduler.types import SamplingParams

logger = logging.getLogger(__name__)

#: Seconds it may take. On a slow machine it ends early and the first requests teach the rest.
LIMIT = 2.0
GREEDY = SamplingParams(temperature=0.0)


def calibrate(
    backend: Backend, cost: StepCost, *, pages: int, max_tokens: int, max_sequences: int, limit: float = LIMIT
) -> None:
    """Measures a few steps and lets `cost` observe them. What fails is logged: the worker can do without.

    Nobody may hold pages meanwhile. One step more than `limit` seconds allow may be under way at their end.
    """
    probe = _Probe(backend, cost, time.monotonic() + limit)
    try:
        probe.prompts(1, 1, measured=False)  # the first step of a process pays for much that no later one does
        for sequences, tokens in _points(max_tokens, max_sequences):
            pages_each = -(-(tokens + 2 * DECODES) // backend.namespace.kv.block_tokens)
            fits = sequences * pages_each <= pages and tokens + 2 * DECODES <= backend.max_positions
            if fits and not probe.all_of(sequences, tokens, pages_each):
                break
    except Exception:
        logger.exception("the cost model could not be calibrated: the first requests will teach it")


#: Steps that decode behind each prompt.
DECODES = 2


def _points(max_tokens: int, max_sequences: int) -> list[tuple[int, int]]:
    """(sequences, tokens of each), cheap ones first."""
    points = [(1, 16), (1, 64), (4, 16), (8, 32), (1, 256), (2, max_tokens // 2), (1, max_tokens)]
    points.append((max_sequences, max_tokens // max_sequences))
    return sorted(
        {
            point
            for point in points
            if min(point) >= 1 and point[0] <= max_sequences and point[0] * point[1] <= max_tokens
        },
        key=lambda point: (point[0] * point[1], point),
    )


class _Probe:
    def __init__(self, backend: Backend, cost: StepCost, until: float) -> None:
        self._backend = backend
        self._cost = cost
        self._until = until
        #: Seconds that a token has taken at worst, to tell what is too long to begin.
        self._worst = 0.0

    def all_of(self, sequences: int, tokens: int, pages_each: int) -> bool:
        """A step of prompts, then some that decode behind them; False when there is no time for more."""
        if time.monotonic() + self._worst * sequences * tokens > self._until:
            return False
        self.prompts(sequences, tokens, pages_each=pages_each)
        for _ in range(DECODES):
            if time.monotonic() > self._until:
                return False
            self._measure(sequences, tokens, 1, pages_each, StepWork(0, 0, sequences, sequences * (tokens + 1)))
            tokens += 1
        return True

    def prompts(self, sequences: int, tokens: int, *, pages_each: int = 1, measured: bool = True) -> None:
        work = StepWork(sequences * tokens, sequences * context_of(0, tokens), 0, 0)
        seconds = self._measure(sequences, 0, tokens, pages_each, work if measured else None)
        if measured:
            self._worst = max(self._worst, seconds / (sequences * tokens)) if tokens >= 64 else self._worst

    def _measure(self, sequences: int, start: int, count: int, pages_each: int, work: StepWork | None) -> float:
        slices = [
            Slice(
                tokens=np.arange(start, start + count, dtype=np.uint32) % self._backend.vocab_size,
                start=start,
                pages=np.arange(k * pages_each, (k + 1) * pages_each, dtype=np.int32),
                sampling=GREEDY,
            )
            for k in range(sequences)
        ]
        began = time.perf_counter()
        self._backend.execute(slices)
        seconds = time.perf_counter() - began
        if work is not None:
            self._cost.observe(work, seconds)
        return seconds
