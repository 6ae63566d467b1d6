"""Goal: predictions are the sums they say they are: queues that run down, loads by tier, congested links, corrections;
and who has no room, or no time left, is not chosen.

Method: one conductor, few workers with known speeds, arithmetic by hand.
"""

from __future__ import annotations

import random

import pytest

from pyengine.scheduler.changes import Change, pack
from pyengine.scheduler.events import DaemonGone, FromGateway, FromWorker, SendToGateway, WorkerLost
from pyengine.scheduler.explanation import Candidate, Explanation
from pyengine.scheduler.link_cost import LINK_DELAY, LINK_RATE
from pyengine.scheduler.messages import (
    CostFit,
    Explain,
    Explained,
    GatewayHello,
    LoadSample,
    PagesChanged,
    Planned,
    Rejected,
    Route,
    WorkerHello,
)
from pyengine.scheduler.types import Medium, Role, Slo

from .world import BLOCK, SPEC, World, chain, worker

#: Seconds of a step, per prompt token, and per decoding sequence and token of its context.
FIT = CostFit(coefficients=(0.01, 0.001, 0.0, 0.002, 1e-6), samples=100, error=0.1)
SIZE = SPEC.block_bytes


def world(*roles: Role, policy: str = "kvcache-centric", **settings: object) -> World:
    made = World(
        *(worker(f"{role.value}-{i}", role, f"node-{i}") for i, role in enumerate(roles)), policy=policy, **settings
    )
    for name in made.workers:
        made.alive(name, cost=FIT)
    return made


