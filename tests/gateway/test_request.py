"""Goal: a request's answer is the model's, whole, in order, each token once, whatever happens to its attempts.
Method: the state machine alone. Hypothesis plays conductor, workers, network and clock; a naive model knows the answer.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.gateway.request import (
    FIRST_TOKEN_GRACE,
    LATER_PAUSE,
    MAX_FAILURES,
    PACE_SPARE,
    ErrorKind,
    Request,
    State,
    Terms,
    ToConductor,
    ToWorker,
)
from pyengine.scheduler.messages import Abort, Failed, PrefillReport, Rejected, Route, RouteEnded, Tokens, Work
from pyengine.scheduler.policies.admission.patient import LATER
from pyengine.scheduler.types import (
    FinishReason,
    Logprobs,
    Medium,
    Node,
    Plan,
    Rejection,
    SamplingParams,
    Slo,
    Source,
    WorkerRef,
    tenant_number,
)

NODE = Node("node-0", "127.0.0.1:1", 1)
PROMPT = list(range(40))


def answer(index: int) -> int:
    return 1000 + index


def told(index: int) -> Logprobs:
    return Logprobs(-float(index), index + 1, ((answer(index), -float(index)),))


def ref(name: str, incarnation: int = 1) -> WorkerRef:
    return WorkerRef(name, incarnation, NODE, f"ipc://{name}")


def plan(request: Request, prefill: str = "p", decode: str = "d") -> Plan:
    return Plan(request=request.id, attempt=request.attempt, prefill=ref(prefill), decode=ref(decode))


def make(max_tokens: int = 8, patience: float = 5.0, longest: float = 100.0, tenant: str = "", **terms: Any) -> Request:
    return Request(
        7,
        PROMPT,
        SamplingParams(max_tokens=max_tokens, seed=1, stop=("x",)),
        model="m",
        namespace=b"n",
        block_tokens=16,
        root=bytes(16),
        key_of=lambda tokens: bytes(len(tokens) // 64 * 16),
        patience=patience,
        longest=longest,
        terms=Terms(arrived=0.0, tenant=tenant, **terms),
    )


def running(**settings: Any) -> Request:
    request = make(**settings)
    request.start(0.0)
    request.on_planned(plan(request), 0.0)
    request.check()
    return request


def tokens(
    request: Request, first: int, count: int, finish: FinishReason | None = None, attempt: int | None = None
) -> Tokens:
    return Tokens(
        request=request.id,
        attempt=request.attempt if attempt is None else attempt,
        first=first,
        tokens=tuple(answer(index) for index in range(first, first + count)),
        finish=finish,
        logprobs=tuple(told(index) for index in range(first, first + count)),
    )


def failed(request: Request, kind: str, worker: str = "p") -> Failed:
    return Failed(request=request.id, attempt=request.attempt, worker=worker, kind=kind, reason="because")


def test_route_and_work_carry_what_they_should() -> None:
    request = make()
    (asked,) = request.start(0.0)
    assert isinstance(asked, ToConductor)
    assert isinstance(asked.message, Route)
    assert len(asked.message.keys) == 2 * 16
    assert asked.message.prompt_tokens == 40
    actions = request.on_planned(plan(request), 1.0)
    assert [
        (a.worker.worker, a.message.part) for a in actions if isinstance(a, ToWorker) and isinstance(a.message, Work)
    ] == [
        ("d", "decode"),
        ("p", "prefill"),
    ]
    for action in actions:
        assert isinstance(action.message, Work)
        assert action.message.sampling.stop == ()
        assert action.message.deadline == 99.0


def test_first_token_that_ends_the_request_frees_the_decode_worker() -> None:
    request = running(max_tokens=1)
    actions = request.on_tokens(tokens(request, 0, 1, FinishReason.LENGTH), 1.0)
    assert request.done
    assert [type(action.message) for action in actions] == [RouteEnded, Abort]
    assert [action.worker.worker for action in actions if isinstance(action, ToWorker)] == ["d"]


def test_work_says_what_the_plan_knows_and_for_whom() -> None:
    request = make(tenant="somebody")
    request.start(0.0)
    sources = (Source(NODE, 0, 2, Medium.SSD),)
    works = request.on_planned(msgspec.structs.replace(plan(request), sources=sources, cached_blocks=2), 0.0)
    for action in works:
        assert isinstance(action.message, Work)
        assert (action.message.sources, action.message.cached_blocks) == (sources, 2)
        assert action.message.tenant == tenant_number("somebody") != tenant_number("")
    assert tenant_number("") == 0


def test_hand_off_that_ended_with_the_first_token_is_no_failure() -> None:
    """The decode worker says that its hand-off has ended before the prefill worker's token arrives, which ended it."""
    request = running(max_tokens=1)
    assert request.on_failed(failed(request, "retry", "d"), 1.0) == []
    request.on_tokens(tokens(request, 0, 1, FinishReason.LENGTH), 1.0)
    assert request.done
    assert (request.attempt, request.finish) == (0, FinishReason.LENGTH)


