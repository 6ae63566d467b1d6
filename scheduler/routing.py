"""One request becomes a plan: candidates, what of the prompt lies where, what each would take, the policy's choice.

What is planned counts at once: the load at its workers until heartbeats show it, the bytes on their links, and the
blocks it will leave, which requests right behind it may share.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from .accuracy import Accuracy, Prediction
from .ahead import POINTS, point_of
from .candidates import Refused, candidates
from .cluster import Assigned, Cluster, View, some
from .estimates import Estimate, estimate, inlines, soonest
from .explaining import Decision, Decisions, explain, unserved
from .explanation import Explanation
from .inflight import Expectations
from .link_cost import LinkCost
from .messages import Route, RouteEnded
from .outlook import Judgement, Outlook
from .overlap import Overlap, Overlaps
from .policies import Choice, PolicyFailed, decide, find_policy
from .policies.admission.base import SHORTEST_WAIT
from .policies.base import Ask, ttft_of
from .prefix_index import Index
from .types import KEY_BYTES, Medium, Plan, Source, WorkerInfo, WorkerRef, cacheable_blocks

#: Requests whose load is accounted for at once; beyond, the oldest is forgotten, as if it had ended.
MAX_ROUTES = 100_000


@dataclass(slots=True, eq=False)
class Planned:
    """What a route has become, and what was known of its prompt then."""

    plan: Plan
    view: View
    overlap: Overlap


class _Open(msgspec.Struct, frozen=True):
    """A plan under way. waited: seconds that the request was old when it was made."""

    attempt: int
    prefill: str
    decode: str
    waited: float
    prediction: Prediction


@dataclass(slots=True, eq=False)
class _Considered:
    """All that a choice rests on, the choice, and whether it is admitted."""

    decision: Decision
    view: View
    overlap: Overlap
    estimate: Estimate
    choice: Choice
    prediction: Prediction
    judgement: Judgement


class Router:
    """Plans under way by (gateway, request). nodes: the daemon's node by name, to name sources."""

    def __init__(
        self,
        cluster: Cluster,
        index: Index,
        pages: Index,
        inflight: Expectations,
        policy: str,
        outlook: Outlook,
        seed: int,
    ) -> None:
        self.policy_name = policy
        self.policy = find_policy(policy)
        self.outlook = outlook
        self.links = LinkCost()
        self.inflight = inflight
        self.accuracy = Accuracy()
        self.decisions = Decisions()
        self.plans = 0
        self._cluster = cluster
        self._overlaps = Overlaps(index, pages, self.inflight)
        self._random = random.Random(seed)
        self._open: OrderedDict[tuple[str, int], _Open] = OrderedDict()

    # -- plans -----------------------------------------------------------------------------------------------------

    def attempt(self, gateway: str, request: int) -> int | None:
        """The attempt that is planned of this request, if one is."""
        known = self._open.get((gateway, request))
        return known.attempt if known is not None else None

    def plan(self, gateway: str, route: Route, now: float) -> Planned:
        """Decides, and takes the plan's load into account. Raises Refused."""
        try:
            considered = self._consider(route, self.outlook, self._random, now)
        except Refused as refused:
            self.decisions.refused(gateway, route, refused.reason, now, None)
            raise
        self.outlook.decided((gateway, route.request), route, considered.judgement, now)
        refusal = considered.judgement.refusal
        if refusal is not None:
            self.decisions.refused(gateway, route, refusal.reason, now, considered.decision)
            raise Refused(refusal.kind, refusal.reason, refusal.retry_after)
        view, overlap, choice = considered.view, considered.overlap, considered.choice
        prefill, decode = view.workers[choice.prefill], view.workers[choice.decode]
        here = int(overlap.held[view.node[choice.prefill]])
        cached, sources = self._sources(considered, now)
        plan = Plan(
            request=route.request,
            attempt=route.attempt,
            prefill=_reference(prefill),
            decode=_reference(decode),
            sources=tuple(sources),
            cached_blocks=cached,
            predicted_ttft=considered.prediction.ttft,
            predicted_tbt=considered.prediction.tbt,
            why=f"{self.policy_name}: {here} blocks at {prefill.node.node},"
            f" {int(overlap.ssd[view.node[choice.prefill]])} of them on its SSD only, {max(cached - here, 0)} to fetch",
        )
        self._account((gateway, route.request), route, plan, considered, now)
        self.decisions.planned(gateway, considered.decision, plan)
        return Planned(plan, view, overlap)

    def explain(self, gateway: str, route: Route, now: float) -> Explanation:
        """What would be decided, and why; nothing is. Raises Refused if nobody could serve it at all."""
        # Whoever asks brings what is foreseen up to date, and draws: here both are copies.
        considered = self._consider(route, self.outlook.aside(), copy.deepcopy(self._random), now)
        refusal = considered.judgement.refusal
        return explain(gateway, considered.decision, None, refusal.reason if refusal is not None else "")

    def foresee(self, gateway: str, route: Route, now: float) -> Explanation:
        """The same; of one that nobody could serve, why."""
        try:
            return self.explain(gateway, route, now)
        except Refused as refused:
            return unserved(gateway, route, refused.reason, now)

    def _consider(self, route: Route, outlook: Outlook, drawn: random.Random, now: float) -> _Considered:
        shortlist = candidates(self._cluster, route, self.plans, now)
        view = shortlist.view
        blocks = min(len(route.keys) // KEY_BYTES, cacheable_blocks(route.prompt_tokens, view.block_tokens))
        overlap = self._overlaps.find(view, route.keys[: blocks * KEY_BYTES], now)
        self._narrow(view, route, overlap, now)
        estimated = estimate(view, route, overlap, self.links, outlook.length(route), now)
        ask = estimated.ask
        if ask.slo.tbt is not None:
            view.inlines = inlines(view, ask)
        _refuse_late(view, ask, route.waited, self.accuracy.ttft.error)
        try:
            choice = decide(self.policy_name, self.policy, view, ask, drawn)
        except PolicyFailed as failed:
            raise Refused("policy", str(failed), None) from failed
        row = choice.prefill
        seconds = ttft_of(view, ask, row, choice.fetch)
        gap = float(view.tbt[choice.decode])
        moved = float(ask.load_seconds[row]) + (float(ask.transfer_seconds[row]) if choice.fetch else 0.0)
        name = view.workers[row].worker
        prediction = Prediction(name, moved, seconds - moved, float(view.correction[row]), gap)
        judgement = outlook.judge(route, view, ask, choice, seconds, gap, now)
        decision = Decision(route, view, shortlist.filters, overlap, ask, choice, self.policy_name, now)
        return _Considered(decision, view, overlap, estimated, choice, prediction, judgement)

    def _narrow(self, view: View, route: Route, overlap: Overlap, now: float) -> None:
        """Of each worker's queue only what goes before this prompt concerns it."""
        if route.slo.ttft is None or route.priority < 0 or not some(view.queue_seconds):
            return
        cached = np.maximum(overlap.has, overlap.best) * view.block_tokens
        view.queue_seconds = self._cluster.queue_before(route.model, route.namespace, route.prompt_tokens, cached, now)

    def _sources(self, considered: _Considered, now: float) -> tuple[int, list[Source]]:
        """Blocks that the prefill node will have, and who has what it lacks in DRAM."""
        view, overlap, choice = considered.view, considered.overlap, considered.choice
        row = choice.prefill
        node = view.workers[row].node
        here = int(overlap.held[view.node[row]])
        on_ssd = considered.estimate.ask.ssd[row]
        runs = self._overlaps.only_on_ssd(overlap.keys[: here * KEY_BYTES], node.node) if on_ssd else []
        if choice.fetch and overlap.best > here:
            runs += self._overlaps.fetched(overlap.keys, here, node.node, view.block_bytes, self.links, now)
        daemons = self._cluster.daemons
        sources = [Source(daemons[run.node].node, run.first, run.last, run.medium) for run in runs]
        cached = max([here, *(run.last for run in runs)])
        estimate = considered.estimate
        if len(estimate.awaited) and estimate.awaited[row]:
            # Whom it waits for may stand in its own line, which is quicker to notice; but not if it has to wait idly.
            wait = float(overlap.ready[row]) - now
            if wait > view.queue_seconds[row]:
                sources.append(Source(node, here, int(overlap.coming[row]), Medium.DRAM, wait))
        elif choice.fetch and estimate.fetch_ready and estimate.ask.best > cached:
            cached = estimate.ask.best
            source = view.workers[estimate.fetch_row].node
            wait = max(estimate.fetch_ready - now, 0.0)
            sources.append(Source(source, max(overlap.best, here), cached, Medium.DRAM, wait))
        return cached, sources

    def _account(self, key: tuple[str, int], route: Route, plan: Plan, considered: _Considered, now: float) -> None:
        """Takes the plan's load into account until heartbeats show it, or it ends."""
        view, choice, prediction = considered.view, considered.choice, considered.prediction
        cached = max(plan.cached_blocks, int(considered.estimate.ask.prefix[choice.prefill]))
        tokens = route.prompt_tokens - cached * view.block_tokens
        seconds = prediction.worked - float(view.queue_seconds[choice.prefill])
        alone = plan.prefill.worker == plan.decode.worker
        context = route.prompt_tokens + 1
        decoding = Assigned(now, 0.0, 0, 1, context, -(-context // view.block_tokens), plan.attempt)
        point = 0
        if route.slo.ttft is None or route.priority < 0:
            point = POINTS
        elif not route.priority:
            point = point_of(seconds / prediction.correction)
        self._cluster.gave(plan.prefill.worker, now, route.prompt_tokens, tokens)
        self._cluster.gave(plan.decode.worker, now, output=int(considered.estimate.ask.output_tokens))
        if alone:
            whole = msgspec.structs.replace(decoding, seconds=seconds, prompt_tokens=tokens, point=point)
            self._cluster.assign(plan.prefill.worker, key, whole)
        else:
            charged = Assigned(now, seconds, tokens, 0, attempt=plan.attempt, point=point)
            self._cluster.assign(plan.prefill.worker, key, charged)
            self._cluster.assign(plan.decode.worker, key, decoding)
        at = 0
        for source in plan.sources:
            # Who only stands in for others, and the node's own SSD, send nothing.
            first = max(source.first, at)
            if source.node.node != plan.prefill.node.node and first < source.last:
                size = (source.last - first) * view.block_bytes
                self.links.order(source.node.node, plan.prefill.node.node, size, now)
                at = source.last
        ready = {plan.prefill.worker: now + prediction.ttft}
        if not alone:
            sender, receiver = plan.prefill.node.node, plan.decode.node.node
            blocks = len(route.keys) // KEY_BYTES - int(considered.overlap.held[view.node[choice.decode]])
            handoff = self.links.seconds(sender, receiver, max(blocks, 0) * view.block_bytes, now)
            ready[plan.decode.worker] = now + prediction.ttft + handoff
        self.inflight.add(key, route.keys, view.block_tokens, ready, now)
        self._open[key] = _Open(plan.attempt, plan.prefill.worker, plan.decode.worker, route.waited, prediction)
        self.plans += 1
        while len(self._open) > MAX_ROUTES:
            self.end(*next(iter(self._open)))

    # -- ends ------------------------------------------------------------------------------------------------------

    def ended(self, gateway: str, message: RouteEnded) -> None:
        """The gateway says that the attempt is over, and how it went."""
        known = self._open.get((gateway, message.request))
        if known is None or known.attempt != message.attempt:
            return
        since = message.ttft - known.waited if message.ttft >= 0 else -1.0
        factor = self.accuracy.observe(known.prediction, since, message.tbt)
        if factor is not None:
            self._cluster.correct(known.prefill, factor)
        self.end(gateway, message.request, message)

    def end(self, gateway: str, request: int, message: RouteEnded | None = None) -> None:
        """Forgets a plan. message: what its gateway told of its end."""
        known = self._open.pop((gateway, request), None)
        if known is not None:
            self.outlook.ended((gateway, request), message)
            self.inflight.end((gateway, request))
            for worker in (known.prefill, known.decode):
                self._cluster.unassign(worker, (gateway, request))

    def forget_gateway(self, gateway: str) -> None:
        for key in [key for key in self._open if key[0] == gateway]:
            self.end(*key)

    def worker_lost(self, worker: str) -> None:
        """The worker is gone: what was to come from there will not."""
        self.inflight.lost(worker)
        self.accuracy.forget(worker)
        self.outlook.lost(worker)

    def gateways(self) -> set[str]:
        """Those that have plans under way."""
        return {gateway for gateway, _ in self._open}

    def check(self) -> None:
        """Raises AssertionError if workers are charged for what is not planned."""
        self.inflight.check()
        self.outlook.check()
        for name, worker in self._cluster.workers.items():
            for key in worker.assigned:
                known = self._open[key]
                assert name in (known.prefill, known.decode), "a worker is charged for another's request"


def _refuse_late(view: View, ask: Ask, waited: float, error: float) -> None:
    """Raises Refused for a request whose first token alone would come after its deadline, wherever it went.

    Not if one that may compute it was never measured; and error, the usual one of predictions, is taken off, half of
    the time at most: only who is surely late is sent away, as its worker would do.
    """
    deadline = ask.slo.deadline
    if deadline is None:
        return
    left = deadline - waited
    sure = 1.0 - min(error, 0.5)
    needed = sure * soonest(view, ask) if view.measured[view.prefills | view.inlines].all() else 0.0
    if 0.0 < left >= needed:
        return
    reason = (
        f"the answer is worthless {deadline:g} s after the request, and the first token would come"
        f" {waited + needed:.2f} s after it at the earliest: give it more time"
    )
    # Who asks anew has all of its time again, and the queues are shorter by then; but no shorter than nothing.
    if sure * soonest(replace(view, queue_seconds=np.zeros(len(view.workers))), ask) > deadline:
        raise Refused("late", reason, None)
    raise Refused("late", f"{reason}, or ask when less is waiting", max(needed - deadline, SHORTEST_WAIT))


def _reference(worker: WorkerInfo) -> WorkerRef:
    return WorkerRef(worker.worker, worker.incarnation, worker.node, worker.work)