def prefill(tokens: int, cached: int = 0) -> float:
    rest = tokens - cached
    return -(-rest // 512) * 0.01 + rest * 0.001


def explained(made: World, request: int | None = None) -> Explanation:
    (answer,) = made.on(FromGateway("gateway", Explain(number=7, request=request)))
    assert isinstance(answer, SendToGateway)
    assert isinstance(answer.message, Explained)
    assert answer.message.number == 7
    assert answer.message.explanation is not None
    return answer.message.explanation


def row(made: World, name: str) -> Candidate:
    return {each.worker: each for each in explained(made).candidates}[name]


def test_a_queue_is_what_its_worker_predicts_and_runs_down_until_it_says_more() -> None:
    made = world(Role.BOTH)
    made.alive("both-0", cost=FIT, queue_seconds=3.0)
    assert made.plan([], 100, request=1).predicted_ttft == pytest.approx(3.0 + prefill(100))
    made.end(1)
    made.now += 2.5
    assert made.plan([], 100, request=2).predicted_ttft == pytest.approx(0.5 + prefill(100))
    made.end(2)
    made.now += 0.4
    made.alive("both-0", cost=FIT, queue_seconds=1.0)
    assert made.plan([], 100, request=3).predicted_ttft == pytest.approx(1.0 + prefill(100))


def test_plans_add_their_prefill_until_a_heartbeat_shows_them() -> None:
    made = world(Role.BOTH)
    first = made.plan([], 1000, request=1)
    made.now += 0.3
    second = made.plan([], 500, request=2)
    assert first.predicted_ttft == pytest.approx(prefill(1000))
    assert second.predicted_ttft == pytest.approx(prefill(1000) - 0.3 + prefill(500))
    # The worker has taken in the first: what is left of it is in its own number.
    made.alive("both-0", cost=FIT, queue_seconds=0.7, accepted=((1, 0),))
    third = made.plan([], 16, request=3)
    assert third.predicted_ttft == pytest.approx(0.7 + prefill(500) + prefill(16))
    # In the middle of a long step it takes in nothing.
    made.now += 1.1
    made.alive("both-0", cost=FIT, queued_requests=1)
    assert made.plan([], 16, request=4).predicted_ttft == pytest.approx(prefill(500) + 2 * prefill(16))
    # What it never tells of is forgotten after two heartbeats.
    made.now += 1.1
    made.alive("both-0", cost=FIT, progress=1)
    assert made.plan([], 16, request=5).predicted_ttft == pytest.approx(prefill(16))


def test_an_attempt_that_was_taken_in_hides_nothing_of_the_next() -> None:
    """A worker takes in an attempt, loses it, and gets the request once more, all within one heartbeat."""
    made = world(Role.BOTH)
    made.plan([], 1000, request=1)
    made.end(1)
    made.plan([], 1000, request=1, attempt=1)
    made.alive("both-0", cost=FIT, accepted=((1, 0),))
    assert made.plan([], 16, request=2).predicted_ttft == pytest.approx(prefill(1000) + prefill(16))
    made.alive("both-0", cost=FIT, accepted=((1, 1), (2, 0)))
    assert made.plan([], 16, request=3).predicted_ttft == pytest.approx(prefill(16))


def test_loads_are_credited_by_tier() -> None:
    made = world(Role.BOTH)
    keys = chain(*range(40))
    made.store("node-0", keys[:30])
    made.store("node-0", keys, Medium.SSD)
    loads = [LoadSample("node-0", 1 << 20, 0.01, device=True), LoadSample("node-0", 1 << 30, 2.0)]
    made.alive("both-0", cost=FIT, loads=tuple(loads))
    ssd = made.conductor.links.rate("node-0", "node-0")
    assert ssd == pytest.approx((1 << 30) / (2.0 - LINK_DELAY))
    copied, read = 40 * SIZE * 0.01 / (1 << 20), 10 * SIZE / ssd
    plan = made.plan(keys, request=1)
    assert plan.predicted_ttft == pytest.approx(copied + read + prefill(645, 640))
    made.end(1)
    # What lies in its own pages need not be copied.
    pages = pack(Change(False, 0, key, keys[i - 1] if i else bytes(16), i) for i, key in enumerate(keys[:35]))
    made.on(FromWorker(PagesChanged(worker="both-0", changes=pages, first=True)))
    plan = made.plan(keys, request=2)
    assert plan.predicted_ttft == pytest.approx(5 / 40 * copied + 5 / 10 * read + prefill(645, 640))
    assert row(made, "both-0").device == 35
    assert (row(made, "both-0").dram, row(made, "both-0").ssd) == (30, 10)


def test_device_pages_alone_are_reused_and_die_with_their_worker() -> None:
    made = world(Role.BOTH, Role.BOTH)
    keys = chain(*range(30))
    pages = pack(Change(False, 0, key, keys[i - 1] if i else bytes(16), i) for i, key in enumerate(keys))
    made.on(FromWorker(PagesChanged(worker="both-1", changes=pages)))
    assert {made.planned_alone(keys).prefill.worker for _ in range(4)} == {"both-1"}
    made.on(FromWorker(PagesChanged(worker="both-1", changes=b"", first=True)))
    assert row_prefix(made, keys) == 0
    made.on(FromWorker(PagesChanged(worker="both-1", changes=pages)))
    made.on(FromWorker(WorkerHello(info=worker("both-1", Role.BOTH, "node-1", incarnation=2))))
    assert row_prefix(made, keys) == 0
    made.on(FromWorker(PagesChanged(worker="both-1", changes=pages)))
    made.on(WorkerLost("both-1"))
    made.on(FromWorker(PagesChanged(worker="both-1", changes=pages)))
    made.on(FromWorker(PagesChanged(worker="nobody", changes=pages)))
    made.on(FromWorker(PagesChanged(worker="both-0", changes=b"no whole change")))
    odd = made.conductor.counters()
    assert odd['pyengine_conductor_odd_events_total{what="worker"}'] == 2
    assert odd['pyengine_conductor_odd_events_total{what="pages"}'] == 1
    assert made.conductor.pages.count("both-1") == 0


def row_prefix(made: World, keys: list[bytes]) -> int:
    made.planned_alone(keys)
    return row(made, "both-1").device


def test_a_fetch_waits_for_its_sender_and_its_receiver() -> None:
    made = world(Role.BOTH, Role.BOTH, Role.BOTH)
    keys = chain(*range(100))
    made.store("node-0", keys)
    made.alive("both-0", cost=FIT, queue_seconds=60.0)
    links = made.conductor.links
    moved = LINK_DELAY + 100 * SIZE / LINK_RATE
    plan = made.plan(keys, request=1, exclude=("both-2",))
    assert plan.predicted_ttft == pytest.approx(moved + prefill(1605, 1600))
    assert row(made, "both-1").transfer == pytest.approx(moved)
    made.end(1)
    # The sender has that to send; the receiver gets more from elsewhere.
    links.order("node-2", "node-1", int(LINK_RATE), made.now)
    made.plan(keys, request=2)
    assert row(made, "both-1").transfer == pytest.approx(moved + 1.0 + LINK_DELAY + moved)
    assert row(made, "both-2").transfer == pytest.approx(2 * moved)


def test_a_hand_off_costs_what_decode_lacks() -> None:
    made = world(Role.PREFILL, Role.DECODE, Role.DECODE)
    keys = chain(*range(100))
    made.store("node-2", keys[:60])
    made.plan(keys)
    assert row(made, "decode-1").handoff == pytest.approx(LINK_DELAY + 101 * SIZE / LINK_RATE)
    assert row(made, "decode-2").handoff == pytest.approx(LINK_DELAY + 41 * SIZE / LINK_RATE)
    assert row(made, "prefill-0").handoff == 0


def test_the_predicted_gap_counts_what_runs_what_waits_and_this_request() -> None:
    made = world(Role.PREFILL, Role.DECODE)
    made.alive("decode-1", cost=FIT, running=3, queued_requests=2, running_context=5000, expected_tokens=700)
    plan = made.plan([], 300)
    assert plan.predicted_tbt == pytest.approx(0.01 + 6 * 0.002 + (5000 + 700 + 300) * 1e-6)
    plan = made.plan([], 100)
    assert plan.predicted_tbt == pytest.approx(0.01 + 7 * 0.002 + (5000 + 700 + 301 + 100) * 1e-6)


def test_decode_workers_without_room_are_left_only_if_nobody_has_any() -> None:
    made = world(Role.PREFILL, Role.DECODE, Role.DECODE, policy="round-robin")

    def chosen() -> set[str]:
        return {made.planned_alone([], 320).decode.worker for _ in range(4)}

    assert chosen() == {"decode-1", "decode-2"}
    made.alive("decode-1", cost=FIT, free_pages=20)
    assert chosen() == {"decode-2"}, "a page for the first token is missing"
    assert row(made, "decode-1").masked == "it has no room now, others have"
    made.alive("decode-1", cost=FIT, free_pages=30, expected_tokens=10 * BLOCK)
    assert chosen() == {"decode-2"}, "what waits takes the rest"
    made.alive("decode-1", cost=FIT, free_pages=31, expected_tokens=10 * BLOCK)
    assert chosen() == {"decode-1", "decode-2"}
    made.alive("decode-1", cost=FIT, running=32)
    assert chosen() == {"decode-2"}, "its batch is full"
    made.alive("decode-2", cost=FIT, running=30, queued_requests=2)
    assert chosen() == {"decode-1", "decode-2"}


def test_plans_take_pages_before_any_heartbeat() -> None:
    made = world(Role.PREFILL, Role.DECODE, Role.DECODE, policy="round-robin")
    # Of 128 pages each, 60 are planned for: the third finds room nowhere, and is served all the same.
    chosen = [made.plan([], 60 * BLOCK - 1).decode.worker for _ in range(5)]
    assert sorted(chosen[:4]) == ["decode-1", "decode-1", "decode-2", "decode-2"]
    assert row(made, "decode-1").free_pages == 8


def test_short_prompts_may_run_inside_decode_batches_that_keep_their_objective() -> None:
    made = world(Role.PREFILL, Role.DECODE)

    def may(tokens: int, **route: object) -> bool:
        made.planned_alone([], tokens, **route)
        return row(made, "decode-1").inlines

    # A step with one sequence takes 12 ms and a millisecond for each token.
    assert may(37, slo=Slo(tbt=0.05))
    assert not may(39, slo=Slo(tbt=0.05))
    assert not may(37), "nobody said what gap is allowed"
    made.alive("decode-1", cost=FIT, running=10, running_context=0)
    assert may(17, slo=Slo(tbt=0.05))
    assert not may(19, slo=Slo(tbt=0.05))
    keys = chain(*range(10))
    made.store("node-1", keys)
    made.planned_alone(keys, 170, slo=Slo(tbt=0.05))
    assert row(made, "decode-1").inlines, "what is cached need not be computed"
    assert not row(made, "prefill-0").inlines
    assert may(17, slo=Slo(tbt=0.05))
    made.on(DaemonGone(made.pools["node-1"].node))
    assert not may(17, slo=Slo(tbt=0.05)), "nothing it computes is cached, nor moved"


def test_what_came_corrects_what_is_predicted() -> None:
    made = world(Role.BOTH, Role.BOTH)
    for request in range(200):
        plan = made.plan([], 500, request=request, waited=2.0, exclude=("both-1",))
        made.end(request, ttft=2.0 + 2 * prefill(500), tbt=0.02, generated=8, finished=True)
    assert plan.predicted_ttft == pytest.approx(2 * prefill(500), rel=0.05)
    assert row(made, "both-0").correction == pytest.approx(2.0, rel=0.05)
    assert made.plan([], 500, request=900, exclude=("both-0",)).predicted_ttft == pytest.approx(prefill(500))
    counters = made.conductor.counters()
    assert 0 < counters["pyengine_conductor_ttft_error"] < 0.25
    assert -0.25 < counters["pyengine_conductor_ttft_bias"] < 0
    for request in range(1000, 1200):
        made.plan([], 500, request=request, exclude=("both-1",))
        made.end(request, ttft=100.0)
    assert row(made, "both-0").correction == pytest.approx(3.0)
    # Attempts that failed tell nothing.
    made.plan([], 500, request=2000)
    made.end(2000)
    assert made.conductor.counters()["pyengine_conductor_ttft_error"] > 0.5


def test_what_is_moved_is_not_corrected() -> None:
    made = world(Role.BOTH)
    keys = chain(*range(100))
    made.store("node-0", keys, Medium.SSD)
    made.alive("both-0", cost=FIT, loads=(LoadSample("node-0", 100 * SIZE, 1.0),) * 30)
    for request in range(100):
        plan = made.plan(keys, request=request)
        made.end(request, ttft=1.0 + prefill(1605, 1600))
    assert row(made, "both-0").correction == pytest.approx(1.0, abs=0.05)
    assert plan.predicted_ttft == pytest.approx(1.0 + prefill(1605, 1600), rel=0.01)


def test_what_can_be_in_time_nowhere_is_refused() -> None:
    made = world(Role.BOTH, Role.BOTH)
    for name in made.workers:
        made.alive(name, cost=FIT, queue_seconds=5.0)
    made.alive("both-1", cost=FIT, queue_seconds=4.0)
    late = made.refusal([], 100, slo=Slo(deadline=4.0))
    assert late.kind == "late"
    assert late.retry_after is not None
    assert late.retry_after == pytest.approx(max(prefill(100), 0.5))
    assert "4.11 s" in late.reason
    assert made.refusal([], 100, slo=Slo(deadline=10.0), waited=6.0).kind == "late"
    assert made.refusal([], 100, slo=Slo(deadline=10.0), waited=11.0).kind == "late"
    assert made.planned_alone([], 100, slo=Slo(deadline=10.0), waited=5.0).prefill.worker == "both-1"
    said = explained(made, request=made.requests - 2)
    assert (said.prefill, said.candidates) == ("", ())
    assert "worthless 10 s after the request" in said.refused
    assert made.conductor.counters()['pyengine_conductor_rejections_total{reason="late"}'] == 3
    # Waiting helps as far as a queue is in the way, and nobody is told to wait for what cannot come.
    never = made.refusal([], 1000, slo=Slo(deadline=0.5))
    assert never.retry_after is None
    assert "ask when less" not in never.reason
    for name in made.workers:
        made.alive(name, cost=FIT)
    assert made.refusal([], 1000, slo=Slo(deadline=0.5)).retry_after is None, "an idle cluster is as quick as it gets"
    # Guesses refuse nobody.
    fresh = World(worker("both-0", Role.BOTH, "node-0"))
    fresh.plan([], 2000, slo=Slo(deadline=0.001))


def test_one_that_took_long_sends_nobody_away() -> None:
    """The first request took three times as long as predicted: what is predicted now is that uncertain."""
    made = world(Role.BOTH)
    slo = Slo(deadline=1.5 * prefill(1000))
    made.plan([], 1000, request=1)
    made.end(1, ttft=3 * prefill(1000), tbt=0.02, generated=8, finished=True)
    for request in range(2, 100):
        made.plan([], 1000, request=request, slo=slo)
        made.end(request, ttft=prefill(1000), tbt=0.02, generated=8, finished=True)
        if request == 2:
            assert row(made, "both-0").correction > 1.5, "what the first took is not believed at all"
    assert made.refusal([], 1900, request=100, slo=slo).kind == "late", "what is known by now is not"


def test_an_explanation_says_of_links_what_the_choice_rested_on() -> None:
    made = world(Role.PREFILL, Role.DECODE, Role.DECODE, policy="least-harm")
    made.plan([], 1000, request=5)
    before = [each.handoff for each in explained(made, request=5).candidates]
    made.conductor.links.order("node-0", "node-1", 10**12, made.now)
    assert [each.handoff for each in explained(made, request=5).candidates] == before
    made.plan([], 1000, request=6)
    assert min(each.handoff for each in explained(made, request=6).candidates if each.decodes) > 90.0


def test_an_explanation_adds_up_and_names_what_was_in_the_way() -> None:
    made = world(Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    keys = chain(*range(50))
    made.store("node-0", keys[:20])
    made.store("node-2", keys[:45])
    made.alive("prefill-1", cost=FIT, queue_seconds=2.0)
    plan = made.plan(keys, exclude=("decode-3",), request=5)
    said = explained(made, request=5)
    assert (said.gateway, said.request, said.prefill, said.decode) == ("gateway", 5, "prefill-0", "decode-2")
    assert (said.policy, said.prompt_tokens, said.blocks, said.best) == ("kvcache-centric", 805, 50, 45)
    assert (said.predicted_ttft, said.predicted_tbt, said.why) == (plan.predicted_ttft, plan.predicted_tbt, plan.why)
    assert [each.worker for each in said.candidates] == sorted(made.workers)
    for each in said.candidates:
        assert each.ttft == pytest.approx(each.load + each.transfer + each.queue + each.compute)
    by_name = {each.worker: each for each in said.candidates}
    assert by_name["prefill-0"].ttft == plan.predicted_ttft
    assert by_name["prefill-1"].queue == 2.0
    assert by_name["decode-3"].masked == "it has just failed this request"
    assert {each.worker: each.dram for each in said.candidates if each.dram} == {"prefill-0": 20, "decode-2": 45}
    made.plan([], 5, request=6)
    assert explained(made).request == 6
    assert explained(made, request=5).blocks == 50
    (nothing,) = made.on(FromGateway("gateway", Explain(number=1, request=999)))
    assert isinstance(nothing, SendToGateway)
    assert nothing.message == Explained(number=1, explanation=None)


def test_whoever_asks_is_told_where_a_request_would_go_that_nobody_has_sent() -> None:
    made = world(Role.PREFILL, Role.DECODE)
    keys = chain(*range(40))
    made.store("node-0", keys[:20])
    made.plan([], 5, request=5)

    def foreseen(route: Route) -> Explanation:
        (answer,) = made.on(FromGateway("gateway", Explain(number=3, route=route)))
        assert isinstance(answer, SendToGateway)
        assert isinstance(answer.message, Explained)
        assert answer.message.number == 3
        assert answer.message.explanation is not None
        return answer.message.explanation

    said = foreseen(made.asked(keys, request=6))
    nobody = foreseen(made.asked([], 100, request=7, model="another"))
    assert (nobody.refused, nobody.candidates) != ("", ())
    assert "another" in nobody.refused
    assert explained(made).request == 5, "a question is no decision"
    plan = made.plan(keys, request=6)
    assert (said.best, said.predicted_ttft, said.predicted_tbt) == (20, plan.predicted_ttft, plan.predicted_tbt)
    assert (said.prefill, said.decode) == (plan.prefill.worker, plan.decode.worker)


@pytest.mark.parametrize("admission", ["none", "predictive"])
def test_to_explain_what_would_be_decided_changes_nothing(admission: str) -> None:
    """Nor is it remembered: not what is foreseen, not the shares of tenants, not the work that roles follow."""
    told: list[list[object]] = []
    for asks in (0, 1):
        made = world(Role.PREFILL, Role.DECODE, Role.BOTH, policy="random", admission=admission, roles="auto")
        told.append([])
        rng = random.Random(1)
        for name in made.workers:
            made.alive(name, cost=FIT)
        slo = Slo(ttft=0.5, tbt=0.1, deadline=3.0)
        for request in range(30):
            for _ in range(3):
                made.now += 0.01
                made.alive("decode-1", cost=FIT, running=rng.randrange(8), running_context=rng.randrange(900))
                other = made.asked([], 100, request=1000, slo=slo, max_tokens=40)
                for _ in range(asks):
                    made.conductor.explain("gateway", other, made.now)
            route = made.asked([], 100, request=request, slo=slo, tenant=f"t{request % 2}", max_tokens=40)
            said = [made.conductor.explain("gateway", route, made.now) for _ in range(asks)]
            (answer,) = made.on(FromGateway("gateway", route))
            assert isinstance(answer, SendToGateway)
            told[-1].append(answer)
            for each in said:
                if isinstance(answer.message, Planned):
                    plan = answer.message.plan
                    assert (each.prefill, each.decode, each.refused) == (plan.prefill.worker, plan.decode.worker, "")
                else:
                    assert isinstance(answer.message, Rejected)
                    assert (each.prefill, each.refused) == ("", answer.message.rejection.reason)
                    assert len(each.candidates) == 3
        told[-1].append(made.conductor.counters())
        outlook = made.conductor.outlook
        told[-1] += [outlook.shares.level(made.now), outlook.planners["model"].prefill.value(made.now)]
        told[-1] += [outlook.forecast.batch("decode-1", made.now + ahead, made.now) for ahead in (0.0, 0.5, 1.0)]
    assert told[0] == told[1]
    refused = sum(isinstance(each, SendToGateway) and isinstance(each.message, Rejected) for each in told[0])
    assert (refused > 0) == (admission != "none")


def test_a_refusal_is_explained_with_all_candidates() -> None:
    made = world(Role.PREFILL, Role.DECODE, admission="at-arrival")
    for name in made.workers:
        made.alive(name, cost=FIT, queue_seconds=5.0, queued_requests=3)
    refusal = made.refusal([], 100, slo=Slo(ttft=1.0), request=7)
    said = explained(made, request=7)
    assert (said.refused, said.prefill, len(said.candidates)) == (refusal.reason, "", 2)
    assert said.predicted_ttft == pytest.approx(5.0 + prefill(100))


def test_only_the_latest_decisions_are_kept() -> None:
    made = world(Role.BOTH)
    for request in range(200):
        made.planned_alone([], 5, request=request)
    made.on(FromGateway("gateway", GatewayHello(gateway="gateway", incarnation=1)))
    (answer,) = made.on(FromGateway("gateway", Explain(number=1, request=100)))
    assert isinstance(answer, SendToGateway)
    assert answer.message == Explained(number=1, explanation=None)
    assert explained(made, request=150).request == 150


def test_a_clock_that_runs_backwards_stands_still() -> None:
    made = world(Role.BOTH)
    made.alive("both-0", cost=FIT, queue_seconds=3.0)
    made.now -= 50.0
    assert made.plan([], 100).predicted_ttft == pytest.approx(3.0 + prefill(100))
    assert made.conductor.counters()['pyengine_conductor_odd_events_total{what="clock"}'] == 1
    made.now += 49.0
    made.plan([], 100)
    assert [info.worker for info in made.conductor.cluster.live()] == ["both-0"]
