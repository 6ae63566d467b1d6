"""How long steps take: running fits of measured ones, with priors before anything was measured.

A step's time is modelled as

    seconds = step + token·P + context·C + sequence·S + history·H

with P computed prompt tokens, C their summed context, S decoding sequences, H their summed context. One fit per worker
serves prefill, decode and mixed steps alike; features a worker never shows keep their prior.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .messages import CostFit

F64 = npt.NDArray[np.float64]

#: A small model on a few CPU cores, in the order of the formula above. Only until a worker's first samples.
UNMEASURED = CostFit(coefficients=(5e-3, 1e-3, 1e-8, 2e-3, 1e-6))
PRIOR: F64 = np.array(UNMEASURED.coefficients)
#: Weight of the prior in samples: it says "right to a factor of ten", so a handful of samples overrules it.
PRIOR_WEIGHT = 0.01
#: Each sample lowers the weight of all before it: about 100 samples are remembered, some seconds of work.
FORGETTING = 0.99
EYE: F64 = np.eye(len(PRIOR))
#: Of the prior, what each sample brings back: to the vector, and to the matrix.
FRESH = (1 - FORGETTING) * PRIOR_WEIGHT
FRESH_EYE: F64 = FRESH * EYE
#: Shorter times are mostly noise of the clock and the loop; they count as this long when errors are weighed.
SHORTEST = 1e-4


class StepWork(NamedTuple):
    """What one step computes: P, C, S and H of the formula above."""

    prefill_tokens: int
    prefill_context: int
    decode_sequences: int
    decode_context: int


def context_of(start: int, end: int) -> int:
    """Summed context of positions `start` to `end` (exclusive): each sees itself and all before it."""
    return (end * (end + 1) - start * (start + 1)) // 2


class StepCost:
    """Least squares on relative errors, with forgetting, shrunk towards the prior so that it never runs away."""

    def __init__(self) -> None:
        self.samples = 0
        #: Mean relative error of predictions made just before each sample, of the last ten or so; 1 before the second.
        self.error = 1.0
        #: Mean context of a computed prompt token, and of a decoding sequence, in the latest samples.
        self.prompt_context = 0.0
        self.decode_context = 0.0
        self._fit: CostFit | None = None
        # Unknowns are coefficients in units of the prior: the prior is all ones and the matrix well conditioned.
        self._matrix: F64 = PRIOR_WEIGHT * EYE
        self._vector: F64 = PRIOR_WEIGHT * np.ones(len(PRIOR))
        self._coefficients: F64 = PRIOR

    @property
    def measured(self) -> bool:
        return self.samples > 0

    @property
    def coefficients(self) -> F64:
        """[5]: step, token, context, sequence, history; none negative."""
        return self._coefficients

    def fit(self) -> CostFit:
        """The same as plain data. Equal objects while nothing is observed: heartbeats cost nothing."""
        if self._fit is None:
            step, token, context, sequence, history = self._coefficients.tolist()
            self._fit = CostFit(
                (step, token, context, sequence, history),
                self.samples,
                self.error,
                self.prompt_context,
                self.decode_context,
            )
        return self._fit

    def seconds(self, work: StepWork) -> float:
        """Predicted time of one step."""
        step, token, context, sequence, history = self.fit().coefficients
        return (
            step
            + token * work.prefill_tokens
            + context * work.prefill_context
            + sequence * work.decode_sequences
            + history * work.decode_context
        )

    def observe(self, work: StepWork, seconds: float) -> None:
        """Takes in one measured step. Samples without time or work are ignored."""
        if seconds <= 0 or not (work.prefill_tokens or work.decode_sequences):
            return
        self._fit = None
        features = np.array([1.0, *work])
        seconds = max(seconds, SHORTEST)
        error = abs(float(features @ self._coefficients) - seconds) / seconds
        if self.samples:  # before the first nothing was predicted, but guessed
            self.error += (error - self.error) / min(self.samples, 10)
        self.samples += 1
        if work.prefill_tokens:
            self.prompt_context = work.prefill_context / work.prefill_tokens
        if work.decode_sequences:
            self.decode_context = work.decode_context / work.decode_sequences
        row = features * PRIOR / seconds
        self._matrix = FORGETTING * self._matrix + row[:, None] * row + FRESH_EYE
        self._vector = FORGETTING * self._vector + row + FRESH
        self._coefficients = np.maximum(np.linalg.solve(self._matrix, self._vector), 0.0) * PRIOR
