"""Goal: every backend keeps the contract of `ClusterBackend`. Method: one list of expectations over all of them: the
simulator, a live cluster of real processes over the fake model, and the null twin.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pyengine.scheduler.backends import BackendError, ClusterBackend, Task, find_backend
from pyengine.scheduler.report.summary import summarize
from pyengine.scheduler.sim.report import DONE, UNFINISHED
from pyengine.scheduler.sim.spec import ClusterSpec, RunSpec, WorkerSpec
from pyengine.scheduler.sim.specfile import check_cluster
from pyengine.scheduler.sim.trace import Request
from pyengine.scheduler.types import BLOCK_TOKENS, Role, Slo
from tests.system.conftest import FAKE_SLOW, fake_server

from .null import NullBackend

CLUSTER = ClusterSpec(
    workers=(WorkerSpec(role=Role.PREFILL, count=1), WorkerSpec(role=Role.DECODE, count=1)),
    block_tokens=BLOCK_TOKENS,
    slo=Slo(ttft=60.0, tbt=60.0),
)

Maker = Callable[[], ClusterBackend]


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def request(arrival: float, first: int, blocks: int, tail: int = 5, output: int = 6) -> Request:
    """Its full blocks are numbered from `first`."""
    keys = tuple(key(first + i) for i in range(blocks))
    return Request(arrival, blocks * BLOCK_TOKENS + tail, output, keys)


#: Two conversations of two turns each, one long after the other, and one request shorter than a block.
REQUESTS = [
    request(0.0, 100, 3),
    request(0.05, 200, 4),
    request(0.1, 300, 0, output=1),
    request(0.8, 100, 5),
    request(0.9, 200, 6),
]


def task(requests: list[Request], seed: int = 3) -> Task:
    return Task(
        requests=iter(requests),
        description="two conversations",
        cluster=CLUSTER,
        run=RunSpec(seed=seed),
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    state = tmp_path_factory.mktemp("state")
    with fake_server(state, "--nodes", "2", "--prefill", "1", "--decode", "1", model=FAKE_SLOW) as server:
        yield server.base


@pytest.fixture(params=["null", "sim", "live"])
def make(request: pytest.FixtureRequest) -> Maker:
    if request.param == "null":
        return NullBackend
    if request.param == "sim":
        return lambda: find_backend("sim")
    url = request.getfixturevalue("url")
    return lambda: find_backend(f"live:url={url}")


def test_there_is_one_record_for_each_request_in_order(make: Maker) -> None:
    told: list[int] = []
    report = make().run(task(REQUESTS), lambda done, count, seconds: told.append(done))
    records = report.records
    assert report.complete
    np.testing.assert_allclose(records.arrival, [r.arrival for r in REQUESTS])
    assert records.prompt_tokens.tolist() == [r.prompt_tokens for r in REQUESTS]
    assert records.output_tokens.tolist() == [r.output_tokens for r in REQUESTS]
    assert (records.outcome == DONE).all(), report.notes
    assert (records.ttft > 0).all() and (records.finished >= records.arrival + records.ttft - 1e-9).all()
    assert (records.tbt >= records.tbt_mean - 1e-9).all()
    assert told == sorted(told) and all(0 <= done <= len(REQUESTS) for done in told)
    assert summarize(report, CLUSTER.slo).effective == 1.0


def test_what_was_computed_before_is_reused(make: Maker) -> None:
    records = make().run(task(REQUESTS)).records
    assert records.cached[:3].tolist() == [0, 0, 0]
    assert records.cached[3:].tolist() == [3 * BLOCK_TOKENS, 4 * BLOCK_TOKENS]
    np.testing.assert_array_equal(sum(records.tiers.values()), records.cached)


def test_a_report_says_what_it_rests_on(make: Maker) -> None:
    backend = make()
    facts = backend.run(task(REQUESTS[:1])).provenance
    assert facts["trace"] == "two conversations"
    assert facts["backend"] == backend.name and facts["fidelity"] == backend.fidelity
    assert {"policy", "seed", "version"} <= set(facts)


def test_equal_tasks_give_equal_digests_where_that_is_promised(make: Maker) -> None:
    if not make().deterministic:
        return
    one, other = (make().run(task(REQUESTS)) for _ in range(2))
    assert one.digest == other.digest
    np.testing.assert_array_equal(one.records.ttft, other.records.ttft)
    assert make().run(task(REQUESTS[:3])).digest != one.digest


def test_an_interrupt_leaves_the_partial_report(make: Maker) -> None:
    """Ctrl-C comes when the first request has ended, long before the last one is due."""
    late = [*REQUESTS[:3], *(request(1000.0 + i, 100, 2, output=3) for i in range(2000))]

    def interrupt(done: int, count: int | None, seconds: float) -> None:
        if done and not sent:
            sent.append(done)
            os.kill(os.getpid(), signal.SIGINT)

    sent: list[int] = []
    report = make().run(task(late), interrupt)
    assert sent and not report.complete
    assert (report.records.outcome == DONE).any()
    assert (report.records.outcome[:-1] != UNFINISHED).sum() < len(late)
    assert 0 < summarize(report, CLUSTER.slo).requests < len(late)


def test_what_a_cluster_says_of_itself_can_be_simulated(make: Maker, tmp_path: Path) -> None:
    backend = make()
    backend.run(task(REQUESTS))
    found = backend.cluster()
    if found is None:
        return
    paths = {}
    for name, model in found.models.items():
        paths[name] = str(tmp_path / f"{name}.toml")
        model.save(tmp_path / f"{name}.toml")
    spec = ClusterSpec(
        workers=tuple(WorkerSpec(role=w.role, count=w.count, model=paths[w.model]) for w in found.spec.workers),
        node=found.spec.node,
        block_tokens=found.spec.block_tokens,
    )
    check_cluster(spec)
    assert [worker.role for worker in spec.workers] == [Role.DECODE, Role.PREFILL]
    assert spec.block_tokens == BLOCK_TOKENS and found.policy == "kvcache-centric"


def test_one_decision_is_explained_or_it_is_said_who_can(make: Maker) -> None:
    backend = make()
    if backend.name == "live":
        with pytest.raises(BackendError, match="conductor explain --conductor"):
            backend.explain(task(REQUESTS), 3)
        return
    found = backend.explain(task(REQUESTS), 3)
    assert (found.prompt_tokens, found.request) == (REQUESTS[3].prompt_tokens, 3)
