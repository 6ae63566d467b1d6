"""The gateway, modelled: a request's attempts, its tokens by number only, retries, and what clients saw.

The production state machine (`pyengine/gateway/request.py`) puts token ids in order; it lives on a floor above, and
would cost more than all else here. This has its states and its rules for retries, and counts tokens.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..cost import F64
from ..messages import Planned, Rejected, Route, RouteEnded
from ..policies.admission.patient import LATER
from ..types import KEY_BYTES, Plan, Slo, Source, WorkerRef, cacheable_blocks
from .jobs import Job, times
from .node import NodeModel
from .report import DONE, DROPPED, REJECTED, UNFINISHED, longest_tenth
from .trace import Request
from .worker import WorkerModel

if TYPE_CHECKING:
    from .cluster import Simulation

#: As the gateway's: failures in a row, the pauses after them, seconds of failing, and the pause before a rejected
#: question is asked again while workers are missing.
MAX_FAILURES = 8
BACK_OFF = (0.0, 0.1, 0.2, 0.4, 0.8, 1.0)
PATIENCE = 5.0
REJECTED_PAUSE = 0.2

#: Seconds before the objective for the first token at which it is held no longer.
PACE_SPARE = 0.5
#: Seconds before a request that was told "later" asks again.
LATER_PAUSE = 1.0


class State(enum.Enum):
    ROUTING = "routing"
    RUNNING = "running"
    BACKING_OFF = "backing off"
    OVER = "over"


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What a worker is sent of an attempt: `messages.Work` without its tokens."""

    request: RequestModel
    attempt: int
    part: str
    incarnation: int
    prompt_tokens: int
    generated: int
    keys: bytes
    sources: tuple[Source, ...]
    handoff: Handoff | None
    slo: Slo
    waited: float
    priority: int
    tenant: str

    @property
    def id(self) -> tuple[int, int]:
        return self.request.number, self.attempt


class Handoff:
    """One attempt's way from its prefill to its decode worker: the grant, and who waits for it."""

    def __init__(self, sim: Simulation, node: NodeModel) -> None:
        self.sim = sim
        self.node = node
        self._decode: tuple[WorkerModel, Job, int] | None = None
        self._prefill: tuple[WorkerModel, Job] | None = None

    def open(self, job: Job) -> None:
        """The prefill worker's question has come: it is answered when the grant stands."""
        worker = self.sim.workers[job.work.request.prefill]
        self._prefill = worker, job
        self._answer()

    def granted(self, worker: WorkerModel, job: Job, here: int) -> None:
        self._decode = worker, job, here
        self._answer()

    def _answer(self) -> None:
        if self._prefill is not None and self._decode is not None:
            worker, job = self._prefill
            self.sim.loop.after(self.sim.delay, worker.open, job, self._decode[2])

    def complete(self) -> None:
        """The last byte and the note behind it have come."""
        decode, self._decode, self._prefill = self._decode, None, None
        if decode is not None:
            worker, job, _ = decode
            worker.complete(job)


