"""Both other sides of the gateway, scripted: a conductor and workers on real ZeroMQ sockets, in the test's own loop."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
import zmq

from pyengine.config import GatewayConfig, SloClass
from pyengine.gateway.app import create_app
from pyengine.gateway.auth import Door
from pyengine.gateway.listener import listen
from pyengine.gateway.server import http_config
from pyengine.gateway.service import Service
from pyengine.scheduler import links
from pyengine.scheduler.messages import (
    Abort,
    ClusterState,
    Codec,
    Failed,
    GatewayAlive,
    GatewayHello,
    GatewayToConductor,
    GatewayToWorker,
    Message,
    Planned,
    PrefillReport,
    Rejected,
    Route,
    RouteEnded,
    Tokens,
    Work,
    WorkerPing,
)
from pyengine.scheduler.types import (
    FinishReason,
    KvGroup,
    KvSpec,
    Namespace,
    Node,
    Plan,
    Rejection,
    Role,
    WorkerInfo,
    WorkerRef,
)

NAMESPACE = Namespace(
    weights="w",
    config="c",
    compute_dtype="float32",
    weight_quantization="none",
    kv=KvSpec((KvGroup(1, 1, 8, "float32"),)),
)
SESSION_KEY = bytes(32)
ANSWER = "The capital of France is Paris."


class HashKeys:
    """Block keys good enough for the gateway, which never looks into them."""

    def root(self, namespace: bytes, salt: bytes = b"") -> bytes:
        return hashlib.blake2b(namespace + salt, digest_size=16).digest()

    def blocks(self, tokens: bytes, block_tokens: int, root: bytes) -> bytes:
        keys = b""
        for end in range(4 * block_tokens, len(tokens) + 1, 4 * block_tokens):
            keys += hashlib.blake2b(root + tokens[:end], digest_size=16).digest()
        return keys


def answer_token(index: int, answer: str = ANSWER) -> int:
    """What a deterministic model says at `index`: the answer's bytes, over and over."""
    data = answer.encode()
    return data[index % len(data)]


class Router:
    """A bound ROUTER on the loop. serve: called with (identity, message) in order."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, codec: Codec) -> None:
        self.socket = links.bind(context.socket(zmq.ROUTER), endpoint, SESSION_KEY)
        self._codec = codec
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.socket.fileno(), self.drain)
        self.peers: set[bytes] = set()

    def send(self, identity: bytes, *messages: Message) -> None:
        self.socket.send_multipart([identity, self._codec.encode(list(messages))])
        self._loop.call_soon(self.drain)

    def drain(self) -> None:
        while not self.socket.closed:
            try:
                identity, frame = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.peers.add(identity)
            for message in self._codec.decode(frame):
                self.on(identity, message)

    def on(self, identity: bytes, message: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        if not self.socket.closed:
            self._loop.remove_reader(self.socket.fileno())
            self.socket.close(0)


class FakeWorker(Router):
    """Answers work as `script` says (default: the whole part at once); remembers what came."""

    def __init__(self, context: zmq.Context[Any], folder: Path, name: str, role: Role, incarnation: int = 1) -> None:
        self.endpoint = f"ipc://{folder}/{name}"
        super().__init__(context, self.endpoint, Codec(GatewayToWorker))
        self.name = name
        self.role = role
        self.incarnation = incarnation
        self.work: list[Work] = []
        self.aborts: list[Abort] = []
        self.hung = False
        self.arrived = asyncio.Event()
        self.aborted = asyncio.Event()
        self.script: Callable[[FakeWorker, bytes, Work], None] = whole_answer

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker=self.name,
            incarnation=self.incarnation,
            role=self.role,
            node=Node("node-0", "127.0.0.1:1", 1),
            work=self.endpoint,
            model="fake",
            tokenizer="bytes",
            namespace=NAMESPACE,
            vocab_size=258,
            max_positions=1024,
            pages=64,
            pool_slots=64,
            max_tokens_per_step=512,
            max_sequences=32,
        )

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(self.name, self.incarnation, self.info.node, self.endpoint)

    def on(self, identity: bytes, message: Any) -> None:
        if self.hung:
            return
        if isinstance(message, Work):
            self.work.append(message)
            self.arrived.set()
            self.script(self, identity, message)
        elif isinstance(message, Abort):
            self.aborts.append(message)
            self.aborted.set()
        else:
            self.send(identity, WorkerPing(worker=self.name, incarnation=self.incarnation))


def tokens(work: Work, first: int, count: int, finish: FinishReason | None = None) -> Tokens:
    """Numbered tokens of the deterministic model."""
    numbers = tuple(answer_token(index) for index in range(first, first + count))
    return Tokens(request=work.request, attempt=work.attempt, first=first, tokens=numbers, finish=finish)


def whole_answer(worker: FakeWorker, identity: bytes, work: Work) -> None:
    """prefill: report and the first token; decode: the others, one message each; both: all."""
    prompt = len(work.token_ids) // 4
    last = work.sampling.max_tokens
    first = work.generated
    if work.part != "decode":
        cached = prompt // 16 * 16
        report = PrefillReport(
            request=work.request, attempt=work.attempt, cached=cached, computed=prompt % 16, tiers={"ssd": cached}
        )
        ends = first + 1 == last
        worker.send(identity, report, tokens(work, first, 1, FinishReason.LENGTH if ends else None))
        first += 1
    if work.part != "prefill":
        first = work.generated + 1
        for index in range(first, last):
            worker.send(identity, tokens(work, index, 1, FinishReason.LENGTH if index + 1 == last else None))


def silent(worker: FakeWorker, identity: bytes, work: Work) -> None:
    """Takes the work and says nothing."""


def failing(kind: str) -> Callable[[FakeWorker, bytes, Work], None]:
    def script(worker: FakeWorker, identity: bytes, work: Work) -> None:
        failed = Failed(
            request=work.request, attempt=work.attempt, worker=worker.name, kind=kind, reason=f"scripted {kind}"
        )
        worker.send(identity, failed)

    return script


class FakeConductor(Router):
    """Plans onto the first prefill and decode worker that is not excluded; `reject` answers instead if set."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, workers: list[FakeWorker]) -> None:
        super().__init__(context, endpoint, Codec(GatewayToConductor))
        self.workers = workers
        self.routes: list[Route] = []
        self.ended: list[RouteEnded] = []
        self.reject: Callable[[Route], Rejection | None] = lambda route: None
        self.ended_one = asyncio.Event()

    def announce(self) -> None:
        """Tells all gateways the state of the cluster."""
        state = ClusterState(
            workers=tuple(worker.info for worker in self.workers), counters={'pyengine_pool_blocks{node="node-0"}': 3.0}
        )
        for identity in self.peers:
            self.send(identity, state)

    def on(self, identity: bytes, message: Any) -> None:
        if isinstance(message, GatewayHello | GatewayAlive):
            self.announce()
        elif isinstance(message, RouteEnded):
            self.ended.append(message)
            self.ended_one.set()
        elif isinstance(message, Route):
            self.routes.append(message)
            self.send(identity, self.answer(message))

    def answer(self, route: Route) -> Planned | Rejected:
        if (rejection := self.reject(route)) is not None:
            return Rejected(rejection=rejection)

        def pick(able: Callable[[Role], bool]) -> FakeWorker | None:
            fit = [worker for worker in self.workers if able(worker.role)]
            return next((worker for worker in fit if worker.name not in route.exclude), fit[0] if fit else None)

        prefill, decode = pick(lambda role: role.prefills), pick(lambda role: role.decodes)
        if prefill is None or decode is None:
            reason = "no worker"
            return Rejected(
                rejection=Rejection(request=route.request, attempt=route.attempt, reason=reason, retry_after=1.0)
            )
        if prefill.role is Role.BOTH:
            decode = prefill
        return Planned(plan=Plan(request=route.request, attempt=route.attempt, prefill=prefill.ref, decode=decode.ref))


