"""Filters: who could serve a request at all, before a policy prefers anybody; or a sentence on why nobody can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .cluster import SPARE_SLOTS, Bools, Cluster, Ints, View, every, some
from .messages import Route
from .sharing import difference
from .types import Role, WorkerInfo

#: Advised wait (seconds) when a worker of the needed role may appear any moment.
ABSENT_WAIT = 1.0


class Refused(Exception):
    """The request gets no plan. reason: for the client; retry_after: seconds, None if waiting does not help.

    kind: for counters: "absent", "too_large", "unknown_model", "late", "policy" (it failed), or what admission refuses
    for (`Refusal.kind`).
    """

    def __init__(self, kind: str, reason: str, retry_after: float | None) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.retry_after = kind, reason, retry_after


@dataclass(slots=True, eq=False)
class Masks:
    """Rows that may take the prefill part (alone, or as role both) and the decode part of a hand-off."""

    prefills: Bools
    decodes: Bools

    def within(self, rows: Bools, both: Bools) -> Masks:
        """Only these rows."""
        return Masks(self.prefills & rows, self.decodes & rows).paired(both)

    def paired(self, both: Bools) -> Masks:
        """Without prefill workers that have no decode worker to hand off to."""
        return self if some(self.decodes) else Masks(self.prefills & both, self.decodes)

    @property
    def some(self) -> bool:
        return some(self.prefills)


@dataclass(slots=True, eq=False)
class Candidates:
    """view: its masks narrowed to those that fit the request. filters: who passed which of them, in their order, and
    what is to be said of the others.
    """

    view: View
    filters: tuple[tuple[str, Masks], ...]


def candidates(cluster: Cluster, route: Route, turn: int, now: float) -> Candidates:
    """The workers of the route's model and namespace that can serve it.

    Left only if nobody else is: workers the request names in `exclude`, those whose daemon does not report or drains,
    and decode workers that have no room for one more sequence now. Raises Refused.
    """
    view = cluster.view(route.model, route.namespace, turn, now)
    if view is None:
        raise _absent(cluster, route)
    both = view.both
    masks = Masks(view.prefills, view.decodes).paired(both)
    if not masks.some:
        raise _lacking(cluster, route, view)
    filters = [("does not move, or has nobody to hand off to", masks)]
    if route.prompt_tokens > view.fits_all:
        masks = _fitting(view, route.prompt_tokens).paired(both)
        if not masks.some:
            raise _too_large(view, route.prompt_tokens)
        filters.append(("the prompt is too large for it", masks))
    wishes = [
        ("its node's daemon is away or drains", view.takes),
        ("it has no room now, others have", _has_room(view, route.prompt_tokens)),
    ]
    if route.exclude:
        others = np.array([worker.worker not in route.exclude for worker in view.workers], dtype=bool)
        wishes.insert(0, ("it has just failed this request", others))
    for reason, rows in wishes:
        if not every(rows):
            narrower = masks.within(rows, both)
            if narrower.some:
                masks = narrower
                filters.append((reason, masks))
    view.prefills, view.decodes = masks.prefills, masks.decodes
    view.tbt = view.tbt + view.prompt_gap * route.prompt_tokens
    return Candidates(view, tuple(filters))


def _has_room(view: View, prompt: int) -> Bools:
    """[W] a decode worker has pages for the prompt and a token more, and a place in its batch; all others are true."""
    # More tokens than the prompt has is more pages than it fills.
    room: Bools = (view.free_pages > prompt // view.block_tokens) & (view.running < view.max_sequences)
    return room | ~view.decodes


def _room(view: View) -> tuple[Ints, Ints, Ints]:
    """[W] longest prompt that a worker can serve alone, as prefill part, and as decode part of a hand-off.

    To decode, pages hold one token more than the prompt. The decode node's pool has a slot per block of the prompt; at
    the prefill node blocks pass through a few slots.
    """
    pages = view.pages * view.block_tokens
    pool = (view.pool_slots - SPARE_SLOTS) * view.block_tokens
    positions = view.max_positions - 1
    alone = np.where(view.both, np.minimum(pages - 1, positions), 0)
    return alone, np.minimum(pages, positions), np.minimum(np.minimum(pages - 1, pool), positions)


def _fitting(view: View, prompt: int) -> Masks:
    alone, prefill, decode = _room(view)
    return Masks(view.prefills & (np.where(view.both, alone, prefill) >= prompt), view.decodes & (decode >= prompt))


def _too_large(view: View, prompt: int) -> Refused:
    positions = int(view.max_positions.max())
    if prompt + 1 > positions:
        reason = f"the prompt has {prompt} tokens, the model {positions} positions for prompt and answer: shorten it"
    else:
        alone, prefill, decode = _room(view)
        apart = min(int(prefill[view.prefills & ~view.both].max(initial=0)), int(decode[view.decodes].max(initial=0)))
        reason = (
            f"the prompt has {prompt} tokens, but the KV space of the workers holds prompts of"
            f" {max(int(alone.max()), apart)} tokens at most: shorten it, or give the workers more pages and the nodes"
            " more DRAM"
        )
    return Refused("too_large", reason, None)


def _absent(cluster: Cluster, route: Route) -> Refused:
    """Nobody alive has this model and namespace."""
    live = cluster.live()
    same_model = [info for info in live if info.model == route.model]
    if same_model:
        field = next(_differences(cluster.with_namespace(route.namespace), same_model), None)
        detail = f" ({field})" if field else ""
        return Refused(
            "absent", f"the workers of model {route.model!r} share no KV with this request{detail}", ABSENT_WAIT
        )
    if not live:
        return Refused("absent", "no worker is alive", ABSENT_WAIT)
    if any(worker.info.model == route.model for worker in cluster.workers.values()):
        return Refused("absent", f"no worker of model {route.model!r} is alive", ABSENT_WAIT)
    known = ", ".join(sorted({info.model for info in live}))
    return Refused("unknown_model", f"there is no model {route.model!r}: this cluster serves {known}", None)


def _lacking(cluster: Cluster, route: Route, view: View) -> Refused:
    """There are workers, but not one of each role that works with the others."""
    role = Role.DECODE if not any(info.role.decodes for info in view.workers) else Role.PREFILL
    others = [
        info
        for info in cluster.live()
        if info.model == route.model
        and info not in view.workers
        and (info.role.decodes if role is Role.DECODE else info.role.prefills)
    ]
    field = next(_differences(list(view.workers), others), None)
    if field is not None:
        reason = f"no {role.value} worker of model {route.model!r} shares KV with the others: {field}"
    else:
        reason = f"no {role.value} worker of model {route.model!r} is alive"
    return Refused("absent", reason, ABSENT_WAIT)


def _differences(some: list[WorkerInfo], others: list[WorkerInfo]) -> Iterator[str]:
    for one in some:
        for other in others:
            field = difference(one, other)
            if field is not None:
                yield field
