"""Goal: the conductor works over real sockets and with a real daemon, and alone from its command line.

Method: the service on a thread; gateway and worker are played by DEALER sockets, the node by a Daemon in this process.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import zmq

from pyengine import _native
from pyengine.scheduler import dropping
from pyengine.scheduler.conductor import Conductor
from pyengine.scheduler.cost import UNMEASURED
from pyengine.scheduler.links import dial
from pyengine.scheduler.messages import (
    ClusterState,
    Codec,
    ConductorToGateway,
    ConductorToWorker,
    Explain,
    Explained,
    GatewayHello,
    Message,
    Planned,
    Rejected,
    Route,
    RouteEnded,
    SetRole,
    WorkerAlive,
    WorkerHello,
    WorkerLeaving,
)
from pyengine.scheduler.service import Service
from pyengine.scheduler.types import Node, Plan, Role

from .conftest import KEY
from .world import BLOCK, NAMESPACE, SPEC, chain, worker

#: Seconds: far longer than any of this takes.
PATIENCE = 20.0

M = TypeVar("M", bound=Message)


class Peer:
    """A gateway or worker as the conductor sees it."""

    def __init__(self, endpoint: str, key: bytes = KEY) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.setsockopt(zmq.SNDTIMEO, int(PATIENCE * 1000))
        self._socket = dial(self._context.socket(zmq.DEALER), endpoint, key)
        self._codec = Codec(ConductorToGateway | ConductorToWorker)

    def send(self, *messages: Message) -> None:
        self._socket.send(self._codec.encode(list(messages)))

    def expect(self, kind: type[M], wanted: Callable[[M], bool] = lambda message: True) -> M:
        """The next message of this kind that is wanted; others are skipped."""
        deadline = time.monotonic() + PATIENCE
        while self._socket.poll(int(max(deadline - time.monotonic(), 0) * 1000)):
            for message in self._codec.decode(self._socket.recv()):
                if isinstance(message, kind) and wanted(message):
                    return message
        raise AssertionError(f"no such {kind.__name__} came")

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def dialled(service: Service) -> Iterator[Callable[[], Peer]]:
    peers: list[Peer] = []

    def make() -> Peer:
        peers.append(Peer(service.endpoint))
        return peers[-1]

    yield make
    for peer in peers:
        peer.close()


def start_daemon(node: str, conductor: str) -> _native.Daemon:
    return _native.Daemon(node=node, dram_bytes=1 << 22, session_key=KEY, listen="127.0.0.1:0", conductor=conductor)


@pytest.fixture
def daemon(service: Service) -> Iterator[_native.Daemon]:
    daemon = start_daemon("node-1", service.daemons)
    yield daemon
    daemon.stop()


def publish(daemon: _native.Daemon, keys: list[bytes]) -> _native.PoolClient:
    """Puts blocks into the node's pool."""
    client = daemon.attach(1, SPEC.strips, SPEC.strip_bytes)
    tag = _native.Tag(1, 0, 1)
    client.grant(tag, b"".join(keys), False, bytes(16), 0, "now")
    assert client.wait(PATIENCE)
    (granted,) = client.events()
    assert isinstance(granted, _native.Granted)
    for slot in granted.slots:
        client.store(slot.slot, slot.generation, bytes(SPEC.block_bytes))
    client.commit(tag, range(len(keys)))
    return client


def route(request: int, keys: list[bytes]) -> Route:
    return Route(
        request=request,
        attempt=0,
        model="model",
        namespace=NAMESPACE.digest(),
        keys=b"".join(keys),
        prompt_tokens=len(keys) * BLOCK + 1,
        max_tokens=8,
    )


def alive(worker: str, counters: dict[str, float]) -> WorkerAlive:
    return WorkerAlive(
        worker=worker,
        progress=1,
        queued_requests=0,
        queued_tokens=0,
        running=0,
        free_pages=1,
        cost=UNMEASURED,
        counters=counters,
    )


def ask_until(gateway: Peer, keys: list[bytes], wanted: Callable[[Plan], bool]) -> Plan:
    """Asks for plans until one is as wanted: what daemons report takes its time."""
    deadline = time.monotonic() + PATIENCE
    request = 100
    while time.monotonic() < deadline:
        gateway.send(route(request, keys))
        plan = gateway.expect(Planned).plan
        if wanted(plan):
            return plan
        request += 1
    raise AssertionError("no such plan came")


