"""What `pyengine bench` says of its requests, by aiperf's definitions (AIPerf Metrics Reference).

    request latency                  from when it was due to the end of its answer
    time to first token (TTFT)       from when it was due to its first token
    time to second token (TTST)      from the first to the second
    inter-token latency (ITL)        of a request: (last token - first token) / (tokens - 1)
    inter-chunk latency (ICL)        every gap between two chunks, of all requests
    benchmark duration               from the first request to the end of the last answer
    request, output throughput       whole answers, and their tokens, by that duration
    goodput                          those of them within all objectives, by that duration

Two things differ. Time counts from when a request was due, not from when it was sent: a client that is late must not
hide a slow server. And TBT is beside them, the mean of the longest tenth of a request's gaps, by which this project's
objectives are judged.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from pyengine.scheduler.backends.replies import Reply
from pyengine.scheduler.report.table import table
from pyengine.scheduler.sim.report import DONE, UNFINISHED, longest_tenth
from pyengine.scheduler.types import Slo

PERCENTILES = (50, 90, 95, 99)


class Spread(msgspec.Struct, frozen=True):
    """Seconds. Percentiles are interpolated linearly, as numpy does and aiperf with it."""

    count: int
    avg: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """spreads: by name, of requests that were answered whole; a name without a value is missing. Rates are per second.

    good: answered within all objectives; good_share: of all that are over; goodput: by the duration. None where no
    objective was named. late_p99: how late the client was to send. cached: share of the prompts' tokens reused.
    """

    requests: int
    done: int
    failed: int
    unfinished: int
    duration: float
    request_throughput: float
    output_throughput: float
    output_tokens: int
    prompt_tokens: int
    cached: float
    good: int | None
    good_share: float | None
    goodput: float | None
    late_p99: float
    spreads: dict[str, Spread]
    errors: dict[str, int]


#: As the table has them.
NAMES = {
    "ttft": "time to first token",
    "ttst": "time to second token",
    "itl": "inter-token latency",
    "icl": "inter-chunk latency",
    "tbt": "TBT (longest tenth)",
    "latency": "request latency",
}


def measure(replies: Sequence[Reply], slo: Slo) -> Figures:
    """slo: objectives; one that is None is met by every whole answer."""
    done = [reply for reply in replies if reply.outcome == DONE]
    failed = [reply for reply in replies if reply.outcome not in (DONE, UNFINISHED)]
    ended = [reply.ended for reply in replies if reply.ended == reply.ended]
    duration = max(ended) - min(reply.due for reply in replies) if ended else 0.0
    gaps = [np.diff(reply.tokens) for reply in done]
    columns = {
        "ttft": [reply.tokens[0] - reply.due for reply in done if reply.tokens],
        "ttst": [float(gap[0]) for gap in gaps if len(gap)],
        "itl": [float(gap.mean()) for gap in gaps if len(gap)],
        "icl": [later - earlier for reply in done for earlier, later in itertools.pairwise(sorted(set(reply.tokens)))],
        "tbt": [longest_tenth(gap) for gap in gaps if len(gap)],
        "latency": [reply.ended - reply.due for reply in done],
    }
    good = sum(_within(reply, slo) for reply in done) if slo != Slo() else None
    tokens = sum(len(reply.tokens) for reply in done)
    prompts = sum(reply.request.prompt_tokens for reply in done)
    over = len(done) + len(failed)
    errors: dict[str, int] = {}
    for reply in failed:
        errors[reply.error or "?"] = errors.get(reply.error or "?", 0) + 1
    return Figures(
        requests=len(replies),
        done=len(done),
        failed=len(failed),
        unfinished=len(replies) - over,
        duration=duration,
        request_throughput=_rate(len(done), duration),
        output_throughput=_rate(tokens, duration),
        output_tokens=tokens,
        prompt_tokens=prompts,
        cached=_rate(sum(reply.cached for reply in done), prompts),
        good=good,
        good_share=None if good is None else _rate(good, over),
        goodput=None if good is None else _rate(good, duration),
        late_p99=float(np.percentile([reply.sent - reply.due for reply in replies if reply.sent] or [0.0], 99)),
        spreads={name: spread(values) for name, values in columns.items() if values},
        errors=dict(sorted(errors.items(), key=lambda each: -each[1])),
    )


def spread(values: Sequence[float]) -> Spread:
    """Of one value at least."""
    p50, p90, p95, p99 = (float(value) for value in np.percentile(values, PERCENTILES))
    return Spread(len(values), float(np.mean(values)), min(values), p50, p90, p95, p99, max(values))


def _within(reply: Reply, slo: Slo) -> bool:
    if not reply.tokens:
        return False
    measured = (
        (slo.ttft, reply.tokens[0] - reply.due),
        (slo.tbt, longest_tenth(np.diff(reply.tokens))),
        (slo.deadline, reply.ended - reply.due),
    )
    return all(limit is None or value <= limit for limit, value in measured)


def _rate(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def text(figures: Figures, slo: Slo) -> str:
    """For people: milliseconds, and what is per second."""
    f = figures
    rows = [
        (NAMES[name], *(f"{1000 * value:,.1f}" for value in msgspec.structs.astuple(found)[1:]))
        for name, found in f.spreads.items()
    ]
    shown = [table(("ms", "avg", "min", *(f"p{percent}" for percent in PERCENTILES), "max"), rows)] if rows else []
    not_over = f", {f.unfinished} not over" if f.unfinished else ""
    facts = [
        ("requests", f"{f.done} done, {f.failed} failed{not_over}, in {f.duration:.1f} s"),
        ("request throughput", f"{f.request_throughput:.2f} requests/s"),
        ("output throughput", f"{f.output_throughput:.1f} tokens/s ({f.output_tokens} tokens)"),
        ("prompt tokens reused", f"{f.cached:.1%} of {f.prompt_tokens}"),
    ]
    if f.good is not None and f.good_share is not None and f.goodput is not None:
        wanted = (("TTFT", slo.ttft), ("TBT", slo.tbt), ("latency", slo.deadline))
        named = ", ".join(f"{name} <= {limit:g} s" for name, limit in wanted if limit is not None)
        facts.append(("goodput", f"{f.goodput:.2f} requests/s, {f.good_share:.1%} of all ({named})"))
    facts.append(("sent late, p99", f"{1000 * f.late_p99:.1f} ms"))
    shown.append(table(("", ""), facts, left=2).split("\n", 2)[2])
    shown += ["\n".join(f"failed: {count} x {error}" for error, count in f.errors.items())] if f.errors else []
    return "\n\n".join(shown)
