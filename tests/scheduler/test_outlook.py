"""Goal: the conductor learns from requests that end, forgets those that are gone, and shifts roles with the load.
Method: a conductor in a scripted world (world.py).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import pytest

from pyengine.scheduler.events import (
    Action,
    DaemonHeartbeat,
    FromGateway,
    FromWorker,
    GatewayLost,
    SendToGateway,
    SendToWorker,
    Tick,
    WorkerLost,
)
from pyengine.scheduler.messages import CostFit, GatewayAlive, Planned, Rejected, RouteEnded, SetRole, WorkerHello
from pyengine.scheduler.planner import DWELL
from pyengine.scheduler.policies.admission import Refusal
from pyengine.scheduler.types import Role, Slo

from .world import NAMESPACE, World, chain, worker


def apart(prefill: int = 1, decode: int = 1, **settings: Any) -> World:
    infos = [worker(f"prefill-{k}", Role.PREFILL, f"node-{k}") for k in range(prefill)]
    infos += [worker(f"decode-{k}", Role.DECODE, f"node-{prefill + k}") for k in range(decode)]
    world = World(*infos, **settings)
    for info in infos:
        world.measured(info.worker, 0.001)
    return world


def end(world: World, request: int, generated: int, finished: bool = True, attempt: int = 0) -> None:
    message = RouteEnded(request=request, attempt=attempt, ttft=1.0, generated=generated, tbt=0.1, finished=finished)
    world.on(FromGateway("gateway", message))


def test_lengths_are_learnt_from_answers_that_ended() -> None:
    world = apart()
    outlook = world.conductor.outlook

    def predicted() -> float:
        return outlook.lengths.first("", 37, 2000)[1]

    assert predicted() > 500
    for request in range(60):
        world.plan(chain(1, 2), 37, max_tokens=2000, request=request)
        end(world, request, 40)
    assert predicted() == pytest.approx(40, rel=0.5)
    learnt = predicted()
    for request in range(60, 90):
        world.plan(chain(1, 2), 37, max_tokens=2000, request=request)
        # Clients that leave, an answer of an older attempt, and one that never began say nothing of short answers.
        end(world, request, 3, finished=False)
        end(world, request, 3, attempt=-1)
    assert predicted() >= learnt * 0.95
    assert len(outlook.forecast) == 0
    counters = world.conductor.counters()
    assert 0.0 < counters["pyengine_conductor_length_error"] < 20.0
    assert counters["pyengine_conductor_foreseen_requests"] == 0


def test_nothing_is_foreseen_of_requests_that_are_gone() -> None:
    world = apart(admission="predictive")
    forecast = world.conductor.outlook.forecast
    for request in range(6):
        world.plan(chain(1, request), request=request)
    assert len(forecast) == 6
    world.plan(chain(1, 0), request=0, attempt=1)
    assert len(forecast) == 6
    end(world, 0, 4, attempt=0)
    assert len(forecast) == 6, "the end of an attempt that was replaced means nothing"
    end(world, 0, 4, attempt=1)
    assert len(forecast) == 5
    world.on(WorkerLost("decode-0"))
    world.on(GatewayLost("gateway"))
    assert len(forecast) == 0


def test_who_was_admitted_once_is_not_refused() -> None:
    world = apart(admission="at-arrival")
    for request in range(20):
        world.plan([], 400, request=request)
    slo = Slo(ttft=0.5)
    refusal = world.refusal([], 400, slo=slo)
    assert refusal.kind == "slo_ttft"
    assert world.plan([], 400, slo=slo, admitted=True)
    # Time that has passed already counts.
    assert world.refusal([], 16, slo=Slo(ttft=30.0), waited=29.9).kind == "slo_ttft"


def test_who_is_asked_about_again_is_charged_once() -> None:
    """As after a link that was lost: the gateway asks for the same attempt, and does not know that it was planned."""
    world = apart(admission="predictive", roles="auto")
    world.plan([], 400, request=1, tenant="t")
    outlook = world.conductor.outlook

    def counted() -> tuple[float, float]:
        shares = copy.deepcopy(outlook.shares)
        shares.ask("other", 0.01, False, world.now)
        return shares.excess("t", world.now), outlook.planners["model"].prefill.value(world.now)

    before = counted()
    world.plan([], 400, request=1, tenant="t")
    assert (counted(), len(outlook.forecast)) == (before, 1)


def test_baselines_judge_of_decode_comes_when_the_prompt_is_computed() -> None:
    """It looks at the decode worker as it is then; and only this model of others is asked."""
    world = apart(admission="baseline")
    slo = Slo(tbt=0.1)
    for request in (1, 2):
        world.plan([], 100, slo=slo, request=request)
    outlook = world.conductor.outlook

    def prefilled(request: int) -> Refusal | None:
        view = world.conductor.cluster.view("model", NAMESPACE.digest(), 0, world.now)
        assert view is not None
        return outlook.prefilled(("gateway", request), view, world.now)

    assert prefilled(1) is None
    world.alive("decode-0", cost=CostFit((0.01, 0.0, 0.0, 0.01, 0.0), samples=9), running=20, accepted=((1, 0), (2, 0)))
    refusal = prefilled(1)
    assert refusal is not None
    assert refusal.kind == "slo_tbt"
    end(world, 2, 4)
    assert prefilled(2) is None, "it is over"
    assert prefilled(3) is None, "it was never planned"
    world.on(WorkerLost("decode-0"))
    world.on(FromWorker(WorkerHello(info=worker("decode-1", Role.DECODE, "node-9"))))
    assert prefilled(1) is None, "its worker is gone, which its gateway will find"
    ours = apart(admission="predictive")
    ours.plan([], 100, slo=slo, request=1)
    assert ours.conductor.outlook._known[("gateway", 1)].judgement is None, "views are not kept for nobody"


def test_a_burst_of_one_tenant_leaves_room_for_another() -> None:
    """All ask for a first token within two seconds of a worker that computes a prompt in 0.4 s."""
    world = apart(admission="predictive")
    slo = Slo(ttft=2.0)

    def admitted(tenant: str) -> bool:
        answer = world.route([], 400, slo=slo, tenant=tenant)[0]
        assert isinstance(answer, SendToGateway)
        assert isinstance(answer.message, Planned | Rejected)
        return isinstance(answer.message, Planned)

    heavy = [admitted("heavy") for _ in range(30)]
    assert 2 <= sum(heavy) < 30
    assert all(admitted("light") for _ in range(2)), "it overtakes those that have had their share"


def orders(actions: Iterable[Action]) -> list[tuple[str, Role]]:
    return [
        (action.worker, action.message.role)
        for action in actions
        if isinstance(action, SendToWorker) and isinstance(action.message, SetRole)
    ]


def busy(world: World, seconds: float, prompt: int, tokens: int, per_second: float, seed: int = 0) -> list[Any]:
    """Requests like this for so long; each ends at once. What workers are told, which they do at once."""
    rng = random.Random(seed)
    told = []
    until = world.now + seconds
    beat = world.now
    while world.now < until:
        world.now += rng.expovariate(per_second)
        world.route([], prompt, max_tokens=tokens, request=world.requests)
        end(world, world.requests - 1, tokens)
        if world.now - beat >= 0.5:
            beat = world.now
            world.on(FromGateway("gateway", GatewayAlive(gateway="gateway")))
            for name in world.workers:
                world.alive(name)
            for order in orders(world.on(Tick())):
                told.append(order)
                name, role = order
                world.workers[name] = worker(name, role, world.workers[name].node.node, incarnation=len(told) + 1)
                world.on(FromWorker(WorkerHello(info=world.workers[name])))
                world.measured(name, 0.001)
    return told


def test_roles_follow_the_load_and_fixed_ones_do_not() -> None:
    world = apart(2, 4, roles="auto")
    told = busy(world, 300.0, prompt=1000, tokens=2, per_second=3.0)
    assert told
    assert {role for _, role in told} <= {Role.PREFILL, Role.BOTH}
    assert world.conductor.counters()["pyengine_conductor_role_switches_total"] == len(told)
    assert len(told) * DWELL <= 300.0 + DWELL
    roles = [info.role for info in world.workers.values()]
    assert any(role.decodes for role in roles)
    assert busy(apart(2, 4), 300.0, prompt=1000, tokens=2, per_second=3.0) == []


def test_pinned_workers_stay_and_nobody_switches_while_a_node_drains() -> None:
    pinned = World(
        *(worker(f"p{k}", Role.PREFILL, f"p{k}") for k in range(2)),
        *(worker(f"d{k}", Role.DECODE, f"d{k}", pinned=True) for k in range(4)),
        roles="auto",
    )
    for name in pinned.workers:
        pinned.measured(name, 0.001)
    assert busy(pinned, 200.0, prompt=1000, tokens=2, per_second=3.0) == []
    drained = apart(2, 4, roles="auto")
    pool = drained.pools["node-0"]
    pool.draining = True
    heartbeat = pool.heartbeat()
    assert isinstance(heartbeat, DaemonHeartbeat)
    drained.on(heartbeat)
    assert busy(drained, 200.0, prompt=1000, tokens=2, per_second=3.0) == []


def test_roles_are_fixed_or_auto() -> None:
    with pytest.raises(ValueError, match="fixed or auto"):
        World(roles="free")
