"""The global scheduler as a pure state machine: events and the time go in, actions come out.

It holds no prompts, and no request that cannot go on without it: after a restart everybody dials in again, daemons dump
what they hold, and plans are made as before. Same events, same times, same seed: same actions.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from .candidates import Refused
from .clearing import Clearings
from .cluster import Cluster
from .draining import Drains
from .dropping import Dropper
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
    SendToWorker,
    TellMoved,
    Tick,
    WorkerLost,
)
from .explanation import Explanation
from .feed import Feed
from .health import samples as health
from .inflight import Expectations, Inflight
from .messages import (
    DEAD_AFTER,
    Clear,
    ClusterState,
    Explain,
    Explained,
    FindHot,
    GatewayAlive,
    GatewayHello,
    HotPrefix,
    HotPrefixes,
    OrderRole,
    PagesChanged,
    Planned,
    Rejected,
    Route,
    RouteEnded,
    SetRole,
    WorkerAlive,
    WorkerHello,
    WorkerLeaving,
    WorkerToConductor,
)
from .outlook import Outlook
from .policies import find_admission
from .prefix_index import Index, PrefixIndex
from .replication import Copy, Replicator
from .routing import Router
from .types import KEY_BYTES, Rejection

#: Gateways get counters this often (seconds) or, if there are many, less so; and the workers whenever they change.
STATE_EVERY = 1.0
#: Counters that gateways get each second, on average: to sum and to encode those of a thousand nodes, 80,000, halts all
#: decisions for 15 ms, which is not to happen every second.
COUNTERS_A_SECOND = 20_000
#: Daemons are told who shares objects when nobody has come or gone for so long (seconds).
MEMBERS_AFTER = 1.0
#: Hot prefixes that are told at once.
MOST_HOT = 100
#: The parent of a prefix's first block in a replication order.
NO_PARENT = bytes(KEY_BYTES)


@dataclass(slots=True)
class _Gateway:
    incarnation: int
    heard: float


class Conductor:
    """See the module. policy, admission: names; unknown ones raise UnknownName. roles: "auto": workers are told to take
    on the role that is short. seed: of what policies draw.

    first_order: number of the first order to a daemon. One that outlives a conductor still answers its orders, and
    such an answer is not to be taken for one to this conductor's: so it is higher than any that was given before.
    index: empty; what nodes hold. None: the plain one, which is slow. Another of its kind is made for device pages.
    inflight: empty; what planned requests will leave. None: the plain one.
    """

    def __init__(
        self,
        *,
        policy: str = "kvcache-centric",
        admission: str = "none",
        roles: str = "fixed",
        seed: int = 0,
        first_order: int = 1,
        index: Index | None = None,
        inflight: Expectations | None = None,
    ) -> None:
        self.cluster = Cluster()
        self.index: Index = PrefixIndex() if index is None else index
        #: Device pages; its holders are workers.
        self.pages: Index = type(self.index)()
        self.feed = Feed(self.index)
        self.outlook = Outlook(find_admission(admission), roles)
        # An empty one is false.
        inflight = Inflight() if inflight is None else inflight
        self.router = Router(self.cluster, self.index, self.pages, inflight, policy, self.outlook, seed)
        self.links = self.router.links
        self.replicator = Replicator(self.index, first_order)
        self.dropper = Dropper(self.index, self.replicator)
        self.draining = Drains(self.index, self.replicator)
        self.clearings = Clearings(first_order)
        self._gateways: dict[str, _Gateway] = {}
        self._rejections: dict[str, int] = {}
        self._replicated = 0
        self._moved = 0
        self._now = float("-inf")
        #: Events that said less than is known (a clock that ran backwards, strangers), by kind.
        self._odd = {"clock": 0, "worker": 0, "daemon": 0, "pages": 0}
        self._state_sent = float("-inf")
        #: Counters as gateways were told them last, and when they were summed.
        self._counted: dict[str, float] = {}
        self._counted_at = float("-inf")
        self._members_changed: float | None = None

    def on(self, event: Event, now: float) -> list[Action]:
        """What is to be done about it. now: seconds on any clock; one that runs backwards stands still meanwhile."""
        if now < self._now:
            self._odd["clock"] += 1
            now = self._now
        self._now = now
        match event:
            case FromGateway():
                return self._on_gateway(event, now)
            case FromWorker():
                return self._on_worker(event.message, now)
            case WorkerLost(worker):
                return self._worker_lost([worker], now)
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
            return [SendToGateway(name, self._cluster_state(now))]
        gateway = self._gateways.get(name)
        if gateway is None:
            return []  # its hello is under way: it says so on every new link
        gateway.heard = now
        match message:
            case GatewayAlive():
                return []
            case RouteEnded():
                self.router.ended(name, message)
                return []
            case Route():
                return self._on_route(name, message, now)
            case Clear():
                return self.clearings.begin(name, message, self.cluster.daemons, now)
            case OrderRole():
                worker = self.cluster.workers.get(message.worker)
                away = worker is None or not worker.alive
                return [] if away else [SendToWorker(message.worker, SetRole(role=message.role))]
            case Explain():
                if message.route is None:
                    found = self.router.decisions.find(message.request)
                else:
                    found = self.router.foresee(name, message.route, now)
                return [SendToGateway(name, Explained(number=message.number, explanation=found))]
            case FindHot():
                return [SendToGateway(name, self._hottest(message, now))]

    def _hottest(self, asked: FindHot, now: float) -> HotPrefixes:
        found = self.replicator.hottest(max(0, min(asked.most, MOST_HOT)), now)
        return HotPrefixes(
            number=asked.number,
            prefixes=tuple(
                HotPrefix(key, blocks, heat, now - at, tuple(self.index.holders(key)))
                for key, blocks, heat, at in found
            ),
        )

    def _forget_gateway(self, name: str) -> None:
        self._gateways.pop(name, None)
        self.clearings.forget(name)
        self.router.forget_gateway(name)

    def _state(self, now: float) -> list[Action]:
        self._state_sent = now
        if not self._gateways:
            return []
        state = self._cluster_state(now)
        return [SendToGateway(gateway, state) for gateway in sorted(self._gateways)]

    def _cluster_state(self, now: float) -> ClusterState:
        # A thousand workers that dial in at once are not worth a thousand sums over all that all have counted.
        if now - self._counted_at >= STATE_EVERY:
            self._counted, self._counted_at = self.counters(), now
        return ClusterState(workers=tuple(self.cluster.live()), counters=self._counted)

    def counters(self) -> dict[str, float]:
        """Of the whole cluster, by Prometheus sample name: what workers and daemons report, and the conductor's own."""
        counters = self.cluster.counters()
        counters.update(health(self.cluster, self._now))
        counters[f'pyengine_conductor_plans_total{{policy="{self.router.policy_name}"}}'] = self.router.plans
        counters["pyengine_conductor_replicated_blocks_total"] = self._replicated
        counters["pyengine_conductor_moved_blocks_total"] = self._moved
        counters["pyengine_conductor_dropped_blocks_total"] = self.dropper.dropped
        counters.update(self.router.accuracy.counters())
        counters.update(self.outlook.counters())
        for what, count in self._odd.items():
            counters[f'pyengine_conductor_odd_events_total{{what="{what}"}}'] = count
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
                changed = self._on_hello(message, now)
            case PagesChanged():
                self._on_pages(message)
                return []
            case WorkerAlive():
                changed = False
                if self.cluster.heartbeat(message, now):
                    self._observe_loads(message)
                    self.outlook.heartbeat(message, self.cluster.workers[message.worker], now)
                else:
                    self._odd["worker"] += 1
                    return self._greet(message.worker)
            case WorkerLeaving():
                if (leaving := self.cluster.workers.get(message.worker)) is not None:
                    leaving.left = True
                return self._worker_lost([message.worker], now)
        return self._state(now) if changed else []

    def _greet(self, name: str) -> list[Action]:
        """One that was taken for dead is heard again: it was held up, or this conductor was. Its link has stood all the
        time, so it does not know that it has to say who it is, and what lies in its pages: to be given the role that it
        has makes it do so.
        """
        worker = self.cluster.workers.get(name)
        return [] if worker is None else [SendToWorker(name, SetRole(role=worker.info.role))]

    def _on_hello(self, message: WorkerHello, now: float) -> bool:
        known = self.cluster.workers.get(message.info.worker)
        if known is not None and known.info.incarnation != message.info.incarnation:
            # What the last life computed, and had in its pages, is gone.
            self.pages.clear(message.info.worker)
            self.router.worker_lost(message.info.worker)
        return self.cluster.hello(message.info, now)

    def _on_pages(self, message: PagesChanged) -> None:
        """What lies in a worker's device pages. Of strangers nothing is kept: they say it again after their hello."""
        worker = self.cluster.workers.get(message.worker)
        if worker is None or not worker.alive:
            self._odd["worker"] += 1
            return
        try:
            (self.pages.replace if message.first else self.pages.apply)(message.worker, message.changes)
        except ValueError:
            # A miss that was none is all that comes of it.
            self._odd["pages"] += 1

    def _worker_lost(self, names: list[str], now: float) -> list[Action]:
        lost = [name for name in names if self.cluster.lost(name)]
        for name in lost:
            self.pages.forget(name)
            self.router.worker_lost(name)
            self._leave(self.cluster.workers[name].info.node.node)
        return self._state(now) if lost else []

    def _leave(self, node: str) -> None:
        """A worker of this node is gone: without any, and without a daemon, nothing is moved there."""
        daemon = self.cluster.daemons.get(node)
        if daemon is not None and daemon.up:
            return
        if not any(worker.alive and worker.info.node.node == node for worker in self.cluster.workers.values()):
            self.links.forget(node)

    def _observe_loads(self, message: WorkerAlive) -> None:
        to = self.cluster.workers[message.worker].info.node.node
        for load in message.loads:
            if load.source not in self.cluster.daemons:
                continue
            if load.device:
                self.links.observe_device(to, load.size, load.seconds)
            else:
                self.links.observe(load.source, to, load.size, load.seconds)

    def _tick(self, now: float) -> list[Action]:
        lost = self._worker_lost(self.cluster.silent(now), now)
        silent = [name for name, gateway in self._gateways.items() if now - gateway.heard > DEAD_AFTER]
        for name in silent:
            self._forget_gateway(name)
        self.router.inflight.expire(now)
        actions: list[Action] = [*self.clearings.tick(now), *self.dropper.tick(self.cluster.daemons, now)]
        actions += self.outlook.tick(self.cluster, now)
        if self._members_changed is not None and now - self._members_changed >= MEMBERS_AFTER:
            self._members_changed = None
            actions += self._members()
        actions += lost
        due = now - self._state_sent >= max(STATE_EVERY, len(self._counted) / COUNTERS_A_SECOND)
        return actions + (self._state(now) if due else [])

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
            self.cluster.daemon(report.node, now)
            self._members_changed = now
            return [*late, OrderDump(node)] if self.feed.on_hello(report, now) else late
        if daemon is None or daemon.node.incarnation != report.node.incarnation:
            self._odd["daemon"] += 1
            return []
        order, actions = False, list[Action]()
        match report:
            case BlocksChanged():
                order = self.feed.on_changes(report, now)
            case BlockDump():
                self.feed.on_dump(report, now)
            case DaemonHeartbeat():
                daemon.counters, daemon.heard = dict(report.counters), now
                daemon.blocks = report.count
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
        actions: list[Action] = [self._order(move.copy, b"".join(move.keys), move.parent, now) for move in moves]
        progress = self.draining.progress(node)
        if progress is not None:
            actions.append(TellMoved(node, *progress))
        return actions

    def _order(self, copy: Copy, keys: bytes, parent: bytes, now: float) -> OrderReplicate:
        self.links.order(copy.source, copy.to, len(keys) // KEY_BYTES * self._block_bytes(copy.source), now)
        source = self.cluster.daemons[copy.source].node
        return OrderReplicate(copy.to, copy.order, keys, parent, copy.first, source)

    def _block_bytes(self, node: str) -> int:
        for worker in self.cluster.workers.values():
            if worker.info.node.node == node:
                return worker.info.namespace.kv.block_bytes
        return 0

    # -- routing ---------------------------------------------------------------------------------------------------

    def _on_route(self, gateway: str, route: Route, now: float) -> list[Action]:
        attempt = self.router.attempt(gateway, route.request)
        if attempt is not None:
            if route.attempt < attempt:
                return []
            self.router.end(gateway, route.request)
            # Its gateway may not have heard of the plan: what was admitted is not judged, nor charged, once more.
            route = msgspec.structs.replace(route, admitted=True)
        try:
            planned = self.router.plan(gateway, route, now)
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
        view, overlap = planned.view, planned.overlap
        # Whatever the policy: what is hot is moved when its node drains.
        hot = self.replicator.hit(overlap.keys[: overlap.best * KEY_BYTES], view.block_tokens, now)
        actions: list[Action] = [SendToGateway(gateway, Planned(plan=planned.plan))]
        if hot and self.router.policy.replicates:
            copy = self.replicator.propose(view, overlap, hot, self.links, now)
            if copy is not None:
                first, last = copy.first * KEY_BYTES, copy.last * KEY_BYTES
                parent = overlap.keys[first - KEY_BYTES : first] if first else NO_PARENT
                actions.append(self._order(copy, overlap.keys[first:last], parent, now))
        return actions

    def explain(self, gateway: str, route: Route, now: float) -> Explanation:
        """What would be decided about this request, and why; nothing is. Raises Refused if nobody could serve it."""
        return self.router.explain(gateway, route, max(now, self._now))

    def check(self) -> None:
        """Raises AssertionError if a part contradicts itself or the others."""
        self.cluster.check()
        self.index.check()
        self.pages.check()
        self.router.check()
        assert self.router.gateways() <= self._gateways.keys(), "a route has no gateway"
