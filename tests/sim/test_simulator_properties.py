"""Goal: whatever happens in a simulated cluster, every request has one outcome, nothing stays held, and the same seed
gives the same digest, step by step or fast-forward, in this process or another. Method: small random clusters, traces.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyengine.scheduler.policies import ADMISSIONS, known_policies
from pyengine.scheduler.sim.sessions import sessions
from pyengine.scheduler.sim.spec import ClusterSpec, Failure, NodeSpec, WorkerSpec
from pyengine.scheduler.sim.trace import Request
from pyengine.scheduler.types import Role, Slo

from .worlds import BLOCK, cluster, model, request, simulated

#: Disciplines of coupled workers.
OTHERS = ["ours", "ours", "vllm", "vllm-pc", "vllm-cp"]
FOLDER = Path(tempfile.mkdtemp(prefix="models-"))


class Case(NamedTuple):
    requests: list[Request]
    spec: ClusterSpec
    run: dict[str, object]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A cluster of up to six workers, some of them short of pages or slots, and a trace of shared prefixes."""
    # The models of others are coupled: only clusters of such workers may have them.
    prefill, decode, both = draw(
        st.sampled_from([(1, 1, 0), (2, 1, 0), (1, 2, 0), (3, 3, 0), (0, 0, 1), (0, 0, 3), (1, 1, 1), (2, 2, 2)])
    )
    time = model(FOLDER, token=draw(st.sampled_from([1e-5, 1e-3])), context=draw(st.sampled_from([0.0, 3e-6])))
    node = NodeSpec(
        dram_tokens=draw(st.sampled_from([14, 30, 200])) * BLOCK,
        ssd_tokens=draw(st.sampled_from([0, 60])) * BLOCK,
        link_rate=draw(st.sampled_from([1e5, 1e8])),
        link_delay=draw(st.sampled_from([0.0, 1e-3])),
        device_rate=draw(st.sampled_from([1e6, 1e9])),
        ssd_rate=1e6,
        evict=draw(st.sampled_from(["lru", "lfu"])),
    )
    deadline = draw(st.sampled_from([None, None, 3.0]))
    spec = cluster(
        time,
        prefill,
        decode,
        both,
        node=node,
        pages=draw(st.sampled_from([12, 40])),
        max_sequences=draw(st.sampled_from([2, 16])),
        slo=Slo(
            ttft=draw(st.sampled_from([None, 0.3, 2.0])),
            tbt=draw(st.sampled_from([None, 0.02, 0.1])),
            deadline=deadline,
        ),
        stages=draw(st.sampled_from([1, 1, 3])),
        discipline="ours"
        if prefill or decode
        else draw(st.sampled_from(["ours", "ours", "vllm", "vllm-pc", "vllm-cp"])),
    )
    requests, arrival = [], 0.0
    for _ in range(draw(st.integers(1, 25))):
        arrival += draw(st.sampled_from([0.0, 0.01, 0.3]))
        path = [draw(st.integers(0, 2)) for _ in range(draw(st.integers(0, 9)))]
        terms = {"tenant": draw(st.sampled_from(["", "a", "b"])), "priority": draw(st.sampled_from([0, 0, 1]))}
        requests.append(request(arrival, path, draw(st.integers(1, BLOCK - 1)), draw(st.integers(1, 60)), **terms))
    names = [f"{role}{n:04}" for n, role in enumerate(["prefill"] * prefill + ["decode"] * decode + ["both"] * both)]
    failures = []
    for _ in range(draw(st.integers(0, 2))):
        number = draw(st.integers(0, len(names) - 1))
        node_too = draw(st.booleans())
        failures.append(
            Failure(
                at=draw(st.sampled_from([0.1, 0.5, 1.0])),
                worker=None if node_too else names[number],
                node=f"n{number:04}" if node_too else None,
                seconds=draw(st.sampled_from([0.2, 2.0])),
                drains=draw(st.sampled_from([0.0, 0.3, 5.0])) if node_too else 0.0,
            )
        )
    run = {
        "policy": draw(st.sampled_from(known_policies())),
        "admission": draw(st.sampled_from(sorted(ADMISSIONS))),
        "roles": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
        "write_through": draw(st.booleans()),
        "failures": tuple(failures),
    }
    return Case(requests, spec, run)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_the_digest_is_the_same_step_by_step_and_fast_forward(case: Case) -> None:
    fast = simulated(case.requests, case.spec, **case.run)
    slow = simulated(case.requests, case.spec, **case.run, fast_forward=False)
    assert fast.complete
    for a, b in zip(fast.workers.values(), slow.workers.values(), strict=True):
        assert a.ends == b.ends
    assert fast.measure.report("").digest == slow.measure.report("").digest
    for each in fast.requests:
        if each.outcome == 0:
            # An answer ends early where it fills all pages there are.
            pages = case.spec.workers[0].pages * case.spec.workers[0].stages * BLOCK + 1
            assert each.held == min(each.request.output_tokens, pages - each.request.prompt_tokens)


def test_the_generated_trace_has_one_digest() -> None:
    """The repository's own trace on the paper's nodes: long prompts, KV that flows with their steps, evictions."""
    trace = sessions(rate=4.0, seed=3, block_tokens=512).limit(120)
    workers = (WorkerSpec(role=Role.PREFILL, count=2), WorkerSpec(role=Role.DECODE, count=2))
    node = NodeSpec(dram_tokens=20_000, ssd_tokens=60_000)
    spec = ClusterSpec(workers=workers, node=node, slo=Slo(ttft=10.0, tbt=0.1))
    fast, slow = (simulated(list(trace), spec, fast_forward=fast) for fast in (True, False))
    report = fast.measure.report(trace.description)
    assert report.digest == slow.measure.report(trace.description).digest
    assert report.totals["evictions"] > 20
    assert report.records.outcome.tolist() == [0] * 120
    assert slow.loop.events > fast.loop.events + 1000


SCRIPT = """
import sys
from tests.sim.worlds import *
spec = cluster(sys.argv[1], 2, 2)
requests = [request(n * 0.05, [n % 3, n % 5, n % 7], output=30) for n in range(60)]
print(simulated(requests, spec, policy="random", seed=int(sys.argv[2])).measure.report("").digest)
"""


def test_another_process_gives_the_same_digest_and_another_seed_another(tmp_path: Path) -> None:
    time = model(tmp_path)

    def digest(hash_seed: str, seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", SCRIPT, time, seed]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    first = digest("1", "0")
    assert len(first) == 33
    assert digest("2", "0") == first
    assert digest("2", "1") != first


@pytest.mark.parametrize("output", [1, 2, 300])
def test_fast_forward_takes_fewer_events(tmp_path: Path, output: int) -> None:
    spec, requests = cluster(model(tmp_path)), [request(0.0, [1, 2], output=output)]
    fast = simulated(requests, spec)
    slow = simulated(requests, spec, fast_forward=False)
    assert fast.measure.report("").totals == slow.measure.report("").totals
    if output > 100:
        assert slow.loop.events - fast.loop.events > output / 2
