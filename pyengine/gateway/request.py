"""One request as a state machine: attempts, numbered tokens put in order, retries. No socket, no clock, no text.

    ROUTING --plan--> RUNNING --last token, stop, error--> DONE
       ^                |  a worker failed or was lost
       |                v
       +---wake_at--- BACKING_OFF   (a new attempt: prompt + the tokens held, numbering goes on)

Time comes in as `now` (seconds, monotonic); what is to be sent comes out as actions. Tokens, finish and error are read
by the shell after each call.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from pyengine.scheduler import messages
from pyengine.scheduler.policies.admission.patient import LATER
from pyengine.scheduler.types import (
    FinishReason,
    Logprobs,
    Plan,
    SamplingParams,
    Slo,
    WorkerRef,
    cacheable_blocks,
    tenant_number,
)

#: Failed attempts in a row, without one new token, after which the client gets the error. With the back-off below they
#: take about 5 s, the promised bound.
MAX_FAILURES = 8
#: First retry at once (another worker may well be there), then a doubling wait.
BACK_OFF = (0.0, 0.1, 0.2, 0.4, 0.8, 1.0)
#: Seconds a decode worker's failure waits for the first token: that token may have ended the request and its hand-off,
#: and the two messages come over two links. Many heartbeats of the loop, and little beside a retry's prefill.
FIRST_TOKEN_GRACE = 0.2
#: What admission refuses for (`Rejection.kind`): its answer stands, also for who has waited for workers before.
ADMISSION_KINDS = ("slo_ttft", "slo_tbt", "slo_deadline", "share")
#: Pause before a rejected route is asked again while workers are missing.
REJECTED_PAUSE = 0.2
#: Pause before a request that was told "later" asks again: batches change within seconds.
LATER_PAUSE = 1.0
#: Seconds before its objective at which a first token is not held any more (see `Request.shown`).
PACE_SPARE = 0.5


class State(enum.Enum):
    ROUTING = "routing"
    RUNNING = "running"
    BACKING_OFF = "backing off"
    DONE = "done"


class ErrorKind(enum.Enum):
    """What the client can do about it; the HTTP status follows from it (see openai.py)."""

    BUSY = "busy"
    UNAVAILABLE = "unavailable"
    TOO_LARGE = "too_large"
    TIMEOUT = "timeout"
    REFUSED = "refused"
    DENIED = "denied"
    BUG = "bug"


class RequestError(Exception):
    """Why a request could not be completed. retry_after: seconds, None: not known or never. detail: what refused it, as
    the conductor calls it (`Rejection.kind`).
    """

    def __init__(self, kind: ErrorKind, reason: str, retry_after: float | None = None, detail: str = "") -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.retry_after = retry_after
        self.detail = detail


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks for beside the answer. slo: objectives, which count from `arrived` on (seconds, monotonic).

    priority: higher goes first. tenant: for whom; whose share and quota it counts in; "": nobody in particular. salt:
    KV is shared among requests of one salt only.
    """

    arrived: float
    slo: Slo = Slo()
    priority: int = 0
    tenant: str = ""
    salt: bytes = b""


class ToConductor(msgspec.Struct, frozen=True):
    message: messages.Route | messages.RouteEnded


class ToWorker(msgspec.Struct, frozen=True):
    worker: WorkerRef
    message: messages.Work | messages.Abort


Action: TypeAlias = ToConductor | ToWorker


