"""Ours: each request is judged by the batch it will be in, each answer has its own predicted length.

Time to first token: as the policy predicts it, behind prompts that are shorter (`ahead.py`), without those of them that
this one may overtake: of lower priority, and of tenants that have had all of their fair share of late, if this one's
has not. Waiting for room in the decode worker's pages counts: a prefill does not begin before.

Gap between tokens: the batch of the chosen decode worker from when this prompt is computed until this answer ends. It
is judged when the request joins it, and each time when somebody who was planned before joins later; against the
strictest promise made to anybody in it, as a newcomer slows all. Who has not joined yet and has a lower priority does
not count.

Deadline: first token, then the predicted length at that gap.

Fairness: while somebody is refused, and the place chosen for this request is more than half as loaded as it may be, a
tenant above its fair share gets no more (`fairness.py`). So who asks for little finds room.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...cost import F64
from ...work import decode_gap
from .base import Case, Refusal, advised, refuse_deadline, refuse_tbt, refuse_ttft

#: Joins after this one's that are looked at, evenly chosen.
LOOKS = 8
#: Load of the chosen workers, of what the objectives allow, from which on shares count: below, all find room.
CONTENDED = 0.5


@dataclass(frozen=True, slots=True)
class Predictive:
    """margin: predicted times are multiplied by it. Above 1 refuses more and misses less."""

    margin: float = 1.0

    def __post_init__(self) -> None:
        if self.margin <= 0.0:
            raise ValueError(f"margin must be above 0, not {self.margin:g}")

    def __call__(self, case: Case) -> Refusal | None:
        if case.free:
            return None
        slo = case.ask.slo
        room = _room_wait(case)
        first = self.margin * (max(case.ttft - _overtaken(case), 0.0) + room)
        gap, promised = _worst_gap(case, room)
        gap *= self.margin
        refusal = refuse_ttft(case, case.waited + first) or refuse_tbt(case, gap, promised)
        if refusal is None and slo.deadline is not None:
            refusal = refuse_deadline(case, case.waited + first + max(case.ask.output_tokens - 1.0, 0.0) * gap)
        if refusal is not None:
            return refusal
        load = max(
            0.0 if slo.ttft is None else (case.waited + first) / slo.ttft,
            0.0 if promised is None else gap / promised,
        )
        tenant = case.ask.tenant
        if load > CONTENDED and case.prefill_measured and case.shares.above(tenant, case.now):
            reason = "this tenant has had more than its share of a cluster that is full"
            return Refusal("share", reason, advised(case.shares.wait(tenant, case.now)))
        return None


def _overtaken(case: Case) -> float:
    """Seconds of prompts queued at the chosen prefill worker that this request may overtake."""
    worker = case.view.workers[case.choice.prefill].worker
    seconds, priorities, tenants = case.forecast.pending(worker, case.now)
    if not len(seconds):
        return 0.0
    behind = priorities < case.ask.priority
    level = case.shares.level(case.now)
    if np.isfinite(level) and case.shares.content(case.ask.tenant, case.now, level):
        others = {name: case.shares.content(name, case.now, level) for name in dict.fromkeys(tenants)}
        behind |= (priorities == case.ask.priority) & np.array([not others[name] for name in tenants])
    if case.ask.slo.ttft is not None and case.ask.priority >= 0:
        # The queue before it has no longer ones (`ahead.py`).
        behind &= seconds <= _own_seconds(case)
    # Some of it may have been computed meanwhile: what is queued in all is known better.
    return min(float(seconds[behind].sum()), float(case.view.queue_seconds[case.choice.prefill]))


def _own_seconds(case: Case) -> float:
    """That the chosen worker computes for this prompt, as `Forecast.pending` has it of others: uncorrected."""
    view, ask, row = case.view, case.ask, case.choice.prefill
    prefix = int(ask.prefix[row])
    cached = (max(ask.best, prefix) if case.choice.fetch else prefix) * view.block_tokens
    return view.prefill_seconds_of(row, ask.prompt_tokens, cached) / float(view.correction[row])


def _worst_gap(case: Case, room: float) -> tuple[float, float | None]:
    """The longest predicted gap while this answer is decoded, and the strictest promise of who is there then."""
    view, row, ask = case.view, case.choice.decode, case.ask
    name = view.workers[row].worker
    begin = case.now + case.ttft + room
    strictest = np.inf if ask.slo.tbt is None else ask.slo.tbt
    end = begin + ask.output_tokens * max(case.tbt, 0.0)
    later = case.forecast.joins(name, begin, end, case.now)
    if len(later) > LOOKS:
        later = later[np.linspace(0, len(later) - 1, LOOKS).astype(np.int64)]
    at = np.concatenate([[begin], later])
    course = case.forecast.course(name, at, case.now, ask.priority)
    grown = np.minimum((at - begin) / case.tbt, ask.output_tokens) if case.tbt > 0.0 else np.zeros(len(at))
    sequences: F64 = np.add(course.sequences, 1.0, dtype=np.float64)
    gaps: F64 = decode_gap(view, row, sequences, course.context + ask.prompt_tokens + grown)
    worst, strictest = float(gaps.max(initial=0.0)), min(strictest, float(course.tbt.min()))
    return worst, None if np.isinf(strictest) else strictest


def _room_wait(case: Case) -> float:
    """Seconds that the prompt has to wait for pages at the decode worker after it could have been there."""
    view, row = case.view, case.choice.decode
    at = case.now + case.ttft
    leaves, contexts = case.forecast.leaves(view.workers[row].worker, at, case.now)
    short = float(contexts.sum()) + case.ask.prompt_tokens + 1 - float(view.pages[row] * view.block_tokens)
    if short <= 0.0 or not len(leaves):
        return 0.0
    enough = np.flatnonzero(np.cumsum(contexts) >= short)
    return max(float(leaves[enough[0] if len(enough) else -1]) - at, 0.0)
