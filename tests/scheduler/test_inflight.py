"""Goal: what is planned counts as coming until it is over, for exactly the prompts that share it; and bursts share.

Method: random operations against a list of promises that is searched in full; then whole conductors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pyengine import _native
from pyengine.scheduler import inflight
from pyengine.scheduler.events import DaemonGone, FromWorker, WorkerLost
from pyengine.scheduler.inflight import GRACE, SHORTEST, STRIDE_TOKENS, Coming, Expectations, Inflight, marks
from pyengine.scheduler.messages import WorkerHello
from pyengine.scheduler.types import Role

from .world import BLOCK, NAMESPACE, World, chain, worker

#: The plain twin, and the one that serves.
KINDS = (Inflight, _native.Inflight)
STRIDE = STRIDE_TOKENS // BLOCK
WORKERS = ("a", "b", "c")
#: A gateway's numbers are any of 64 bits, and two gateways may have the same.
REQUESTS = [("g", 0), ("g", 1), ("g", -1), ("g", 2**64 - 1), ("h", 0), ("h", 1)]
#: Prompts that begin alike for a while: the first goes on for longest.
PROMPTS = [
    b"".join(chain(*range(40))),
    b"".join(chain(*range(20), *range(100, 130))),
    b"".join(chain(*range(200, 215))),
]


@given(st.integers(0, 5000), st.sampled_from([1, 16, 256, 512]))
def test_marks_are_ascending_and_end_with_the_last_block(blocks: int, block_tokens: int) -> None:
    found = marks(blocks, block_tokens)
    assert found == tuple(sorted(set(found)))
    assert (found[-1] if found else 0) == blocks
    stride = max(STRIDE_TOKENS // block_tokens, 1)
    assert all(n % stride == 0 for n in found[:-1])
    assert len(found) == -(-blocks // stride)


@dataclass
class Promise:
    keys: bytes
    workers: dict[str, float]
    until: float


class InflightMachine(RuleBasedStateMachine):
    """The oracle keeps every promise and looks through all of them."""

    @staticmethod
    def empty() -> Expectations:
        return Inflight()

    @initialize()
    def begin(self) -> None:
        self.real, self.now = self.empty(), 0.0
        self.promises: dict[tuple[str, int], Promise] = {}

    @rule(
        request=st.sampled_from(REQUESTS),
        keys=st.sampled_from(PROMPTS),
        count=st.integers(0, 40),
        workers=st.dictionaries(st.sampled_from(WORKERS), st.floats(0, 20), min_size=1, max_size=2),
        ragged=st.sampled_from([b"", b"no key"]),
    )
    def add(self, request: tuple[str, int], keys: bytes, count: int, workers: dict[str, float], ragged: bytes) -> None:
        ready = {name: self.now + after for name, after in workers.items()}
        self.real.add(request, keys[: count * 16] + ragged, BLOCK, ready, self.now)
        self.promises.pop(request, None)
        if count:
            until = self.now + max(GRACE * (max(ready.values()) - self.now), SHORTEST)
            self.promises[request] = Promise(keys[: count * 16], ready, until)
        self.promises = {key: each for key, each in self.promises.items() if each.until > self.now}

    @rule(request=st.sampled_from(REQUESTS))
    def end(self, request: tuple[str, int]) -> None:
        self.real.end(request)
        self.promises.pop(request, None)

    @rule(name=st.sampled_from(WORKERS))
    def lose(self, name: str) -> None:
        self.real.lost(name)
        self.promises = {key: each for key, each in self.promises.items() if name not in each.workers}

    @rule(seconds=st.floats(0, 30))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.real.expire(self.now)
        self.promises = {key: each for key, each in self.promises.items() if each.until > self.now}

    @rule(keys=st.sampled_from(PROMPTS), count=st.integers(0, 40))
    def find(self, keys: bytes, count: int) -> None:
        self.compare(keys[: count * 16])

    def compare(self, keys: bytes) -> None:
        expected: dict[str, Coming] = {}
        for n in marks(len(keys) // 16, BLOCK):
            prefix = keys[: n * 16]
            # Where a prompt ends between two kept keys, only one that ends there too is found.
            same = [
                each
                for each in self.promises.values()
                if each.keys.startswith(prefix) and (n % STRIDE == 0 or len(each.keys) == len(prefix))
            ]
            if not same:
                break
            for name in WORKERS:
                ready = [each.workers[name] for each in same if name in each.workers]
                if ready:
                    expected[name] = (n, max(min(ready), self.now))
        assert self.real.find(keys, BLOCK, self.now) == expected

    @invariant()
    def consistent(self) -> None:
        self.real.check()
        assert len(self.real) == len(self.promises)
        # After each step, or two requests of one worker hardly ever meet.
        for keys in PROMPTS:
            self.compare(keys)


class NativeMachine(InflightMachine):
    @staticmethod
    def empty() -> Expectations:
        return _native.Inflight()


for machine in (InflightMachine, NativeMachine):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestInflight = InflightMachine.TestCase
TestNativeInflight = NativeMachine.TestCase


@pytest.mark.parametrize("kind", KINDS)
def test_requests_remembered_have_a_limit(kind: Callable[[], Expectations]) -> None:
    real, most = kind(), inflight.MAX_REQUESTS
    keys = PROMPTS[0]
    for request in range(most + 10):
        real.add(("g", request), keys, BLOCK, {"a": 1.0}, 0.0)
    assert len(real) == most
    # The oldest are forgotten: these are not known.
    for request in range(10):
        real.end(("g", request))
    assert len(real) == most
    real.expire(1e9)
    assert len(real) == 0
    real.check()


def test_who_is_planned_anew_is_expected_for_as_long_as_the_new_plan_says() -> None:
    real = Inflight()
    real.add(("g", 1), PROMPTS[0], BLOCK, {"a": 0.5}, 0.0)
    real.add(("g", 1), PROMPTS[0], BLOCK, {"a": 20.0}, 0.0)
    real.expire(SHORTEST + 1.0)
    assert len(real) == 1
    real.expire(GRACE * 20.0)
    assert len(real) == 0


def pair() -> World:
    world = World(*(worker(f"both-{i}", Role.BOTH, f"node-{i}", pages=4000) for i in range(2)))
    for name in world.workers:
        world.measured(name, 0.001)
    return world


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    """3,200 tokens of head cost 3.2 s, what follows some 10 ms: nobody but the first computes the head."""
    world = pair()
    plans = [world.plan(chain(*range(200), 1000 + i)) for i in range(8)]
    computed = [
        plan.prompt_tokens for each in world.conductor.cluster.workers.values() for plan in each.assigned.values()
    ]
    assert len(computed) == 8
    # What lies between the last kept key that all share and their end is counted as computed again.
    assert sorted(computed)[-1] == 201 * BLOCK + 5
    assert all(tokens <= STRIDE_TOKENS + BLOCK + 5 for tokens in sorted(computed)[:-1])
    assert all(3.2 < plan.predicted_ttft < 4.5 for plan in plans[1:])
    # Behind the first, its own line is as quick to notice that the head is there as anybody.
    assert not any(plan.sources for plan in plans if plan.prefill.worker == plans[0].prefill.worker)
    # The other worker fetches the head once; whom it gets meanwhile waits for that.
    others = [plan for plan in plans if plan.prefill.worker != plans[0].prefill.worker]
    assert others[0].sources[0].node == plans[0].prefill.node
    assert all(source.node == others[0].prefill.node for plan in others[1:] for source in plan.sources)
    assert others[0].sources[0].ready > 3.0


def test_who_computes_nothing_else_fetches_what_another_is_about_to_have() -> None:
    """The head is nearly done where a long queue stands behind it; to compute it anew would take longer."""
    world = pair()
    head = list(range(200))
    first = world.plan(chain(*head, 1))
    idle = "both-1" if first.prefill.worker == "both-0" else "both-0"
    for i in range(6):
        world.plan(chain(10_000 + i, *range(60)), exclude=(idle,))
    world.now += 2.0
    other = world.plan(chain(*head, 2))
    assert other.prefill.worker == idle
    (source,) = other.sources
    assert source.node == first.prefill.node
    assert (source.first, source.last) == (0, 200 // STRIDE * STRIDE)
    assert 1.0 < source.ready < 1.5
    assert source.ready < other.predicted_ttft < 2.0
    # To wait for what takes longer than to compute it is no gain.
    world = pair()
    for i in range(6):
        world.plan(chain(10_000 + i, *range(60)), exclude=(idle,))
    first = world.plan(chain(*head, 1), exclude=(idle,))
    other = world.plan(chain(*head, 2))
    assert (first.prefill.worker == idle, other.prefill.worker == idle) == (False, True)
    assert not other.sources


def test_what_a_neighbour_on_the_same_node_computes_is_not_moved() -> None:
    world = World(*(worker(f"both-{i}", Role.BOTH, "node-0", pages=4000) for i in range(2)))
    for name in world.workers:
        world.measured(name, 0.001)
    head = list(range(200))
    first = world.plan(chain(*head, 1))
    other = world.plan(chain(*head, 2), exclude=(first.prefill.worker,))
    (source,) = other.sources
    assert source.node == other.prefill.node and source.ready > 3.0
    view = world.conductor.cluster.view("model", NAMESPACE.digest(), 0, world.now)
    assert view is not None
    row = [info.worker for info in view.workers].index(other.prefill.worker)
    rest = view.prefill_seconds_of(row, 201 * BLOCK + 5, 200 // STRIDE * STRIDE * BLOCK)
    assert other.predicted_ttft == pytest.approx(source.ready + rest, abs=1e-6)


def test_expectations_end_with_their_request_their_worker_and_their_time() -> None:
    head = list(range(200))
    for ended in ("request", "worker", "life", "time"):
        world = pair()
        first = world.plan(chain(*head, 1))
        name = first.prefill.worker
        if ended == "request":
            world.end(first.request)
        elif ended == "worker":
            world.on(WorkerLost(name))
        elif ended == "life":
            info = world.workers[name]
            world.on(FromWorker(WorkerHello(info=worker(name, Role.BOTH, info.node.node, pages=4000, incarnation=2))))
        else:
            world.wait(10.0)
        assert len(world.conductor.router.inflight) == 0
        again = world.plan(chain(*head, 2))
        assert not again.sources
        assert again.predicted_ttft > 3.0


def test_nothing_comes_to_a_node_whose_daemon_is_gone() -> None:
    head = list(range(200))
    world = pair()
    name = world.plan(chain(*head, 1)).prefill.worker
    node = world.workers[name].node.node
    world.now += 2.5
    other = ("both-0", "both-1")[name == "both-0"]
    assert world.planned_alone(chain(*head, 2), exclude=(name,)).prefill.worker == other
    assert world.planned_alone(chain(*head, 3), exclude=(name,)).sources
    world.on(DaemonGone(world.pools[node].node))
    assert not world.planned_alone(chain(*head, 4), exclude=(name,)).sources