class Pace:
    """When the tokens of one attempt came."""

    def __init__(self) -> None:
        self.count = 0
        self.first = self._last = 0.0
        self._gaps: list[float] = []

    def tokens(self, count: int, now: float) -> None:
        """So many have come together: the time since those before is shared among them."""
        if self.count and count == 1:
            self._gaps.append(now - self._last)
        elif self.count:
            self._gaps += [(now - self._last) / count] * count
        else:
            self.first = now
            self._gaps += [0.0] * (count - 1)
        self.count += count
        self._last = now

    def tbt(self) -> float:
        """Mean of the longest tenth of the gaps, in seconds; -1 if there were none."""
        if not self._gaps:
            return -1.0
        longest = sorted(self._gaps, reverse=True)[: -(-len(self._gaps) // 10)]
        return sum(longest) / len(longest)


class Request:
    """One sequence of one HTTP request.

    key_of: uint32 LE token bytes -> 16 bytes per full block, under `root`. patience: seconds without progress that a
    failing request is given; longest: seconds after which any request is worthless, also one with no deadline.
    excluded: workers that are not to have its first attempt. alone: makes another root, and `key_of` under it, that
    nobody else has: where the prompt's logprobs are asked for, nothing of it may be reused.
    """

    def __init__(
        self,
        request: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        model: str,
        namespace: bytes,
        block_tokens: int,
        root: bytes,
        key_of: Callable[[bytes], bytes],
        patience: float,
        longest: float,
        terms: Terms,
        excluded: tuple[str, ...] = (),
        alone: Callable[[], tuple[bytes, Callable[[bytes], bytes]]] | None = None,
    ) -> None:
        if not prompt:
            raise ValueError("a prompt has at least one token")
        if sampling.seed is None:
            raise ValueError("the gateway draws the seed: a retry must continue the same random numbers")
        self.id = request
        self.prompt = list(prompt)
        # Stop strings are found here, in text; workers need not carry them.
        self.sampling = msgspec.structs.replace(sampling, stop=())
        self.state = State.BACKING_OFF
        self.attempt = -1
        self.plan: Plan | None = None
        self.tokens: list[int] = []
        #: One for each of `tokens`; None if they were not asked for.
        self.logprobs: list[Logprobs | None] = []
        self.finish: FinishReason | None = None
        self.error: RequestError | None = None
        self.cached: int | None = None
        self.tiers: dict[str, int] = {}
        self.arrived = terms.arrived
        self.failures = 0
        self.model = model
        self._namespace = namespace
        self._block_tokens = block_tokens
        self._root = root
        self._key_of = key_of
        self._patience = patience
        self.terms = terms
        own = math.inf if terms.slo.deadline is None else terms.slo.deadline
        self._whose = "its deadline" if own <= longest else "this server"
        self._deadline = terms.arrived + min(own, longest)
        self.wake_at = self._deadline
        self._pace = Pace()
        self._admitted = False
        #: When the first token came, of whichever attempt, and when it was first `shown`.
        self.came = self.given = math.nan
        #: When the conductor was first asked, when the last plan came, and the second token.
        self.asked = self.planned = self.second = math.nan
        self.report: messages.PrefillReport | None = None
        #: Of the first attempt that a decode worker went on with.
        self.handoff: messages.Handoff | None = None
        #: Attempts that were not the last: number, when it was over (seconds, monotonic), and why.
        self.lost: list[tuple[int, float, str]] = []
        #: Whom the last plan gave its prefill, and whom its decode.
        self.went = ("", "")
        self._held_until = -math.inf
        self._early: dict[int, tuple[int, Logprobs | None]] = {}
        self._ends_at: int | None = None
        self._ends_as: FinishReason | None = None
        self._failing_since: float | None = None
        self._doubt: messages.Failed | None = None
        self._excluded = excluded
        self._alone = alone
        #: Of the prompt's tokens from its second on, if they were asked for.
        self.prompt_logprobs: list[Logprobs] = []
        self._base = 0
        self._ids = b""
        self._keys = b""
        self._route: messages.Route | None = None

    @property
    def done(self) -> bool:
        return self.state is State.DONE

    @property
    def shown(self) -> int:
        """How many of `tokens` the client is to have by now.

        The second token comes from another worker, a hand-off later than the first, and its gap is longer than any
        behind it. Where both are promised, the first is shown with the second, as long as its own objective allows.
        """
        return 0 if len(self.tokens) == 1 and not self.done and self._held_until > -math.inf else len(self.tokens)

    @property
    def prompt_is_told(self) -> bool:
        """Nothing was asked for of the prompt's tokens, or all is there."""
        asked = self.sampling.prompt_logprobs is not None
        return not asked or len(self.prompt_logprobs) == len(self.prompt) - 1

    @property
    def tbt(self) -> float:
        """Seconds: the mean of the longest tenth of the gaps between tokens of the last attempt; NaN if it has none."""
        tbt = self._pace.tbt()
        return tbt if tbt >= 0.0 else math.nan

    def check(self) -> None:
        """Invariants, for tests."""
        assert len(self.tokens) <= self.sampling.max_tokens
        assert len(self.logprobs) == len(self.tokens)
        assert self._base <= len(self.tokens)
        assert all(len(self.tokens) < index < self.sampling.max_tokens for index in self._early)
        assert (self.plan is not None) == (self.state is State.RUNNING)
        assert (self.finish is not None or self.error is not None) <= self.done
        assert self.finish is None or self.error is None

    # -- inputs ----------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        """The first attempt. Also what a back-off ends in."""
        self.attempt += 1
        if not self.attempt:
            self.asked = now
        self.state = State.ROUTING
        self._base = len(self.tokens)
        if not self.prompt_is_told and self._alone is not None:
            # What an earlier attempt has computed tells nothing, should this one find it.
            self.prompt_logprobs.clear()
            self._root, self._key_of = self._alone()
        self._early.clear()
        self._ends_at = self._ends_as = None
        self._doubt = None
        self._pace = Pace()
        self._ids = np.asarray(self.prompt + self.tokens, dtype="<u4").tobytes()
        self._keys = self._key_of(self._ids)
        length = len(self._ids) // 4
        self._route = messages.Route(
            request=self.id,
            attempt=self.attempt,
            model=self.model,
            namespace=self._namespace,
            keys=self._keys[: 16 * cacheable_blocks(length, self._block_tokens)],
            prompt_tokens=length,
            max_tokens=self.sampling.max_tokens - self._base,
            slo=self.terms.slo,
            tenant=self.terms.tenant,
            exclude=self._excluded,
            priority=self.terms.priority,
            waited=max(now - self.arrived, 0.0),
            admitted=self._admitted,
        )
        self.wake_at = min(self._deadline, now + self._patience)
        return [ToConductor(self._route)]

    def ask_again(self, now: float) -> list[Action]:
        """The conductor is there (again): it may never have seen the question. The client has waited meanwhile."""
        if self.state is not State.ROUTING or self._route is None:
            return []
        self._route = msgspec.structs.replace(self._route, waited=max(now - self.arrived, 0.0))
        return [ToConductor(self._route)]

    def on_planned(self, plan: Plan, now: float) -> list[Action]:
        if self.state is not State.ROUTING or plan.attempt != self.attempt:
            return []
        self.state = State.RUNNING
        if not self.tokens:
            self.planned = now
        self.plan = plan
        self.went = (plan.prefill.worker, plan.decode.worker)
        self._admitted = True
        self.wake_at = self._deadline
        alone = plan.prefill.worker == plan.decode.worker
        sampling = self.sampling
        if sampling.prompt_logprobs is not None and self.prompt_is_told:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        parts = [("both", plan.prefill)] if alone else [("decode", plan.decode), ("prefill", plan.prefill)]
        return [
            ToWorker(
                worker,
                messages.Work(
                    request=self.id,
                    attempt=self.attempt,
                    part=part,
                    token_ids=self._ids,
                    generated=self._base,
                    root=self._root,
                    keys=self._keys,
                    sampling=sampling,
                    namespace=self._namespace,
                    decode_node=plan.decode.node,
                    decode_incarnation=plan.decode.incarnation,
                    sources=plan.sources,
                    cached_blocks=plan.cached_blocks,
                    tenant=tenant_number(self.terms.tenant),
                    deadline=max(self._deadline - now, 0.0),
                    slo=self.terms.slo,
                    waited=max(now - self.arrived, 0.0),
                    priority=self.terms.priority,
                ),
            )
            for part, worker in parts
        ]

    def on_rejected(self, rejection: messages.Rejected, now: float, servable: bool) -> list[Action]:
        """servable: workers for every part are alive, so the rejection is about load, not about absence."""
        refusal = rejection.rejection
        if self.state is not State.ROUTING or refusal.attempt != self.attempt:
            return []
        if refusal.kind == "late":
            if self._admitted:
                # It was taken in as one that would be in time, and what it lost since is not the client's doing.
                return self._give_up(RequestError(ErrorKind.TIMEOUT, refusal.reason))
            return self._give_up(RequestError(ErrorKind.BUSY, refusal.reason, refusal.retry_after, "slo_deadline"))
        if refusal.kind in ADMISSION_KINDS:
            return self._give_up(RequestError(ErrorKind.BUSY, refusal.reason, refusal.retry_after, refusal.kind))
        if refusal.kind == "policy":
            return self._give_up(RequestError(ErrorKind.BUG, refusal.reason))
        if servable and refusal.kind == LATER:
            self.state = State.BACKING_OFF
            self.wake_at = min(now + LATER_PAUSE, self._deadline)
            return []
        if servable and refusal.retry_after is None:
            return self._give_up(RequestError(ErrorKind.TOO_LARGE, refusal.reason))
        if servable and self._failing_since is None:
            return self._give_up(RequestError(ErrorKind.BUSY, refusal.reason, refusal.retry_after, refusal.kind))
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since >= self._patience:
            return self._give_up(RequestError(ErrorKind.UNAVAILABLE, refusal.reason, refusal.retry_after))
        self.state = State.BACKING_OFF
        self.wake_at = min(now + REJECTED_PAUSE, self._deadline)
        return []

    def on_tokens(self, message: messages.Tokens, now: float) -> list[Action]:
        """Numbered tokens of either worker, in any order, possibly twice."""
        if self.state is not State.RUNNING or message.attempt != self.attempt:
            return []
        limit = self.sampling.max_tokens
        before = len(self.tokens)
        if message.finish is not None:
            self._ends_at = message.first + len(message.tokens)
            self._ends_as = message.finish
        if message.handoff is not None:
            self.handoff = self.handoff or message.handoff
        if len(message.tokens) == 1 and message.first == before < limit and not self._early:
            # Nearly all that ever comes: the next token, in its turn.
            self.tokens.append(message.tokens[0])
            self.logprobs.append(message.logprobs[0] if message.logprobs else None)
        else:
            self._sort_in(message, limit)
        if len(self.tokens) > before:
            if not before:
                self.came = now
            if before <= 1 < len(self.tokens):
                self.second = now
            if len(self.tokens) == 1:
                self._hold(now)
            self._pace.tokens(len(self.tokens) - before, now)
            if self._failing_since is not None:
                self.failures = 0
                self._failing_since = None
                self._excluded = ()
        actions: list[Action] = []
        if self._ends_at is not None and len(self.tokens) >= self._ends_at:
            actions = self._complete(self._ends_as or FinishReason.STOP, abort_decode=self._ends_at == self._base + 1)
        elif len(self.tokens) >= limit:
            actions = self._complete(FinishReason.LENGTH, abort_decode=True)
        if before <= 1:
            self._give(now)
        return actions

    def _give(self, now: float) -> None:
        """The first token may be shown now."""
        if math.isnan(self.given) and self.shown:
            self.given = now

    def _sort_in(self, message: messages.Tokens, limit: int) -> None:
        """What comes before its turn waits for it."""
        told = itertools.chain(message.logprobs or (), itertools.repeat(None))
        for index, token in enumerate(zip(message.tokens, told, strict=False), start=message.first):
            if len(self.tokens) <= index < limit:
                self._early[index] = token
        while (token_at := self._early.pop(len(self.tokens), None)) is not None:
            self.tokens.append(token_at[0])
            self.logprobs.append(token_at[1])

    def _hold(self, now: float) -> None:
        """The first token has come: whether it waits for the second, and until when at most."""
        slo, plan = self.terms.slo, self.plan
        apart = plan is not None and plan.prefill.worker != plan.decode.worker
        if apart and slo.ttft is not None and slo.tbt is not None:
            until = self.arrived + slo.ttft - PACE_SPARE
            if until > now:
                self._held_until = until
                self.wake_at = min(self.wake_at, until)

    def on_prefill_report(self, message: messages.PrefillReport) -> None:
        """What the first prefill that succeeded had reused; later attempts reuse what earlier ones computed."""
        if message.attempt == self.attempt and not self.tokens:
            self.report = message
        if message.attempt == self.attempt and self.cached is None:
            # A retry's worker may have reused answers, too: they are no part of the prompt, whose tokens come first.
            left = self.cached = min(message.cached, len(self.prompt))
            self.tiers = {}
            for tier, tokens in message.tiers.items():
                if taken := min(tokens, left):
                    self.tiers[tier] = taken
                    left -= taken

    def on_prompt_told(self, message: messages.PromptTold) -> None:
        """In order; what was computed twice is told twice, and taken once."""
        have = len(self.prompt_logprobs)
        # The first token of a prompt has none.
        begin = message.first - 1
        if message.attempt == self.attempt and 0 <= begin <= have:
            most = len(self.prompt) - 1 - have
            self.prompt_logprobs += message.logprobs[have - begin :][:most]

    def on_failed(self, message: messages.Failed, now: float) -> list[Action]:
        if self.state is not State.RUNNING or message.attempt != self.attempt or self.plan is None:
            return []
        if message.kind == "too_large":
            return self._give_up(RequestError(ErrorKind.TOO_LARGE, message.reason), gone=message.worker)
        if message.kind == "refused":
            return self._give_up(RequestError(ErrorKind.REFUSED, message.reason), gone=message.worker)
        if message.kind == "bug":
            return self._give_up(RequestError(ErrorKind.BUG, message.reason), gone=message.worker)
        if message.kind == "late":
            return self._give_up(RequestError(ErrorKind.TIMEOUT, message.reason), gone=message.worker)
        if message.kind == "retry" and self._awaits_first_token_beside(message.worker):
            if self._doubt is None:
                self._doubt = message
                self.wake_at = min(self._deadline, now + FIRST_TOKEN_GRACE)
            return []
        return self._retry_after(message, self.plan, now)

    def _awaits_first_token_beside(self, worker: str) -> bool:
        """The prefill worker has not spoken yet: its first token may end the request, which ends the hand-off too."""
        plan = self.plan
        apart = plan is not None and worker == plan.decode.worker != plan.prefill.worker
        return apart and len(self.tokens) == self._base

    def _retry_after(self, message: messages.Failed, plan: Plan, now: float) -> list[Action]:
        if message.kind == "retry":
            # Whoever reports it need not be the one at fault (its peer's daemon may be): try with neither.
            exclude = {plan.prefill.worker, plan.decode.worker}
        elif message.kind == "wrong_role":
            exclude = {message.worker}
        else:
            exclude = set()
        return self._retry(now, f"{message.worker}: {message.reason}", exclude, gone=message.worker)

    def on_lost(self, worker: str, now: float, reason: str) -> list[Action]:
        """The link to a worker is gone, or it is another incarnation than planned."""
        if self.state is not State.RUNNING or self.plan is None:
            return []
        if worker not in (self.plan.prefill.worker, self.plan.decode.worker):
            return []
        return self._retry(now, f"{worker}: {reason}", {worker}, gone=worker)

    def tick(self, now: float) -> list[Action]:
        """To be called at `wake_at` or later."""
        if self.done or now < self.wake_at:
            return []
        if now >= self._deadline:
            return self._give_up(RequestError(ErrorKind.TIMEOUT, f"the request took longer than {self._whose} allows"))
        if self.state is State.ROUTING:
            return self._give_up(RequestError(ErrorKind.UNAVAILABLE, "the conductor does not answer", self._patience))
        if self.state is State.BACKING_OFF:
            return self.start(now)
        if self._doubt is not None and self.plan is not None:
            return self._retry_after(self._doubt, self.plan, now)
        if now >= self._held_until:
            self._held_until = -math.inf
            self.wake_at = self._deadline
            self._give(now)
        return []

    def stop(self) -> list[Action]:
        """A stop string was found in the text: enough."""
        if self.done:
            return []
        actions = self._release(finished=True)
        self.state = State.DONE
        self.finish = FinishReason.STOP
        return actions

    def abort(self) -> list[Action]:
        """The client is gone."""
        if self.done:
            return []
        actions = self._release()
        self.state = State.DONE
        return actions

    def deny(self, error: RequestError) -> list[Action]:
        """The client may have no more."""
        return [] if self.done else self._give_up(error)

    # -- transitions -----------------------------------------------------------------------------------------------

    def _retry(self, now: float, reason: str, exclude: set[str], gone: str) -> list[Action]:
        if self._failing_since is None:
            self._failing_since = now
        self.failures += 1
        self.lost.append((self.attempt, now, reason))
        if self.failures > MAX_FAILURES or now - self._failing_since >= self._patience:
            return self._give_up(RequestError(ErrorKind.UNAVAILABLE, reason, 1.0), gone)
        actions = self._release(gone)
        # Nobody knows when the second token comes now.
        self._held_until = -math.inf
        self._give(now)
        self._excluded = tuple(sorted(exclude))
        self.state = State.BACKING_OFF
        pause = BACK_OFF[min(self.failures, len(BACK_OFF)) - 1]
        self.wake_at = min(now + pause, self._deadline)
        return actions + (self.start(now) if pause == 0.0 and now < self._deadline else [])

    def _complete(self, finish: FinishReason, abort_decode: bool) -> list[Action]:
        # The prefill worker may have ended the request with the first token: its decode worker still holds the grant.
        plan = self.plan
        self.state = State.DONE
        self.plan = None
        self.finish = finish
        self._early.clear()
        actions: list[Action] = [self._ended(finished=True)]
        if plan is not None and abort_decode and plan.prefill.worker != plan.decode.worker:
            actions.append(ToWorker(plan.decode, messages.Abort(request=self.id, attempt=self.attempt)))
        return actions

    def _give_up(self, error: RequestError, gone: str | None = None) -> list[Action]:
        actions = self._release(gone)
        self.state = State.DONE
        self.error = error
        return actions

    def _ended(self, finished: bool) -> ToConductor:
        pace = self._pace
        return ToConductor(
            messages.RouteEnded(
                request=self.id,
                attempt=self.attempt,
                ttft=pace.first - self.arrived if pace.count else -1.0,
                generated=pace.count,
                tbt=pace.tbt(),
                finished=finished,
            )
        )

    def _release(self, gone: str | None = None, finished: bool = False) -> list[Action]:
        """Ends the attempt everywhere but at the worker that is gone or has ended it itself."""
        actions: list[Action] = []
        if self.plan is not None:
            workers = {worker.worker: worker for worker in (self.plan.prefill, self.plan.decode)}
            abort = messages.Abort(request=self.id, attempt=self.attempt)
            actions += [ToWorker(worker, abort) for name, worker in workers.items() if name != gone]
        if self.attempt >= 0 and self.state in (State.ROUTING, State.RUNNING):
            actions.append(self._ended(finished))
        self.plan = None
        self._early.clear()
        return actions