class Cluster:
    """Everything around one gateway, and the gateway itself behind a real HTTP server."""

    def __init__(
        self, folder: Path, context: zmq.Context[Any], listener: socket.socket, patience: float, **settings: Any
    ) -> None:
        self.folder = folder
        self.context = context
        self.conductor_endpoint = f"ipc://{folder}/conductor"
        self.workers: dict[str, FakeWorker] = {}
        self.conductor = FakeConductor(context, self.conductor_endpoint, [])
        self.config = GatewayConfig(
            conductor=self.conductor_endpoint,
            secret_file="",
            patience=patience,
            slo_ttft=7.0,
            slo_class=(SloClass(name="batch", deadline=600.0),),
            **settings,
        )
        self.service = Service(self.config, SESSION_KEY, HashKeys())
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def add(self, name: str, role: Role, incarnation: int = 1) -> FakeWorker:
        worker = self.workers[name] = FakeWorker(self.context, self.folder, name, role, incarnation)
        self.conductor.workers.append(worker)
        return worker

    def kill(self, name: str, known: bool = True) -> None:
        """The worker's socket is gone at once. known: the conductor knows it, too."""
        worker = self.workers.pop(name)
        worker.close()
        if known:
            self.conductor.workers.remove(worker)
            self.conductor.announce()

    def joined(self, workers: int) -> bool:
        """The gateway has a link to so many workers: what a test allows for waiting is not spent on their first."""
        ready = all(self.service.is_read(name) for name in self.service.models)
        return ready and sum(link.up for link in self.service._workers.values()) >= workers

    def restart_conductor(self) -> FakeConductor:
        self.conductor = FakeConductor(self.context, self.conductor_endpoint, self.conductor.workers)
        return self.conductor


@asynccontextmanager
async def cluster(
    folder: Path,
    *roles: Role,
    patience: float = 5.0,
    door: Door | None = None,
    address: str = "127.0.0.1",
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """A served gateway with one worker per role, named "prefill-0" and so on.

    door: who is let in; all, without one. address: where it listens. settings: fields of GatewayConfig.
    """
    folder.chmod(0o700)
    context: zmq.Context[Any] = zmq.Context()
    with listen(address, 0) as listener:
        made = Cluster(folder, context, listener, patience, **settings)
        for index, role in enumerate(roles):
            count = sum(1 for earlier in roles[:index] if earlier is role)
            made.add(f"{role.value}-{count}", role)
        server = uvicorn.Server(http_config(create_app(made.service, door), made.config))
        serving = asyncio.create_task(server._serve([listener]))
        try:
            while not server.started or not made.joined(len(roles)):
                await asyncio.sleep(0.005)
            yield made
        finally:
            server.should_exit = True
            await serving
            for router in [*made.workers.values(), made.conductor]:
                router.close()
            context.term()
