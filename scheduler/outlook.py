"""What the conductor expects of requests it plans, and what follows: who is admitted, and which role workers have.

Ties together the length predictor, the forecast of batches, the shares of tenants and the planner of roles; each of
them knows nothing of the others. The conductor calls: `length` and `judge` for a route, `decided` and `ended`,
`heartbeat`, `lost`, `tick`.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

from .cluster import Cluster, View, Worker
from .events import SendToWorker
from .fairness import Shares
from .forecast import Entry, Forecast, Key
from .lengths import LengthPredictor
from .messages import Route, RouteEnded, SetRole, WorkerAlive
from .planner import Member, Planner
from .policies.admission import Admission, Case, Refusal
from .policies.base import Ask, Choice
from .work import Work, decode_seconds

#: Seconds between two looks at the roles: a small part of the planner's dwell.
PLAN_EVERY = 5.0
#: Models whose roles are planned; another one's workers keep theirs.
MAX_MODELS = 64
#: Seconds between two looks at how long the answers are that are being written.
LOOK_EVERY = 1.0
ROLES = ("fixed", "auto")


@dataclass(slots=True, eq=False)
class Judgement:
    """refusal: None if it is admitted. The rest is for `decided`."""

    refusal: Refusal | None
    entry: Entry
    work: Work
    case: Case


@dataclass(slots=True, eq=False)
class _Known:
    """What `ended` compares with. said: predicted tokens. judgement: for admissions that look twice."""

    attempt: int
    tenant: str
    prompt: int
    most: int
    said: float
    work: Work
    judgement: Judgement | None


class Outlook:
    """See the module. roles: "auto": workers are told to switch their role; "fixed": they are not."""

    def __init__(self, admission: Admission, roles: str = "fixed") -> None:
        if roles not in ROLES:
            raise ValueError(f"roles are {' or '.join(ROLES)}, not {roles!r}")
        self.lengths = LengthPredictor()
        self.forecast = Forecast(self.lengths)
        self.shares = Shares()
        self.planners: dict[str, Planner] = {}
        self.switches = 0
        self._admission = admission
        self._roles = roles
        self._known: dict[Key, _Known] = {}
        self._planned_at = self._looked_at = -math.inf

    def aside(self) -> Outlook:
        """Another that foresees the same, to be asked: what that changes, it changes there. It is told of nothing.

        What is known of each request that was planned is not copied, as nobody asks about that: it is most of all.
        """
        other = copy.copy(self)
        other.lengths, other.shares, other._admission = copy.deepcopy((self.lengths, self.shares, self._admission))
        other.forecast = self.forecast.aside(other.lengths)
        return other

    # -- requests --------------------------------------------------------------------------------------------------

    def length(self, route: Route) -> float:
        """Tokens that the answer is expected to have."""
        return self.lengths.first(route.tenant, route.prompt_tokens, route.max_tokens)[1]

    def judge(
        self, route: Route, view: View, ask: Ask, choice: Choice, ttft: float, tbt: float, now: float
    ) -> Judgement:
        """Whether the request may have the place that the policy chose; nothing comes of asking. ttft, tbt: predicted
        there.
        """
        prefill, decode = choice.prefill, choice.decode
        work = _work(view, ask, choice)
        case = Case(
            now,
            view,
            ask,
            choice,
            ttft,
            tbt,
            self.forecast,
            self.shares,
            waited=route.waited,
            admitted=route.admitted,
        )
        promised = ask.slo.tbt
        table, length = self.lengths.first(route.tenant, route.prompt_tokens, route.max_tokens)
        entry = Entry(
            prefill=view.workers[prefill].worker,
            decode=view.workers[decode].worker,
            joins=now + ttft,
            prompt=route.prompt_tokens,
            most=route.max_tokens,
            table=table,
            length=length,
            # What is missed from the beginning on binds nobody else.
            tbt=math.inf if promised is None or tbt > promised else promised,
            prefill_seconds=work.prefill,
            priority=route.priority,
            tenant=route.tenant,
        )
        return Judgement(self._admission(case), entry, work, case)

    def decided(self, key: Key, route: Route, judgement: Judgement, now: float) -> None:
        """The request gets its plan, or is refused, as it was judged."""
        entry, work = judgement.entry, judgement.work
        if not route.admitted:
            self.shares.ask(route.tenant, work.total, judgement.refusal is None, now)
            # Who asks again has been counted.
            if self._roles == "auto" and not route.attempt and (planner := self._planner(route.model)) is not None:
                planner.ask(work.prefill, work.decode, now)
        if judgement.refusal is not None:
            return
        self.forecast.add(key, entry, now)
        kept = judgement if hasattr(self._admission, "prefilled") else None
        said = judgement.case.ask.output_tokens
        self._known[key] = _Known(route.attempt, entry.tenant, entry.prompt, entry.most, said, work, kept)

    def ended(self, key: Key, message: RouteEnded | None) -> None:
        """It is over; message: what its gateway told of it, None: nothing."""
        known = self._known.pop(key, None)
        self.forecast.end(key)
        if known is None or message is None or message.attempt != known.attempt or message.generated < 1:
            return
        self.lengths.learn(
            known.tenant,
            known.prompt,
            known.most,
            message.generated,
            # At its limit the answer was cut: it says only that it would have been that long at least.
            message.finished and message.generated < known.most,
            known.said,
        )
        if message.finished:
            actual = known.work.decode * message.generated / max(known.said, 1.0)
            self.shares.correct(known.tenant, actual - known.work.decode)

    def prefilled(self, key: Key, view: View, now: float) -> Refusal | None:
        """For models of others that judge decode when a prompt has been computed; ours judge once."""
        known = self._known.get(key)
        judgement = known.judgement if known is not None else None
        if judgement is None:
            return None
        case, entry = judgement.case, judgement.entry
        rows = [row for row, info in enumerate(view.workers) if info.worker == entry.decode]
        if not rows:
            return None
        choice = replace(case.choice, decode=rows[0], prefill=rows[0])
        # It is not to be counted among those that it would join.
        self.forecast.end(key)
        case = replace(case, now=now, view=view, choice=choice, ttft=0.0, tbt=float(view.tbt[rows[0]]))
        refusal: Refusal | None = self._admission.prefilled(case)  # type: ignore[attr-defined]
        self.forecast.add(key, replace(entry, joins=now), now)
        return refusal

    # -- workers and time ------------------------------------------------------------------------------------------

    def heartbeat(self, message: WorkerAlive, worker: Worker, now: float) -> None:
        """worker: as the heartbeat has left it."""
        if worker.info.role.decodes:
            step, _, _, sequence, history = worker.cost.coefficients
            running = max(message.running, 1)
            gap = float(step + sequence * running + history * message.running_context)
            self.forecast.heartbeat(message.worker, message.running, gap, now)

    def lost(self, worker: str) -> None:
        self.forecast.lost(worker)

    def tick(self, cluster: Cluster, now: float) -> list[SendToWorker]:
        """At most one order to take on another role, for each model."""
        if now - self._looked_at >= LOOK_EVERY:
            self._looked_at = now
            self.lengths.under_way(*self.forecast.under_way(now))
        if self._roles != "auto" or now - self._planned_at < PLAN_EVERY:
            return []
        self._planned_at = now
        if any(daemon.draining for daemon in cluster.daemons.values() if daemon.up):
            return []
        actions = []
        for model, planner in self.planners.items():
            members = [
                Member(
                    worker.info.worker,
                    worker.info.role,
                    float(worker.running + worker.queued_requests + len(worker.assigned)),
                    worker.info.pinned,
                )
                for worker in cluster.workers.values()
                if worker.alive and not worker.stuck and worker.info.model == model
            ]
            switch = planner.decide(members, now)
            if switch is not None:
                self.switches += 1
                actions.append(SendToWorker(switch.worker, SetRole(role=switch.role)))
        return actions

    def _planner(self, model: str) -> Planner | None:
        planner = self.planners.get(model)
        if planner is None and len(self.planners) < MAX_MODELS:
            planner = self.planners[model] = Planner()
        return planner

    def counters(self) -> dict[str, float]:
        """By Prometheus sample name."""
        return {
            "pyengine_conductor_length_error": self.lengths.error,
            "pyengine_conductor_length_bias": self.lengths.bias,
            "pyengine_conductor_foreseen_requests": len(self.forecast),
            "pyengine_conductor_unforeseen_requests_total": self.forecast.unforeseen,
            "pyengine_conductor_role_switches_total": self.switches,
            "pyengine_conductor_role_switches_given_up_total": sum(p.given_up for p in self.planners.values()),
        }

    def check(self) -> None:
        """Raises AssertionError if a part contradicts itself or the others."""
        self.forecast.check()
        self.shares.check()
        assert len(self.forecast) + self.forecast.unforeseen >= len(self._known), "a request is not foreseen"


def _work(view: View, ask: Ask, choice: Choice) -> Work:
    row, tokens = choice.prefill, ask.prompt_tokens
    # `item`: numbers of numpy's own are slow to calculate with.
    prefix = ask.prefix.item(row)
    cached = (max(ask.best, prefix) if choice.fetch else prefix) * view.block_tokens
    rest = tokens - cached
    steps = -(-rest // max(view.max_tokens_per_step.item(row), 1))
    # What the worker computes, and not what its predictions are corrected by, which is for waits.
    right = view.correction.item(row)
    each = (view.token_seconds.item(row) + view.context_seconds.item(row) * (tokens + cached + 1) / 2) / right
    context = tokens + ask.output_tokens / 2
    decode = decode_seconds(view, choice.decode, context, ask.output_tokens, ask.slo.tbt)
    return Work(steps * view.base_seconds.item(row) + rest * each, decode)
