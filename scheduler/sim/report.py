"""What a run has found: one row per request, curves over time, and all that is needed to repeat it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


#: Values of `Records.outcome`.
DONE, REJECTED, DROPPED, UNFINISHED = range(4)
#: The count, in `Report.totals`, of requests refused because the policy failed: there only if one did.
FAILED = "failed decisions"


@dataclass(frozen=True)
class Records:
    """Columns [R] over requests in the order of the trace. Seconds, tokens; NaN where it never came to that.

    outcome: 0 done, 1 rejected at arrival, 2 dropped later (its deadline passed), 3 not over when the run ended.
    tbt: mean of the longest 10 % of the gaps between tokens, 0 for an answer of one token. tbt_mean: of all gaps.
    prefill_seconds: of a prefill worker's steps, by share of the tokens computed. wasted: prefilled and then dropped.
    cached: tokens of the prompt that were reused, in all and by tier (device, dram, ssd, peer_dram, peer_ssd).
    predicted_ttft: when it was first planned, from its arrival on. held: of ttft, how long the first token was there
    and was held for the second; no prediction is about that.
    """

    arrival: F64
    prompt_tokens: I64
    output_tokens: I64
    outcome: I64
    ttft: F64
    second_gap: F64
    tbt: F64
    tbt_mean: F64
    finished: F64
    prefill_seconds: F64
    cached: I64
    tiers: dict[str, I64]
    prefill_worker: I64
    decode_worker: I64
    predicted_ttft: F64
    held: F64
    wasted: npt.NDArray[np.bool_]


def longest_tenth(gaps: F64) -> float:
    """A request's TBT: the mean of the longest 10 % of its gaps, one at least; 0 without any."""
    if not len(gaps):
        return 0.0
    count = -(-len(gaps) // 10)
    return float(np.partition(gaps, len(gaps) - count)[-count:].mean())


@dataclass(frozen=True)
class Report:
    """records: of requests. workers: names, as records number them. series: curves by name, each (seconds, values):
    "prefill load", "decode load", "running", "queued", "replicas"... totals: counts by name. provenance: trace (name,
    what was done to it), seed, version, spec, cost models, fidelity, policy. digest: of all events and times; equal for
    equal input. complete: False if it was stopped early.
    """

    records: Records
    workers: list[str]
    series: dict[str, tuple[F64, F64]]
    totals: dict[str, float]
    provenance: dict[str, object]
    digest: str
    complete: bool = True
    notes: list[str] = field(default_factory=list)
