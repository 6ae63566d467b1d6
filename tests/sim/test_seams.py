"""Goal: what modelled workers, daemons and gateways say to the production conductor is what the live ones say, and what
it orders and plans is carried out. Method: small clusters whose messages are all looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from pyengine.scheduler.calibration import probes
from pyengine.scheduler.changes import RECORD
from pyengine.scheduler.events import BlocksChanged, DaemonGone, Event, FromGateway, FromWorker, OrderReplicate
from pyengine.scheduler.messages import Message, Planned, Rejected, Route, RouteEnded, WorkerAlive
from pyengine.scheduler.sim.cluster import Simulation
from pyengine.scheduler.sim.spec import ClusterSpec, Failure, NodeSpec, RunSpec
from pyengine.scheduler.sim.trace import Request
from pyengine.scheduler.types import Plan, Slo

from .worlds import BLOCK, KV_BYTES, blocks, check, cluster, model, request

Kind = TypeVar("Kind", bound=Message)


class Heard:
    """A run of which every message to the conductor is kept, and every plan."""

    def __init__(self, requests: list[Request], spec: ClusterSpec, **run: object) -> None:
        self.simulation = Simulation(requests, spec, RunSpec(**run))  # type: ignore[arg-type]
        self.said: list[tuple[float, object]] = []
        self.plans: list[Plan] = []
        conduct = self.simulation.conduct

        def listen(event: Event) -> None:
            said = event.message if isinstance(event, FromGateway | FromWorker) else event
            self.said.append((self.simulation.loop.now, said))
            conduct(event)

        self.simulation.conduct = listen  # type: ignore[method-assign]
        for each in self.simulation.requests:
            each.on_answer = self._answering(each.on_answer)  # type: ignore[method-assign,assignment]

    def _answering(self, answer: Callable[[Planned | Rejected], None]) -> Callable[[Planned | Rejected], None]:
        def listen(message: Planned | Rejected) -> None:
            if isinstance(message, Planned):
                self.plans.append(message.plan)
            answer(message)

        return listen

    def run(self) -> Heard:
        self.simulation.run()
        check(self.simulation)
        return self

    def all(self, kind: type[Kind]) -> list[Kind]:
        return [message for _, message in self.said if isinstance(message, kind)]


def test_a_worker_is_calibrated_with_the_steps_of_a_live_one(tmp_path: Path) -> None:
    (fast, *_) = Simulation([], cluster(model(tmp_path)), RunSpec()).workers.values()
    assert fast.batcher.cost.samples == len(list(probes(128, 16)))
    # 128 tokens take 1.3 s: the second prompt as long is not begun, as it would end after the 2 s that a worker has.
    (slow, *_) = Simulation([], cluster(model(tmp_path, token=1e-2)), RunSpec()).workers.values()
    assert 3 < slow.batcher.cost.samples < fast.batcher.cost.samples


def test_heartbeats_tell_of_copies_into_pages(tmp_path: Path) -> None:
    node = NodeSpec(dram_tokens=4096, link_rate=1e8, device_rate=1e7)
    heard = Heard([request(0.1, range(9), output=80)], cluster(model(tmp_path), node=node)).run()
    loads = [(beat.worker, load) for beat in heard.all(WorkerAlive) for load in beat.loads]
    (worker, load) = loads[0]
    assert len(loads) == 1
    assert worker == "decode0001"
    assert load.device
    assert load.source == "n0001"
    assert load.size == 10 * BLOCK * KV_BYTES
    assert load.seconds == pytest.approx(load.size / 1e7)


def test_heartbeats_tell_what_will_come_to_the_pages(tmp_path: Path) -> None:
    """The prompt of 149 tokens takes 1.5 s; meanwhile it is expected at the decode worker, then it is in its pages."""
    requests = [request(0.1, range(9), output=80)]
    heard = Heard(requests, cluster(model(tmp_path, token=1e-2, decode=0.1))).run()
    beats = [(at, beat) for at, beat in heard.said if isinstance(beat, WorkerAlive) and beat.worker == "decode0001"]
    expected = [beat.expected_tokens for at, beat in beats if 0.2 < at < 1.5]
    assert expected and set(expected) == {150}
    assert {beat.expected_tokens for at, beat in beats if at > 2.5} == {0}


def test_what_others_compute_just_now_is_waited_for(tmp_path: Path) -> None:
    """The second of two equal prompts is sent to the other worker; it fetches the prefix once the first has it."""
    spec = cluster(model(tmp_path, token=1e-3), prefill=2)
    requests = [request(0.1, range(40)), request(0.2, range(40))]
    heard = Heard(requests, spec, policy="round-robin").run()
    first, second = heard.plans
    assert first.prefill.worker != second.prefill.worker
    (source,) = second.sources
    assert source.node == first.prefill.node and source.ready > 0.4
    records = heard.simulation.measure.report("").records
    assert records.tiers["peer_dram"].tolist() == [0, 640]
    # It has not waited for the first one's hand-off, or for another look, only until its prompt was there.
    assert records.ttft[1] < records.ttft[0] + 0.2


def test_a_worker_of_role_both_waits_for_them_too(tmp_path: Path) -> None:
    spec = cluster(model(tmp_path, token=1e-3), prefill=0, decode=0, both=2)
    requests = [request(0.1, range(40)), request(0.2, range(40))]
    heard = Heard(requests, spec, policy="round-robin").run()
    assert heard.plans[1].sources[0].ready > 0.4
    assert heard.simulation.measure.report("").records.tiers["peer_dram"].tolist() == [0, 640]


def test_a_copy_is_told_of_as_what_it_is(tmp_path: Path) -> None:
    """The second half of a prefix is copied: whoever knows the copy alone knows which blocks come before it."""
    heard = Heard([request(0.1, range(10)), request(3.0, [99])], cluster(model(tmp_path), prefill=2))
    simulation, keys = heard.simulation, blocks(*range(10))

    def order() -> None:
        source, to = sorted(("n0000", "n0001"), key=lambda name: -simulation.nodes[name].leading(keys[0])[0])
        copy = OrderReplicate(to, 1, b"".join(keys[5:]), keys[4], 5, simulation.nodes[source].node)
        simulation._replicate(copy)
        receivers.append(to)

    receivers: list[str] = []
    simulation.loop.at(1.0, order)
    told = [event for _, event in heard.run().said if isinstance(event, BlocksChanged)]
    copied = {
        key: (position, parent)
        for event in told
        if event.node.node in receivers
        for _, _, _, position, key, parent in RECORD.iter_unpack(event.changes)
    }
    assert {key: copied[key] for key in keys[5:]} == {keys[n]: (n, keys[n - 1]) for n in range(5, 10)}


def test_cold_copies_are_forgotten_where_room_is_short(tmp_path: Path) -> None:
    """Three nodes hold a prefix and are almost full. Nobody asks for it any more: one of them forgets it."""
    spec = cluster(
        model(tmp_path),
        prefill=0,
        decode=0,
        both=3,
        node=NodeSpec(dram_tokens=40 * BLOCK, link_rate=1e8, device_rate=1e9),
    )
    requests = [request(1.0 + n, range(10)) for n in range(6)]
    requests += [request(10.0 + n, range(100 * n, 100 * n + 28)) for n in range(1, 4)]
    requests.append(request(400.0, [7]))
    heard = Heard(requests, spec, policy="round-robin").run()
    conductor = heard.simulation.conductor
    assert conductor.dropper.dropped == 10
    last = blocks(*range(10))[-1]
    assert len(conductor.index.holders(last)) == 2
    assert sum(node.leading(last)[0] for node in heard.simulation.nodes.values()) == 2


def gone_at(heard: Heard, node: str) -> float:
    return next(when for when, said in heard.said if isinstance(said, DaemonGone) and said.node.node == node)


def test_a_node_that_drains_leaves_what_is_hot_to_others_and_loses_nothing(tmp_path: Path) -> None:
    """One of two nodes holds what all ask for. While it drains it finishes its answer, and gets nothing new."""
    spec = cluster(model(tmp_path), prefill=0, decode=0, both=2, node=NodeSpec(dram_tokens=4096, link_rate=1e8))
    first = [request(0.1, range(8), output=2), request(1.0, range(8), output=2), request(4.9, range(8), output=500)]
    rows = [*first, *(request(6.0 + n, [*range(8), 90 + n], output=20) for n in range(10))]
    policy = "kvcache-centric:replicates=false"
    home = Heard(rows[:1], spec, policy=policy).run().plans[0].prefill.node.node
    stopped = Failure(at=5.0, node=home, drains=60.0)
    heard = Heard(rows, spec, policy=policy, failures=(stopped,)).run()
    report = heard.simulation.measure.report("")
    assert {plan.prefill.node.node for plan in heard.plans[:3]} == {home}
    assert home not in {plan.prefill.node.node for plan in heard.plans[3:]}
    assert (report.totals["retries"], set(report.records.outcome.tolist())) == (0, {0})
    assert report.records.finished[2] < gone_at(heard, home) < report.records.finished[2] + 2.0
    assert (report.records.cached[3:] == 8 * BLOCK).all()
    assert not report.records.tiers["peer_dram"][3:].any(), "it was there before anybody asked"
    assert heard.simulation.replicated == 8
    # A node that dies leaves nothing.
    died = Heard(rows, spec, policy=policy, failures=(msgspec.structs.replace(stopped, drains=0.0),)).run()
    assert (died.simulation.replicated, died.simulation.measure.report("").totals["retries"]) == (0, 1)
    assert gone_at(died, home) == pytest.approx(5.0, abs=0.01)


def test_a_drain_takes_no_longer_than_it_may(tmp_path: Path) -> None:
    spec = cluster(model(tmp_path), prefill=0, decode=0, both=2)
    rows = [request(0.1 + n / 10, [n], output=800) for n in range(4)]
    heard = Heard(rows, spec, failures=(Failure(at=2.0, node="n0000", drains=1.5, seconds=1.0),)).run()
    assert gone_at(heard, "n0000") == pytest.approx(3.5, abs=0.01)
    report = heard.simulation.measure.report("")
    assert report.totals["retries"] > 0
    assert [model.held for model in heard.simulation.requests] == [800] * 4


def test_the_gateway_tells_how_an_attempt_ended(tmp_path: Path) -> None:
    heard = Heard([request(0.1, range(3), output=30), request(0.1, [9], output=1)], cluster(model(tmp_path))).run()
    records = heard.simulation.measure.report("").records
    ended = {message.request: message for message in heard.all(RouteEnded)}
    assert ended[0].ttft == pytest.approx(records.ttft[0])
    assert ended[0].tbt == pytest.approx(records.tbt[0])
    assert (ended[0].generated, ended[0].finished) == (30, True)
    assert (ended[1].generated, ended[1].finished, ended[1].tbt) == (1, True, -1.0)


def test_the_gateway_counts_the_tokens_of_what_a_deadline_cuts(tmp_path: Path) -> None:
    heard = Heard([request(0.1, range(3), output=300)], cluster(model(tmp_path), slo=Slo(deadline=1.0))).run()
    (ended,) = heard.all(RouteEnded)
    assert 60 < ended.generated < 100  # 11 ms each
    assert not ended.finished
    assert ended.tbt > 0.0


def test_each_attempt_is_told_of_apart(tmp_path: Path) -> None:
    spec = cluster(model(tmp_path), prefill=2, decode=2)
    failures = tuple(Failure(at=1.0, worker=worker, seconds=0.5) for worker in ("decode0002", "decode0003"))
    heard = Heard([request(0.1, range(3), output=200)], spec, failures=failures).run()
    first, second = heard.all(RouteEnded)
    assert (first.attempt, first.finished, second.finished) == (0, False, True)
    assert first.generated + second.generated == 200
    assert first.ttft < 0.1 and second.ttft > 0.9
    # The pause between them is in the gaps of neither.
    assert second.tbt < 0.02


def test_a_route_tells_what_clients_tell(tmp_path: Path) -> None:
    slo = Slo(ttft=3.0, tbt=0.2, deadline=9.0)
    spec = cluster(model(tmp_path), prefill=2, decode=2, slo=slo)
    each = request(0.1, range(3), output=200, tenant="somebody", priority=3)
    failures = tuple(Failure(at=1.0, worker=worker, seconds=0.5) for worker in ("decode0002", "decode0003"))
    heard = Heard([each], spec, failures=failures).run()
    first, *_, second = heard.all(Route)
    assert (first.slo, first.tenant, first.priority, first.waited) == (slo, "somebody", 3, 0.0)
    assert (first.attempt, first.admitted, second.admitted) == (0, False, True)
    # It was asked for until workers were back.
    assert 1.4 < second.waited < 1.4 + 0.3
    # Nobody is told how long the answer will be.
    assert first.max_tokens > 1000
    assert second.max_tokens == first.max_tokens - heard.all(RouteEnded)[0].generated


def test_a_worker_whose_requests_wait_elsewhere_is_not_stuck(tmp_path: Path) -> None:
    """The decode node has room for one prompt, whose answer keeps its pages for a minute; the others' grants wait."""
    node = NodeSpec(dram_tokens=8 * BLOCK, link_rate=1e8, device_rate=1e9)
    spec = cluster(model(tmp_path, decode=1.3), node=node, pages=9)
    requests = [request(0.1, range(10 * n, 10 * n + 5), output=40) for n in range(3)]
    heard = Heard(requests, spec)
    stuck: list[str] = []

    def look() -> None:
        stuck.extend(name for name, worker in heard.simulation.conductor.cluster.workers.items() if worker.stuck)

    heard.simulation.loop.at(45.0, look)
    records = heard.run().simulation.measure.report("").records
    assert records.ttft[2] > 45.0
    assert stuck == []


