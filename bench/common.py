"""What the benchmarks share: one JSON object a line, percentiles, and an ending that leaves nothing behind."""

from __future__ import annotations

import json
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

#: Seconds before each turn: OpenMP's and OpenBLAS's threads look out for work for some milliseconds after theirs.
PAUSE = 0.05


def line(
    bench: str,
    case: str,
    value: float,
    unit: str,
    *,
    against: str | None = None,
    ratio: float | None = None,
    **more: str | float | bool | None,
) -> None:
    """Prints one result. ratio: how many times better than `against` we are (above 1: better).

    more: further fields that a reader of this bench needs (rounds, errors, ...).
    """
    record: dict[str, object] = {"bench": bench, "case": case, "value": tidy(value), "unit": unit}
    if against is not None:
        record["against"] = against
        record["ratio"] = None if ratio is None else tidy(ratio)
    record.update({name: tidy(item) if isinstance(item, float) else item for name, item in more.items()})
    print(json.dumps(record), flush=True)


def note(text: str) -> None:
    """For the person watching; stdout carries results only."""
    print(text, file=sys.stderr, flush=True)


def tidy(value: float) -> float | None:
    """Four significant digits; JSON has no NaN, so nothing measured is null."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: a value that was measured. NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def mean(values: Sequence[float]) -> float:
    """NaN of nothing."""
    return statistics.fmean(values) if values else math.nan


def median(values: Sequence[float]) -> float:
    """NaN of nothing."""
    return statistics.median(values) if values else math.nan


def in_turn(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each, the median round. All take their turns in every round; in one more before, to warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        for name, run in runs.items():
            time.sleep(PAUSE)
            start = time.perf_counter()
            run()
            if index:
                times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def longest_tenth(gaps: Sequence[float]) -> float:
    """TBT of a request: the mean of the longest 10 % of its token gaps (at least one). NaN of nothing."""
    return mean(sorted(gaps)[-max(1, math.ceil(len(gaps) / 10)) :]) if gaps else math.nan


def end_on_sigterm() -> None:
    """SIGTERM becomes SystemExit, so that `with` blocks end what they started."""

    def leave(*_: object) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, leave)
