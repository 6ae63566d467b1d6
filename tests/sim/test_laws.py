"""Goal: what the scheduler promises of whole runs holds in the simulated cluster, with all production parts together.
Method: loads for which the answer is known.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from pyengine.scheduler.order import PATIENCE
from pyengine.scheduler.policies import ADMISSIONS
from pyengine.scheduler.sim.cluster import Simulation
from pyengine.scheduler.sim.spec import RunSpec
from pyengine.scheduler.sim.trace import Request
from pyengine.scheduler.types import Role, Slo

from .worlds import check, cluster, model, request, simulated


@pytest.mark.parametrize("admission", sorted(ADMISSIONS))
def test_nobody_is_refused_by_an_idle_cluster(tmp_path: Path, admission: str) -> None:
    """Objectives that no cluster could meet; each request finds all at rest."""
    spec = cluster(model(tmp_path), prefill=2, decode=2, slo=Slo(ttft=1e-3, tbt=1e-4))
    requests = [request(5.0 * n, range(10 * n, 10 * n + 5), output=20, tenant=f"t{n % 2}") for n in range(8)]
    records = simulated(requests, spec, admission=admission).measure.report("").records
    assert records.outcome.tolist() == [0] * 8


def test_nobody_starves(tmp_path: Path) -> None:
    """More comes of a higher priority than the worker can do. Who has none is overtaken for so long as it was said."""
    seconds = 0.1
    time = model(tmp_path, token=seconds / 21, pair=0.0, decode=1e-6)
    spec = cluster(time, prefill=0, decode=0, both=1, max_tokens_per_step=21)
    requests = [request(n * seconds / 1.3, [n], output=1, priority=1) for n in range(700)]
    requests.insert(60, request(requests[60].arrival, [5000], output=1))
    records = simulated(requests, spec).measure.report("").records
    # All that had come before it was done long ago; a step is under way.
    assert PATIENCE - seconds < records.ttft[60] <= PATIENCE + 2 * seconds + 0.01
    others = np.delete(records.ttft, 60)
    assert others[60:300].max() < PATIENCE


def test_roles_follow_the_load_and_then_stay(tmp_path: Path) -> None:
    """An hour of a steady load that needs four workers for prefill, with two of them at first."""
    rng = random.Random(7)
    time = model(tmp_path, token=3e-2, pair=0.0, decode=2e-2, sequence=2e-2, context=0.0)
    spec = cluster(time, prefill=2, decode=4, max_tokens_per_step=400, max_sequences=8)
    requests: list[Request] = []
    at = 0.0
    while at < 3600.0:
        at += rng.expovariate(0.2)
        requests.append(request(at, range(10 * len(requests), 10 * len(requests) + 18), output=rng.randint(60, 140)))
    simulation = Simulation(requests, spec, RunSpec(roles=True))
    switches: list[tuple[float, str, Role]] = []
    hello = simulation.hello

    def listen(worker: object, role: Role) -> None:
        switches.append((simulation.loop.now, worker.name, role))  # type: ignore[attr-defined]
        hello(worker, role)  # type: ignore[arg-type]

    simulation.hello = listen  # type: ignore[method-assign]
    simulation.run()
    check(simulation)
    assert 1 <= len(switches) <= 3
    assert all(role is Role.PREFILL for _, _, role in switches)
    assert max(when for when, _, _ in switches) < 900.0
    assert set(simulation.measure.report("").records.outcome.tolist()) == {0}