class RequestModel:
    """One request, from its arrival to its outcome.

    spans: where its tokens so far came: ends of a worker's steps, and ranges of them.
    """

    def __init__(self, sim: Simulation, number: int, request: Request) -> None:
        self.sim = sim
        self.number = number
        self.request = request
        self.output_tokens = request.output_tokens
        self.state = State.BACKING_OFF
        self.attempt = -1
        self.plan: Plan | None = None
        self.outcome = UNFINISHED
        self.held = 0
        self._base = 0
        # Of the attempt under way: spans before it, and when its first token came.
        self._spans_before = 0
        self._first_here = math.nan
        #: How old it was when it asked for the plan of this attempt.
        self._waited = 0.0
        self.prefill = self.decode = ""
        self.prefill_seconds = 0.0
        self.finished = math.nan
        #: When the first token came, and when the client had it.
        self.came = self.first_token = math.nan
        self.predicted = math.nan
        self.cached: int | None = None
        self.reused: list[int] = []
        self.failures = 0
        self.prefills = 0
        self.admitted = False
        self._spans: list[tuple[WorkerModel, list[list[int]]]] = []
        self._live: list[tuple[WorkerModel, Job]] = []
        self._excluded: tuple[str, ...] = ()
        self._failing_since: float | None = None

    # -- attempts --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new attempt: its prompt is the prompt and the tokens held."""
        if self.state is not State.BACKING_OFF:
            return
        sim = self.sim
        self.attempt += 1
        self.state = State.ROUTING
        self._base = self.held
        self._spans_before = len(self._spans)
        self._first_here = math.nan
        self._waited = sim.loop.now - self.request.arrival
        length = self.request.prompt_tokens + self.held
        self.keys = sim.keys_of(self, length)
        sim.ask(
            Route(
                request=self.number,
                attempt=self.attempt,
                model=sim.model,
                namespace=sim.namespace_digest,
                keys=self.keys[: KEY_BYTES * cacheable_blocks(length, sim.block_tokens)],
                prompt_tokens=length,
                max_tokens=sim.limit_of(self.request) - self.held,
                slo=sim.spec.slo,
                tenant=self.request.tenant,
                exclude=self._excluded,
                priority=self.request.priority,
                waited=self._waited,
                admitted=self.admitted,
            )
        )

    def on_answer(self, message: Planned | Rejected) -> None:
        if isinstance(message, Planned):
            self._on_planned(message.plan)
        else:
            self._on_rejected(message)

    def _on_planned(self, plan: Plan) -> None:
        if self.state is not State.ROUTING or plan.attempt != self.attempt:
            return
        sim = self.sim
        self.state = State.RUNNING
        self.plan = plan
        self.admitted = True
        self.prefill, self.decode = plan.prefill.worker, plan.decode.worker
        if math.isnan(self.predicted):
            self.predicted = self._waited + plan.predicted_ttft
        alone = plan.prefill.worker == plan.decode.worker
        handoff = None if alone else Handoff(sim, sim.workers[plan.decode.worker].node)
        parts = [("both", plan.prefill)] if alone else [("decode", plan.decode), ("prefill", plan.prefill)]
        for part, worker in parts:
            work = Work(
                self,
                self.attempt,
                part,
                worker.incarnation,
                self.request.prompt_tokens + self.held,
                self.held,
                self.keys,
                plan.sources,
                handoff,
                sim.spec.slo,
                sim.loop.now - self.request.arrival,
                self.request.priority,
                self.request.tenant,
            )
            sim.loop.after(sim.delay, sim.workers[worker.worker].accept, work)
        if not all(sim.reachable(worker) for worker in (plan.prefill, plan.decode)):
            # Its link is gone already: nobody would tell.
            gone = next(w for w in (plan.prefill, plan.decode) if not sim.reachable(w))
            sim.loop.after(sim.delay, self.on_lost, gone.worker, self.attempt)

    def _on_rejected(self, message: Rejected) -> None:
        refusal = message.rejection
        now = self.sim.loop.now
        if self.state is not State.ROUTING or refusal.attempt != self.attempt:
            return
        if self.sim.servable and refusal.kind == LATER:
            self.state = State.BACKING_OFF
            self.sim.loop.after(LATER_PAUSE, self.start)
            return
        if refusal.kind == "policy":
            self.sim.failed_decisions[refusal.reason] += 1
        final = refusal.kind in ("late", "policy")
        if final or (self.sim.servable and (refusal.retry_after is None or self._failing_since is None)):
            self._refused()
            return
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since >= PATIENCE:
            self._refused()
            return
        self.state = State.BACKING_OFF
        self.sim.loop.after(REJECTED_PAUSE, self.start)

    def _refused(self) -> None:
        self._over(DROPPED if self.admitted else REJECTED)

    # -- what workers say ------------------------------------------------------------------------------------------

    def begun(self, worker: WorkerModel, job: Job) -> None:
        """A worker has accepted a part: asked for its tokens, should it die."""
        self._live.append((worker, job))

    def on_prefilled(self, attempt: int, cached: int, reused: list[int]) -> None:
        self.prefills += 1
        if attempt == self.attempt and self.cached is None:
            self.cached = min(cached, self.request.prompt_tokens)
            self.reused = list(reused)

    def on_first_token(self, attempt: int, worker: WorkerModel, job: Job) -> None:
        """It is on the client's screen, or held for as long as `pace_until` says."""
        if self.state is State.RUNNING and attempt == self.attempt:
            if math.isnan(self.came):
                self.came = self.sim.loop.now
            self._first_here = self.sim.loop.now
            until = self._pace_until() if job.work.part == "prefill" else self.sim.loop.now
            if until > self.sim.loop.now:
                self.sim.loop.at(until, self._show, attempt)
            else:
                self._show(attempt)
            self.failures = 0
            self._failing_since = None
            self._excluded = ()

    def on_second_token(self, attempt: int) -> None:
        """From the decode worker: the first is held no longer."""
        if self.held > self._base:
            self._show(attempt)

    def _show(self, attempt: int) -> None:
        if attempt == self.attempt and self.state is not State.OVER and math.isnan(self.first_token):
            self.first_token = self.sim.loop.now

    def _pace_until(self) -> float:
        slo = self.sim.spec.slo
        if not self.sim.run_spec.pacing or slo.ttft is None or slo.tbt is None:
            return 0.0
        return self.request.arrival + slo.ttft - PACE_SPARE

    def on_tokens(self, attempt: int, worker: WorkerModel, job: Job, last: bool) -> None:
        """A part has got all its tokens; last: with them the answer is whole."""
        if self.state is not State.RUNNING or attempt != self.attempt:
            return
        if job.work.part == "prefill":
            self.on_first_token(attempt, worker, job)
        self._hold(worker, job)
        if last:
            self._show(attempt)
            self._over(DONE, abort=job.work.part == "prefill")

    def _hold(self, worker: WorkerModel, job: Job) -> None:
        spans = [[first, end] for first, end in job.tokens]
        self._spans.append((worker, spans))
        self.held += sum(end - first for first, end in spans)

    def on_failed(self, attempt: int, worker: str, kind: str) -> None:
        if self.state is not State.RUNNING or attempt != self.attempt or self.plan is None:
            return
        if kind == "too_large":
            self._over(REJECTED, gone=worker)
        elif kind == "late":
            self._over(DROPPED, gone=worker)
        else:
            both = {self.plan.prefill.worker, self.plan.decode.worker}
            self._retry({"retry": both, "wrong_role": {worker}}.get(kind, set()), worker)

    def on_turned_away(self, attempt: int) -> None:
        """Its prompt was computed for nothing: nobody is to decode it."""
        if self.state is State.RUNNING and attempt == self.attempt:
            self._over(REJECTED if not self.held else DROPPED)

    def on_lost(self, worker: str, attempt: int) -> None:
        """The link to a worker of its plan is gone."""
        if self.state is State.RUNNING and attempt == self.attempt:
            self._retry({worker}, worker)

    def late(self) -> None:
        """Its deadline has passed."""
        if self.state is not State.OVER:
            self._over(DROPPED)

    def _retry(self, excluded: set[str], gone: str) -> None:
        now = self.sim.loop.now
        if self._failing_since is None:
            self._failing_since = now
        self.failures += 1
        self._collect()
        if self.held:
            self._show(self.attempt)
        if self.failures > MAX_FAILURES or now - self._failing_since >= PATIENCE:
            self._over(DROPPED, gone=gone)
            return
        self._release(gone)
        self._excluded = tuple(sorted(excluded))
        self.state = State.BACKING_OFF
        pause = BACK_OFF[min(self.failures, len(BACK_OFF)) - 1]
        if pause:
            self.sim.loop.after(pause, self.start)
        else:
            self.start()

    def _collect(self) -> None:
        """Tokens that came from parts that are over now, unless they were whole."""
        for worker, job in self._live:
            if job.work.part != "prefill" and job.work.attempt == self.attempt:
                worker.touch()
                if job.tokens:
                    self._hold(worker, job)
        self._live.clear()

    def _release(self, gone: str | None, *, decode_only: bool = False, done: bool = False) -> None:
        """Ends the attempt everywhere but at the worker that is gone or has ended it itself."""
        sim, plan = self.sim, self.plan
        if plan is not None:
            workers: dict[str, WorkerRef] = {worker.worker: worker for worker in (plan.prefill, plan.decode)}
            for name in workers:
                if name != gone and not (decode_only and name == plan.prefill.worker):
                    sim.loop.after(sim.delay, sim.workers[name].end, (self.number, self.attempt))
        # As tokens came, not as they were shown: that is what was predicted.
        gaps = np.diff(self._times(self._spans_before))
        first = self._first_here - self.request.arrival
        sim.tell(
            RouteEnded(
                request=self.number,
                attempt=self.attempt,
                ttft=-1.0 if math.isnan(first) else first,
                generated=self.held - self._base,
                tbt=longest_tenth(gaps) if len(gaps) else -1.0,
                finished=done,
            )
        )
        self.plan = None

    def _over(self, outcome: int, gone: str | None = None, *, abort: bool = False) -> None:
        if outcome == DONE:
            self.finished = self.sim.loop.now
            if not abort:
                # Both parts are over at their workers.
                self.plan = None
            self._release(gone, decode_only=abort, done=True)
        elif self.state in (State.ROUTING, State.RUNNING):
            self._collect()
            self._release(gone)
        self.state = State.OVER
        self.outcome = outcome
        self.keys = b""
        self._live.clear()
        self.sim.over(self)

    # -- what clients saw ------------------------------------------------------------------------------------------

    def gaps(self) -> F64:
        """Seconds between its tokens, the first at its place."""
        seen = self._times(0)
        # Those that were held came together; no message's delay is counted in gaps.
        shown = self.first_token - self.sim.delay
        return np.diff(seen if math.isnan(shown) else np.maximum(seen, shown))

    def _times(self, first: int) -> F64:
        """When the tokens of the spans from number `first` on came."""
        came = [times(worker.ends, spans) for worker, spans in self._spans[first:] if spans]
        return np.concatenate(came) if came else np.empty(0)
