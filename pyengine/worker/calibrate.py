"""A short run of the backend at start-up, so that the first request already meets a fitted cost model.

Prompts of several lengths, and batches that decode behind them, are computed in the worker's own pages before anybody
else uses them. No page gets a key, so what is written there is never found.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from pyengine.backend import Backend, Slice
from pyengine.scheduler import calibration
from pyengine.scheduler.calibration import LIMIT, Probe, probes
from pyengine.scheduler.cost import StepCost
from pyengine.scheduler.types import SamplingParams

logger = logging.getLogger(__name__)

GREEDY = SamplingParams(temperature=0.0)


def calibrate(
    backend: Backend, cost: StepCost, *, pages: int, max_tokens: int, max_sequences: int, limit: float = LIMIT
) -> None:
    """Measures a few steps and lets `cost` observe them. What fails is logged: the worker can do without.

    Nobody may hold pages meanwhile. limit: seconds, after a first step that is not measured, as it pays for much that
    no later one does (weights are read, buffers made); the first request would have paid.
    """
    try:
        _compute(backend, Probe(1, 0, 1, 1))
        fitting = [probe for probe in probes(max_tokens, max_sequences) if _fits(backend, probe, pages)]
        calibration.calibrate(cost, fitting, lambda probe: _seconds(backend, probe), limit)
    except Exception:
        logger.exception("the cost model could not be calibrated: the first requests will teach it")


def _pages_each(backend: Backend, probe: Probe) -> int:
    return -(-probe.length // backend.namespace.kv.block_tokens)


def _fits(backend: Backend, probe: Probe, pages: int) -> bool:
    return probe.sequences * _pages_each(backend, probe) <= pages and probe.length <= backend.max_positions


def _seconds(backend: Backend, probe: Probe) -> float:
    began = time.perf_counter()
    _compute(backend, probe)
    return time.perf_counter() - began


def _compute(backend: Backend, probe: Probe) -> None:
    pages = _pages_each(backend, probe)
    tokens = np.arange(probe.start, probe.start + probe.count, dtype=np.uint32) % backend.vocab_size
    backend.execute(
        [
            Slice(
                tokens=tokens.astype(np.uint32),
                start=probe.start,
                pages=np.arange(k * pages, (k + 1) * pages, dtype=np.int32),
                sampling=GREEDY,
            )
            for k in range(probe.sequences)
        ]
    )