@pytest.mark.parametrize("first_token", [False, True])
def test_decode_workers_failure_is_tried_again_after_a_moment(first_token: bool) -> None:
    request = running()
    assert request.on_failed(failed(request, "retry", "d"), 1.0) == []
    assert request.on_failed(failed(request, "retry", "d"), 1.1) == []
    if first_token:
        request.on_tokens(tokens(request, 0, 1), 1.1)
    assert request.tick(1.1) == []
    assert request.wake_at == pytest.approx(1.0 + FIRST_TOKEN_GRACE)
    actions = request.tick(request.wake_at)
    assert [type(action.message) for action in actions] == [Abort, RouteEnded, Route]
    assert (request.attempt, request.failures) == (1, 1)
    assert request.tick(request.wake_at - 1.0) == []
    request.check()


PROMISED = Slo(ttft=10.0, tbt=0.1)


def test_where_both_are_promised_the_first_token_is_shown_with_the_second() -> None:
    request = running(slo=PROMISED)
    request.on_tokens(tokens(request, 0, 1), 1.0)
    assert (len(request.tokens), request.shown) == (1, 0)
    request.on_tokens(tokens(request, 1, 1), 1.2)
    assert request.shown == 2
    request.on_tokens(tokens(request, 2, 1), 1.3)
    assert request.shown == 3


def test_no_first_token_is_held_beyond_its_own_objective() -> None:
    request = running(slo=PROMISED)
    request.on_tokens(tokens(request, 0, 1), 1.0)
    assert request.wake_at == 10.0 - PACE_SPARE
    assert request.tick(9.4) == []
    assert request.shown == 0
    assert request.tick(request.wake_at) == []
    assert (request.shown, request.wake_at) == (1, 100.0)
    late = running(slo=PROMISED)
    late.on_tokens(tokens(late, 0, 1), 9.8)
    assert late.shown == 1


def test_a_stuck_decode_worker_delays_the_first_token_to_its_objective_and_the_conductor_hears_when_it_came() -> None:
    request = running(slo=PROMISED)
    request.on_tokens(tokens(request, 0, 1), 1.0)
    for now in (2.0, 5.0, 9.4):
        assert request.tick(now) == []
        assert (request.shown, request.came) == (0, 1.0)
    request.tick(request.wake_at)
    assert (request.shown, request.came) == (1, 1.0)
    (ended,) = (a.message for a in request.tick(request.wake_at) if isinstance(a.message, RouteEnded))
    assert (request.done, ended.ttft, ended.generated) == (True, 1.0, 1)


def test_a_deadline_before_the_objective_shows_what_there_is() -> None:
    request = running(slo=Slo(ttft=10.0, tbt=0.1, deadline=3.0))
    request.on_tokens(tokens(request, 0, 1), 1.0)
    assert (request.shown, request.wake_at) == (0, 3.0)
    request.tick(3.0)
    assert (request.shown, request.error is not None) == (1, True)


@pytest.mark.parametrize("slo", [Slo(), Slo(ttft=10.0), Slo(tbt=0.1)])
def test_without_both_promises_the_first_token_is_shown_as_it_comes(slo: Slo) -> None:
    request = running(slo=slo)
    request.on_tokens(tokens(request, 0, 1), 1.0)
    assert request.shown == 1


def test_of_one_worker_the_first_token_is_shown_as_it_comes() -> None:
    request = make(slo=PROMISED)
    request.start(0.0)
    request.on_planned(plan(request, "w", "w"), 0.0)
    request.on_tokens(tokens(request, 0, 1), 1.0)
    assert request.shown == 1


