"""The global scheduler as a pure state machine: events and the time go in, actions come out.

It holds no prompts, and no request that cannot go on without it: after a restart everybody dials in again, daemons dump
what they hold, and plans are made as before. Same events, same times, same seed: same actions.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from .candidates import Refused, candidates
from .clearing import Clearings
from .cluster import Assigned, Cluster, Ints, View
from .cost import F64, LINK_DELAY, LinkCost
from .draining import Drains
from .events import (
    Action,
    BlockDump,
    BlocksChanged,
    Cleared,
    DaemonGone,
    DaemonHeartbeat,
    DaemonHello,
    DaemonReport,
    Event,
    FromGateway,
    FromWorker,
    GatewayLost,
    OrderDump,
    OrderMembers,
    OrderReplicate,
    Replicated,
    SendToGateway,
    TellMoved,
    Tick,
    WorkerLost,
)
from .feed import Feed
from .messages import (
    DEAD_AFTER,
    Clear,
    ClusterState,
    GatewayAlive,
    GatewayHello,
    PagesChanged,
    Planned,
    Rejected,
    Route,
    RouteEnded,
    WorkerAlive,
    WorkerHello,
    WorkerLeaving,
    WorkerToConductor,
)
from .policies import Ask, find_admission, find_policy
from .policies.base import ttft
from .prefix_index import Index, Match, PrefixIndex, Run
from .replication import Copy, Replicator
from .spreading import spread
from .types import (
    KEY_BYTES,
    Medium,
    Plan,
    Rejection,
    Source,
    WorkerInfo,
    WorkerRef,
    cacheable_blocks,
)

#: Gateways get counters this often (seconds), and the workers whenever they change.
STATE_EVERY = 1.0
#: Daemons are told who shares objects when nobody has come or gone for so long (seconds).
MEMBERS_AFTER = 1.0
#: Requests whose load is accounted for at once; beyond, the oldest is forgotten, as if it had ended.
MAX_ROUTES = 100_000
#: The parent of a prefix's first block in a replication order.
NO_PARENT = bytes(KEY_BYTES)


@dataclass(slots=True)
class _Gateway:
    incarnation: int
    heard: float


@dataclass(frozen=True, slots=True)
class _Route:
    attempt: int
    prefill: str
    decode: str


class Conductor:
    """See the module. policy, admission: names; unknown ones raise UnknownName. seed: of what policies draw.

    first_order: number of the first order to a daemon. One that outlives a conductor still answers its orders, and
    such an answer is not to be taken for one to this conductor's: so it is higher than any that was given before.
    index: empty; what nodes hold. None: the plain one, which is slow.
    """

    def __init__(
        self,
        *,
        policy: str = "kvcache-centric",
        admission: str = "none",
        seed: int = 0,
        first_order: int = 1,
        index: Index | None = None,
    ) -> None:
        self.policy_name = policy
        self.policy = find_policy(policy)
        self.admission = find_admission(admission)
        self.cluster = Cluster()
        self.index: Index = PrefixIndex() if index is None else index
        self.feed = Feed(self.index)
        self.links = LinkCost()
        self.replicator = Replicator(self.index, first_order)
        self.draining = Drains(self.index, self.replicator)
        self.clearings = Clearings(first_order)
        self._random = random.Random(seed)
        self._gateways: dict[str, _Gateway] = {}
        self._routes: OrderedDict[tuple[str, int], _Route] = OrderedDict()
        self._plans = 0
        self._rejections: dict[str, int] = {}
        self._replicated = 0
        self._moved = 0
        self._state_sent = float("-inf")
        self._members_changed: float | None = None

    def on(self, event: Event, now: float) -> list[Action]:
        """What is to be done about it. now: seconds on any clock that never runs backwards."""
        match event:
            case FromGateway():
                return self._on_gateway(event, now)
            case FromWorker():
                return self._on_worker(event.message, now)
            case WorkerLost(worker):
                return self._state(now) if self.cluster.lost(worker) else []
            case GatewayLost(gateway):
                self._forget_gateway(gateway)
                return []
            case Tick():
                return self._tick(now)
            case _:
                return self._on_daemon(event, now)

    # -- gateways --------------------------------------------------------------------------------------------------

    def _on_gateway(self, event: FromGateway, now: float) -> list[Action]:
        name, message = event.gateway, event.message
        if isinstance(message, GatewayHello):
            known = self._gateways.get(name)
            if known is not None and known.incarnation != message.incarnation:
                self._forget_gateway(name)
            self._gateways[name] = _Gateway(message.incarnation, now)
            return [SendToGateway(name, self._cluster_state())]
        gateway = self._gateways.get(name)
        if gateway is None:
            return []  # its hello is under way: it says so on every new link
        gateway.heard = now
        match message:
            case GatewayAlive():
                return []
            case RouteEnded():
                route = self._routes.get((name, message.request))
                if route is not None and route.attempt == message.attempt:
                    self._end(name, message.request)
                return []
            case Route():
                return self._on_route(name, message, now)
            case Clear():
                return self.clearings.begin(name, message, self.cluster.daemons, now)

    def _forget_gateway(self, name: str) -> None:
        self._gateways.pop(name, None)
        self.clearings.forget(name)
        for gateway, request in [key for key in self._routes if key[0] == name]:
            self._end(gateway, request)

    def _end(self, gateway: str, request: int) -> None:
        route = self._routes.pop((gateway, request), None)
        if route is not None:
            for worker in (route.prefill, route.decode):
                self.cluster.unassign(worker, (gateway, request))

    def _state(self, now: float) -> list[Action]:
        self._state_sent = now
        state = self._cluster_state()
        return [SendToGateway(gateway, state) for gateway in sorted(self._gateways)]

    def _cluster_state(self) -> ClusterState:
        return ClusterState(workers=tuple(self.cluster.live()), counters=self.counters())

    def counters(self) -> dict[str, float]:
        """Of the whole cluster, by Prometheus sample name: what workers and daemons report, and the conductor's own."""
        counters = self.cluster.counters()
        counters[f'pyengine_conductor_plans_total{{policy="{self.policy_name}"}}'] = self._plans
        counters["pyengine_conductor_replicated_blocks_total"] = self._replicated
        counters["pyengine_conductor_moved_blocks_total"] = self._moved
        for kind, count in sorted(self._rejections.items()):
            counters[f'pyengine_conductor_rejections_total{{reason="{kind}"}}'] = count
        for cause, count in self.feed.dumps.items():
            counters[f'pyengine_conductor_dumps_total{{cause="{cause}"}}'] = count
        for name, daemon in self.cluster.daemons.items():
            if daemon.up:
                counters[f'pyengine_index_blocks{{node="{name}"}}'] = self.index.count(name)
        return counters

    # -- workers and time ------------------------------------------------------------------------------------------

    def _on_worker(self, message: WorkerToConductor, now: float) -> list[Action]:
        match message:
            case WorkerHello():
                changed = self.cluster.hello(message.info, now)
            case PagesChanged():
                return []
            case WorkerAlive():
                changed = False
                if self.cluster.heartbeat(message, now):
                    self._observe_loads(message)
            case WorkerLeaving():
                changed = self.cluster.lost(message.worker)
        return self._state(now) if changed else []

    def _observe_loads(self, message: WorkerAlive) -> None:
        to = self.cluster.workers[message.worker].info.node.node
        for load in message.loads:
            if load.source in self.cluster.daemons:
                self.links.observe(load.source, to, load.size, load.seconds)

    def _tick(self, now: float) -> list[Action]:
        lost = [name for name in self.cluster.silent(now) if self.cluster.lost(name)]
        silent = [name for name, gateway in self._gateways.items() if now - gateway.heard > DEAD_AFTER]
        for name in silent:
            self._forget_gateway(name)
        actions = self.clearings.tick(now)
        if self._members_changed is not None and now - self._members_changed >= MEMBERS_AFTER:
            self._members_changed = None
            actions += self._members()
        return actions + (self._state(now) if lost or now - self._state_sent >= STATE_EVERY else [])

    # -- daemons ---------------------------------------------------------------------------------------------------

    def _on_daemon(
        self,
        report: DaemonReport,
        now: float,
    ) -> list[Action]:
        node = report.node.node
        daemon = self.cluster.daemons.get(node)
        if isinstance(report, DaemonHello):
            if daemon is not None and daemon.node.incarnation != report.node.incarnation:
                self.draining.end(node)
            # It may not have got what was ordered on an earlier session.
            late = self.clearings.on_gone(node)
            self.cluster.daemon(report.node)
            self._members_changed = now
            return [*late, OrderDump(node)] if self.feed.on_hello(report, now) else late
        if daemon is None or daemon.node.incarnation != report.node.incarnation:
            return []
        order, actions = False, list[Action]()
        match report:
            case BlocksChanged():
                order = self.feed.on_changes(report, now)
            case BlockDump():
                self.feed.on_dump(report, now)
            case DaemonHeartbeat():
                daemon.counters = dict(report.counters)
                order = self.feed.on_heartbeat(report, now)
                actions = self._drain(report, now)
            case Replicated():
                actions = self._on_replicated(report, now)
            case Cleared():
                return self.clearings.on_cleared(report)
            case DaemonGone():
                self.cluster.daemon_lost(node)
                self.feed.on_gone(node)
                self.links.forget(node)
                self.replicator.lost(node)
                self.draining.end(node)
                moved = [action for name in self.draining.lost(node) for action in self._move_on(name, now)]
                self._members_changed = now
                actions = [*self.clearings.on_gone(node), *moved]
        return [*actions, OrderDump(node)] if order else actions

    def _members(self) -> list[Action]:
        """The set of daemons is another one: all that are up are told, and find each other's objects.

        Not before it has been the same for a while: a conductor that starts would tell each of a thousand daemons a
        thousand times, and first of all that nobody else is there.
        """
        daemons = self.cluster.daemons
        up = tuple(daemons[name].node for name in sorted(daemons) if daemons[name].up)
        return [OrderMembers(node.node, up) for node in up]

    def _on_replicated(self, report: Replicated, now: float) -> list[Action]:
        drained = self.draining.done(report.order, report.stored, report.missing)
        if drained is not None:
            self._moved += report.stored
            return self._move_on(drained, now)
        self._replicated += report.stored
        done = self.replicator.done(report.order, now)
        if done is not None:
            copy, seconds = done
            self.links.observe(copy.source, copy.to, report.stored * self._block_bytes(copy.to), seconds)
        return []

    def _drain(self, report: DaemonHeartbeat, now: float) -> list[Action]:
        """The node's daemon says whether it drains."""
        node, daemons = report.node.node, self.cluster.daemons
        actions: list[Action] = []
        if self.cluster.drains(node, report.draining):
            if report.draining:
                actions = [action for name in self.draining.lost(node) for action in self._move_on(name, now)]
            else:
                self.draining.end(node)
        if not report.draining:
            return actions
        if not self.feed.synced(node) or any(daemon.takes and not daemon.counters for daemon in daemons.values()):
            # What it holds is not known yet, or what room others have: it is to wait.
            return [*actions, TellMoved(node, 0, 1)]
        self.draining.begin(node, daemons, now)
        return [*actions, *self._move_on(node, now)]

    def _move_on(self, node: str, now: float) -> list[Action]:
        """Orders what is next of a node's drain, and tells its daemon how far it is."""
        moves = self.draining.moves(node, now)
        actions: list[Action] = [self._order(move.copy, move.keys, move.parent, now) for move in moves]
        progress = self.draining.progress(node)
        if progress is not None:
            actions.append(TellMoved(node, *progress))
        return actions

    def _order(self, copy: Copy, keys: list[bytes], parent: bytes, now: float) -> OrderReplicate:
        self.links.order(copy.source, copy.to, len(keys) * self._block_bytes(copy.source), now)
        source = self.cluster.daemons[copy.source].node
        return OrderReplicate(copy.to, copy.order, b"".join(keys), parent, copy.first, source)

    def _block_bytes(self, node: str) -> int:
        for worker in self.cluster.workers.values():
            if worker.info.node.node == node:
                return worker.info.namespace.kv.block_bytes
        return 0

    # -- routing ---------------------------------------------------------------------------------------------------

    def _on_route(self, gateway: str, route: Route, now: float) -> list[Action]:
        known = self._routes.get((gateway, route.request))
        if known is not None:
            if route.attempt < known.attempt:
                return []
            self._end(gateway, route.request)
        try:
            return self._plan(gateway, route, now)
        except Refused as refused:
            self._rejections[refused.kind] = self._rejections.get(refused.kind, 0) + 1
            rejection = Rejection(
                request=route.request,
                attempt=route.attempt,
                reason=refused.reason,
                retry_after=refused.retry_after,
                kind=refused.kind,
            )
            return [SendToGateway(gateway, Rejected(rejection=rejection))]

    def _plan(self, gateway: str, route: Route, now: float) -> list[Action]:
        view = candidates(self.cluster, route, self._plans)
        blocks = min(len(route.keys) // KEY_BYTES, cacheable_blocks(route.prompt_tokens, view.block_tokens))
        keys = route.keys[: blocks * KEY_BYTES]
        match = self.index.match(keys)
        slots = self.index.slots(view.nodes)
        prefix = match.held[slots][view.node]
        ssd = match.ssd[slots]
        load_by_node = np.zeros(len(view.nodes))
        for row in np.flatnonzero(ssd):
            node = view.nodes[row]
            load_by_node[row] = ssd[row] * view.block_bytes / self.links.rate(node, node)
        transfer = self._transfer_seconds(view, match, prefix, now)
        ask = Ask(
            route.prompt_tokens,
            prefix,
            match.best,
            load_by_node[view.node],
            transfer,
            route.slo,
            device=np.zeros(len(view.workers), dtype=np.int64),
            ssd=ssd[view.node],
            output_tokens=float(route.max_tokens),
            tenant=route.tenant,
            priority=route.priority,
        )
        choice = self.policy(view, ask, self._random)
        seconds = float(ttft(view, ask, np.full(len(view.workers), choice.fetch))[choice.prefill])
        gap = float(view.tbt[choice.decode])
        refusal = self.admission(view, ask, choice, seconds, gap)
        if refusal is not None:
            raise Refused("slo", refusal.reason, refusal.retry_after)

        prefill, decode = view.workers[choice.prefill], view.workers[choice.decode]
        here, node = int(prefix[choice.prefill]), prefill.node.node
        fetched = self._fetched(keys, here, node, view.block_bytes, now) if choice.fetch else []
        cached = max((run.last for run in fetched), default=here)
        sources = [*self.index.only_on_ssd(keys[: here * KEY_BYTES], node), *fetched]
        plan = Plan(
            request=route.request,
            attempt=route.attempt,
            prefill=_reference(prefill),
            decode=_reference(decode),
            sources=tuple(
                Source(self.cluster.daemons[run.node].node, run.first, run.last, run.medium) for run in sources
            ),
            cached_blocks=cached,
            predicted_ttft=seconds,
            predicted_tbt=gap,
            why=f"{self.policy_name}: {here} blocks at {node}, {ask.ssd[choice.prefill]} of them on its SSD only,"
            f" {cached - here} to fetch",
        )
        tokens = route.prompt_tokens - cached * view.block_tokens
        self._account(gateway, plan, tokens, view.block_bytes, now)
        return [SendToGateway(gateway, Planned(plan=plan)), *self._replicate(view, keys[: match.best * KEY_BYTES], now)]

    def _transfer_seconds(self, view: View, match: Match, prefix: Ints, now: float) -> F64:
        """[W] to fetch what somebody holds beyond each worker's own prefix, from whoever holds most."""
        if not match.best:
            return np.zeros(len(view.workers))
        # Which node it is does not depend on slots: they tell who came first.
        most = np.flatnonzero(match.held == match.held.max())
        most = most[match.ssd[most] == match.ssd[most].min()]
        source, loaded = max((self.index.name(slot), int(match.ssd[slot])) for slot in most.tolist())
        rate = self.links.rates(source, view.nodes)[view.node]
        blocks = match.best - prefix
        size = blocks * view.block_bytes
        # Which of its blocks are on SSD is not asked: those that are fetched, at worst.
        read = np.minimum(blocks, loaded) * view.block_bytes / self.links.rate(source, source)
        return np.where(size > 0, self.links.queue(source, now) + LINK_DELAY + size / rate + read, 0.0)

    def _fetched(self, keys: bytes, first: int, to: str, block_bytes: int, now: float) -> list[Run]:
        """Who has what `to` lacks from block `first` on, each for a part; behind them who else has it, should they
        fail.
        """
        runs: list[Run] = []
        others: list[Run] = []
        for run in self.index.runs(keys, first, {to}):

            def seconds(node: str, medium: Medium = run.medium) -> float:
                read = block_bytes / self.links.rate(node, node) if medium is Medium.SSD else 0.0
                return read + block_bytes / self.links.rate(node, to)

            shared = self.index.shared(keys, run, {to})
            stripes, stand_ins = spread(run, shared, block_bytes, lambda node: self.links.queue(node, now), seconds)
            runs += stripes
            others += stand_ins
        return [*runs, *others, *self.index.runs(keys, first, {to, *(run.node for run in runs)})]

    def _account(self, gateway: str, plan: Plan, tokens: int, block_bytes: int, now: float) -> None:
        """Takes the plan's load into account until heartbeats show it, or it ends."""
        key = (gateway, plan.request)
        alone = plan.prefill.worker == plan.decode.worker
        self.cluster.assign(plan.prefill.worker, key, Assigned(now, tokens, int(alone)))
        if not alone:
            self.cluster.assign(plan.decode.worker, key, Assigned(now, 0, 1))
        at = 0
        for source in plan.sources:
            # Who only stands in for others, and the node's own SSD, send nothing.
            first = max(source.first, at)
            if source.node.node != plan.prefill.node.node and first < source.last:
                size = (source.last - first) * block_bytes
                self.links.order(source.node.node, plan.prefill.node.node, size, now)
                at = source.last
        self._routes[key] = _Route(plan.attempt, plan.prefill.worker, plan.decode.worker)
        self._plans += 1
        while len(self._routes) > MAX_ROUTES:
            self._end(*next(iter(self._routes)))

    def _replicate(self, view: View, reused: bytes, now: float) -> list[Action]:
        keys = [reused[i : i + KEY_BYTES] for i in range(0, len(reused), KEY_BYTES)]
        # Whatever the policy: what is hot is moved when its node drains.
        hot = self.replicator.hit(keys, now)
        copy = self.replicator.propose(view, keys[:hot], now) if self.policy.replicates else None
        if copy is None:
            return []
        parent = keys[copy.first - 1] if copy.first else NO_PARENT
        return [self._order(copy, keys[copy.first : copy.last], parent, now)]

    def check(self) -> None:
        """Raises AssertionError if a part contradicts itself or the others."""
        self.cluster.check()
        self.index.check()
        for name, worker in self.cluster.workers.items():
            for gateway, request in worker.assigned:
                route = self._routes[gateway, request]
                assert name in (route.prefill, route.decode), "a worker is charged for another's request"
        assert all(gateway in self._gateways for gateway, _ in self._routes), "a route has no gateway"


def _reference(worker: WorkerInfo) -> WorkerRef:
    return WorkerRef(worker.worker, worker.incarnation, worker.node, worker.work)
