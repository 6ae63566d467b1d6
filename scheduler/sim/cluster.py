"""A simulated cluster: the production conductor, and around it modelled workers, daemons, links and clients.

    clients ──Route──> Conductor.on(event, now) ──> actions ──> gateway, daemons, workers ──> events ──> ...

Every message takes `ClusterSpec.message_delay`. Heartbeats come as in a live cluster, each worker and daemon at its own
moment.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from pyengine._native import Inflight

from ..conductor import Conductor
from ..events import (
    DaemonGone,
    DaemonHello,
    Event,
    FromGateway,
    FromWorker,
    OrderDump,
    OrderForget,
    OrderReplicate,
    Replicated,
    SendToGateway,
    SendToWorker,
    TellMoved,
    Tick,
    WorkerLost,
)
from ..messages import (
    HEARTBEAT_EVERY,
    GatewayAlive,
    GatewayHello,
    PagesChanged,
    Planned,
    Rejected,
    Route,
    RouteEnded,
    SetRole,
    WorkerHello,
)
from ..native_index import NativeIndex
from ..policies import find_admission
from ..types import (
    KEY_BYTES,
    KvGroup,
    KvSpec,
    Namespace,
    Role,
    Source,
    WorkerInfo,
    WorkerRef,
)
from .compute import StepTime
from .engine import Loop
from .gateway import RequestModel
from .jobs import EOS, ROOT, own_key
from .links import Links
from .measure import Measure
from .node import NodeModel, Place
from .report import UNFINISHED, Report
from .spec import ClusterSpec, Failure, RunSpec
from .trace import Request, TraceError
from .worker import WorkerModel

#: Seconds between ticks, as the conductor's shell sends them.
TICK_EVERY = 0.25
#: Seconds without progress of those under way after which a run is given up: somebody waits for what never comes.
STALL = 3600.0
#: Seconds that a trace may last. Hearts beat in the longest silence too: a year takes hours, times in a wrong unit for
#: ever.
LONGEST = 366 * 86_400.0
#: Seconds that a run goes on after its last request, so that everybody lets go of it.
REST = 2.0
#: Tokens that clients allow an answer to have, unless it has more: traces do not say.
LIMIT = 4096
#: Of the model, unless the trace has more.
POSITIONS = 131_072
GATEWAY = "gateway"
MODEL = "model"


class Simulation:
    """One run. After `run`, everything can be looked at, and `check` says whether anything is held for nobody.

    Raises TraceError for a trace that lasts longer than can be simulated.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        spec: ClusterSpec,
        run: RunSpec,
        *,
        progress: Callable[[float, int, int], None] | None = None,
    ) -> None:
        self.spec, self.run_spec = spec, run
        self.progress = progress
        self.loop = Loop()
        self.delay = spec.message_delay
        self.replicated = self.sent = self.switches = 0
        self.block_tokens = spec.block_tokens
        self.block_bytes = spec.block_tokens * spec.kv_bytes
        self.model = MODEL
        self.namespace = _namespace(spec)
        self.namespace_digest = self.namespace.digest()
        self.links = Links(spec.node.link_rate, spec.node.link_delay, spec.fabric_rate)
        self.conductor = Conductor(
            policy=run.policy,
            admission=run.admission,
            roles="auto" if run.roles else "fixed",
            seed=run.seed,
            index=NativeIndex(),
            inflight=Inflight(),
        )
        self._looks_twice = hasattr(find_admission(run.admission), "prefilled")
        self.nodes: dict[str, NodeModel] = {}
        self.workers: dict[str, WorkerModel] = {}
        self.requests = [RequestModel(self, number, request) for number, request in enumerate(requests)]
        if self.requests and self.requests[-1].request.arrival > LONGEST:
            raise TraceError(
                f"the trace lasts {self.requests[-1].request.arrival:.4g} s, and a year at most can be simulated:"
                " are its times in the unit of its format?"
            )
        self.open = len(self.requests)
        self._under_way = 0
        self.complete = self.interrupted = False
        self.notes: list[str] = []
        #: Requests refused because the policy failed, by what it did.
        self.failed_decisions: Counter[str] = Counter()
        self._tags = 0
        self._flows: dict[int, tuple[Callable[[bool], None], NodeModel, NodeModel]] = {}
        self._links_due = float("inf")
        self._progressed = 0.0
        self._build()
        self.measure = Measure(self)

    # -- building --------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        longest = max(
            (model.request.prompt_tokens + self.limit_of(model.request) for model in self.requests), default=0
        )
        positions = max(POSITIONS, longest + 1)
        for spec in self.spec.workers:
            time = StepTime.load(spec.model)
            for _ in range(spec.count):
                number = len(self.workers)
                node = NodeModel(self, f"n{number:04}", number, spec.stages, time)
                name = f"{spec.role.value}{number:04}"
                info = WorkerInfo(
                    worker=name,
                    incarnation=1,
                    role=spec.role,
                    node=node.node,
                    work=f"sim://{name}",
                    model=MODEL,
                    tokenizer="none",
                    namespace=self.namespace,
                    vocab_size=EOS + 1,
                    max_positions=positions,
                    pages=spec.pages * spec.stages,
                    pool_slots=node.dram,
                    max_tokens_per_step=spec.max_tokens_per_step,
                    max_sequences=spec.max_sequences,
                    pinned=not self.run_spec.roles,
                )
                self.nodes[node.name] = node
                self.workers[name] = WorkerModel(self, info, number, node, time, spec)

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until every request has its outcome. An interrupt ends it early: `complete` tells."""
        self._dial_in()
        for request in self.requests:
            self.loop.at(request.request.arrival, self._arrive, request)
        for failure in self.run_spec.failures:
            self.loop.at(failure.at, self._fail, failure)
        try:
            with _rare_collections():
                self.loop.run(self._over)
                self.complete = not self.open
                if self.complete:
                    until = self.loop.now + REST
                    self.loop.run(lambda: self.loop.now >= until)
        except KeyboardInterrupt:
            self.interrupted = True
            self.notes.append(f"interrupted at {self.loop.now:.0f} s of the trace")

    def _over(self) -> bool:
        if self._under_way and self.loop.now - self._progressed > STALL:
            self.notes.append(
                f"given up at {self.loop.now:.0f} s: {self._under_way} requests wait for what never comes"
            )
            return True
        return not self.open

    def _dial_in(self) -> None:
        self.conduct(FromGateway(GATEWAY, GatewayHello(gateway=GATEWAY, incarnation=1)))
        count = max(len(self.workers), 1)
        for worker in self.workers.values():
            self.conduct(DaemonHello(worker.node.node, 0))
            self.conduct(FromWorker(WorkerHello(info=worker.info)))
            self.tell_pages(worker, b"", first=True)
            # Before clients come, workers have said what their steps cost.
            self._say(worker)
            phase = HEARTBEAT_EVERY * (worker.number + 1) / (count + 1)
            self.loop.after(phase, self._beat, worker)
        self.conduct(Tick())
        self.loop.after(TICK_EVERY, self._tick)
        self.loop.after(0.0, self._gateway_beat)

    def _beat(self, worker: WorkerModel) -> None:
        """A worker's heart, and its daemon's."""
        self._say(worker)
        self.loop.after(HEARTBEAT_EVERY, self._beat, worker)

    def _say(self, worker: WorkerModel) -> None:
        node = worker.node
        if node.up:
            for event in node.changes():
                self.conduct(event)
            self.conduct(node.heartbeat())
        if worker.alive:
            for message in worker.heartbeat():
                self.conduct(FromWorker(message))

    def _gateway_beat(self) -> None:
        self.conduct(FromGateway(GATEWAY, GatewayAlive(gateway=GATEWAY)))
        self.loop.after(HEARTBEAT_EVERY, self._gateway_beat)

    def _tick(self) -> None:
        self.conduct(Tick())
        self.loop.after(TICK_EVERY, self._tick)

    def _arrive(self, request: RequestModel) -> None:
        self._progressed = self.loop.now
        self._under_way += 1
        if self.spec.slo.deadline is not None:
            self.loop.after(self.spec.slo.deadline, request.late)
        request.start()

    def over(self, request: RequestModel) -> None:
        """The request has its outcome."""
        assert request.outcome != UNFINISHED
        self.open -= 1
        self._under_way -= 1
        self._progressed = self.loop.now
        self.measure.over(request)

    # -- the conductor ---------------------------------------------------------------------------------------------

    def conduct(self, event: Event) -> None:
        """What has reached the conductor, and what it has done about it."""
        for action in self.conductor.on(event, self.loop.now):
            match action:
                case SendToGateway(_, message):
                    if isinstance(message, Planned):
                        self.loop.after(self.delay, self.requests[message.plan.request].on_answer, message)
                    elif isinstance(message, Rejected):
                        self.loop.after(self.delay, self.requests[message.rejection.request].on_answer, message)
                case SendToWorker(worker, SetRole(role=role)):
                    self.loop.after(self.delay, self.workers[worker].set_role, role)
                case OrderReplicate():
                    self.loop.after(self.delay, self._replicate, action)
                case OrderForget(node, keys):
                    self.loop.after(self.delay, self.nodes[node].forget, keys)
                case OrderDump(node):
                    self.loop.after(self.delay, self._dump, node)
                case TellMoved(node, _, left):
                    self.loop.after(self.delay, self._moved, node, left)
                case _:
                    pass  # OrderMembers, OrderClear: nobody shares objects or clears here

    def turned_away(self, request: int) -> bool:
        """Whether a request is refused after all, now that its prompt is computed: only models of others look twice."""
        if not self._looks_twice:
            return False
        now, conductor = self.loop.now, self.conductor
        view = conductor.cluster.view(self.model, self.namespace_digest, conductor.router.plans, now)
        return view is not None and conductor.outlook.prefilled((GATEWAY, request), view, now) is not None

    def ask(self, route: Route) -> None:
        self.loop.after(self.delay, self.conduct, FromGateway(GATEWAY, route))

    def tell(self, message: RouteEnded) -> None:
        self.loop.after(self.delay, self.conduct, FromGateway(GATEWAY, message))

    def hello(self, worker: WorkerModel, role: Role) -> None:
        """A worker says who it is, anew."""
        self.switches += role is not worker.info.role
        worker.info = msgspec.structs.replace(worker.info, role=role, node=worker.node.node)
        self.loop.after(self.delay, self.conduct, FromWorker(WorkerHello(info=worker.info)))
        self.loop.after(self.delay, self.tell_pages, worker, worker.batcher.pool.take_all(), True)

    def tell_pages(self, worker: WorkerModel, changes: bytes, first: bool) -> None:
        self.conduct(FromWorker(PagesChanged(worker=worker.name, changes=changes, first=first)))

    def _dump(self, name: str) -> None:
        raise AssertionError(f"the conductor has lost track of {name}, which has told it everything")

    def _replicate(self, order: OrderReplicate) -> None:
        node = self.nodes[order.node]
        if not node.up:
            return
        count = len(order.keys) // KEY_BYTES
        source = (Source(order.source, 0, count),)

        def brought(tiers: dict[int, int]) -> None:
            stored = len(tiers)
            self.replicated += stored
            missing = count - node.leading(order.keys)[0]
            node.report()
            self.loop.after(self.delay, self.conduct, Replicated(node.node, order.order, stored, missing))

        node.bring(order.keys, source, brought, Place(order.position, order.parent if order.position else None))

    # -- transfers -------------------------------------------------------------------------------------------------

    def send(self, source: NodeModel, to: NodeModel, size: int, then: Callable[[bool], None]) -> int:
        """Bytes flow from node to node. then: told whether all came, or one of the two has gone."""
        self.sent += size
        flow = self.links.start(self.loop.now, source.name, to.name, size)
        self._flows[flow] = (then, source, to)
        self._mind_links()
        return flow

    def stop_sending(self, flow: int) -> None:
        """Nobody wants it any more; nobody is told."""
        if self._flows.pop(flow, None) is not None:
            self.links.cancel(self.loop.now, flow)
            self._mind_links()

    def _mind_links(self) -> None:
        due = self.links.next()
        if due < self._links_due:
            self._links_due = due
            self.loop.at(due, self._flowed, due)

    def _flowed(self, due: float) -> None:
        if due != self._links_due:
            return
        self._links_due = float("inf")
        for flow in self.links.advance(self.loop.now):
            then, _, _ = self._flows.pop(flow)
            then(True)
        self._mind_links()

    # -- failures --------------------------------------------------------------------------------------------------

    def _fail(self, failure: Failure) -> None:
        node = self.nodes[failure.node] if failure.node is not None else None
        if node is None or failure.drains <= 0.0:
            self._die(failure)
        elif node.up and node.draining is None:
            node.draining = failure
            self.conduct(node.heartbeat())
            self.loop.after(failure.drains, self._stop, node, failure)

    def _moved(self, name: str, left: int) -> None:
        """How far the node's drain is, says the conductor, which it does after each of its heartbeats."""
        node = self.nodes[name]
        busy = any(worker.jobs for worker in self.workers.values() if worker.node is node)
        if node.draining is not None and not left and node.idle and not busy:
            self._stop(node, node.draining)

    def _stop(self, node: NodeModel, failure: Failure) -> None:
        """Its drain is over, or its time."""
        if node.draining is failure:
            node.draining = None
            self._die(failure)

    def _die(self, failure: Failure) -> None:
        names = [failure.worker] if failure.worker is not None else []
        if failure.node is not None:
            names += [worker.name for worker in self.workers.values() if worker.node.name == failure.node]
        for name in names:
            self._worker_dies(self.workers[name])
        if failure.node is not None:
            self._node_dies(self.nodes[failure.node])
        if failure.seconds is not None:
            self.loop.after(failure.seconds, self._back, names, failure.node)

    def _worker_dies(self, worker: WorkerModel) -> None:
        if not worker.alive:
            return
        worker.fail()
        self.loop.after(self.delay, self.conduct, WorkerLost(worker.name))
        for request in self.requests:
            plan = request.plan
            if plan is not None and worker.name in (plan.prefill.worker, plan.decode.worker):
                self.loop.after(self.delay, request.on_lost, worker.name, request.attempt)

    def _node_dies(self, node: NodeModel) -> None:
        if not node.up:
            return
        node.fail()
        for flow, (then, source, to) in list(self._flows.items()):
            if node in (source, to):
                self.stop_sending(flow)
                self.loop.after(self.delay, then, False)
        self.loop.after(self.delay, self.conduct, DaemonGone(node.node))

    def _back(self, workers: Sequence[str], node: str | None) -> None:
        if node is not None and not self.nodes[node].up:
            self.nodes[node].revive()
            self.conduct(DaemonHello(self.nodes[node].node, 0))
        for name in workers:
            worker = self.workers[name]
            if not worker.alive and worker.node.up:
                info = worker.info
                worker.revive(msgspec.structs.replace(info, incarnation=info.incarnation + 1, node=worker.node.node))
                self.hello(worker, info.role)

    def reachable(self, worker: WorkerRef) -> bool:
        model = self.workers[worker.worker]
        return model.alive and model.info.incarnation == worker.incarnation

    @property
    def servable(self) -> bool:
        """Workers for every part are alive."""
        roles = [worker.role for worker in self.workers.values() if worker.alive]
        return any(role.prefills for role in roles) and any(role.decodes for role in roles)

    # -- what requests are made of ---------------------------------------------------------------------------------

    def number_of(self, worker: str) -> int:
        """As reports number workers; -1: nobody."""
        return self.workers[worker].number if worker else -1

    def tag(self) -> int:
        """A fresh one."""
        self._tags += 1
        return self._tags

    def limit_of(self, request: Request) -> int:
        """Tokens that the client allows: by default a power of two that tells nobody how many there will be."""
        if self.run_spec.exact_limits:
            return request.output_tokens
        return LIMIT if request.output_tokens <= LIMIT else 1 << request.output_tokens.bit_length()

    def keys_of(self, model: RequestModel, length: int) -> bytes:
        """Of the full blocks of its prompt and of what was generated behind it, which nobody else has."""
        keys = list(model.request.blocks)
        while len(keys) < length // self.block_tokens:
            keys.append(own_key(keys[-1] if keys else ROOT, model.number))
        return b"".join(keys)

    def check(self) -> None:
        """Raises AssertionError if a part contradicts itself or the others, or holds something for nobody."""
        self.conductor.check()
        self.links.check()
        for worker in self.workers.values():
            worker.check()
        if self.complete:
            assert not self._flows, "something is on its way for nobody"
            for node in self.nodes.values():
                if node.up:
                    node.check()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Python looks for unreachable cycles whenever so many objects were made: here are few, and many objects that stay.
    It took a seventh of a run.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _namespace(spec: ClusterSpec) -> Namespace:
    """One whose blocks are as large as the cluster's."""
    heads, rest = divmod(spec.kv_bytes, spec.layers * 2 * 2)
    group = KvGroup(spec.layers, 1, heads, "bfloat16") if not rest else KvGroup(1, 1, spec.kv_bytes // 4, "bfloat16")
    return Namespace("simulated", "simulated", "bfloat16", "none", KvSpec((group,), spec.block_tokens))


def simulate(
    requests: Iterable[Request],
    cluster: ClusterSpec,
    run: RunSpec,
    *,
    description: str,
    progress: Callable[[float, int, int], None] | None = None,
) -> Report:
    """Runs a trace through a cluster and reports what came of it.

    requests: in the order of their arrival. description: which trace it is and what was done to it. progress: told the
    seconds of the trace that have passed, and how many of how many requests have their outcome.
    """
    simulation = Simulation(requests, cluster, run, progress=progress)
    simulation.run()
    return simulation.measure.report(description)


__all__ = ["Simulation", "simulate"]