def test_a_token_that_is_held_is_shown_when_the_answer_ends_or_begins_anew() -> None:
    request = running(slo=PROMISED, max_tokens=1)
    request.on_tokens(tokens(request, 0, 1, FinishReason.LENGTH), 1.0)
    assert request.shown == 1
    request = running(slo=PROMISED)
    request.on_tokens(tokens(request, 0, 1), 1.0)
    ended = next(a.message for a in request.on_lost("d", 1.5, "gone") if isinstance(a.message, RouteEnded))
    assert request.shown == 1
    assert ended.ttft == 1.0, "the conductor is told when it came, not when it was shown"


def test_who_is_told_later_asks_again_and_says_how_long_it_has_waited() -> None:
    request = make(slo=PROMISED)
    request.start(0.0)
    refusal = Rejection(request=7, attempt=0, reason="full", retry_after=3.0, kind=LATER)
    assert request.on_rejected(Rejected(rejection=refusal), 0.5, servable=True) == []
    assert request.wake_at == 0.5 + LATER_PAUSE
    (asked,) = request.tick(request.wake_at)
    assert isinstance(asked.message, Route)
    assert (asked.message.attempt, asked.message.waited, asked.message.admitted) == (1, 1.5, False)
    request.check()


def test_whole_blocks_only_up_to_the_last_token() -> None:
    """A prompt of exactly n blocks asks for n - 1: at least one token is computed."""
    request = make()
    request.prompt = list(range(32))
    (asked,) = request.start(0.0)
    assert isinstance(asked.message, Route)
    assert len(asked.message.keys) == 16


@pytest.mark.parametrize(("kind", "excluded"), [("retry", ("d", "p")), ("wrong_role", ("p",)), ("need_prefill", ())])
def test_failed_kinds_that_are_tried_again(kind: str, excluded: tuple[str, ...]) -> None:
    request = running()
    request.on_tokens(tokens(request, 0, 3), 0.5)
    actions = request.on_failed(failed(request, kind), 1.0)
    kinds = [type(action.message) for action in actions]
    assert kinds == [Abort, RouteEnded, Route]
    route = actions[-1].message
    assert isinstance(route, Route)
    assert route.exclude == excluded
    assert (route.attempt, route.prompt_tokens, route.max_tokens) == (1, 43, 5)
    (work, _) = request.on_planned(plan(request, "p2", "d2"), 1.0)
    assert isinstance(work.message, Work)
    assert work.message.generated == 3
    request.check()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("too_large", ErrorKind.TOO_LARGE), ("impossible", ErrorKind.IMPOSSIBLE), ("bug", ErrorKind.BUG)],
)
def test_failed_kinds_that_end_it(kind: str, expected: ErrorKind) -> None:
    request = running()
    actions = request.on_failed(failed(request, kind), 1.0)
    assert request.error is not None
    assert request.error.kind is expected
    assert [type(action.message) for action in actions] == [Abort, RouteEnded]


def test_failures_without_progress_end_within_the_promise() -> None:
    """Five seconds and MAX_FAILURES bound the attempts; a new token starts both anew."""
    request = running()
    now = 0.0
    count = 0
    while not request.done:
        request.on_lost("d", now, "gone")
        count += 1
        if request.state is State.BACKING_OFF:
            now = request.wake_at
            request.tick(now)
        request.on_planned(plan(request), now)
        request.check()
    assert request.error is not None
    assert request.error.kind is ErrorKind.UNAVAILABLE
    assert now <= 5.0
    assert count <= MAX_FAILURES + 1


def test_silent_conductor() -> None:
    request = make(patience=5.0)
    request.start(0.0)
    assert request.tick(4.9) == []
    (again,) = request.ask_again(4.9)
    assert isinstance(again.message, Route)
    assert again.message.waited == 4.9, "the client has waited meanwhile"
    request.tick(5.0)
    assert request.error is not None
    assert request.error.kind is ErrorKind.UNAVAILABLE


def test_rejections() -> None:
    def rejected(request: Request, retry_after: float | None, kind: str = "") -> Rejected:
        return Rejected(
            rejection=Rejection(
                request=request.id, attempt=request.attempt, reason="full", retry_after=retry_after, kind=kind
            )
        )

    busy = make()
    busy.start(0.0)
    busy.on_rejected(rejected(busy, 2.0), 0.0, servable=True)
    assert busy.error is not None
    assert (busy.error.kind, busy.error.retry_after) == (ErrorKind.BUSY, 2.0)
    never = make()
    never.start(0.0)
    never.on_rejected(rejected(never, None), 0.0, servable=True)
    assert never.error is not None
    assert never.error.kind is ErrorKind.TOO_LARGE
    ours = make()
    ours.start(0.0)
    ours.on_rejected(rejected(ours, None, "policy"), 0.0, servable=True)
    assert ours.error is not None
    assert ours.error.kind is ErrorKind.BUG
    absent = make()
    absent.start(0.0)
    now = 0.0
    while not absent.done:
        absent.on_rejected(rejected(absent, 1.0), now, servable=False)
        now = max(now, absent.wake_at) if not absent.done else now
        absent.tick(now)
    assert absent.error is not None
    assert absent.error.kind is ErrorKind.UNAVAILABLE
    assert 4.5 <= now <= 5.5


