"""The latest decisions, kept as they were made: they become words only when somebody asks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from .candidates import Masks
from .cluster import View
from .cost import F64
from .explanation import Candidate, Explanation
from .messages import Route
from .overlap import Overlap
from .policies.base import Ask, Choice, ttft
from .types import KEY_BYTES, Plan

#: Decisions remembered. One of a thousand workers holds some 300 KB.
KEPT = 64


@dataclass(slots=True, eq=False)
class Decision:
    """All that a choice rests on, and the choice. filters: as in `Candidates`."""

    route: Route
    view: View
    filters: tuple[tuple[str, Masks], ...]
    overlap: Overlap
    ask: Ask
    choice: Choice
    policy: str
    at: float


@dataclass(slots=True, eq=False)
class _Kept:
    """plan: None if the request was refused. explanation: of one that was refused before anything was decided."""

    gateway: str
    request: int
    decision: Decision | None
    plan: Plan | None = None
    refused: str = ""
    explanation: Explanation | None = None


class Decisions:
    """A ring of them."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque(maxlen=KEPT)

    def planned(self, gateway: str, decision: Decision, plan: Plan) -> None:
        self._kept.append(_Kept(gateway, decision.route.request, decision, plan))

    def refused(self, gateway: str, route: Route, reason: str, at: float, decision: Decision | None) -> None:
        """decision: what had been decided before it was refused, if it came to that."""
        said = unserved(gateway, route, reason, at) if decision is None else None
        self._kept.append(_Kept(gateway, route.request, decision, None, reason, said))

    def find(self, request: int | None) -> Explanation | None:
        """The latest one about this request, or the latest of all."""
        for kept in reversed(self._kept):
            if request is None or kept.request == request:
                if kept.decision is None:
                    return kept.explanation
                return explain(kept.gateway, kept.decision, kept.plan, kept.refused)
        return None


def unserved(gateway: str, route: Route, reason: str, at: float) -> Explanation:
    """Of a request for which nothing could be decided."""
    return Explanation(
        gateway=gateway,
        request=route.request,
        attempt=route.attempt,
        at=at,
        policy="",
        prompt_tokens=route.prompt_tokens,
        blocks=len(route.keys) // KEY_BYTES,
        best=0,
        refused=reason,
    )


def explain(gateway: str, decision: Decision, plan: Plan | None, refused: str = "") -> Explanation:
    """A decision in plain data. plan: what it has become; refused: or why it was not carried out."""
    route, view, overlap, ask, choice = (
        decision.route,
        decision.view,
        decision.overlap,
        decision.ask,
        decision.choice,
    )
    fetch = np.full(len(view.workers), choice.fetch)
    seconds = ttft(view, ask, fetch)
    transfer = np.where(fetch, ask.transfer_seconds, 0.0)
    handoff = np.broadcast_to(ask.handoff_seconds(choice.prefill), seconds.shape)
    coming, ready = overlap.coming, overlap.ready
    if not overlap.some_coming:
        coming, ready = np.zeros(len(seconds), dtype=np.int64), np.full(len(seconds), decision.at)
    masked = _masked(view, decision.filters)
    terms = _terms(choice, len(view.workers))
    candidates = tuple(
        Candidate(
            worker=info.worker,
            node=info.node.node,
            role=info.role.value,
            prefills=bool(view.prefills[row]),
            decodes=bool(view.decodes[row]),
            inlines=bool(view.inlines[row]),
            masked=masked[row],
            device=int(overlap.device[row]),
            dram=int(overlap.held[view.node[row]] - overlap.ssd[view.node[row]]),
            ssd=int(overlap.ssd[view.node[row]]),
            coming=int(coming[row]),
            coming_seconds=float(max(ready[row] - decision.at, 0.0)),
            load=float(ask.load_seconds[row]),
            transfer=float(transfer[row]),
            queue=float(view.queue_seconds[row]),
            compute=float(seconds[row] - ask.load_seconds[row] - transfer[row] - view.queue_seconds[row]),
            ttft=float(seconds[row]),
            tbt=float(view.tbt[row]),
            handoff=float(handoff[row]),
            running=int(view.running[row]),
            free_pages=int(view.free_pages[row]),
            measured=bool(view.measured[row]),
            correction=float(view.correction[row]),
            terms={name: float(column[row]) for name, column in terms.items()},
        )
        for row, info in enumerate(view.workers)
    )
    return Explanation(
        gateway=gateway,
        request=route.request,
        attempt=route.attempt,
        at=decision.at,
        policy=decision.policy,
        prompt_tokens=route.prompt_tokens,
        blocks=len(overlap.keys) // KEY_BYTES,
        best=ask.best,
        prefill="" if refused else view.workers[choice.prefill].worker,
        decode="" if refused else view.workers[choice.decode].worker,
        fetch=choice.fetch,
        refused=refused,
        predicted_ttft=plan.predicted_ttft if plan is not None else float(seconds[choice.prefill]),
        predicted_tbt=plan.predicted_tbt if plan is not None else float(view.tbt[choice.decode]),
        why=plan.why if plan is not None else "",
        candidates=candidates,
    )


def _terms(choice: Choice, count: int) -> dict[str, F64]:
    """[W] each. Another package's policy may call anything a term: what is no column is not told, and ends nobody."""
    found: dict[str, F64] = {}
    try:
        for name, column in dict(choice.terms).items():
            numbers = np.asarray(column, dtype=np.float64)
            if numbers.shape == (count,):
                found[str(name)] = numbers
    except (TypeError, ValueError):
        pass
    return found


def _masked(view: View, filters: tuple[tuple[str, Masks], ...]) -> list[str]:
    """[W] the first filter that a worker did not pass in any part that its role has."""
    masked = [""] * len(view.workers)
    for reason, masks in filters:
        passed = masks.prefills | masks.decodes
        for row in np.flatnonzero(~passed):
            masked[row] = masked[row] or reason
    return masked
