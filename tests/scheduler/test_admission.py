"""Goal: nobody is admitted whom the model says to miss its objectives, nobody is refused by an idle cluster, and waits
are those after which there is room. Method: random views and forecasts; predictions written out anew, one worker at a
time.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pyengine.scheduler.cluster import View
from pyengine.scheduler.fairness import Shares
from pyengine.scheduler.forecast import Entry, Forecast
from pyengine.scheduler.lengths import LengthPredictor
from pyengine.scheduler.policies import ADMISSIONS, UnknownName, find_admission
from pyengine.scheduler.policies.admission.base import LONGEST_WAIT, SHORTEST_WAIT, Case
from pyengine.scheduler.policies.admission.patient import LATER
from pyengine.scheduler.policies.admission.predictive import CONTENDED
from pyengine.scheduler.policies.base import Ask, Choice
from pyengine.scheduler.policies.kvcache_centric import KvCacheCentric
from pyengine.scheduler.sim.policies.baseline import Baseline
from pyengine.scheduler.types import Role, Slo

from .situations import situations
from .world import BLOCK

NOW = 50.0
JUDGES = [name for name in ADMISSIONS if name != "none"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A request with its place chosen, in a cluster where other requests are planned to decode."""
    view, ask = draw(situations())
    objective = st.one_of(st.none(), st.floats(1e-3, 20.0))
    slo = Slo(draw(objective), draw(objective), draw(objective))
    ask = replace(ask, slo=slo, output_tokens=float(draw(st.integers(1, 60))), priority=draw(st.integers(-1, 1)))
    choice = KvCacheCentric()(view, ask, random.Random(0))
    lengths = LengthPredictor()
    forecast = Forecast(lengths)
    for number in range(draw(st.integers(0, 8))):
        table, length = lengths.first("", 10, 50)
        prefill, decode = (view.workers[draw(st.integers(0, len(view.workers) - 1))].worker for _ in range(2))
        entry = Entry(
            prefill=prefill,
            decode=decode,
            joins=NOW - 1.0 + draw(st.floats(0, 20)),
            prompt=draw(st.integers(1, 900)),
            most=50,
            table=table,
            length=length,
            tbt=draw(st.sampled_from([math.inf, 0.1])),
            prefill_seconds=draw(st.floats(0, 2)),
            priority=draw(st.integers(-1, 1)),
        )
        forecast.add(("g", number), entry, NOW - 1.0)
    waited = draw(st.sampled_from([0.0, 3.0]))
    ttft, tbt = draw(st.floats(0, 20)), float(view.tbt[choice.decode])
    return Case(NOW, view, ask, choice, ttft, tbt, forecast, Shares(), waited=waited)


def idle(view: View) -> View:
    nothing = np.zeros(len(view.workers))
    none = nothing.astype(np.int64)
    return replace(view, queue_seconds=nothing, running=none, queued_requests=none, queued_tokens=none)


@pytest.mark.parametrize("name", sorted(ADMISSIONS))
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_never_refuses_on_an_idle_cluster_nor_by_a_guess_nor_twice(name: str, case: Case) -> None:
    admission = find_admission(name)
    assert admission(replace(case, view=idle(case.view))) is None
    assert admission(replace(case, admitted=True)) is None
    unmeasured = replace(case.view, measured=np.zeros(len(case.view.workers), dtype=bool))
    assert admission(replace(case, view=unmeasured)) is None
    promised_nothing = replace(case, ask=replace(case.ask, slo=Slo()), forecast=Forecast(LengthPredictor()))
    assert admission(promised_nothing) is None


@pytest.mark.parametrize("name", JUDGES)
@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_refusals_are_bounded_and_pure(name: str, case: Case) -> None:
    refusal = find_admission(name)(case)
    if refusal is None:
        return
    assert SHORTEST_WAIT <= refusal.retry_after <= LONGEST_WAIT
    assert refusal.kind in ("slo_ttft", "slo_tbt", "slo_deadline", "share", LATER)
    assert find_admission(name)(case) == refusal


