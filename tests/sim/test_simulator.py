"""Goal: the simulator's times are those of closed forms, and nothing is lost or held. Method: small clusters with cost
models whose results can be worked out by hand.
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pyengine.scheduler.sim import cluster as cluster_module
from pyengine.scheduler.sim.cluster import Simulation, simulate
from pyengine.scheduler.sim.compute import StepTime
from pyengine.scheduler.sim.spec import MESSAGE_DELAY, Failure, NodeSpec, RunSpec
from pyengine.scheduler.sim.trace import TraceError
from pyengine.scheduler.types import Role, Slo

from .worlds import BLOCK, KV_BYTES, blocks, check, cluster, model, request, simulated


def test_one_request_takes_what_its_steps_messages_and_bytes_take(tmp_path: Path) -> None:
    time, node = model(tmp_path), NodeSpec(dram_tokens=4096, link_rate=1e6, link_delay=3e-3, device_rate=1e8)
    spec = cluster(time, node=node)
    simulation = simulated([request(2.0, range(3), rest=5, output=4)], spec)
    records = simulation.measure.report("").records

    d, seconds = MESSAGE_DELAY, StepTime.load(time).seconds
    prompt, sent = 53, 4 * BLOCK * KV_BYTES
    # Route, plan, work; the grant's question and answer; then one step.
    began = 2.0 + 5 * d
    computed = began + seconds([(0, prompt)], 0, 0)
    # The KV leaves with the step. Over this link it takes longer than the step.
    there = began + sent / 1e6 + 3e-3
    assert there > computed + sent / 4 / 1e6
    loaded = there + d + sent / 1e8
    ends = [loaded + seconds([], 1, prompt + 1)]
    ends.append(ends[0] + seconds([], 1, prompt + 2))
    ends.append(ends[1] + seconds([], 1, prompt + 3))
    gaps = np.diff([computed, *ends])
    assert records.ttft[0] == pytest.approx(computed + d - 2.0, rel=1e-12)
    assert records.second_gap[0] == pytest.approx(gaps[0], rel=1e-9)
    assert records.tbt[0] == pytest.approx(max(gaps), rel=1e-9)
    assert records.tbt_mean[0] == pytest.approx(np.mean(gaps), rel=1e-9)
    assert records.finished[0] == pytest.approx(ends[-1] + d, rel=1e-12)
    assert records.prefill_seconds[0] == pytest.approx(computed - began, rel=1e-12)
    assert records.cached[0] == 0
    # The next turn finds the prompt at both nodes.
    for name in ("n0000", "n0001"):
        assert simulation.nodes[name].pool.count == 3


def test_where_both_are_promised_the_first_token_is_shown_with_the_second(tmp_path: Path) -> None:
    """The hand-off moves from the gap behind the first token into the time to it; nothing else moves."""
    time, node = model(tmp_path), NodeSpec(dram_tokens=4096, link_rate=1e6, link_delay=3e-3, device_rate=1e8)
    rows = [request(2.0, range(3), output=4), request(2.5, (7,), output=1), request(3.0, (8, 9), output=30)]
    plain = simulated(rows, cluster(time, node=node), policy="kvcache-centric")
    promised = cluster(time, node=node, slo=Slo(ttft=10.0, tbt=1.0))
    paced, unpaced = simulated(rows, promised), simulated(rows, promised, pacing=False)
    before, after, off = (s.measure.report("").records for s in (plain, paced, unpaced))
    assert off.ttft == pytest.approx(before.ttft, rel=1e-12)
    assert after.finished == pytest.approx(before.finished, rel=1e-12)
    assert after.ttft[0] == pytest.approx(before.ttft[0] + before.second_gap[0], rel=1e-9)
    assert after.ttft[1] == before.ttft[1], "an answer of one token waits for no other"
    assert after.second_gap[[0, 2]] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert (after.tbt[[0, 2]] < before.tbt[[0, 2]]).all()
    assert after.ttft - after.held == pytest.approx(before.ttft, rel=1e-12), "held is what pacing adds, and no more"
    assert after.held == pytest.approx([before.second_gap[0], 0.0, before.second_gap[2]], rel=1e-9)
    assert not before.held.any() and not off.held.any()
    assert np.array_equal(after.predicted_ttft, before.predicted_ttft), "predictions know nothing of it"
    # Of what must be shown at once nothing is held: 0.5 s before the objective, all is.
    hurried = simulated(rows, cluster(time, node=node, slo=Slo(ttft=0.5, tbt=1.0))).measure.report("").records
    assert hurried.ttft == pytest.approx(before.ttft, rel=1e-12)


def test_who_is_told_later_is_served_when_there_is_room(tmp_path: Path) -> None:
    """One decode worker that may hold two sequences for its objective: three come at once, and none is refused for good
    by an admission that waits.
    """
    time = model(tmp_path, decode=1e-2, sequence=1e-2, context=0.0)
    spec = cluster(time, slo=Slo(ttft=20.0, tbt=0.035))
    rows = [request(1.0 + n / 10, (n,), output=60) for n in range(3)]
    outcomes = {}
    for admission in ("at-arrival", "patient"):
        simulation = simulated(rows, spec, admission=admission)
        outcomes[admission] = simulation.measure.report("").records
    assert outcomes["at-arrival"].outcome.tolist() == [0, 0, 1]
    assert outcomes["patient"].outcome.tolist() == [0, 0, 0]
    assert outcomes["patient"].ttft[2] > 1.0
    assert (outcomes["patient"].tbt <= 0.035).all()


def test_over_a_fast_link_the_last_layer_is_what_is_waited_for(tmp_path: Path) -> None:
    time, node = model(tmp_path), NodeSpec(dram_tokens=4096, link_rate=1e7, link_delay=0.0, device_rate=1e12)
    records = simulated([request(0.0, range(3), output=2)], cluster(time, node=node)).measure.report("").records
    layer = 4 * BLOCK * KV_BYTES / 4 / 1e7
    load = 4 * BLOCK * KV_BYTES / 1e12
    gap = layer + MESSAGE_DELAY + load + StepTime.load(time).seconds([], 1, 54)
    assert records.second_gap[0] == pytest.approx(gap, rel=1e-9)


def test_two_hand_offs_at_once_share_the_sender_s_link(tmp_path: Path) -> None:
    # Prompts of two steps' length, one prefill and two decode workers: the second flows while the first still does.
    time = model(tmp_path, token=1e-6, pair=0.0)
    node = NodeSpec(dram_tokens=4096, link_rate=1e5, link_delay=0.0, device_rate=1e12)
    spec = cluster(time, decode=2, node=node, max_tokens_per_step=64)
    requests = [request(0.0, (1, 2), rest=5, output=2), request(0.0, (3, 4), rest=5, output=2)]
    records = simulated(requests, spec, policy="round-robin").measure.report("").records
    # Both take about the time of both: 6 blocks over the link.
    both = 6 * BLOCK * KV_BYTES / 1e5
    assert records.second_gap == pytest.approx([both, both], rel=0.05)


def test_a_single_server_queue_is_the_closed_form(tmp_path: Path) -> None:
    """Poisson arrivals, one prompt per step and all steps alike: M/D/1, whose mean wait is rho S / (2 (1 - rho))."""
    seconds, load, count = 0.1, 0.5, 3000
    # One step takes one prompt; an answer of one token ends with it.
    time = model(tmp_path, token=seconds / 21, pair=0.0, decode=1e-6)
    spec = cluster(time, prefill=0, decode=0, both=1, max_tokens_per_step=21)
    rng = random.Random(1)
    arrivals = np.cumsum([rng.expovariate(load / seconds) for _ in range(count)])
    requests = [request(float(at), [n], output=1) for n, at in enumerate(arrivals)]
    records = simulated(requests, spec).measure.report("").records
    waits = records.ttft - seconds - 4 * MESSAGE_DELAY
    expected = np.zeros(count)
    for n in range(1, count):
        expected[n] = max(expected[n - 1] + seconds - (arrivals[n] - arrivals[n - 1]), 0.0)
    assert waits == pytest.approx(expected, abs=1e-6)
    # Neighbours wait alike: some five of them say as much as one. Of 600 of sd 0.76 S the mean has sd 0.03 S.
    assert np.mean(waits) == pytest.approx(load * seconds / (2 * (1 - load)), abs=0.12 * seconds)


@pytest.mark.parametrize("half", [0, 64])
def test_chunks_of_a_prompt_run_on_the_stages_of_a_group_at_once(tmp_path: Path, half: int) -> None:
    """n chunks that take c each, on X stages: (n + X - 1) c / X. A shorter one at the end waits behind the others at
    each stage, and has its own time on the last.
    """
    time, stages, chunks, chunk = model(tmp_path, token=1e-3, pair=0.0), 4, 6, 128
    spec = cluster(time)
    prefill, decode = spec.workers
    group = msgspec.structs.replace(prefill, max_tokens_per_step=chunk, stages=stages)
    spec = msgspec.structs.replace(spec, workers=(group, decode))
    prompt = chunks * chunk + half
    records = simulated([request(0.0, range(prompt // BLOCK), rest=0, output=3)], spec).measure.report("").records
    took = records.ttft[0] - 6 * MESSAGE_DELAY
    assert took == pytest.approx(((chunks + stages - 1) * chunk + half) * 1e-3 / stages, rel=1e-9)
    assert records.outcome[0] == 0


@pytest.mark.parametrize("both", [False, True])
def test_an_answer_waits_for_each_token_to_pass_all_stages(tmp_path: Path, both: bool) -> None:
    time = model(tmp_path)
    spec = cluster(time, 0, 0, 1) if both else cluster(time)
    workers = tuple(msgspec.structs.replace(each, stages=4) for each in spec.workers)
    spec = msgspec.structs.replace(spec, workers=workers)
    records = simulated([request(0.0, range(3), output=100)], spec).measure.report("").records
    seconds = StepTime.load(time).seconds
    assert records.tbt[0] >= seconds([], 1, 140)
    assert records.tbt_mean[0] == pytest.approx(seconds([], 1, 103), rel=0.05)


def test_a_prefix_is_found_in_pages_in_dram_and_at_another_node(tmp_path: Path) -> None:
    spec = cluster(model(tmp_path), prefill=2)
    requests = [request(0.0, range(5)), request(1.0, range(5)), request(2.0, [*range(5), 9])]
    report = simulated(requests, spec, policy="round-robin").measure.report("")
    # Round robin: the second goes to the other node, which fetches all from the first; the third finds it in pages.
    assert report.records.cached.tolist() == [0, 80, 80]
    assert report.records.tiers["peer_dram"].tolist() == [0, 80, 0]
    assert report.records.tiers["device"].tolist() == [0, 0, 80]


def test_what_a_worker_has_taken_in_is_counted_once(tmp_path: Path) -> None:
    """What was planned counts until a heartbeat shows it; then the conductor predicts the queue as it is. Four of five
    prompts come in the middle of a step of 1.2 s, after which they are taken in; heartbeats come at 0.25, 0.75...
    """
    simulation = Simulation(
        [request(0.1 + n * 1e-3, range(100 * n, 100 * n + 7), output=1) for n in range(5)],
        cluster(model(tmp_path, token=1e-2), prefill=0, decode=0, both=1),
        RunSpec(),
    )
    (worker,) = simulation.workers.values()
    seen: list[tuple[float, float, int]] = []

    def look() -> None:
        known = simulation.conductor.cluster.workers[worker.name]
        seen.append((known.busy_until - simulation.loop.now, worker.queue_seconds(), len(known.assigned)))

    for when in (1.26, 1.78):
        simulation.loop.at(when, look)
    simulation.run()
    (first, _, assigned), (predicted, actual, left) = seen
    assert assigned >= 4, "what is not taken in yet is forgotten"
    assert left == 0
    assert first > 3.0
    assert predicted == pytest.approx(actual, rel=0.3)


def test_a_baseline_refuses_when_the_prompt_is_computed(tmp_path: Path) -> None:
    """The decode worker keeps the promise with two sequences: the prompts of the others were for nothing."""
    spec = cluster(model(tmp_path, decode=1e-2, sequence=1e-2, context=0.0), decode=1, slo=Slo(ttft=60.0, tbt=0.035))
    requests = [request(1.0 + 0.1 * n, range(10 * n, 10 * n + 3), output=100) for n in range(6)]
    simulation = simulated(requests, spec, admission="baseline")
    records = simulation.measure.report("").records
    assert records.outcome.tolist() == [0, 0, 1, 1, 1, 1]
    assert records.wasted.tolist() == [False, False, True, True, True, True]
    assert not np.isnan(records.ttft[:2]).any() and np.isnan(records.ttft[2:]).all()
    # At arrival the same is seen before anything is computed.
    early = simulated(requests, spec, admission="at-arrival").measure.report("").records
    assert early.outcome.tolist() == [0, 0, 1, 1, 1, 1]
    assert not early.wasted.any()


def test_what_left_dram_is_read_from_the_ssd(tmp_path: Path) -> None:
    node = NodeSpec(dram_tokens=40 * BLOCK, ssd_tokens=400 * BLOCK, link_rate=1e8, device_rate=1e9, ssd_rate=1e8)
    spec = cluster(model(tmp_path), node=node, prefill=0, decode=0, both=1, pages=20)
    requests = [request(n * 1.0, range(100 * n, 100 * n + 8)) for n in range(10)]
    requests.append(request(20.0, range(8)))
    report = simulated(requests, spec).measure.report("")
    assert report.records.cached.tolist()[-1] == 128
    assert report.records.tiers["ssd"].tolist()[-1] == 128


def test_a_node_that_comes_back_reads_what_its_ssd_has_and_nothing_else(tmp_path: Path) -> None:
    """The first of ten prompts had left DRAM when the node died, the last was there only."""
    node = NodeSpec(dram_tokens=40 * BLOCK, ssd_tokens=400 * BLOCK, link_rate=1e8, device_rate=1e9, ssd_rate=1e8)
    spec = cluster(model(tmp_path), node=node, prefill=0, decode=0, both=1, pages=20)
    requests = [request(n * 1.0, range(100 * n, 100 * n + 8)) for n in range(10)]
    requests += [request(20.0, range(8)), request(21.0, range(900, 908))]
    simulation = simulated(requests, spec, failures=(Failure(at=15.0, node="n0000", seconds=2.0),))
    records = simulation.measure.report("").records
    assert records.outcome.tolist() == [0] * 12
    assert records.cached.tolist()[-2:] == [128, 0]
    assert records.tiers["ssd"].tolist()[-2] == 128


def test_reads_of_an_ssd_are_one_after_the_other(tmp_path: Path) -> None:
    node = NodeSpec(dram_tokens=40 * BLOCK, ssd_tokens=400 * BLOCK, link_rate=1e8, device_rate=1e12, ssd_rate=1e5)
    spec = cluster(model(tmp_path, token=1e-6), node=node, prefill=0, decode=0, both=1, pages=20)
    requests = [request(n * 1.0, range(100 * n, 100 * n + 8), output=1) for n in range(10)]
    requests += [request(20.0, range(8), output=1), request(20.0, range(100, 108), output=1)]
    records = simulated(requests, spec).measure.report("").records
    read = 8 * BLOCK * KV_BYTES / 1e5
    assert records.ttft[-2:] == pytest.approx([read, 2 * read], rel=0.02)


def test_a_worker_that_dies_loses_no_request(tmp_path: Path) -> None:
    spec = cluster(model(tmp_path, token=1e-3), prefill=2, decode=2)
    requests = [request(n * 0.05, [n, n + 1, n + 2], output=40) for n in range(40)]
    failures = (
        Failure(at=0.6, worker="prefill0000", seconds=1.0),
        Failure(at=1.0, node="n0002", seconds=2.0),
        Failure(at=1.5, worker="decode0003", seconds=1.0),
    )
    simulation = simulated(requests, spec, failures=failures)
    report = simulation.measure.report("")
    assert report.totals["retries"] > 5
    assert report.records.outcome.tolist() == [0] * 40
    for number, each in enumerate(simulation.requests):
        assert each.held == 40, f"request {number} has {each.held} tokens"


def test_a_cluster_without_decode_workers_gives_requests_up(tmp_path: Path) -> None:
    spec = cluster(model(tmp_path))
    requests = [request(n * 1.0, [n], output=400) for n in range(10)]
    simulation = simulated(requests, spec, failures=(Failure(at=3.2, node="n0001"),))
    outcome = simulation.measure.report("").records.outcome
    assert outcome.tolist()[:2] != [1, 1]
    assert set(outcome.tolist()[5:]) <= {1, 2}


def test_a_role_switch_under_load_loses_no_request(tmp_path: Path) -> None:
    spec = cluster(model(tmp_path), prefill=2, decode=2)
    requests = [request(n * 0.02, [n, n + 1], output=30) for n in range(200)]
    simulation = Simulation(requests, spec, RunSpec())
    simulation.loop.at(1.0, simulation.workers["prefill0000"].set_role, Role.DECODE)
    simulation.loop.at(2.0, simulation.workers["decode0003"].set_role, Role.PREFILL)
    simulation.loop.at(2.5, simulation.workers["prefill0000"].set_role, Role.BOTH)
    simulation.run()
    check(simulation)
    report = simulation.measure.report("")
    assert report.records.outcome.tolist() == [0] * 200
    assert report.totals["role switches"] == 3
    assert set(report.records.decode_worker[150:]) != {2, 3}


def test_a_deadline_drops_work_everywhere(tmp_path: Path) -> None:
    spec = cluster(model(tmp_path, token=1e-2), slo=Slo(deadline=2.0))
    requests = [request(n * 0.1, [n, n + 1], output=80) for n in range(30)]
    report = simulated(requests, spec).measure.report("")
    assert set(report.records.outcome.tolist()) >= {0, 2}
    finished = report.records.finished[report.records.outcome == 0]
    assert max(finished - report.records.arrival[report.records.outcome == 0]) <= 2.0 + 1e-9


def test_more_than_fits_waits_for_room(tmp_path: Path) -> None:
    # The decode node has room for three prompts at once.
    node = NodeSpec(dram_tokens=20 * BLOCK, link_rate=1e8, device_rate=1e9)
    spec = cluster(model(tmp_path), node=node, pages=30)
    requests = [request(0.0, range(10 * n, 10 * n + 5), output=20) for n in range(20)]
    report = simulated(requests, spec).measure.report("")
    assert report.records.outcome.tolist() == [0] * 20


def test_what_can_never_fit_is_refused(tmp_path: Path) -> None:
    spec = cluster(model(tmp_path), pages=10)
    outcome = simulated([request(0.0, range(20)), request(0.0, [7])], spec).measure.report("").records.outcome
    assert outcome.tolist() == [1, 0]


def test_an_interrupt_leaves_a_partial_report(tmp_path: Path) -> None:
    def progress(seconds: float, over: int, total: int) -> None:
        if seconds >= 20:
            raise KeyboardInterrupt

    requests = [request(n * 1.0, [n]) for n in range(60)]
    report = simulate(requests, cluster(model(tmp_path)), RunSpec(), description="sixty", progress=progress)
    assert not report.complete
    assert "interrupted" in report.notes[0]
    assert 15 < (report.records.outcome == 0).sum() < 25
    assert report.provenance["trace"] == "sixty"
    assert report.provenance["seed"] == 0


def test_nobody_stalls_who_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace has a night in it. But whoever waits for so long waits for what never comes."""
    monkeypatch.setattr(cluster_module, "STALL", 60.0)
    night = 120.0
    simulation = simulated([request(0.0, [1]), request(night, [1])], cluster(model(tmp_path)))
    assert simulation.complete and not simulation.notes
    assert simulation.measure.report("").records.outcome.tolist() == [0, 0]
    # The bytes of the hand-off take years.
    stuck = cluster(model(tmp_path), node=NodeSpec(dram_tokens=4096, link_rate=1e-6, device_rate=1e9))
    given_up = Simulation([request(0.0, [1]), request(night, [1])], stuck, RunSpec())
    given_up.run()
    assert not given_up.complete and given_up.loop.now < night
    assert given_up.notes == [f"given up at {given_up.loop.now:.0f} s: 1 requests wait for what never comes"]


def test_a_trace_of_more_than_a_year_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"lasts 1e\+11 s, and a year at most .*: are its times in the unit"):
        Simulation([request(0.0, [1]), request(1e11, [1])], cluster(model(tmp_path)), RunSpec())


def test_copies_of_popular_blocks_are_counted(tmp_path: Path) -> None:
    requests = [request(n * 0.5, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 100 + n]) for n in range(60)]
    report = simulated(requests, cluster(model(tmp_path), prefill=2, decode=2), policy="round-robin").measure.report("")
    seconds, copies = report.series["replicas 10"]
    assert copies[0] == 0
    assert copies[-1] == 4
    assert blocks(*range(1, 11))[-1] in requests[0].blocks
    assert list(seconds) == [10.0 * n for n in range(len(seconds))]
