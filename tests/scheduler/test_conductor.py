"""Goal: plans are right for what is known, refusals say what to do, and what is known follows what is said and unsaid.

Method: scripted events into the pure conductor, its `check` after each.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from typing import Any

import msgspec
import pytest

from pyengine.scheduler.conductor import MEMBERS_AFTER, Conductor
from pyengine.scheduler.events import (
    DaemonGone,
    DaemonHello,
    Event,
    FromGateway,
    FromWorker,
    GatewayLost,
    OrderDump,
    OrderMembers,
    OrderReplicate,
    Replicated,
    SendToGateway,
    SendToWorker,
    Tick,
    WorkerLost,
)
from pyengine.scheduler.messages import (
    PROTOCOL,
    ClusterState,
    Codec,
    CostFit,
    GatewayAlive,
    GatewayHello,
    LoadSample,
    ProtocolError,
    Route,
    RouteEnded,
    SetRole,
    ToConductor,
    WorkerAlive,
    WorkerHello,
    WorkerLeaving,
)
from pyengine.scheduler.native_index import NativeIndex
from pyengine.scheduler.policies import POLICIES
from pyengine.scheduler.prefix_index import Index, PrefixIndex
from pyengine.scheduler.types import KvGroup, KvSpec, Medium, Namespace, Node, Role, Slo, Source

from .world import BLOCK, NAMESPACE, SPEC, World, chain, worker

#: The others compute what the node they chose lacks.
FETCHING = ("random", "round-robin", "least-loaded", "least-queue-time", "kvcache-centric", "least-harm")


def apart(nodes: int = 2, **settings: object) -> World:
    """One prefill and one decode worker."""
    return World(
        worker("prefill-0", Role.PREFILL, "node-0"),
        worker("decode-0", Role.DECODE, f"node-{nodes - 1}"),
        **settings,  # type: ignore[arg-type]
    )


def twins(**settings: object) -> World:
    """Two workers of role both, each on its own node."""
    return World(
        worker("both-0", Role.BOTH, "node-0"),
        worker("both-1", Role.BOTH, "node-1"),
        **settings,  # type: ignore[arg-type]
    )


def states(actions: list[object]) -> list[ClusterState]:
    return [a.message for a in actions if isinstance(a, SendToGateway) and isinstance(a.message, ClusterState)]


@pytest.mark.parametrize("policy", POLICIES)
def test_prefill_and_decode_apart_get_a_worker_of_each_role(policy: str) -> None:
    plan = apart(policy=policy).plan(chain(1, 2, 3))
    assert (plan.prefill.worker, plan.decode.worker) == ("prefill-0", "decode-0")
    assert (plan.sources, plan.cached_blocks) == ((), 0)
    assert plan.predicted_ttft > 0
    assert plan.predicted_tbt > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_of_role_both_serves_alone(policy: str) -> None:
    plan = twins(policy=policy).plan(chain(1))
    assert plan.prefill == plan.decode


@pytest.mark.parametrize("policy", [*FETCHING, "lmetric:fetch=true"])
def test_every_policy_that_fetches_names_the_sources_of_what_the_prefill_node_lacks(policy: str) -> None:
    world = apart(policy=policy)
    keys = chain(1, 2, 3, 4)
    world.store("node-0", keys[:1])
    world.store("node-1", keys[:3])
    plan = world.plan(keys)
    (source,) = plan.sources
    assert (source.node.node, source.first, source.last) == ("node-1", 1, 3)
    assert plan.cached_blocks == 3


def test_a_hit_leaves_one_token_to_compute() -> None:
    world = apart()
    keys = chain(1, 2, 3)
    world.store("node-1", keys)
    assert world.planned_alone(keys, tokens=3 * BLOCK).sources[0].last == 2
    assert world.plan(keys, tokens=3 * BLOCK + 1).sources[0].last == 3


def test_the_same_prompt_on_another_node_under_round_robin_is_fetched() -> None:
    world = twins(policy="round-robin")
    keys = chain(1, 2)
    first = world.plan(keys)
    world.store(first.prefill.node.node, keys)
    second = world.plan(keys)
    assert second.prefill != first.prefill
    assert [(s.node, s.first, s.last) for s in second.sources] == [(first.prefill.node, 0, 2)]


def parts(sources: tuple[Source, ...]) -> list[tuple[str, int, int, Medium]]:
    return [(source.node.node, source.first, source.last, source.medium) for source in sources]


def test_a_nodes_own_ssd_is_a_source_of_what_its_dram_lacks() -> None:
    world = World(worker("both-0", Role.BOTH, "node-0"), worker("decode-0", Role.DECODE, "node-1"))
    keys = chain(*range(8))
    world.store("node-0", keys[:5], Medium.SSD)
    world.store("node-0", keys[:2])
    world.store("node-1", keys[:6])
    plan = world.plan(keys)
    assert parts(plan.sources) == [("node-0", 2, 5, Medium.SSD), ("node-1", 5, 6, Medium.DRAM)]
    assert plan.cached_blocks == 6
    assert "3 of them on its SSD only, 1 to fetch" in plan.why


def test_dram_of_another_node_is_preferred_to_its_ssd_and_others_stand_in() -> None:
    world = World(
        worker("both-0", Role.BOTH, "node-0"),
        *(worker(f"decode-{k}", Role.DECODE, f"node-{k}") for k in (1, 2)),
    )
    keys = chain(*range(4))
    world.store("node-1", keys, Medium.SSD)
    world.store("node-2", keys[:3])
    plan = world.planned_alone(keys)
    assert parts(plan.sources) == [("node-2", 0, 3, Medium.DRAM), ("node-1", 3, 4, Medium.SSD)]
    world.store("node-1", keys[:1])
    world.store("node-2", keys, Medium.SSD)
    world.store("node-2", keys)
    # Whoever has all in DRAM is first; behind it, who has it otherwise.
    plan = world.plan(keys)
    assert parts(plan.sources) == [
        ("node-2", 0, 4, Medium.DRAM),
        ("node-1", 0, 1, Medium.DRAM),
        ("node-1", 1, 4, Medium.SSD),
    ]
    assert plan.cached_blocks == 4


def test_only_who_is_to_send_is_busy_with_it() -> None:
    """Of two that hold a prefix one sends; the other, who would stand in, has as much time as before."""
    world = World(
        worker("both-0", Role.BOTH, "node-0"),
        *(worker(f"decode-{k}", Role.DECODE, f"node-{k}") for k in (1, 2)),
    )
    keys = chain(*range(4))
    world.store("node-1", keys[:3])
    world.store("node-2", keys)
    plan = world.plan(keys)
    assert parts(plan.sources) == [("node-2", 0, 4, Medium.DRAM), ("node-1", 0, 3, Medium.DRAM)]
    busy = {name: world.conductor.links.queue(name, world.now) for name in ("node-1", "node-2")}
    assert busy["node-2"] > busy["node-1"] == 0.0


def test_reading_from_ssd_counts_and_measured_loads_correct_it() -> None:
    world = twins()
    keys = chain(*range(64))
    world.store("node-0", keys, Medium.SSD)
    world.store("node-1", keys)
    for name in world.workers:
        world.measured(name, 0.001)
    assert world.plan(keys).prefill.worker == "both-1", "DRAM is quicker than SSD"
    world.on(DaemonGone(world.pools["node-1"].node))
    before = world.plan(keys, exclude=("both-1",)).predicted_ttft
    size = 64 * SPEC.block_bytes
    loads = tuple(LoadSample("node-0", size, 2.0) for _ in range(9))
    world.alive("both-0", loads=(*loads, LoadSample("nobody", size, 9.0)))
    slower = world.plan(keys, exclude=("both-1",)).predicted_ttft
    assert slower - before == pytest.approx(2.0, rel=0.1)
    assert world.conductor.links.rate("nobody", "node-0") == world.conductor.links.rate("x", "y")


def test_the_prefix_decides_until_the_queue_does() -> None:
    world = twins()
    keys = chain(*range(20))
    world.store("node-1", keys)
    for name in world.workers:
        world.measured(name, 0.01)
    assert world.plan(keys).prefill.worker == "both-1"
    world.end(0)
    world.alive("both-1", queued_tokens=50_000, queued_requests=3, queue_seconds=500.0)
    world.wait(0)
    moved = world.plan(keys)
    assert moved.prefill.worker == "both-0"
    assert moved.sources[0].node.node == "node-1"


@pytest.mark.parametrize("policy", ["least-loaded", "kvcache-centric", "least-harm", "lmetric"])
def test_a_burst_spreads_before_any_heartbeat(policy: str) -> None:
    world = twins(policy=policy)
    chosen = [world.plan(chain(100 + i, 7)).prefill.worker for i in range(20)]
    assert 8 <= chosen.count("both-0") <= 12
    for request in range(20):
        world.on(FromGateway("gateway", RouteEnded(request=request, attempt=0)))
    assert not any(w.assigned for w in world.conductor.cluster.workers.values())


def test_what_heartbeats_show_is_not_counted_twice() -> None:
    world = twins(policy="least-loaded")
    world.plan(chain(1))
    assert any(w.assigned for w in world.conductor.cluster.workers.values())
    world.wait(2.0)
    assert not any(w.assigned for w in world.conductor.cluster.workers.values())


def test_silence_loss_and_goodbye_end_a_worker() -> None:
    for end in ("silence", "loss", "goodbye"):
        world = twins()
        if end == "silence":
            actions: list[object] = list(world.wait(4.0, silent=("both-0",)))
        elif end == "loss":
            actions = list(world.on(WorkerLost("both-0")))
        else:
            actions = list(world.on(FromWorker(WorkerLeaving(worker="both-0"))))
        assert [info.worker for info in states(actions)[-1].workers] == ["both-1"]
        assert {world.plan(chain(i)).prefill.worker for i in range(8)} == {"both-1"}
        # A late heartbeat does not revive it, a hello does.
        world.alive("both-0")
        assert {world.plan(chain(i)).prefill.worker for i in range(8)} == {"both-1"}
        world.on(FromWorker(WorkerHello(info=worker("both-0", Role.BOTH, "node-0", incarnation=2))))
        assert 2 in {world.plan(chain(i)).prefill.incarnation for i in range(16)}


def test_who_was_taken_for_dead_and_is_heard_again_is_asked_who_it_is() -> None:
    """A process that was stopped for longer than anybody waits, and goes on: its link has stood."""
    world = World(worker("both-0", Role.BOTH, "node-0"), worker("both-1", Role.BOTH, "node-1"))
    world.wait(4.0, silent=("both-0",))
    assert world.planned_alone(chain(1)).prefill.worker == "both-1"
    assert world.alive("both-0") == [SendToWorker("both-0", SetRole(role=Role.BOTH))]
    assert world.alive("both-1") == []
    world.on(FromWorker(WorkerHello(info=world.workers["both-0"])))
    assert world.alive("both-0") == []
    assert {world.plan(chain(n)).prefill.worker for n in range(8)} == {"both-0", "both-1"}


def test_a_worker_that_stands_still_with_work_queued_gets_no_more() -> None:
    world = twins(policy="round-robin")
    for _ in range(80):
        world.now += 0.5
        world.alive("both-0", progress=7, queued_requests=2, running=1)
        world.alive("both-1", progress=int(world.now), queued_requests=2, running=1)
        world.on(FromGateway("gateway", GatewayAlive(gateway="gateway")))
    assert {world.plan(chain(i)).prefill.worker for i in range(4)} == {"both-1"}
    world.alive("both-0", progress=8, queued_requests=2, running=1)
    assert {world.plan(chain(i)).prefill.worker for i in range(4)} == {"both-0", "both-1"}


def test_excluded_workers_are_used_only_if_nobody_else_is_left() -> None:
    world = twins()
    assert {world.plan(chain(i), exclude=("both-0",)).prefill.worker for i in range(8)} == {"both-1"}
    assert world.plan(chain(1), exclude=("both-0", "both-1")).prefill.worker in ("both-0", "both-1")


def test_workers_whose_daemon_is_gone_are_used_last() -> None:
    world = twins()
    world.on(DaemonGone(world.pools["node-0"].node))
    assert {world.plan(chain(i)).prefill.worker for i in range(8)} == {"both-1"}
    world.on(DaemonGone(world.pools["node-1"].node))
    world.plan(chain(1))


def test_what_cannot_be_served_is_refused_with_a_sentence() -> None:
    world = apart()
    assert "this cluster serves model" in (gone := world.refusal([], 5, model="other")).reason
    assert gone.retry_after is None
    # A pool of 128 slots of 16 tokens, of which a grant leaves one.
    assert world.plan([], 127 * 16)
    too_large = world.refusal([], 127 * 16 + 1)
    assert "2033 tokens" in too_large.reason
    assert "2032 tokens at most" in too_large.reason
    assert too_large.retry_after is None
    assert "4096 positions" in world.refusal([], 4096).reason
    world.on(WorkerLost("decode-0"))
    lacking = world.refusal([], 5)
    assert "no decode worker" in lacking.reason
    assert lacking.retry_after is not None
    world.on(WorkerLost("prefill-0"))
    assert world.refusal([], 5).reason == "no worker is alive"


def test_a_prompt_larger_than_the_decode_nodes_pool_is_refused() -> None:
    world = World(
        worker("prefill-0", Role.PREFILL, "node-0"),
        worker("decode-0", Role.DECODE, "node-1", pool_slots=4),
    )
    world.plan([], 48)
    assert "prompts of 48 tokens at most" in world.refusal([], 49).reason
    # Alone, nothing passes through a pool.
    both = World(worker("both-0", Role.BOTH, "node-0", pool_slots=4))
    both.plan([], 2047)
    assert "2047 tokens at most" in both.refusal([], 2048).reason


def test_only_workers_of_one_namespace_are_paired() -> None:
    half = Namespace("weights", "config", "bfloat16", "none", SPEC)
    world = World(
        worker("prefill-0", Role.PREFILL, "node-0"),
        worker("decode-0", Role.DECODE, "node-1", namespace=half),
    )
    assert "`compute_dtype` differs: float32 and bfloat16" in world.refusal([], 5).reason
    assert "`compute_dtype` differs: bfloat16 and float32" in world.refusal([], 5, namespace=half.digest()).reason
    unknown = world.refusal([], 5, namespace=bytes(32))
    assert "share no KV" in unknown.reason


def test_admission_at_arrival_keeps_its_promise() -> None:
    world = twins(admission="at-arrival")
    world.plan([], 1000, slo=Slo(ttft=0.001))  # nobody was measured yet
    for name in world.workers:
        world.measured(name, 0.01)
    world.plan([], 1000, slo=Slo(ttft=20.0, tbt=1.0))
    late = world.refusal([], 1000, slo=Slo(ttft=5.0))
    assert "objective is 5 s" in late.reason
    assert late.retry_after is not None
    assert late.retry_after > 1
    assert "objective is 1 ms" in world.refusal([], 5, slo=Slo(tbt=0.001)).reason
    assert 'pyengine_conductor_rejections_total{reason="slo_ttft"}' in world.conductor.counters()


def test_stale_attempts_are_dropped_and_new_ones_replace_them() -> None:
    world = twins()
    assert world.plan(chain(1), request=7, attempt=1)
    assert world.route(chain(1), request=7, attempt=0) == []
    assert world.plan(chain(1), request=7, attempt=2)
    world.on(FromGateway("gateway", RouteEnded(request=7, attempt=1)))
    assert sum(len(w.assigned) for w in world.conductor.cluster.workers.values()) == 1
    world.on(GatewayLost("gateway"))
    assert sum(len(w.assigned) for w in world.conductor.cluster.workers.values()) == 0
    assert world.route(chain(1)) == [], "a gateway that has not said hello gets no answer"


def test_gateways_hear_of_changes_at_once_and_of_counters_each_second() -> None:
    world = World()
    assert len(states(list(world.on(FromGateway("other", GatewayHello(gateway="other", incarnation=1)))))) == 1
    world.workers["both-0"] = worker("both-0", Role.BOTH, "node-0")
    changed = world.on(FromWorker(WorkerHello(info=world.workers["both-0"])))
    assert [a.gateway for a in changed if isinstance(a, SendToGateway)] == ["gateway", "other"]
    assert world.on(FromWorker(WorkerHello(info=world.workers["both-0"]))) == []
    world.now += 0.5
    world.alive("both-0", counters={"pyengine_worker_steps_total": 5.0})
    assert world.on(Tick()) == []
    world.now += 0.5
    (state, _) = states(list(world.on(Tick())))
    assert state.counters["pyengine_worker_steps_total"] == 5.0
    world.now += 2.6
    world.alive("both-0")
    world.on(FromGateway("gateway", GatewayAlive(gateway="gateway")))
    assert [a.gateway for a in world.on(Tick()) if isinstance(a, SendToGateway)] == ["gateway"], "the other was silent"


def test_a_hot_prefix_with_few_holders_is_replicated() -> None:
    world = twins()
    keys = chain(1, 2, 3)
    world.store("node-0", keys)
    orders: list[OrderReplicate] = []
    for i in range(20):
        # Each with its own tail; the shared head gets hot. Everything ends at once, so the holder stays the best place.
        actions = world.route([*keys, *chain(1, 2, 3, 50 + i)[3:]])
        world.on(FromGateway("gateway", RouteEnded(request=world.requests - 1, attempt=0)))
        orders += [action for action in actions if isinstance(action, OrderReplicate)]
    (order,) = orders
    assert order.node == "node-1"
    assert (order.source.node, order.keys, order.position, order.parent) == ("node-0", b"".join(keys), 0, bytes(16))
    world.now += 0.001
    world.on(Replicated(world.pools["node-1"].node, order.order, 3, 0))
    assert world.conductor.counters()["pyengine_conductor_replicated_blocks_total"] == 3
    world.store("node-1", keys)
    more = [action for _ in range(20) for action in world.route(keys) if isinstance(action, OrderReplicate)]
    assert more == []


def test_a_restarted_conductor_is_rebuilt_by_those_who_dial_in() -> None:
    """Only hellos, dumps and heartbeats: afterwards it plans like the old one."""
    world = apart()
    keys = chain(1, 2, 3, 4)
    world.store("node-1", keys[:3])
    before = world.plan(keys)
    world.conductor = Conductor()
    dumps = [action.node for action in world.dial_in() if isinstance(action, OrderDump)]
    assert dumps == ["node-1"], "an empty pool needs no dump"
    for part in world.pools["node-1"].dump(parts=2):
        world.on(part)
    after = world.plan(keys, request=before.request)
    assert after == before


def test_daemons_are_told_who_else_shares_objects() -> None:
    world = apart(3)
    first, second = (world.pools[name].node for name in ("node-0", "node-2"))
    gone = world.on(DaemonGone(second)) + world.wait(MEMBERS_AFTER)
    assert [(a.node, a.members) for a in gone if isinstance(a, OrderMembers)] == [("node-0", (first,))]
    again = world.on(DaemonHello(second, 0)) + world.wait(MEMBERS_AFTER)
    orders = [(a.node, a.members) for a in again if isinstance(a, OrderMembers)]
    assert orders == [("node-0", (first, second)), ("node-2", (first, second))]
    assert not world.on(DaemonGone(Node("node-2", "node-2:1", 99))), "another life"


def test_a_conductor_that_starts_tells_of_the_daemons_once() -> None:
    """And not that each is alone: those who share objects would look for their homes anew."""
    world = apart(3)
    world.conductor = Conductor()
    orders = [a for a in world.dial_in() + world.wait(2 * MEMBERS_AFTER) if isinstance(a, OrderMembers)]
    nodes = tuple(pool.node for _, pool in sorted(world.pools.items()))
    assert orders == [OrderMembers(node.node, nodes) for node in nodes]


def test_a_daemons_new_life_drops_what_the_old_one_held() -> None:
    world = apart()
    keys = chain(1, 2)
    world.store("node-1", keys)
    assert world.planned_alone(keys).sources
    world.pools["node-1"].node = Node("node-1", "node-1:2", 2)
    world.pools["node-1"].blocks.clear()
    world.pools["node-1"].sequence = 0
    world.on(DaemonHello(world.pools["node-1"].node, 0))
    assert not world.planned_alone(keys).sources
    world.store("node-1", keys)
    assert world.plan(keys).sources[0].node.incarnation == 2


def events(seed: int) -> list[tuple[Event, float]]:
    """A busy minute: routes, ends, stored blocks, heartbeats, deaths."""
    rng = random.Random(seed)
    script = World(*(worker(f"both-{i}", Role.BOTH, f"node-{i}") for i in range(4)))
    made: list[tuple[Event, float]] = []
    now = 0.0
    made += [(FromGateway("gateway", GatewayHello(gateway="gateway", incarnation=1)), now)]
    made += [(FromWorker(WorkerHello(info=info)), now) for info in script.workers.values()]
    made += [(DaemonHello(pool.node, 0), now) for pool in script.pools.values()]
    for request in range(300):
        now += rng.random() * 0.4
        keys = chain(*(rng.randrange(2) for _ in range(rng.randrange(6))))
        pool = rng.choice(list(script.pools.values()))
        for position, key in enumerate(keys):
            medium = rng.choice(list(Medium))
            if (key, medium) not in pool.blocks:
                made.append((pool.store(key, keys[position - 1] if position else bytes(16), position, medium), now))
        route = Route(
            request=request,
            attempt=0,
            model="model",
            namespace=NAMESPACE.digest(),
            keys=b"".join(keys),
            prompt_tokens=len(keys) * BLOCK + 1,
            max_tokens=8,
        )
        made.append((FromGateway("gateway", route), now))
        made.append((FromGateway("gateway", GatewayAlive(gateway="gateway")), now))
        if rng.random() < 0.5:
            made.append((FromGateway("gateway", RouteEnded(request=rng.randrange(request + 1), attempt=0)), now))
        if rng.random() < 0.02:
            made.append((WorkerLost(f"both-{rng.randrange(3)}"), now))
        made.append((Tick(), now))
    return made


@pytest.mark.parametrize(("counters", "seconds"), [(100, 1.0), (60_000, 3.0)])
def test_many_counters_are_told_less_often(counters: int, seconds: float) -> None:
    world = apart()
    times = []
    for _ in range(40):
        world.now += 0.25
        world.on(FromGateway("gateway", GatewayAlive(gateway="gateway")))
        for name in world.workers:
            world.alive(name, counters={f'{name}_{i}{{worker="{name}"}}': 1.0 for i in range(counters // 2)})
        if states(list(world.on(Tick()))):
            times.append(world.now)
    # Seconds go by in quarters, and the conductor has counters of its own.
    assert {second - first for first, second in itertools.pairwise(times[1:])} <= {seconds, seconds + 0.25}


@pytest.mark.parametrize(
    "load", [{"queue_seconds": float("nan")}, {"queue_seconds": -1.0}, {"running": -1}, {"expected_tokens": 1 << 63}]
)
def test_heartbeats_with_a_load_that_nobody_can_have_are_no_frames(load: dict[str, float]) -> None:
    codec = Codec(ToConductor)
    good = WorkerAlive(
        worker="w",
        progress=0,
        queued_requests=0,
        queued_tokens=0,
        running=0,
        free_pages=0,
        cost=CostFit((0.0,) * 5),
        counters={},
    )
    assert codec.decode(codec.encode([good])) == [good]
    frame = msgspec.msgpack.encode([PROTOCOL, {"type": "WorkerAlive", **msgspec.structs.asdict(good), **load}])
    with pytest.raises(ProtocolError, match="negative or no number"):
        codec.decode(frame)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("Route", {"waited": float("nan")}),
        ("Route", {"waited": -1.0}),
        ("Route", {"max_tokens": -5}),
        ("Route", {"prompt_tokens": 1 << 62}),
        ("Route", {"slo": {"tbt": float("nan")}}),
        ("Route", {"slo": {"deadline": -1.0}}),
        ("Route", {"slo": {"ttft": 0.0}}),
        ("RouteEnded", {"ttft": float("inf")}),
        ("RouteEnded", {"tbt": float("nan")}),
        ("RouteEnded", {"generated": -1}),
    ],
)
def test_what_no_request_has_is_no_frame(kind: str, wrong: dict[str, object]) -> None:
    """One such number would stay in running means, and in the shares of all tenants, for ever."""
    codec = Codec(ToConductor)
    route = Route(request=1, attempt=0, model="m", namespace=b"", keys=b"", prompt_tokens=5, max_tokens=1)
    good = route if kind == "Route" else RouteEnded(request=1, attempt=0)
    assert codec.decode(codec.encode([good])) == [good]
    frame = msgspec.msgpack.encode([PROTOCOL, {"type": kind, **msgspec.structs.asdict(good), **wrong}])
    with pytest.raises(ProtocolError, match=r"no number|negative or none"):
        codec.decode(frame)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens_per_step": 0},
        {"max_sequences": -1},
        {"pages": 0},
        {"pages": 1 << 62},
        {"pool_slots": -1},
        {"kv": KvSpec((), 16)},
        {"kv": KvSpec((KvGroup(2, 2, 16, "float8"),), 16)},
        {"kv": KvSpec((KvGroup(2, 2, 16, "float32"), KvGroup(2, 2, 8, "float32")), 16)},
        {"kv": KvSpec((KvGroup(2, 2, 16, "float32"),), 0)},
    ],
)
def test_a_worker_that_cannot_be_is_no_frame(wrong: dict[str, Any]) -> None:
    """Estimates divide by what it says of itself: one such worker would end every decision."""
    codec = Codec(ToConductor)
    good = WorkerHello(info=worker("w", Role.BOTH, "n"))
    assert codec.decode(codec.encode([good])) == [good]
    info = good.info
    if kv := wrong.pop("kv", None):
        wrong = {"namespace": msgspec.structs.replace(info.namespace, kv=kv)}
    plain = msgspec.to_builtins(msgspec.structs.replace(info, **wrong), builtin_types=(bytes,))
    frame = msgspec.msgpack.encode([PROTOCOL, {"type": "WorkerHello", "info": plain}])
    with pytest.raises(ProtocolError, match="says what no worker is"):
        codec.decode(frame)


def test_links_of_nodes_that_are_gone_are_forgotten() -> None:
    """Nodes come and go under new names; the last that is heard of one is a plan made when its daemon was gone."""
    world = World(worker("stays", Role.BOTH, "node-0"))
    world.store("node-0", chain(1, 2))
    for number in range(1, 30):
        info = worker(f"w{number}", Role.BOTH, f"node-{number}")
        world.on(FromWorker(WorkerHello(info=info)))
        world.on(DaemonHello(info.node, 0))
        world.planned_alone(chain(1, 2))
        world.on(DaemonGone(info.node))
        world.planned_alone(chain(1, 2))
        world.on(WorkerLost(info.worker))
    assert set(world.conductor.links._slot) <= {"node-0"}


@pytest.mark.parametrize("policy", POLICIES)
def test_same_events_and_seed_give_the_same_actions(policy: str) -> None:
    def digest(seed: int, index: type[Index] = PrefixIndex) -> str:
        conductor = Conductor(policy=policy, seed=seed, index=index())
        hashed = hashlib.sha256()
        for event, now in events(5):
            for action in conductor.on(event, now):
                message = action.message if isinstance(action, SendToGateway) else repr(action)
                hashed.update(msgspec.msgpack.encode(message))
            conductor.check()
        return hashed.hexdigest()

    assert digest(1) == digest(1) == digest(1, NativeIndex)
    if policy == "random":
        assert digest(1) != digest(2)
