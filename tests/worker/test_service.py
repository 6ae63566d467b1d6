"""Goal: a worker process whose daemon or model is of no use any more ends, loudly; one that merely waits is alive.

Method: `WorkerService`, the process without the process, on a thread of the test, over a real daemon; the test is the
gateway.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from pyengine import _native
from pyengine.backend import Slice, WorkerBroken
from pyengine.backends.fake import FakeBackend
from pyengine.config import WorkerConfig
from pyengine.scheduler.changes import unpack
from pyengine.scheduler.links import bind, dial
from pyengine.scheduler.messages import (
    Codec,
    ConductorToWorker,
    Failed,
    GatewayToWorker,
    PagesChanged,
    SetRole,
    Work,
    WorkerAlive,
    WorkerHello,
    WorkerToConductor,
    WorkerToGateway,
)
from pyengine.scheduler.types import Grammar, Role, SamplingParams
from pyengine.secret import read_secret, secret_file
from pyengine.worker import service as service_module
from pyengine.worker.core import HOPELESS_STEPS
from pyengine.worker.service import WorkerService, run_worker

PATIENCE = 60.0


def configuration(folder: Path, secret: Path) -> WorkerConfig:
    return WorkerConfig(
        worker="w",
        role=Role.DECODE,
        node="a",
        daemon_socket=f"{folder}/a.sock",
        conductor=f"ipc://{folder}/conductor",
        work_endpoint=f"ipc://{folder}/w",
        secret_file=str(secret),
        model="fake",
        backend="fake",
        state_dir=str(folder),
        pages=8,
    )


class Running:
    """A service that serves on a thread, its daemon, and its conductor and gateway."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o700)
        self._secret = secret_file(folder)
        self._folder = folder
        self.session_key = _native.derive_key(read_secret(self._secret), "session")
        self.hash_key = _native.derive_key(read_secret(self._secret), "hash")
        self.daemon = self.start_daemon()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.conductor = self.new_conductor()
        self.service = WorkerService(configuration(folder, self._secret))
        self.gateway = dial(context.socket(zmq.DEALER), f"ipc://{folder}/w", self.session_key)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def new_conductor(self) -> zmq.Socket[bytes]:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        return bind(context.socket(zmq.ROUTER), f"ipc://{self._folder}/conductor", self.session_key)

    def start_daemon(self) -> _native.Daemon:
        return _native.Daemon(
            node="a", dram_bytes=1 << 20, session_key=self.session_key, socket=f"{self._folder}/a.sock"
        )

    def _serve(self) -> None:
        try:
            self.service.serve()
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            self.error = error

    def ended(self) -> BaseException | None:
        """Waits until `serve` has ended; what it raised."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "it serves on"
        return self.error

    def send(self, part: str, number: int, **changes: Any) -> None:
        info = self.service.info
        root = _native.root_key(info.namespace.digest(), b"", b"", self.hash_key)
        work = Work(
            request=number,
            attempt=1,
            part=part,
            token_ids=bytes(4),
            generated=0,
            root=root,
            keys=b"",
            sampling=SamplingParams(temperature=0.0),
            namespace=info.namespace.digest(),
            decode_node=info.node,
            decode_incarnation=info.incarnation,
        )
        self.gateway.send(Codec(GatewayToWorker).encode([msgspec.structs.replace(work, **changes)]))

    def failed(self) -> Failed:
        """The next failure that the gateway hears of."""
        codec = Codec(WorkerToGateway)
        while self.gateway.poll(int(PATIENCE * 1000)):
            for message in codec.decode(self.gateway.recv()):
                if isinstance(message, Failed):
                    return message
        pytest.fail("no failure is told")

    def heartbeats(self) -> Iterator[WorkerAlive]:
        codec = Codec(WorkerToConductor)
        while self.conductor.poll(int(PATIENCE * 1000)):
            for message in codec.decode(self.conductor.recv_multipart()[1]):
                if isinstance(message, WorkerAlive):
                    yield message

    def close(self) -> None:
        self.service.stop()
        self._thread.join(PATIENCE)
        self.service.close()
        self.daemon.stop()
        self.gateway.close(0)
        self.conductor.close(0)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    yield made
    made.close()


def test_a_worker_waits_for_a_daemon_that_starts_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash, a daemon reads its SSD before it lets anybody in."""
    monkeypatch.setattr(service_module, "DAEMON_LATE", 0.1)
    made: list[_native.Daemon] = []

    class Late(Running):
        def start_daemon(self) -> _native.Daemon:
            """Not before the worker has said that it waits."""

            class Starter(logging.Handler):
                def emit(starter, record: logging.LogRecord) -> None:
                    if not made and "waiting for the daemon" in record.getMessage():
                        made.append(super(Late, self).start_daemon())

            logging.getLogger("pyengine").addHandler(starter := Starter())
            self.starter = starter
            return made  # type: ignore[return-value]

    running = Late(tmp_path)
    logging.getLogger("pyengine").removeHandler(running.starter)
    (running.daemon,) = made
    running.send("prefill", 1)
    assert running.failed().kind == "wrong_role"
    running.close()


