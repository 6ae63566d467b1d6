"""Goal: what processes spend beside computing moves just the times that it should.

Method: one request with it and without.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from pyengine.scheduler.sim.cluster import Simulation
from pyengine.scheduler.sim.report import Records
from pyengine.scheduler.sim.spec import ClusterSpec

from .worlds import cluster, model, request, simulated

#: Messages until the first token is on the screen: route, plan, work, the grant's question and answer, the token.
MESSAGES = 6


def _records(spec: ClusterSpec, **run: object) -> Records:
    return simulated([request(0.0, range(3), output=5)], spec, **run).measure.report("").records


def _with(spec: ClusterSpec, overhead: float) -> ClusterSpec:
    workers = tuple(msgspec.structs.replace(worker, step_overhead=overhead) for worker in spec.workers)
    return msgspec.structs.replace(spec, workers=workers)


def test_a_message_s_delay_is_waited_for_by_the_first_token(tmp_path: Path) -> None:
    spec = cluster(model(tmp_path))
    one, other = (_records(msgspec.structs.replace(spec, message_delay=delay)) for delay in (0.0, 2e-3))
    assert other.ttft - one.ttft == pytest.approx([MESSAGES * 2e-3], rel=1e-9)
    # The hand-off is one message; gaps behind it are none.
    assert other.second_gap - one.second_gap == pytest.approx([2e-3], rel=1e-6)


def test_the_end_of_a_hand_off_is_waited_for_by_the_second_token(tmp_path: Path) -> None:
    spec = cluster(model(tmp_path))
    one, other = (_records(msgspec.structs.replace(spec, handoff_delay=delay)) for delay in (0.0, 7e-3))
    assert other.ttft == pytest.approx(one.ttft, rel=1e-12)
    assert other.second_gap - one.second_gap == pytest.approx([7e-3], rel=1e-6)


def test_every_step_has_its_overhead(tmp_path: Path) -> None:
    spec = cluster(model(tmp_path))
    one, other = (_records(_with(spec, overhead)) for overhead in (0.0, 3e-3))
    assert other.ttft - one.ttft == pytest.approx([3e-3], rel=1e-6)
    assert other.tbt_mean - one.tbt_mean == pytest.approx([3e-3], rel=1e-6)
    # Work is what was computed, and costs are learnt from that.
    assert other.prefill_seconds == pytest.approx(one.prefill_seconds, rel=1e-12)


def test_fast_forward_has_the_same_overheads(tmp_path: Path) -> None:
    spec = _with(cluster(model(tmp_path), decode=2), 3e-3)
    requests = [request(0.1 * n, (n % 3, n), output=20 + n) for n in range(12)]
    digests = {simulated(requests, spec, fast_forward=fast).measure.report("").digest for fast in (True, False)}
    assert len(digests) == 1


def test_limits_can_be_as_long_as_answers(tmp_path: Path) -> None:
    simulations: list[Simulation] = [
        simulated([request(0.0, range(3), output=5)], cluster(model(tmp_path)), exact_limits=exact)
        for exact in (False, True)
    ]
    told = [simulation.limit_of(simulation.requests[0].request) for simulation in simulations]
    assert told[0] > 5 and told[1] == 5
    records = [simulation.measure.report("").records for simulation in simulations]
    assert np.array_equal(records[0].ttft, records[1].ttft) and records[1].outcome[0] == 0


def test_a_busy_worker_waits_for_what_its_pool_answers_at_once(tmp_path: Path) -> None:
    """What comes during a step is seen at its end, and with it the pool's answer to what is asked then."""
    # One token takes no time, so every step is as long: 0.1 s from 3 messages after 0 on.
    time = model(tmp_path, token=1e-9, pair=0.0, step=0.1, decode=0.0, sequence=0.0, context=0.0)
    spec = msgspec.structs.replace(cluster(time, prefill=0, decode=0, both=1), message_delay=0.0)
    requests = [request(0.0, range(3), output=40), request(1.05, range(7, 10), output=2)]
    records = simulated(requests, spec).measure.report("").records
    # Steps end at 0.1, 0.2, ... It comes at 1.05 and is seen at 1.1: it is in the step until 1.2.
    assert records.ttft == pytest.approx([0.1, 0.15], abs=1e-6)