def test_a_hand_off_that_is_lost_goes_back_for_a_new_plan(tmp_path: Path) -> None:
    """Two answers outgrow the pages, and one gives way. When there is room again, the other has taken almost all of its
    pages, and prompts that wait have driven its KV out of the pool.
    """
    node = NodeSpec(dram_tokens=24 * BLOCK, link_rate=1e8, device_rate=1e9)
    spec = cluster(model(tmp_path), node=node, pages=27, max_tokens_per_step=32)
    outputs = [220, 120, 4, 4]
    arrivals = [0.1, 0.1, 0.5, 0.55]
    requests = [request(arrivals[n], range(100 * n, 100 * n + 10), output=outputs[n]) for n in range(4)]
    heard = Heard(requests, spec)
    kinds: list[str] = []
    failed = heard.simulation.requests[1].on_failed

    def listen(attempt: int, worker: str, kind: str) -> None:
        kinds.append(kind)
        failed(attempt, worker, kind)

    heard.simulation.requests[1].on_failed = listen  # type: ignore[method-assign]
    records = heard.run().simulation.measure.report("").records
    assert kinds == ["need_prefill"]
    assert records.outcome.tolist() == [0, 0, 0, 0]
    assert [each.held for each in heard.simulation.requests] == outputs


def test_whoever_waits_for_deadlines_does_so_once(tmp_path: Path) -> None:
    requests = [request(0.1 * n, [n, n + 1], output=3) for n in range(100)]
    without = Heard(requests, cluster(model(tmp_path))).run()
    late = Heard(requests, cluster(model(tmp_path), slo=Slo(deadline=5.0))).run()
    # Each request's own, and at most one for each worker in all that time of 5 s.
    assert late.simulation.loop.events < without.simulation.loop.events + 100 + 50