def test_a_plan_names_the_blocks_that_a_real_daemon_has_published(
    dialled: Callable[[], Peer], daemon: _native.Daemon
) -> None:
    keys = chain(1, 2, 3)
    client = publish(daemon, keys)
    gateway, loop = dialled(), dialled()
    gateway.send(GatewayHello(gateway="g", incarnation=1))
    assert gateway.expect(ClusterState).workers == ()
    gateway.send(route(1, keys))
    assert gateway.expect(Rejected).rejection.reason == "no worker is alive"
    info = worker("both-0", Role.BOTH, "node-0")
    loop.send(WorkerHello(info=info))
    gateway.expect(ClusterState, lambda state: state.workers == (info,))
    plan = ask_until(gateway, keys, lambda plan: bool(plan.sources))
    address = daemon.address
    (source,) = plan.sources
    assert source.node == Node(address.node, address.address, address.incarnation)
    assert (source.first, source.last) == (0, 3)
    client.close()


def test_counters_of_workers_and_daemons_reach_the_gateway(dialled: Callable[[], Peer], daemon: _native.Daemon) -> None:
    client = publish(daemon, chain(1, 2))
    gateway, loop = dialled(), dialled()
    gateway.send(GatewayHello(gateway="g", incarnation=1))
    loop.send(WorkerHello(info=worker("both-0", Role.BOTH, "node-0")))
    loop.send(alive("both-0", {"pyengine_worker_steps_total": 3}))

    def complete(state: ClusterState) -> bool:
        # A played gateway sends no heartbeats: it says hello again before it counts as silent.
        gateway.send(GatewayHello(gateway="g", incarnation=1))
        indexed = state.counters.get('pyengine_index_blocks{node="node-1"}') == 2
        daemons = any(name.startswith("pyengine_pool_blocks") for name in state.counters)
        return indexed and daemons and state.counters.get("pyengine_worker_steps_total") == 3

    gateway.expect(ClusterState, complete)
    client.close()


def test_a_hot_prefix_is_really_copied(service: Service, dialled: Callable[[], Peer], daemon: _native.Daemon) -> None:
    """Algorithm 1 sends every request to the one holder; the order to copy goes to the other node's daemon."""
    keys = chain(1, 2, 3)
    other = start_daemon("node-0", service.daemons)
    clients = [publish(daemon, keys), other.attach(1, SPEC.strips, SPEC.strip_bytes)]
    gateway, loop = dialled(), dialled()
    gateway.send(GatewayHello(gateway="g", incarnation=1))
    for name, at in (("both-0", other.address), ("both-1", daemon.address)):
        node = Node(at.node, at.address, at.incarnation)
        info = msgspec.structs.replace(worker(name, Role.BOTH, node.node), node=node)
        loop.send(WorkerHello(info=info))
    gateway.expect(ClusterState, lambda state: len(state.workers) == 2)
    requests = itertools.count()

    def copied(state: ClusterState) -> bool:
        request = next(requests)
        gateway.send(
            GatewayHello(gateway="g", incarnation=1), route(request, keys), RouteEnded(request=request, attempt=0)
        )
        return state.counters.get('pyengine_index_blocks{node="node-0"}') == 3

    state = gateway.expect(ClusterState, copied)
    assert state.counters["pyengine_conductor_replicated_blocks_total"] == 3
    for client in clients:
        client.close()
    other.stop()