def test_a_worker_that_waits_for_its_daemon_can_be_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket is there, and nobody answers yet: so is a daemon that looks through its SSD."""
    monkeypatch.setattr(service_module, "DAEMON_LATE", 0.1)
    monkeypatch.setattr(service_module, "DAEMON_PATIENCE", 5.0)

    class Terminator(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting for the daemon" in record.getMessage():
                signal.raise_signal(signal.SIGTERM)

    config = configuration(tmp_path, secret_file(tmp_path))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    logging.getLogger("pyengine").addHandler(terminator := Terminator())
    try:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(config.daemon_socket)
            silent.listen()
            assert run_worker(config, lambda _: pytest.fail("it is not ready")) == 0
    finally:
        logging.getLogger("pyengine").removeHandler(terminator)
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_daemon_that_comes_back_with_another_secret_ends_the_worker(running: Running) -> None:
    running.daemon.stop()
    running.session_key = bytes(32)
    running.daemon = running.start_daemon()
    assert isinstance(running.ended(), _native.GiveUpError)


def test_a_broken_model_ends_the_worker(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FakeBackend, slices: list[Slice]) -> list[int]:
        raise ArithmeticError("broken")

    monkeypatch.setattr(FakeBackend, "execute", broken)
    running.service._worker.role = Role.BOTH
    for number in range(1, HOPELESS_STEPS + 1):
        running.send("both", number)
        if number < HOPELESS_STEPS:
            assert running.failed().request == number
    assert isinstance(running.ended(), WorkerBroken)


def test_a_worker_whose_requests_all_wait_for_kv_is_alive(running: Running) -> None:
    """Its progress moves on, or the conductor would take it for one that hangs."""
    running.send("decode", 1)
    seen: set[int] = set()
    for beat in running.heartbeats():
        if beat.queued_requests == 1:
            seen.add(beat.progress)
        if len(seen) == 3:
            break
    assert len(seen) == 3


def test_a_grammar_that_is_compiled_wakes_the_loop(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else happens, and the loop sleeps for as long as it likes."""
    monkeypatch.setattr(service_module, "IDLE_POLL", int(10 * PATIENCE * 1000))
    gate = threading.Event()
    grammars = running.service._worker.grammars
    assert grammars._vocabulary is not None, "it is loaded before work comes"
    compiles = grammars._compile

    def compiled(grammar: Grammar) -> Any:
        gate.wait(PATIENCE)
        return compiles(grammar)

    monkeypatch.setattr(grammars, "_compile", compiled)
    running.send("both", 1, sampling=SamplingParams(grammar=Grammar("regex", "[")), deadline=20 * PATIENCE)
    beats = running.heartbeats()
    before = next(beat.progress for beat in beats if beat.queued_requests == 1)
    while (progress := next(beats).progress) != before:  # until it sleeps
        before = progress
    gate.set()
    failed = running.failed()
    assert failed.kind == "refused" and "unclosed" in failed.reason


def test_the_conductor_follows_device_pages_and_roles(running: Running) -> None:
    """8 pages, prompts of two full blocks each: pages come and go, and what it is told always adds up to the pool."""
    index: set[bytes] = set()
    pool = running.service._worker.batcher.pool
    identity = b""
    hellos: list[Role] = []

    def listen() -> None:
        nonlocal identity
        assert running.conductor.poll(int(PATIENCE * 1000)), "nothing is said"
        identity, frame = running.conductor.recv_multipart()
        for message in Codec(WorkerToConductor).decode(frame):
            match message:
                case WorkerHello():
                    hellos.append(message.info.role)
                case PagesChanged() if hellos:
                    # What was said to the conductor before may be on the way still: it knows no such worker.
                    if message.first:
                        index.clear()
                    for change in unpack(message.changes):
                        (index.discard if change.removed else index.add)(change.key)

    def say(role: Role) -> None:
        running.conductor.send_multipart([identity, Codec(ConductorToWorker).encode([SetRole(role=role)])])

    def prompt(number: int) -> tuple[bytes, list[bytes]]:
        tokens = np.full(40, number, np.uint32)
        info = running.service.info
        root = _native.root_key(info.namespace.digest(), b"", b"", running.hash_key)
        packed = _native.block_keys(tokens, 16, root, running.hash_key)
        return tokens.tobytes(), [packed[:16], packed[16:]]

    for number in range(10):
        tokens, keys = prompt(number)
        running.send("both", number, token_ids=tokens, keys=b"".join(keys))
        while not index.issuperset(keys):
            listen()
    assert len(index) <= pool.pages, "what went was not told"
    say(Role.PREFILL)
    while hellos[-1] is not Role.PREFILL:
        listen()
    running.send("decode", 99)
    assert running.failed().kind == "wrong_role"
    # A hello on the same link changes nothing in the pages; a new link makes all of them news.
    running.conductor.close(0)
    index.clear()
    hellos.clear()
    running.conductor = running.new_conductor()
    while not index:
        listen()
    assert hellos[-1] is Role.PREFILL
    assert all(pool.count([key]) for key in index)
    assert len(index) == pool.cached