def test_who_was_admitted_and_then_refused_was_dropped(tmp_path: Path) -> None:
    spec = cluster(model(tmp_path, token=1e-2))
    requests = [request(0.1, range(7), output=300), request(8.0, [2], output=3)]
    heard = Heard(requests, spec, failures=(Failure(at=0.5, worker="decode0001"),)).run()
    assert heard.simulation.measure.report("").records.outcome.tolist() == [2, 1]


def test_who_would_be_late_is_refused_for_good(tmp_path: Path) -> None:
    """Its worker dies in the middle of a prompt of 1.2 s, and another one could not have it in time any more."""
    spec = cluster(model(tmp_path, token=1e-3), prefill=2, slo=Slo(deadline=2.0), max_tokens_per_step=2000)
    failures = tuple(Failure(at=1.0, worker=worker, seconds=0.01) for worker in ("prefill0000", "prefill0001"))
    heard = Heard([request(0.1, range(75), output=3)], spec, failures=failures).run()
    assert heard.simulation.measure.report("").records.outcome.tolist() == [2]
    asked = [message.waited for message in heard.all(Route)]
    assert max(asked) < 1.4, "it was asked for again"


def test_workers_have_told_of_their_speed_before_clients_come(tmp_path: Path) -> None:
    heard = Heard([request(0.0, range(7))], cluster(model(tmp_path))).run()
    came = next(at for at, (_, message) in enumerate(heard.said) if isinstance(message, Route))
    told = {message.worker for _, message in heard.said[:came] if isinstance(message, WorkerAlive)}
    assert told == set(heard.simulation.workers)
