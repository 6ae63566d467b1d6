"""Goal: nothing that a gateway sends stops a worker's heartbeats, and its links hold no more than they may.

Method: `WorkerLinks` alone over ipc; the test is the gateway and the conductor, and takes the loop's place.
"""

from __future__ import annotations

import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from pyengine.backends.fake import FakeBackend
from pyengine.scheduler.cost import UNMEASURED
from pyengine.scheduler.links import bind, dial
from pyengine.scheduler.messages import (
    Abort,
    Codec,
    ConductorToWorker,
    Failed,
    GatewayPing,
    GatewayToWorker,
    Message,
    PagesChanged,
    SetRole,
    Work,
    WorkerAlive,
    WorkerHello,
    WorkerPing,
    WorkerToConductor,
    WorkerToGateway,
)
from pyengine.scheduler.types import Node, Role, SamplingParams, WorkerInfo
from pyengine.worker import links as module
from pyengine.worker.links import WorkerLinks
from tests.stranger import GREETINGS, Stranger

PATIENCE = 30_000  # ms
NODE = Node("a", "", 1)
WORK = Work(
    request=1,
    attempt=1,
    part="both",
    token_ids=bytes(4),
    generated=0,
    root=bytes(16),
    keys=b"",
    sampling=SamplingParams(),
    namespace=b"",
    decode_node=NODE,
    decode_incarnation=1,
)
ALIVE = WorkerAlive(
    worker="w",
    progress=0,
    queued_requests=0,
    queued_tokens=0,
    running=0,
    free_pages=0,
    cost=UNMEASURED,
    counters={},
)


