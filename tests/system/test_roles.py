"""Goal: a worker takes on another role at run time, under load, and no request is lost or answered wrongly.

Method: real processes over the fake backend; the test tells the conductor, as an operator would, which role is wanted.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import zmq

from bench.server import Server
from pyengine import _native
from pyengine.backends.fake import fake_tokens
from pyengine.scheduler.links import dial
from pyengine.scheduler.messages import Codec, ConductorToGateway, GatewayHello, OrderRole
from pyengine.scheduler.types import Role
from pyengine.secret import read_secret, secret_file
from tests.system.conftest import FAKE_SLOW, PATIENCE, complete, fake_server, prompt, text, until

CLIENTS = 8


def test_roles_that_switch_under_load_lose_no_request(state_dir: Path, tmp_path: Path) -> None:
    """Prefill workers become decode workers and back while clients ask on and on; each switch is seen at /health."""
    # Round-robin gives every worker work, however fast calibration found it.
    flags = ("--prefill", "2", "--decode", "2", "--nodes", "2", "--policy", "round-robin")
    with (
        fake_server(state_dir, *flags, model=FAKE_SLOW, environment={"XDG_RUNTIME_DIR": str(tmp_path)}) as server,
        Operator(tmp_path, state_dir) as operator,
    ):
        over = threading.Event()

        def client(i: int) -> int:
            answered = 0
            while not over.is_set() or answered < 2:
                ids = prompt(70 + 5 * i, 100 * i + answered)
                assert complete(server, ids, 12)["choices"][0]["text"] == text(fake_tokens(ids, 12))
                answered += 1
            return answered

        with ThreadPoolExecutor(CLIENTS) as threads:
            answers = [threads.submit(client, i) for i in range(CLIENTS)]
            try:
                for worker, role in (
                    ("prefill-0", Role.DECODE),
                    ("decode-0", Role.BOTH),
                    ("prefill-0", Role.PREFILL),
                    ("decode-0", Role.DECODE),
                ):
                    operator.order(worker, role)
                    await_switch(server, worker, role, answers)
            finally:
                over.set()
            assert all(answer.result(PATIENCE) >= 2 for answer in answers)
        until(lambda: server.metric("pyengine_worker_requests") == 0, "requests have ended")
        until(lambda: server.metric("pyengine_pool_blocks", state="pinned") == 0, "pins are dropped")
        assert roles(server) == {
            "prefill-0": "prefill",
            "prefill-1": "prefill",
            "decode-0": "decode",
            "decode-1": "decode",
        }


def await_switch(server: Server, worker: str, role: Role, answers: list[Future[int]]) -> None:
    """Until all know of the new role and the worker has worked in it; fails when a client has."""
    done: list[float] = []

    def switched() -> bool:
        for answer in answers:
            assert answer.running() or answer.result() >= 0
        if not done:
            if roles(server).get(worker) == role.value:
                done.append(tokens_of(server, worker, role))
            return False
        return tokens_of(server, worker, role) > done[0]

    until(switched, f"{worker} works as {role.value}")


def roles(server: Server) -> dict[str, str]:
    workers: dict[str, str] = server.get_json("/health")[1]["workers"]
    return workers


def tokens_of(server: Server, worker: str, role: Role) -> float:
    """Computed by the worker in the phase of this role."""
    phase = {} if role is Role.BOTH else {"phase": role.value}
    return server.metric("pyengine_worker_tokens_total", worker=worker, **phase)


class Operator:
    """Speaks to a server's conductor as whoever has its secret may."""

    def __init__(self, run: Path, state_dir: Path) -> None:
        (socket,) = run.glob("*/conductor")
        key = _native.derive_key(read_secret(secret_file(state_dir)), "session")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = dial(self._context.socket(zmq.DEALER), f"ipc://{socket}", key)
        self._codec = Codec(ConductorToGateway)

    def order(self, worker: str, role: Role) -> None:
        hello = GatewayHello(gateway="operator", incarnation=time.time_ns())
        self._socket.send(self._codec.encode([hello, OrderRole(worker=worker, role=role)]))

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(0)
        self._context.term()