def test_a_cold_replica_really_goes(
    service: Service, dialled: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three daemons hold a long prefix and are nearly full; when nobody reuses it any more, one of them forgets it."""
    monkeypatch.setattr(dropping, "COLD_AFTER", 0.5)
    # Of some 500 slots less than a tenth are left.
    keys = chain(*range(470))
    nodes = [start_daemon(f"node-{i}", service.daemons) for i in range(3)]
    clients = [publish(node, keys) for node in nodes]
    for client in clients:
        client.end(_native.Tag(1, 0, 1))
    gateway, loop = dialled(), dialled()
    gateway.send(GatewayHello(gateway="g", incarnation=1))
    for i, at in enumerate(node.address for node in nodes):
        info = worker(f"both-{i}", Role.BOTH, at.node, pages=2000, max_positions=1 << 20)
        loop.send(WorkerHello(info=msgspec.structs.replace(info, node=Node(at.node, at.address, at.incarnation))))
    gateway.expect(ClusterState, lambda state: len(state.workers) == 3)

    def held(state: ClusterState) -> list[float]:
        # A played gateway sends no heartbeats: it says hello again before it counts as silent.
        gateway.send(GatewayHello(gateway="g", incarnation=1))
        return sorted(value for name, value in state.counters.items() if name.startswith("pyengine_index_blocks"))

    gateway.expect(ClusterState, lambda state: held(state) == [470, 470, 470])
    gateway.send(route(1, keys), RouteEnded(request=1, attempt=0))
    gateway.expect(Planned)
    state = gateway.expect(ClusterState, lambda state: held(state) == [0, 470, 470])
    assert state.counters["pyengine_conductor_dropped_blocks_total"] >= 470
    for client in clients:
        client.close()
    for node in nodes:
        node.stop()


def test_a_live_conductor_explains_its_latest_decision(dialled: Callable[[], Peer]) -> None:
    gateway, loop = dialled(), dialled()
    gateway.send(GatewayHello(gateway="g", incarnation=1))
    loop.send(WorkerHello(info=worker("both-0", Role.BOTH, "node-0")))
    gateway.expect(ClusterState, lambda state: len(state.workers) == 1)
    gateway.send(route(5, chain(1, 2)), Explain(number=9, request=5))
    explained = gateway.expect(Explained)
    assert explained.number == 9
    assert explained.explanation is not None
    assert (explained.explanation.prefill, explained.explanation.gateway) == ("both-0", "g")
    assert [each.worker for each in explained.explanation.candidates] == ["both-0"]
    gateway.send(Explain(number=10, request=6))
    assert gateway.expect(Explained).explanation is None
    gateway.send(Explain(number=11, route=route(6, chain(1, 2))))
    foreseen = gateway.expect(Explained)
    assert foreseen.explanation is not None
    assert (foreseen.number, foreseen.explanation.request, foreseen.explanation.prefill) == (11, 6, "both-0")


def test_a_worker_whose_link_is_gone_is_dead_at_once(dialled: Callable[[], Peer]) -> None:
    gateway, loop = dialled(), dialled()
    gateway.send(GatewayHello(gateway="g", incarnation=1))
    loop.send(WorkerHello(info=worker("both-0", Role.BOTH, "node-0")))
    gateway.expect(ClusterState, lambda state: len(state.workers) == 1)
    loop.close()
    gateway.expect(ClusterState, lambda state: not state.workers)


def test_a_worker_that_was_held_up_is_asked_who_it_is(
    dialled: Callable[[], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its link stands all the time, so by itself it would say hello never more, and get no work."""
    monkeypatch.setattr("pyengine.scheduler.cluster.DEAD_AFTER", 0.5)
    gateway, loop = dialled(), dialled()
    info = worker("both-0", Role.BOTH, "node-0")
    gateway.send(GatewayHello(gateway="g", incarnation=1))
    loop.send(WorkerHello(info=info))
    gateway.expect(ClusterState, lambda state: state.workers == (info,))
    gateway.expect(ClusterState, lambda state: not state.workers)
    loop.send(alive("both-0", {}))
    assert loop.expect(SetRole).role is Role.BOTH
    loop.send(WorkerHello(info=info))
    gateway.expect(ClusterState, lambda state: state.workers == (info,))


def test_a_worker_that_shares_no_kv_is_named_at_its_hello(
    dialled: Callable[[], Peer], caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever starts it must hear why no request will reach it; the field, and both values."""
    small = msgspec.structs.replace(SPEC, block_tokens=2 * BLOCK)
    larger = msgspec.structs.replace(NAMESPACE, kv=small)
    strangers = [
        worker("decode-1", Role.DECODE, "node-1", namespace=larger),
        worker("other-0", Role.DECODE, "node-1", namespace=larger, model="other"),
        worker("decode-2", Role.DECODE, "node-1"),
        worker("both-0", Role.BOTH, "node-1", vocab_size=300),
    ]
    gateway, loop = dialled(), dialled()
    gateway.send(GatewayHello(gateway="g", incarnation=1))
    for info in (worker("prefill-0", Role.PREFILL, "node-0"), *strangers):
        with caplog.at_level("WARNING"):
            loop.send(WorkerHello(info=info))
            gateway.expect(ClusterState, lambda state: info.worker in {each.worker for each in state.workers})  # noqa: B023
            # It is said after the state was sent: whoever is answered now, is answered after it.
            gateway.send(route(1, []))
            gateway.expect(Planned if info.worker in ("decode-2", "both-0") else Rejected)
    said = [record.message for record in caplog.records if "share KV" in record.message]
    assert said == [
        f"prefill-0 and decode-1 serve 'model' and cannot share KV: `kv.block_tokens` differs: {BLOCK} and {2 * BLOCK}",
        f"decode-1 and decode-2 serve 'model' and cannot share KV: `kv.block_tokens` differs: {2 * BLOCK} and {BLOCK}",
        "decode-1 and both-0 serve 'model' and cannot share KV: `vocab_size` differs: 258 and 300",
    ]


def test_what_an_earlier_life_of_a_worker_still_says_is_ignored(dialled: Callable[[], Peer]) -> None:
    """The old process lives on, cut off for a while; the new one has its name. Neither the heartbeats nor the
    leave-taking of the old one count any more.
    """
    gateway, old, new = dialled(), dialled(), dialled()
    gateway.send(GatewayHello(gateway="g", incarnation=1))
    first = worker("both-0", Role.BOTH, "node-0")
    second = msgspec.structs.replace(first, incarnation=2)
    old.send(WorkerHello(info=first))
    gateway.expect(ClusterState, lambda state: state.workers == (first,))
    new.send(WorkerHello(info=second))
    gateway.expect(ClusterState, lambda state: state.workers == (second,))
    old.send(alive("both-0", {"pyengine_worker_steps_total": 1e6}), WorkerLeaving(worker="both-0"))
    # Another worker's hello, behind all that on the same link: when it is known, the rest has been looked at.
    other = worker("both-1", Role.BOTH, "node-1")
    old.send(WorkerHello(info=other))
    new.send(alive("both-0", {"pyengine_worker_steps_total": 3}))

    def settled(state: ClusterState) -> bool:
        gateway.send(GatewayHello(gateway="g", incarnation=1))
        return other in state.workers and "pyengine_worker_steps_total" in state.counters

    state = gateway.expect(ClusterState, settled)
    assert state.workers == (second, other)
    assert state.counters["pyengine_worker_steps_total"] == 3


def test_frames_of_another_protocol_are_refused_and_nothing_breaks(dialled: Callable[[], Peer]) -> None:
    stranger, gateway = dialled(), dialled()
    stranger._socket.send(b"\x92\x63\x80")
    stranger._socket.send_multipart([b""])
    # Arrays within arrays, as deep as the frame is long.
    stranger._socket.send(b"\x92\x01" + b"\x91" * 100_000 + b"\x01")
    stranger._socket.send_multipart([b"a", b"b", b"c"])
    gateway.send(GatewayHello(gateway="g", incarnation=1))
    gateway.expect(ClusterState)


def test_a_conductor_that_restarts_is_rebuilt_by_those_who_dial_in(tmp_path: Path) -> None:
    """The daemon keeps running; a second conductor at the same address learns its blocks from a dump."""
    tmp_path.chmod(0o700)
    keys = chain(4, 5)
    endpoint, daemons = f"ipc://{tmp_path}/conductor", "127.0.0.1:0"
    daemon = client = None
    for life in range(2):
        service = Service(Conductor(), endpoint, daemons, KEY)
        daemons = service.daemons
        thread = threading.Thread(target=service.run)
        thread.start()
        gateway, loop = Peer(endpoint), Peer(endpoint)
        try:
            if daemon is None:
                daemon = start_daemon("node-1", daemons)
                client = publish(daemon, keys)
            gateway.send(GatewayHello(gateway="g", incarnation=life))
            loop.send(WorkerHello(info=worker("both-0", Role.BOTH, "node-0")))
            gateway.expect(ClusterState, lambda state: len(state.workers) == 1)
            assert ask_until(gateway, keys, lambda plan: plan.cached_blocks == 2).sources
        finally:
            gateway.close()
            loop.close()
            service.stop()
            thread.join(PATIENCE)
            service.close()
    assert client is not None
    assert daemon is not None
    client.close()
    daemon.stop()


def serve(tmp_path: Path, *arguments: str, ready_fd: int) -> subprocess.Popen[bytes]:
    tmp_path.chmod(0o700)
    command = [sys.executable, "-m", "pyengine.scheduler.cli", "serve", "--listen", f"ipc://{tmp_path}/conductor"]
    command += ["--state-dir", str(tmp_path / "state"), "--ready-fd", str(ready_fd), *arguments]
    return subprocess.Popen(command, pass_fds=(ready_fd,), stderr=subprocess.PIPE)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_conductor_serve_says_where_it_is_and_ends_cleanly(tmp_path: Path, end: signal.Signals) -> None:
    reading, writing = os.pipe()
    process = serve(tmp_path, ready_fd=writing)
    os.close(writing)
    try:
        assert select.select([reading], [], [], PATIENCE)[0]
        facts = json.loads(os.read(reading, 4096))
        assert facts["endpoint"] == f"ipc://{tmp_path}/conductor"
        assert facts["daemons"].startswith("127.0.0.1:")
        process.send_signal(end)
        assert process.wait(PATIENCE) == 0
        assert not (tmp_path / "conductor").exists()
    finally:
        process.kill()
        os.close(reading)


def test_conductor_serve_explains_what_cannot_work(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    process = serve(tmp_path, "--policy", "kv-centric", ready_fd=writing)
    os.close(writing)
    _, errors = process.communicate(timeout=PATIENCE)
    os.close(reading)
    assert process.returncode == 2
    assert b"did you mean 'kvcache-centric'" in errors