def test_deadline_abort_and_stop() -> None:
    late = running(longest=10.0)
    actions = late.tick(10.0)
    assert late.error is not None
    assert late.error.kind is ErrorKind.TIMEOUT
    assert [type(action.message) for action in actions] == [Abort, Abort, RouteEnded]
    gone = running()
    assert [type(action.message) for action in gone.abort()] == [Abort, Abort, RouteEnded]
    assert gone.abort() == []
    stopped = running()
    stopped.on_tokens(tokens(stopped, 0, 2), 1.0)
    assert [type(action.message) for action in stopped.stop()] == [Abort, Abort, RouteEnded]
    assert stopped.finish is FinishReason.STOP


def test_terms_travel_with_every_message() -> None:
    """Objectives count from the client's request on, whichever attempt it is; who was admitted once stays so."""
    slo = Slo(ttft=2.0, tbt=0.1, deadline=30.0)
    request = make(slo=slo, priority=3)
    (asked,) = request.start(0.25)
    assert isinstance(asked.message, Route)
    assert (asked.message.slo, asked.message.priority, asked.message.waited) == (slo, 3, 0.25)
    assert not asked.message.admitted
    for action in request.on_planned(plan(request), 0.5):
        assert isinstance(action.message, Work)
        work = action.message
        assert (work.slo, work.priority, work.waited, work.deadline) == (slo, 3, 0.5, 29.5)
    route = request.on_failed(failed(request, "need_prefill"), 1.0)[-1].message
    assert isinstance(route, Route)
    assert (route.waited, route.admitted) == (1.0, True)


@pytest.mark.parametrize(("deadline", "ends", "says"), [(3.0, 3.0, "its deadline"), (300.0, 100.0, "this server")])
def test_the_earlier_of_deadline_and_servers_limit_ends_it(deadline: float, ends: float, says: str) -> None:
    request = running(slo=Slo(deadline=deadline))
    assert request.wake_at == ends
    assert request.tick(ends - 0.01) == []
    assert [type(action.message) for action in request.tick(ends)] == [Abort, Abort, RouteEnded]
    assert request.error is not None
    assert says in request.error.reason
    assert request.error.kind is ErrorKind.TIMEOUT


def test_the_end_of_an_attempt_tells_its_pace() -> None:
    """Twenty-one gaps of which two were long: the longest tenth are three."""
    request = running(max_tokens=22)
    now = 1.5
    request.on_tokens(tokens(request, 0, 1), now)
    for index in range(1, 22):
        now += {7: 2.0, 9: 1.0}.get(index, 0.1)
        actions = request.on_tokens(tokens(request, index, 1, FinishReason.LENGTH if index == 21 else None), now)
    ended = actions[0].message
    assert isinstance(ended, RouteEnded)
    assert (ended.ttft, ended.generated, ended.finished) == (1.5, 22, True)
    assert ended.tbt == pytest.approx((2.0 + 1.0 + 0.1) / 3)
    silent = running()
    (*_, ended_early) = silent.abort()
    assert isinstance(ended_early.message, RouteEnded)
    none = ended_early.message
    assert (none.ttft, none.generated, none.tbt, none.finished) == (-1.0, 0, -1.0, False)


def test_tokens_that_come_together_share_their_gap() -> None:
    request = running(max_tokens=30)
    request.on_tokens(tokens(request, 0, 2), 1.0)
    request.on_tokens(tokens(request, 2, 4), 3.0)
    (*_, ended) = request.stop()
    assert isinstance(ended.message, RouteEnded)
    # Gaps: none between the first two, then four of half a second.
    assert (ended.message.generated, ended.message.tbt, ended.message.finished) == (6, 0.5, True)