class Ends:
    """The links, and what stands at their other ends."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o700)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        backend = FakeBackend()
        info = WorkerInfo(
            worker="w",
            incarnation=1,
            role=Role.BOTH,
            node=NODE,
            work=f"ipc://{folder}/w",
            model="fake",
            tokenizer="bytes",
            namespace=backend.namespace,
            vocab_size=258,
            max_positions=100,
            pages=1,
            pool_slots=1,
            max_tokens_per_step=1,
            max_sequences=1,
        )
        # Over tcp, as a port can be taken by somebody else.
        self.conductor = bind(context.socket(zmq.ROUTER), "tcp://127.0.0.1:*", bytes(32))
        self.endpoint = self.conductor.getsockopt_string(zmq.LAST_ENDPOINT)
        self.broken = False
        self.links = WorkerLinks(info, self.endpoint, bytes(32), self._alive)
        self.links.start()
        self.gateway = dial(context.socket(zmq.DEALER), info.work, bytes(32))
        self._codec = Codec(WorkerToGateway)
        self._heartbeats = Codec(WorkerToConductor)

    def _alive(self) -> WorkerAlive:
        if self.broken:
            raise ArithmeticError("broken")
        return ALIVE

    def say(self, *messages: Message) -> None:
        self.gateway.send(Codec(GatewayToWorker).encode(list(messages)))

    def heard(self) -> Iterator[Message]:
        """What the gateway hears, but for pings."""
        while self.gateway.poll(PATIENCE):
            yield from (m for m in self._codec.decode(self.gateway.recv()) if not isinstance(m, WorkerPing))

    def taken(self, count: int) -> list[Work | Abort | SetRole]:
        """What the loop takes, when there is so much."""
        messages: list[Work | Abort | SetRole] = []
        while len(messages) < count:
            ready, _, _ = select.select([self.links.arrived], [], [], PATIENCE / 1000)
            assert ready, "nothing comes"
            messages += self.links.take()
        return messages

    def heartbeat(self) -> None:
        """Waits for a new one."""
        while self.conductor.poll(0):
            self.conductor.recv_multipart()
        self.told(WorkerAlive)

    def told(self, kind: type[Message]) -> None:
        """Waits until the conductor is told one of these."""
        while True:
            assert self.conductor.poll(PATIENCE), f"no {kind.__name__}"
            _, frame = self.conductor.recv_multipart()
            if any(isinstance(message, kind) for message in self._heartbeats.decode(frame)):
                return

    def close(self) -> None:
        self.links.stop()
        self.gateway.close(0)
        self.conductor.close(0)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("frame", [b"", b"\xff", b"\x90", b"\x92\x07\x01", b"\x92\x01" + b"\x91" * 100_000 + b"\x01"])
def test_a_frame_that_cannot_be_read_is_skipped(ends: Ends, frame: bytes) -> None:
    ends.gateway.send(frame)
    ends.say(GatewayPing(gateway="g"), WORK)
    assert ends.taken(1) == [WORK]
    ends.heartbeat()


def test_work_beyond_the_limit_is_refused_and_aborts_are_not(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INBOX", 2)
    many = [Work(**{f: getattr(WORK, f) for f in Work.__struct_fields__} | {"request": n}) for n in range(5)]
    aborts = [Abort(request=n, attempt=1) for n in range(5)]
    ends.say(*many, *aborts)
    refused = []
    for message in ends.heard():
        assert isinstance(message, Failed)
        assert message.kind == "retry"
        refused.append(message.request)
        if len(refused) == 3:
            break
    assert refused == [2, 3, 4]
    assert ends.taken(7) == [*many[:2], *aborts]


def test_links_that_fail_wake_the_loop_and_say_so(ends: Ends) -> None:
    ends.broken = True
    ends.links.join(PATIENCE / 1000)
    assert isinstance(ends.links.failed, ArithmeticError)
    ready, _, _ = select.select([ends.links.arrived], [], [], 0)
    assert ready


@pytest.mark.parametrize("greeting", GREETINGS)
def test_a_conductor_is_found_again_after_a_stranger_at_its_port(
    tmp_path: Path, greeting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dial_with_patience(*arguments: Any) -> Any:
        """However slow the machine: no handshake is given up."""
        monkeypatch.setattr(module, "DEAD_AFTER", PATIENCE / 1000)
        return dial(*arguments)

    monkeypatch.setattr(module, "dial", dial_with_patience)
    ends = Ends(tmp_path)
    try:
        ends.told(WorkerHello)
        ends.conductor.close(0)
        Stranger(int(ends.endpoint.rpartition(":")[2]), GREETINGS[greeting]).leave()
        monkeypatch.setattr(module, "DEAD_AFTER", 0.0)
        ends.conductor = bind(zmq.Context.instance().socket(zmq.ROUTER), ends.endpoint, bytes(32))
        ends.told(WorkerHello)
        ends.heartbeat()
    finally:
        ends.close()


def test_an_order_of_the_conductor_reaches_the_loop_and_nonsense_does_not_stop_it(ends: Ends) -> None:
    assert ends.conductor.poll(PATIENCE)
    identity, _ = ends.conductor.recv_multipart()
    codec = Codec(ConductorToWorker)
    for frame in (b"\xc1", Codec(WorkerToGateway).encode([WorkerPing(worker="w", incarnation=1)]), codec.encode([])):
        ends.conductor.send_multipart([identity, frame])
    ends.conductor.send_multipart([identity, codec.encode([SetRole(role=Role.DECODE)])])
    assert ends.taken(1) == [SetRole(role=Role.DECODE)]
    ends.heartbeat()


def test_pages_are_unknown_whenever_a_link_stands_anew_and_are_told_after_the_hello(ends: Ends) -> None:
    ends.told(WorkerHello)
    unknown = ends.links.take_unknown()
    while not unknown:
        ready, _, _ = select.select([ends.links.arrived], [], [], PATIENCE / 1000)
        assert ready, "the loop is not woken"
        ends.links.take()
        unknown = ends.links.take_unknown()
    assert not ends.links.take_unknown()
    ends.links.tell([PagesChanged(worker="w", changes=b"", first=True)])
    ends.told(PagesChanged)


def test_pages_that_could_not_be_told_are_unknown(ends: Ends) -> None:
    ends.told(WorkerHello)
    ends.links.take_unknown()
    ends.conductor.close(0)
    while not ends.links.take_unknown():
        ends.links.tell([PagesChanged(worker="w", changes=bytes(40))])
