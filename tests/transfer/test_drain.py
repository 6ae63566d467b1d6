"""Goal: a daemon that drains hands what only it has, and somebody uses, to other nodes before it stops, and says so.
Method: two real daemons, a real conductor with workers and a gateway played by sockets, and what a user would type.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pyengine.scheduler.conductor import Conductor
from pyengine.scheduler.messages import (
    ClusterState,
    GatewayAlive,
    GatewayHello,
    Message,
    Planned,
    Rejected,
    Route,
    WorkerHello,
)
from pyengine.scheduler.service import Service
from pyengine.scheduler.types import Node, Plan, Role, Slo
from tests.scheduler.test_service import Peer
from tests.scheduler.world import BLOCK, NAMESPACE, SPEC, worker
from tests.transfer.daemons import KEY, LENGTH, PATIENCE, Client, Shape, Transferd

SHAPE = Shape(SPEC.strips, SPEC.strip_bytes)
DRAM = 256 * SHAPE.bytes


class Cluster:
    """Two nodes with a worker of role both each, a gateway and the conductor."""

    def __init__(self, place: Path) -> None:
        self.service = Service(Conductor(), f"ipc://{place}/conductor", "127.0.0.1:0", KEY)
        self._thread = threading.Thread(target=self.service.run)
        self._thread.start()
        self.gateway = Peer(self.service.endpoint, KEY)
        self.workers = Peer(self.service.endpoint, KEY)
        self.daemons: dict[str, Transferd] = {}
        self.clients: dict[str, Client] = {}
        self._hellos: list[WorkerHello] = []
        self._requests = 0
        for number, node in enumerate(("a", "b")):
            way = ("--listen", "127.0.0.1:0", "--conductor", self.service.daemons)
            daemon = self.daemons[node] = Transferd(place, node, DRAM, *way)
            self.clients[node] = Client(daemon, SHAPE, 1 + number, node)
            address = Node(node, daemon.address.address, daemon.address.incarnation)
            info = worker(f"both-{node}", Role.BOTH, node)
            self._hellos.append(WorkerHello(info=msgspec.structs.replace(info, node=address)))
        self.wait_for_blocks("a", 0)
        self.wait_for_blocks("b", 0)

    def wait_for_blocks(self, node: str, count: int) -> None:
        """The conductor knows of so many blocks there."""
        name = f'pyengine_index_blocks{{node="{node}"}}'

        def known(state: ClusterState) -> bool:
            self.workers.send(*self._hellos)
            self.gateway.send(GatewayAlive(gateway="gateway"))
            return len(state.workers) == 2 and state.counters.get(name) == count

        self.live()
        self.gateway.expect(ClusterState, known)

    def live(self) -> None:
        """Workers and gateway are there: also if they have been taken for dead, the test having been slow."""
        self.workers.send(*self._hellos)
        self.gateway.send(GatewayHello(gateway="gateway", incarnation=1))

    def plan(self, prefix: int) -> Plan:
        while True:
            self.live()
            self._requests += 1
            route = Route(
                request=self._requests,
                attempt=0,
                model="model",
                namespace=NAMESPACE.digest(),
                keys=SHAPE.keys(prefix),
                prompt_tokens=LENGTH * BLOCK + 5,
                max_tokens=16,
                slo=Slo(),
            )
            self.gateway.send(route)
            answer = self.gateway.expect(Message, lambda answer: isinstance(answer, Planned | Rejected))
            if isinstance(answer, Planned):
                assert answer.plan.request == self._requests
                return answer.plan

    def publish(self, node: str, prefixes: range) -> None:
        for prefix in prefixes:
            assert len(self.clients[node].take(prefix)) == LENGTH
        self.wait_for_blocks(node, LENGTH * len(prefixes))

    def close(self) -> None:
        for client in self.clients.values():
            client.pool.close()
        for daemon in self.daemons.values():
            if daemon.process.poll() is None:
                daemon.kill()
                daemon.ended()
        self.gateway.close()
        self.workers.close()
        self.service.stop()
        self._thread.join(PATIENCE)
        self.service.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    tmp_path.chmod(0o700)
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def test_a_drained_node_has_handed_on_what_is_used(cluster: Cluster) -> None:
    cluster.publish("a", range(6))
    for prefix in range(4):
        assert cluster.plan(prefix).cached_blocks == LENGTH
    drained = cluster.daemons["a"].command("drain", "--json", "--within", "60")
    assert drained.returncode == 0, drained.stderr
    told = json.loads(drained.stdout)
    assert told["moving"] == {"blocks": 4 * LENGTH, "left": 0, "objects": 0, "over": True}
    assert [cluster.clients["b"].find(prefix) for prefix in range(6)] == [LENGTH] * 4 + [0] * 2
    # Nothing new goes there, and what it has had is found where it is now.
    plan = cluster.plan(0)
    assert plan.prefill.worker == "both-b" and plan.cached_blocks == LENGTH and not plan.sources
    again = cluster.daemons["a"].command("drain")
    assert again.stdout == f"a is drained: {4 * LENGTH} blocks moved, nothing is held, nothing new is taken on\n"
    assert cluster.daemons["a"].command("drain", "--cancel").returncode == 0
    # Used once more, and taken in again.
    assert len(cluster.clients["a"].take(7)) == LENGTH
    cluster.wait_for_blocks("a", 7 * LENGTH)
    cluster.clients["a"].pool.close()
    cluster.daemons["a"].stop()
    cluster.wait_for_blocks("b", 4 * LENGTH)
    assert cluster.plan(0).cached_blocks == LENGTH


def test_a_signal_does_the_same(cluster: Cluster) -> None:
    cluster.publish("a", range(3))
    cluster.plan(1)
    # A worker that goes on holding something keeps it only as long as that may last.
    cluster.clients["a"].counters()
    cluster.daemons["a"].stop()
    assert cluster.clients["b"].find(1) == LENGTH
    assert f"{LENGTH} blocks were moved to other nodes" in cluster.daemons["a"].log()


def test_without_a_conductor_nothing_is_waited_for(cluster: Cluster) -> None:
    cluster.publish("a", range(1))
    cluster.plan(0)
    cluster.service.stop()
    cluster._thread.join(PATIENCE)
    cluster.service._reports.close()
    drained = cluster.daemons["a"].command("drain", "--json")
    assert drained.returncode == 0, drained.stderr
    assert json.loads(drained.stdout)["moving"] == {"blocks": 0, "left": 0, "objects": 0, "over": True}