def test_late_is_the_clients_deadline_and_a_refusal_names_its_objective() -> None:
    late = running()
    late.on_failed(failed(late, "late"), 1.0)
    assert late.error is not None
    assert late.error.kind is ErrorKind.TIMEOUT
    for kind, detail in (("slo_ttft", "slo_ttft"), ("late", "slo_deadline")):
        refused = make()
        refused.start(0.0)
        rejection = Rejection(request=refused.id, attempt=0, reason="no", retry_after=2.5, kind=kind)
        refused.on_rejected(Rejected(rejection=rejection), 0.0, servable=True)
        assert refused.error is not None
        assert (refused.error.kind, refused.error.detail) == (ErrorKind.BUSY, detail)


def rejected(request: Request, kind: str, retry_after: float | None = 1.0) -> Rejected:
    rejection = Rejection(request=request.id, attempt=request.attempt, reason="no", retry_after=retry_after, kind=kind)
    return Rejected(rejection=rejection)


def test_who_was_planned_once_and_is_late_now_has_run_out_of_time() -> None:
    request = running()
    request.on_tokens(tokens(request, 0, 2), 1.0)
    request.on_lost("d", 2.0, "gone")
    assert request.state is State.ROUTING
    request.on_rejected(rejected(request, "late", None), 2.0, servable=True)
    assert request.error is not None
    assert (request.error.kind, request.error.detail) == (ErrorKind.TIMEOUT, "")


@pytest.mark.parametrize("servable", [True, False])
def test_admissions_answer_stands_for_who_has_waited_for_workers(servable: bool) -> None:
    request = make()
    request.start(0.0)
    request.on_rejected(rejected(request, "absent"), 0.0, servable=False)
    request.tick(request.wake_at)
    assert request.state is State.ROUTING
    request.on_rejected(rejected(request, "slo_ttft", 3.0), 0.5, servable=servable)
    assert request.error is not None
    assert (request.error.kind, request.error.retry_after) == (ErrorKind.BUSY, 3.0)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_history_gives_the_whole_answer_or_an_error(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 12), "max_tokens")
    ends_at = data.draw(st.integers(1, length), "the model ends after")
    finish = FinishReason.LENGTH if ends_at == length else FinishReason.STOP
    request = make(max_tokens=length)
    now = 0.0
    request.start(now)
    used: set[int] = set()
    for _ in range(60):
        if request.done:
            break
        event = data.draw(st.sampled_from(["time", "plan", "tokens", "stale", "lost", "failed", "report", "again"]))
        before = list(request.tokens)
        if event == "time":
            now += data.draw(st.sampled_from([0.05, 0.3, 1.0]))
            request.tick(now)
        elif event == "plan":
            request.on_planned(plan(request), now)
        elif event == "tokens":
            first = data.draw(st.integers(0, ends_at - 1))
            count = data.draw(st.integers(1, ends_at - first))
            last = first + count == ends_at
            request.on_tokens(tokens(request, first, count, finish if last else None), now)
        elif event == "stale" and request.attempt > 0:
            request.on_tokens(
                Tokens(
                    request=request.id, attempt=request.attempt - 1, first=len(before), tokens=(666,), finish=finish
                ),
                now,
            )
            assert request.tokens == before
        elif event == "lost":
            request.on_lost(data.draw(st.sampled_from(["p", "d", "other"])), now, "gone")
        elif event == "failed":
            kind = data.draw(st.sampled_from(["retry", "need_prefill"]))
            request.on_failed(failed(request, kind, data.draw(st.sampled_from(["p", "d"]))), now)
        elif event == "report":
            tiers = data.draw(st.permutations([("device", 50), ("ssd", 40), ("peer_ssd", 9)]))
            report = PrefillReport(
                request=request.id, attempt=request.attempt, cached=99, computed=1, tiers=dict(tiers)
            )
            request.on_prefill_report(report)
        elif event == "again":
            request.ask_again(now)
        request.check()
        assert request.tokens[: len(before)] == before
        assert request.tokens == [answer(index) for index in range(len(request.tokens))]
        assert request.logprobs == [told(index) for index in range(len(request.tokens))]
        if request.state is State.ROUTING:
            used.add(request.attempt)
    if request.finish is not None:
        assert len(request.tokens) == ends_at
        assert request.finish is finish
    # A retry reuses answers, too; they are no part of the prompt.
    assert request.cached in (None, len(PROMPT))
    assert sum(request.tiers.values()) == (request.cached or 0)
    assert all(request.tiers.values())
    assert used <= set(range(request.attempt + 1))
