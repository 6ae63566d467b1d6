"""Goal: a tenant's or a namespace's blocks go on all nodes, and whoever asked learns which nodes were away.

Method: scripted events into the pure conductor; then the service with real daemons, one of which is stopped.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pyengine import _native
from pyengine.scheduler import cli
from pyengine.scheduler.asking import ask
from pyengine.scheduler.clearing import MAX_CLEARINGS, PATIENCE
from pyengine.scheduler.events import (
    Action,
    Cleared,
    DaemonGone,
    DaemonHello,
    FromGateway,
    GatewayLost,
    OrderClear,
    SendToGateway,
)
from pyengine.scheduler.messages import Clear, ClearedNode, ClearOutcome
from pyengine.scheduler.service import Service
from pyengine.scheduler.types import Node, Role, tenant_number

from .conftest import KEY
from .world import SPEC, World, worker

#: Seconds: far longer than any of this takes.
GENEROUS = 60.0


def three() -> World:
    return World(*(worker(f"both-{number}", Role.BOTH, f"node-{number}") for number in range(3)))


def clear(world: World, number: int = 1, **whose: Any) -> list[Action]:
    return world.on(FromGateway("gateway", Clear(number=number, **whose)))


def outcomes(actions: list[Action]) -> list[ClearOutcome]:
    sent = [action.message for action in actions if isinstance(action, SendToGateway)]
    return [message for message in sent if isinstance(message, ClearOutcome)]


def test_all_nodes_are_asked_and_who_was_away_is_named() -> None:
    world = three()
    world.on(DaemonGone(world.pools["node-2"].node))
    orders = clear(world, tenant=7)
    assert orders == [OrderClear("node-0", 1, None, 7), OrderClear("node-1", 1, None, 7)]
    assert not outcomes(world.on(Cleared(world.pools["node-0"].node, 1, 5, 1, True)))
    assert not world.on(Cleared(world.pools["node-0"].node, 1, 5, 1, True)), "twice"
    assert not world.on(Cleared(world.pools["node-1"].node, 9, 5, 1, True)), "of no order"
    (outcome,) = outcomes(world.on(Cleared(world.pools["node-1"].node, 1, 0, 0, False)))
    nodes = (ClearedNode("node-0", 5, 1, True), ClearedNode("node-1", 0, 0, False))
    assert outcome == ClearOutcome(number=1, nodes=nodes, away=("node-2",))


def test_an_answer_to_an_earlier_conductor_is_none_to_this_one() -> None:
    before, world = three(), World(first_order=1000)
    pool = three().pools["node-0"]
    world.on(DaemonHello(pool.node, pool.sequence))
    (old,) = (order for order in clear(before, namespace=7) if isinstance(order, OrderClear) and order.node == "node-0")
    world.dial_in()
    (new,) = (order for order in clear(world, tenant=8) if isinstance(order, OrderClear))
    assert not outcomes(world.on(Cleared(pool.node, old.order, 5, 0, True)))
    assert outcomes(world.on(Cleared(pool.node, new.order, 0, 0, True)))


@pytest.mark.parametrize("how", ["gone", "again", "late"])
def test_who_goes_or_is_late_was_away(how: str) -> None:
    world = three()
    orders = clear(world, namespace=7)
    assert [order.node for order in orders if isinstance(order, OrderClear)] == ["node-0", "node-1", "node-2"]
    for name in ("node-0", "node-2"):
        world.on(Cleared(world.pools[name].node, 1, 1, 0, True))
    pool = world.pools["node-1"]
    match how:
        case "gone":
            actions = world.on(DaemonGone(pool.node))
        case "again":
            actions = world.on(DaemonHello(pool.node, pool.sequence))
        case _:
            actions = world.wait(PATIENCE)
    (outcome,) = outcomes(actions)
    assert (outcome.away, len(outcome.nodes), outcome.refused) == (("node-1",), 2, "")
    assert not outcomes(world.on(Cleared(pool.node, 1, 1, 0, True))), "too late"


def test_what_makes_no_sense_is_refused() -> None:
    world = three()
    for whose in ({}, {"namespace": 1, "tenant": 2}):
        (outcome,) = outcomes(clear(world, **whose))
        assert "one of them" in outcome.refused
    # No daemon could be told of such a one: the shell would fail at it.
    for impossible in (-1, 1 << 64):
        for whose in ({"namespace": impossible}, {"tenant": impossible}):
            (outcome,) = outcomes(clear(world, **whose))
            assert "64 bits" in outcome.refused
    for number in range(MAX_CLEARINGS):
        assert not outcomes(clear(world, number, tenant=1))
    (outcome,) = outcomes(clear(world, 99, tenant=1))
    assert (outcome.number, "ask again" in outcome.refused) == (99, True)
    # Of one who has gone nobody is told, and he is in nobody's way.
    world.on(GatewayLost("gateway"))
    world.dial_in()
    assert not outcomes(clear(world, tenant=1))
    # A conductor that knows nobody says so.
    nobody = World()
    assert outcomes(clear(nobody, tenant=1)) == [ClearOutcome(number=1, nodes=(), away=())]


def blocks(daemon: _native.Daemon) -> int:
    cached = [value for name, value in daemon.counters().items() if 'state="cached"' in name]
    stored = [value for name, value in daemon.counters().items() if 'tier="ssd",state="stored"' in name]
    return sum(cached) + sum(stored)


def test_real_daemons_forget_a_tenant(service: Service, tmp_path: Path) -> None:
    daemons = [
        _native.Daemon(
            node=f"node-{number}",
            dram_bytes=1 << 22,
            session_key=KEY,
            listen="127.0.0.1:0",
            conductor=service.daemons,
            ssd_dirs=[str(tmp_path / f"ssd-{number}")],
            ssd_bytes=16 << 20,
        )
        for number in range(2)
    ]
    clients = []
    for daemon in daemons:
        client = daemon.attach(1, SPEC.strips, SPEC.strip_bytes)
        clients.append(client)
        for request, tenant in ((1, "gone"), (2, "stays")):
            tag = _native.Tag(request, 0, 1)
            key = bytes([request]) * 16
            client.grant(tag, key, False, bytes(16), 0, "now", tenant_number(tenant))
            assert client.wait(GENEROUS)
            (granted,) = client.events()
            assert isinstance(granted, _native.Granted)
            client.store(granted.slots[0].slot, granted.slots[0].generation, bytes(SPEC.block_bytes))
            client.commit(tag, [0])
            client.end(tag)
        client.flush()
        assert client.wait(GENEROUS)
        assert blocks(daemon) == 4, "two, in memory and on SSD"
    message = Clear(number=5, tenant=tenant_number("gone"))
    until = time.monotonic() + GENEROUS
    while True:  # until both have dialled in
        outcome = ask(service.endpoint, KEY, message, ClearOutcome, GENEROUS)
        if len(outcome.nodes) == 2 or time.monotonic() > until:
            break
    assert [(node.node, node.held, node.durable) for node in outcome.nodes] == [
        ("node-0", 0, True),
        ("node-1", 0, True),
    ]
    assert not outcome.away
    assert [blocks(daemon) for daemon in daemons] == [2, 2]
    daemons[1].stop()
    while not outcome.away and time.monotonic() < until:
        outcome = ask(service.endpoint, KEY, message, ClearOutcome, GENEROUS)
    assert outcome.away == ("node-1",)
    daemons[0].stop()


def test_the_command_line_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)

    def refused(*words: str) -> str:
        conductor = [] if "--conductor" in words else ["--conductor", f"ipc://{tmp_path}/nobody"]
        arguments = ["clear", "--secret-file", str(secret), *conductor, *words]
        assert cli.app(arguments, exit_on_error=False, result_action="return_value") != 0
        return capsys.readouterr().err

    assert "--tenant or --namespace" in refused()
    assert "--tenant or --namespace" in refused("--tenant", "a", "--namespace", "1")
    assert "empty" in refused("--tenant", "")
    for namespace in ("xyz", "", "1" * 17, "0x1"):
        assert "16 hex digits" in refused("--namespace", namespace)
    assert "no answer" in refused("--tenant", "a", "--timeout", "0.2")
    assert "not an endpoint" in refused("--tenant", "a", "--conductor", "nonsense")


def test_nodes_are_named_by_their_daemons() -> None:
    """A daemon's second life is another one: what the first was asked for does not count as done."""
    world = three()
    clear(world, tenant=3)
    pool = world.pools["node-0"]
    second = Node(pool.node.node, pool.node.address, pool.node.incarnation + 1)
    world.on(DaemonHello(second, 0))
    world.on(Cleared(second, 1, 1, 0, True))
    for name in ("node-1", "node-2"):
        actions = world.on(Cleared(world.pools[name].node, 1, 1, 0, True))
    (outcome,) = outcomes(actions)
    assert outcome.away == ("node-0",)