def gap(case: Case, at: float, above: int | None) -> float:
    """Of the chosen decode worker with this request, where the batch is what the forecast says."""
    view, row = case.view, case.choice.decode
    batch = case.forecast.batch(view.workers[row].worker, at, NOW, above)
    context = batch.context + case.ask.prompt_tokens
    return float(
        view.base_seconds[row]
        + view.sequence_seconds[row] * (batch.sequences + 1)
        + view.history_seconds[row] * context
    )


@settings(max_examples=60, deadline=None)
@given(cases())
def test_at_arrival_is_the_papers_early_rejection(case: Case) -> None:
    assume(not case.idle)
    slo, refusal = case.ask.slo, find_admission("at-arrival")(case)
    prefill_load = 0.0 if slo.ttft is None else (case.waited + case.ttft) / slo.ttft
    decode_load = 0.0 if slo.tbt is None else gap(case, NOW, None) / slo.tbt
    assert (refusal is not None) == (max(prefill_load, decode_load) > 1.0)
    if refusal is not None:
        assert refusal.kind == ("slo_ttft" if prefill_load > 1.0 else "slo_tbt")


@settings(max_examples=30, deadline=None)
@given(cases(), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_patient_waits_for_room_in_decode_and_for_nothing_else(case: Case, share: float) -> None:
    assume(not case.idle)
    slo, late = case.ask.slo, find_admission("at-arrival")(case)
    late = late if late is not None and late.kind == "slo_ttft" else None
    full = slo.tbt is not None and case.tbt > slo.tbt and bool(case.view.measured[case.choice.decode])
    waits = slo.ttft is not None and case.waited < share * slo.ttft
    refusal = find_admission(f"patient:share={share}")(case)
    if late is not None:
        assert refusal == late
    elif full:
        assert refusal is not None
        assert refusal.kind == (LATER if waits else "slo_tbt")
    else:
        assert refusal is None


def test_patient_s_margin_keeps_room() -> None:
    case = scene(Slo(ttft=10.0, tbt=0.2))
    case = replace(case, tbt=0.19)
    assert find_admission("patient")(case) is None
    told = find_admission("patient:margin=1.1")(case)
    assert told is not None
    assert told.kind == LATER
    late = find_admission("patient:margin=1.1")(replace(case, ttft=11.0))
    assert late is not None
    assert late.kind == "slo_ttft", "to come again makes a late first token later"
    for settings_of in ("share=1.5", "margin=0"):
        with pytest.raises(UnknownName):
            find_admission(f"patient:{settings_of}")


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_baseline_computes_prompts_for_nothing(case: Case) -> None:
    """It judges prefill at arrival, and decode when it is too late."""
    assume(not case.idle)
    slo, baseline = case.ask.slo, Baseline()
    first = baseline(case)
    assert (first is not None) == (slo.ttft is not None and case.waited + case.ttft > slo.ttft)
    second = baseline.prefilled(case)
    alone = not case.forecast.batch(case.view.workers[case.choice.decode].worker, NOW, NOW).sequences
    assert (second is not None) == (slo.tbt is not None and gap(case, NOW, None) > slo.tbt and not alone)
    if find_admission("at-arrival")(case) is None:
        assert first is None
        assert second is None


@settings(max_examples=60, deadline=None)
@given(cases())
def test_system_prediction_shares_all_that_will_decode_evenly(case: Case) -> None:
    assume(not case.idle)
    slo = case.ask.slo
    assume(slo.tbt is not None and (slo.ttft is None or case.waited + case.ttft <= slo.ttft))
    view = case.view
    # Of role both: who decodes what it prefills, and may prefill.
    rows = np.flatnonzero(view.both & view.prefills if view.both[case.choice.prefill] else view.decodes)
    sequences, context = case.forecast.lasting(NOW + case.ttft, None, NOW)
    each = (sequences + 1) / len(rows)
    mean = np.mean([view.base_seconds[row] + view.sequence_seconds[row] * each for row in rows])
    mean += np.mean([view.history_seconds[row] for row in rows]) * (context + case.ask.prompt_tokens) / len(rows)
    assume(not math.isclose(mean, slo.tbt or 0.0))
    assert (find_admission("predictive-system")(case) is not None) == (mean > (slo.tbt or 0.0))


@settings(max_examples=100, deadline=None)
@given(cases())
def test_predictive_never_admits_what_must_miss(case: Case) -> None:
    """What the model says at the least: the first token without any prompt that may be overtaken, the gap of the batch
    that it joins, without those it goes before; and the whole answer at that gap.
    """
    assume(not case.idle)
    view, slo, row = case.view, case.ask.slo, case.choice.decode
    seconds, priorities, _ = case.forecast.pending(view.workers[case.choice.prefill].worker, NOW)
    lower = sum(s for s, p in zip(seconds.tolist(), priorities.tolist(), strict=True) if p < case.ask.priority)
    first = max(case.ttft - min(lower, float(view.queue_seconds[case.choice.prefill])), 0.0)
    leaves, contexts = case.forecast.leaves(view.workers[row].worker, NOW + case.ttft, NOW)
    short = sum(contexts) + case.ask.prompt_tokens + 1 - view.pages[row] * BLOCK
    room = 0.0
    for leave, context in zip(leaves, contexts, strict=True):
        if short <= 0:
            break
        short, room = short - context, max(float(leave) - NOW - case.ttft, 0.0)
    joins = NOW + case.ttft + room
    worst = gap(case, joins, case.ask.priority)
    refusal = find_admission("predictive")(case)
    epsilon = 1 + 1e-9  # the same numbers are added up in another order here
    if refusal is None:
        assert slo.ttft is None or case.waited + first + room <= slo.ttft * epsilon
        assert slo.tbt is None or worst <= slo.tbt * epsilon
        others = case.forecast.batch(view.workers[row].worker, joins, NOW, case.ask.priority)
        assert worst <= others.tbt * epsilon
        whole = case.waited + first + room + (case.ask.output_tokens - 1) * worst
        assert slo.deadline is None or whole <= slo.deadline * epsilon
    elif refusal.kind == "slo_ttft":
        assert slo.ttft is not None
        assert (case.waited + first + room) * epsilon > slo.ttft


def scene(slo: Slo, tenant: str = "", priority: int = 0, **columns: Any) -> Case:
    """Two prefill workers and one decode worker that decodes ten sequences of 1,000 tokens: each costs 10 ms a step."""
    from .world import worker

    infos = (
        worker("p0", Role.PREFILL, "n0"),
        worker("p1", Role.PREFILL, "n1"),
        worker("d", Role.DECODE, "n2", pages=1000),
    )
    fields: dict[str, Any] = {
        **dict.fromkeys(("free_pages", "pages", "pool_slots"), np.full(3, 1000)),
        "node": np.arange(3),
        "both": np.zeros(3, dtype=bool),
        "prefills": np.array([True, True, False]),
        "decodes": np.array([False, False, True]),
        "takes": np.ones(3, dtype=bool),
        "measured": np.ones(3, dtype=bool),
        "running": np.array([0, 0, 10]),
        "queue_seconds": np.array([4.0, 3.0, 0.0]),
        "max_positions": np.full(3, 4096),
        "max_tokens_per_step": np.full(3, 512),
        "max_sequences": np.full(3, 32),
        "tbt": np.array([0.0, 0.0, 0.12]),
        "step_seconds": np.full(3, 0.0),
        "token_seconds": np.full(3, 1e-3),
        "context_seconds": np.zeros(3),
        "sequence_seconds": np.full(3, 0.01),
        "history_seconds": np.zeros(3),
        "base_seconds": np.full(3, 0.01),
        "error": np.zeros(3),
        "correction": np.ones(3),
        "inlines": np.zeros(3, dtype=bool),
        **dict.fromkeys(("queued_requests", "queued_tokens", "running_context"), np.zeros(3, dtype=np.int64)),
        **dict.fromkeys(
            ("cached_blocks", "recent_prompt", "recent_computed", "recent_output"), np.zeros(3, dtype=np.int64)
        ),
    }
    view = View(workers=infos, nodes=("n0", "n1", "n2"), block_tokens=16, block_bytes=1, turn=0, **(fields | columns))
    nothing = np.zeros(3, dtype=np.int64)
    ask = Ask(1000, nothing, 0, np.zeros(3), np.zeros(3), slo, nothing, nothing, 50.0, tenant=tenant, priority=priority)
    lengths = LengthPredictor()
    forecast = Forecast(lengths)
    forecast.heartbeat("d", 10, 0.1, NOW)
    for number in range(10):
        # The k-th leaves after k seconds.
        table, _ = lengths.first("", 1000, 1000)
        entry = Entry("p0", "d", NOW, 1000, 1000, table, 10.0 * (number + 1), math.inf, 0.0)
        forecast.add(("g", number), entry, NOW)
    return Case(NOW, view, ask, Choice(1, 2), 4.0, 0.12, forecast, Shares())


def test_waits_are_those_after_which_there_is_room() -> None:
    late = find_admission("at-arrival")(scene(Slo(ttft=2.5)))
    assert late is not None
    # 3 s of queue and 1 s of prompt at the better one: in 1.5 s it is 2.5.
    assert late.kind == "slo_ttft"
    assert late.retry_after == pytest.approx(1.5)
    assert "2.5 s" in late.reason
    never = find_admission("at-arrival")(scene(Slo(ttft=0.5)))
    assert never is not None
    assert never.retry_after == pytest.approx(3.0), "when the queue is empty it is as good as it gets"
    # At NOW + 4 six are left: 10 + 10 * 7 = 80 ms.
    assert find_admission("predictive")(scene(Slo(tbt=0.081))) is None
    slow = find_admission("predictive")(scene(Slo(tbt=0.05)))
    assert slow is not None
    assert slow.kind == "slo_tbt"
    # Three more must leave, which the seventh does after 7 s; whoever comes then has 4 s of prefill before that counts.
    assert slow.retry_after == pytest.approx(7.0 - 4.0)


def test_the_time_of_the_join_counts_and_not_the_time_of_arrival() -> None:
    """The paper's point: what decodes now will have left when this prompt is computed, and the other way round."""
    leaving = scene(Slo(tbt=0.1))
    assert find_admission("at-arrival")(leaving) is not None
    assert find_admission("predictive")(leaving) is None
    coming = scene(Slo(tbt=0.13))
    table, length = coming.forecast._lengths.first("", 1000, 1000)
    for number in range(20):
        entry = Entry("p0", "d", NOW + 4.5, 1000, 1000, table, length, math.inf, 0.0)
        coming.forecast.add(("h", number), entry, NOW)
    assert find_admission("at-arrival")(coming) is None
    assert find_admission("predictive")(coming) is not None, "those join half a second later"


def test_promises_made_to_others_are_kept() -> None:
    case = scene(Slo())
    table, length = case.forecast._lengths.first("", 1000, 1000)
    case.forecast.add(("h", 0), Entry("p0", "d", NOW, 10, 1000, table, length, 0.085, 0.0), NOW)
    refusal = find_admission("predictive")(case)
    assert refusal is not None
    assert refusal.kind == "slo_tbt"


def test_higher_priorities_displace_predicted_capacity_of_lower_ones() -> None:
    for priority, admitted in ((0, False), (1, True)):
        case = scene(Slo(ttft=3.0, tbt=0.13), priority=priority)
        table, length = case.forecast._lengths.first("", 1000, 1000)
        for number in range(4):
            entry = Entry("p1", "d", NOW + 2.0, 1000, 1000, table, length, math.inf, 0.5)
            case.forecast.add(("h", number), entry, NOW)
        refusal = find_admission("predictive")(case)
        assert (refusal is None) == admitted, refusal


def test_who_has_had_more_than_its_share_is_refused_first_and_told_when_to_come() -> None:
    def judge(tenant: str, ttft: float) -> Any:
        case = scene(Slo(ttft=ttft), tenant=tenant)
        case.shares.ask("heavy", 20.0, True, NOW)
        case.shares.ask("light", 1.0, True, NOW)
        case.shares.ask("light", 9.0, False, NOW)
        return find_admission("predictive")(case)

    heavy = judge("heavy", 5.0)
    assert heavy is not None
    # Of 21 s that were done the fair share of light is the 10 it asked for: 11 are left for heavy, which had 20.
    assert heavy.kind == "share"
    assert heavy.retry_after == pytest.approx(60.0 * math.log(20 / 11))
    assert judge("light", 5.0) is None
    assert judge("new", 5.0) is None
    assert judge("heavy", 4.0 / CONTENDED + 0.1) is None, "there is room for all"


def test_a_tenant_is_not_sent_away_for_longer_than_can_be_predicted() -> None:
    case = scene(Slo(ttft=5.0), tenant="heavy")
    case.shares.ask("heavy", 1e6, True, NOW)
    for number in range(1000):
        case.shares.ask(f"light-{number}", 1e5, False, NOW)
    refusal = find_admission("predictive")(case)
    assert refusal is not None
    assert (refusal.kind, refusal.retry_after) == ("share", LONGEST_WAIT)


def test_who_is_content_overtakes_who_is_not() -> None:
    """Its own prompt takes 1 s, behind 3 s of shorter ones: a longer one is not among them, whoever sent it."""
    case = scene(Slo(ttft=3.0), tenant="light")
    table, length = case.forecast._lengths.first("", 1000, 1000)

    def add(request: int, seconds: float) -> None:
        entry = Entry("p1", "d", NOW + 3.0, 10, 1000, table, length, math.inf, seconds, 0, "heavy")
        case.forecast.add(("h", request), entry, NOW)

    add(0, 2.0)
    case.shares.ask("heavy", 20.0, True, NOW)
    case.shares.ask("light", 1.0, True, NOW)
    case.shares.ask("heavy", 9.0, False, NOW)
    assert find_admission("predictive")(case) is not None
    add(1, 1.0)
    assert find_admission("predictive")(case) is None
    known = scene(Slo(ttft=3.0), tenant="heavy")
    assert find_admission("predictive")(replace(case, ask=known.ask)) is not None


def test_room_in_pages_is_waited_for() -> None:
    """Ten thousand tokens are there, of which 6,000 in four seconds; the newcomer's 1,000 need room for 6,500."""
    pages = np.array([1000, 1000, 6500 // 16])
    late = find_admission("predictive")(scene(Slo(ttft=4.5), pages=pages))
    assert late is not None
    assert late.kind == "slo_ttft"
    # The fifth to leave makes room, after 5 s.
    assert find_admission("predictive")(scene(Slo(ttft=5.1), pages=pages)) is None


def test_what_a_client_has_waited_counts() -> None:
    """Its first token would come after 4 s more, of 6; and nobody waits for room beyond half of that."""
    case = scene(Slo(ttft=6.0))
    assert find_admission("predictive")(replace(case, waited=1.9)) is None
    late = find_admission("predictive")(replace(case, waited=2.1))
    assert late is not None and late.kind == "slo_ttft"
    full = replace(scene(Slo(ttft=10.0, tbt=0.2)), tbt=0.25)
    kinds = [told and told.kind for told in (find_admission("patient")(replace(full, waited=w)) for w in (4.9, 5.1))]
    assert kinds == [LATER, "slo_tbt"]


def test_an_answer_that_cannot_be_whole_in_time_is_not_begun() -> None:
    # First token after 4 s, then 49 tokens at 80 ms.
    assert find_admission("predictive")(scene(Slo(deadline=4.0 + 49 * 0.08 + 0.1))) is None
    late = find_admission("predictive")(scene(Slo(deadline=4.0 + 49 * 0.08 - 0.1)))
    assert late is not None
    assert late.kind == "slo_deadline"


def test_unknown_admissions_list_the_known() -> None:
    with pytest.raises(ValueError, match=r"known are none, at-arrival, .*did you mean 'predictive'"):
        find_admission("predicitve")
    with pytest.raises(ValueError, match="margin"):
        find_admission("predictive:margin=0")
    assert find_admission("predictive:margin=2")(scene(Slo(ttft=7.0))) is not None
