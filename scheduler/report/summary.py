"""A run in a few numbers: who met the objectives, how long it took, where the cache was hit, what was wasted."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from ..sim.report import DONE, DROPPED, F64, REJECTED, UNFINISHED, Records, Report
from ..types import Slo

Bools = npt.NDArray[np.bool_]


class Spread(msgspec.Struct, frozen=True):
    """Of the values that there are; None: there is none."""

    count: int
    mean: float | None = None
    p10: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, tokens and shares of 1. Everything about a run but its curves.

    requests: that were asked for and, in a run that was stopped early, had come to an end. wasted: prefilled, then
    dropped. seconds: of arrivals. offered: requests per second. effective: share that was done within the objectives,
    met_ttft and met_tbt: within one of them. goodput: effective requests per second. ttft, tbt, tbt_mean, second_gap:
    of requests that came so far. hit: share of the prompt tokens of the served that were reused; hits: by tier.
    prefill_seconds: of a worker, for each request that was prefilled. ttft_error: of predictions at routing, relative
    to when the first token came (it may have been held then), mean of absolutes; ttft_bias: mean, positive: it took
    longer than was said.
    """

    requests: int
    done: int
    rejected: int
    dropped: int
    unfinished: int
    wasted: int
    seconds: float
    offered: float
    effective: float
    met_ttft: float
    met_tbt: float
    goodput: float
    ttft: Spread
    tbt: Spread
    tbt_mean: Spread
    second_gap: Spread
    hit: float
    hits: dict[str, float]
    prefill_seconds: float | None
    output_rate: float
    ttft_error: float | None
    ttft_bias: float | None


def effective(records: Records, slo: Slo) -> Bools:
    """[R] done, and within all objectives. An objective that is None is met by whoever was done."""
    return met_ttft(records, slo) & met_tbt(records, slo) & _in_time(records, slo)


def met_ttft(records: Records, slo: Slo) -> Bools:
    return _done(records) & _within(records.ttft, slo.ttft)


def met_tbt(records: Records, slo: Slo) -> Bools:
    return _done(records) & _within(records.tbt, slo.tbt)


def summarize(report: Report, slo: Slo) -> Summary:
    """A run that was stopped early is judged by the requests that had come to an end."""
    records = report.records
    counted = np.ones(len(records.outcome), dtype=np.bool_) if report.complete else records.outcome != UNFINISHED
    requests = int(counted.sum())
    seconds = _span(records.arrival[counted])
    good = effective(records, slo) & counted
    served = counted & np.isfinite(records.ttft)
    prompts = int(records.prompt_tokens[served].sum())
    prefilled = records.prefill_seconds[served & np.isfinite(records.prefill_seconds)]
    ends = records.finished[_done(records)]
    length = float(ends.max() - records.arrival.min()) if len(ends) else 0.0
    came = records.ttft - np.nan_to_num(records.held)
    foreseen = served & np.isfinite(records.predicted_ttft) & (came > 0)
    errors = (came[foreseen] - records.predicted_ttft[foreseen]) / came[foreseen]
    return Summary(
        requests=requests,
        done=int(_done(records).sum()),
        rejected=int((records.outcome == REJECTED).sum()),
        dropped=int((records.outcome == DROPPED).sum()),
        unfinished=int((records.outcome == UNFINISHED).sum()),
        wasted=int(records.wasted.sum()),
        seconds=seconds,
        offered=_ratio(requests, seconds),
        effective=_ratio(int(good.sum()), requests),
        met_ttft=_ratio(int((met_ttft(records, slo) & counted).sum()), requests),
        met_tbt=_ratio(int((met_tbt(records, slo) & counted).sum()), requests),
        goodput=_ratio(int(good.sum()), seconds),
        ttft=spread(records.ttft[served]),
        tbt=spread(records.tbt[_done(records)]),
        tbt_mean=spread(records.tbt_mean[_done(records)]),
        second_gap=spread(records.second_gap[served]),
        hit=_ratio(int(records.cached[served].sum()), prompts),
        hits={tier: _ratio(int(tokens[served].sum()), prompts) for tier, tokens in records.tiers.items()},
        prefill_seconds=float(prefilled.mean()) if len(prefilled) else None,
        output_rate=_ratio(int(records.output_tokens[_done(records)].sum()), length),
        ttft_error=float(np.abs(errors).mean()) if len(errors) else None,
        ttft_bias=float(errors.mean()) if len(errors) else None,
    )


def needed_stretch(records: Records, slo: Slo, share: float, kept: Slo = Slo()) -> float:  # noqa: B008 (immutable)
    """By how much all objectives would have to be longer for `share` of the requests to meet them, and to be within
    `kept` as well; inf: no length does.

    1 or less: they are met as they are. A request that is not done meets none.
    """
    stretch = np.where(effective(records, kept), 0.0, np.inf)
    finished = records.finished - records.arrival
    for values, limit in ((records.ttft, slo.ttft), (records.tbt, slo.tbt), (finished, slo.deadline)):
        if limit is not None:
            stretch = np.maximum(stretch, np.where(np.isfinite(values), values, np.inf) / limit)
    if not len(stretch):
        return np.inf
    # The smallest length that `share` of them meet: no interpolation between two requests.
    return float(np.sort(stretch)[max(int(np.ceil(share * len(stretch) - 1e-9)), 1) - 1])


def spread(values: F64) -> Spread:
    """Percentiles interpolate linearly between ranks, as numpy's default does."""
    known = values[np.isfinite(values)]
    if not len(known):
        return Spread(0)
    low, middle, high, most = (float(value) for value in np.percentile(known, (10, 50, 90, 99)))
    return Spread(len(known), float(known.mean()), low, middle, high, most, float(known.max()))


def _done(records: Records) -> Bools:
    done: Bools = records.outcome == DONE
    return done


def _within(values: F64, limit: float | None) -> Bools:
    if limit is None:
        return np.ones(len(values), dtype=np.bool_)
    within: Bools = values <= limit
    return within


def _in_time(records: Records, slo: Slo) -> Bools:
    return _within(records.finished - records.arrival, slo.deadline)


def _span(arrival: F64) -> float:
    """Seconds in which so many requests come, at the rate at which they came: the last one too has its gap."""
    if len(arrival) < 2:
        return 0.0
    return float(arrival.max() - arrival.min()) * len(arrival) / (len(arrival) - 1)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
