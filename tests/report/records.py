"""Made-up runs: what a report's readers need to meet, by hand or at random."""

from __future__ import annotations

import numpy as np

from pyengine.scheduler.sim.report import Records, Report


def records(count: int, seed: int = 0, **columns: object) -> Records:
    """At random, with every outcome; columns: given ones instead."""
    random = np.random.default_rng(seed)
    outcome = random.integers(0, 4, count)
    arrival = np.sort(random.uniform(0, 100, count))
    prompt = random.integers(1, 5000, count)
    ttft = np.where((outcome == 1) | (random.random(count) < 0.1) & (outcome > 1), np.nan, random.exponential(2, count))
    done = outcome == 0
    ttft = np.where(done & np.isnan(ttft), 1.0, ttft)
    cached = (prompt * random.random(count)).astype(np.int64)
    base: dict[str, object] = {
        "arrival": arrival,
        "prompt_tokens": prompt,
        "output_tokens": random.integers(1, 500, count),
        "outcome": outcome,
        "ttft": ttft,
        "second_gap": np.where(np.isnan(ttft), np.nan, random.exponential(0.05, count)),
        "tbt": np.where(done, random.exponential(0.1, count), np.nan),
        "tbt_mean": np.where(done, random.exponential(0.05, count), np.nan),
        "finished": np.where(done, arrival + random.exponential(20, count), np.nan),
        "prefill_seconds": np.where(np.isnan(ttft), np.nan, random.exponential(1, count)),
        "cached": cached,
        "tiers": {"dram": cached // 2, "peer_dram": cached - cached // 2},
        "prefill_worker": random.integers(0, 2, count),
        "decode_worker": random.integers(0, 2, count),
        "predicted_ttft": random.exponential(2, count),
        "held": np.zeros(count),
        "wasted": (outcome == 2) & ~np.isnan(ttft),
    }
    return Records(**{**base, **columns})  # type: ignore[arg-type]


def report(made: Records, **fields: object) -> Report:
    base: dict[str, object] = {
        "records": made,
        "workers": ["prefill-0", "decode-0"],
        "series": {"prefill load": (np.array([0.0, 1.0]), np.array([0.5, np.nan]))},
        "totals": {"events": 3.0},
        "provenance": {"trace": "made up", "policy": "none", "fidelity": "none"},
        "digest": "00",
    }
    return Report(**{**base, **fields})  # type: ignore[arg-type]
