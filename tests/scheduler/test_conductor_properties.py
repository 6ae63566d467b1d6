"""Goal: whatever happens in whatever order, nobody is sent to who is dead, too small or of another model; each request
has one answer; nothing is charged for ever; the index ends equal to the pools; and the same events give the same
actions.

Method: random worlds from one seed. A link to each daemon loses, repeats and delays what it says; workers die, restart
with another life, fall silent; clocks jump back. The test keeps the truth beside it and looks at every plan.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.changes import Change, pack, unpack
from pyengine.scheduler.conductor import Conductor
from pyengine.scheduler.events import (
    Action,
    BlockDump,
    BlocksChanged,
    Cleared,
    DaemonGone,
    DaemonHello,
    DaemonReport,
    Event,
    FromGateway,
    FromWorker,
    GatewayLost,
    OrderDump,
    OrderForget,
    OrderReplicate,
    Replicated,
    SendToGateway,
    Tick,
    WorkerLost,
)
from pyengine.scheduler.messages import (
    CostFit,
    GatewayAlive,
    GatewayHello,
    LoadSample,
    PagesChanged,
    Planned,
    Rejected,
    Route,
    RouteEnded,
    WorkerAlive,
    WorkerHello,
    WorkerLeaving,
)
from pyengine.scheduler.policies import ADMISSIONS, POLICIES
from pyengine.scheduler.prefix_index import DEVICE, TIER
from pyengine.scheduler.types import Medium, Namespace, Node, Plan, Role, Slo, WorkerInfo

from .world import BLOCK, NAMESPACE, SPEC, Pool, chain, worker

MODELS = {"model": NAMESPACE, "other": Namespace("other", "config", "float32", "none", SPEC)}
ROOT = bytes(16)
STEPS = 120


class Truth:
    """The world as it is, however little of it the conductor hears."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        policy = rng.choice([*POLICIES])
        admission, roles = rng.choice([*ADMISSIONS]), rng.choice(["fixed", "auto"])
        self.conductor = Conductor(policy=policy, seed=seed, admission=admission, roles=roles)
        self.now = 50.0
        self.alive: dict[str, WorkerInfo] = {}
        self.pools: dict[str, Pool] = {}
        self.up: set[str] = set()
        self.late: dict[str, deque[DaemonReport]] = {}
        self.asked: dict[tuple[int, int], Route] = {}
        self.open: dict[int, tuple[int, Plan]] = {}
        self.answers = 0
        self.next_request = 0
        self.lives = 1
        self.digest = hashlib.sha256()
        self.tell(FromGateway("g", GatewayHello(gateway="g", incarnation=1)))
        for i in range(rng.randrange(4, 8)):
            self.born(i)

    # -- what is said ----------------------------------------------------------------------------------------------

    def tell(self, event: Event, at: float | None = None) -> list[Action]:
        actions = self.conductor.on(event, self.now if at is None else at)
        for action in actions:
            self.digest.update(
                msgspec.msgpack.encode(action.message) if isinstance(action, SendToGateway) else repr(action).encode()
            )
            self.obey(action)
        return actions

    def obey(self, action: Action) -> None:
        match action:
            case SendToGateway(_, Planned(plan=plan)):
                self.planned(plan)
            case SendToGateway(_, Rejected(rejection=rejection)):
                assert (rejection.request, rejection.attempt) in self.asked
                self.answers += 1
            case OrderDump(node) if node in self.up:
                self.say(node, *self.pools[node].dump(self.rng.randrange(1, 4)))
            case OrderReplicate(node, order):
                assert node != action.source.node
                if node in self.up:
                    self.say(node, Replicated(self.pools[node].node, order, len(action.keys) // 16, 0))
            case OrderForget(node, keys):
                for i in range(0, len(keys), 16):
                    if (keys[i : i + 16], Medium.DRAM) in self.pools[node].blocks:
                        self.say(node, self.pools[node].remove(keys[i : i + 16]))

    def say(self, node: str, *reports: DaemonReport) -> None:
        """In order, as a session has it; some are still under way, some are lost."""
        self.late[node].extend(reports)

    def deliver(self, node: str, faulty: bool) -> None:
        queue, rng = self.late[node], self.rng
        for _ in range(rng.randrange(1 + len(queue)) if faulty else len(queue)):
            report = queue.popleft()
            if faulty and rng.random() < 0.1:
                continue
            self.tell(report)
            if faulty and rng.random() < 0.1:
                self.tell(report)

    # -- what happens ----------------------------------------------------------------------------------------------

    def born(self, i: int) -> None:
        rng, self.lives = self.rng, self.lives + 1
        role = rng.choice([Role.BOTH, Role.PREFILL, Role.DECODE])
        model = "other" if rng.random() < 0.2 else "model"
        node = f"node-{i // 2}"
        if node not in self.pools or node not in self.up:
            self.daemon(node)
        pages = rng.choice([40, 100, 256])
        info = worker(
            f"w{i}",
            role,
            node,
            incarnation=self.lives,
            model=model,
            namespace=MODELS[model],
            pages=pages,
            pool_slots=rng.choice([20, 300]),
        )
        info = msgspec.structs.replace(info, node=self.pools[node].node)
        self.alive[info.worker] = info
        self.tell(FromWorker(WorkerHello(info=info)))

    def daemon(self, node: str) -> None:
        self.lives += 1
        if node in self.up:
            self.tell(DaemonGone(self.pools[node].node))
        pool = Pool(Node(node, f"{node}:1", self.lives))
        if self.rng.random() < 0.5 and node in self.pools:
            pool.blocks = self.pools[node].blocks
            pool.sequence = len(pool.blocks)
        self.pools[node], self.late[node] = pool, deque()
        self.up.add(node)
        self.tell(DaemonHello(pool.node, pool.sequence))

    def publish(self) -> None:
        pool = self.rng.choice([*self.pools.values()])
        keys = self.prompt()
        medium = self.rng.choice(list(Medium))
        for position, key in enumerate(keys):
            if (key, medium) not in pool.blocks:
                self.say(pool.node.node, pool.store(key, keys[position - 1] if position else ROOT, position, medium))

    def evict(self) -> None:
        pool = self.rng.choice([*self.pools.values()])
        if pool.blocks:
            key, medium = self.rng.choice(sorted(pool.blocks, key=repr))
            self.say(pool.node.node, pool.remove(key, medium))

    def prompt(self) -> list[bytes]:
        rng = self.rng
        return chain(
            *(rng.randrange(2) for _ in range(rng.randrange(3))), *range(100, 100 + rng.choice([0, 5, 20, 30]))
        )

    def beat(self, name: str) -> None:
        rng = self.rng
        info = self.alive.get(name)
        some = rng.sample([*self.open], min(len(self.open), 2))
        taken = tuple((request, max(self.open[request][0] - rng.randrange(2), 0)) for request in some)
        pages = info.pages if info else 1
        cost = CostFit(
            coefficients=(rng.random() / 50, rng.random() / 500, 1e-8, 0.001, 1e-7), samples=rng.randrange(3)
        )
        self.tell(
            FromWorker(
                WorkerAlive(
                    worker=name,
                    progress=rng.randrange(1000),
                    queued_requests=rng.randrange(4),
                    queued_tokens=rng.randrange(3000),
                    running=rng.randrange(40),
                    free_pages=rng.randrange(pages + 1),
                    cost=cost,
                    counters={},
                    loads=(LoadSample("node-0", rng.randrange(1 << 24), rng.random(), device=rng.random() < 0.5),),
                    queue_seconds=rng.random() * 2,
                    running_context=rng.randrange(9000),
                    expected_tokens=rng.randrange(500),
                    accepted=taken,
                )
            )
        )

    def pages(self) -> None:
        name = self.rng.choice([*self.alive, "stranger"])
        keys = self.prompt()
        removed = self.rng.random() < 0.3
        changes = pack(Change(removed, DEVICE, key, keys[i - 1] if i else ROOT, i) for i, key in enumerate(keys))
        self.tell(FromWorker(PagesChanged(worker=name, changes=changes, first=self.rng.random() < 0.2)))

    def ask(self) -> None:
        rng = self.rng
        again = [*self.open] and rng.random() < 0.1
        request = rng.choice([*self.open]) if again else self.next_request
        # A gateway may ask for the attempt that was planned already, if it has not heard of that.
        attempt = self.open[request][0] + rng.randrange(2) if again else 0
        self.next_request += not again
        keys = self.prompt()
        model = "model" if rng.random() < 0.8 else rng.choice(["other", "nothing"])
        route = Route(
            request=request,
            attempt=attempt,
            model=model,
            namespace=MODELS.get(model, NAMESPACE).digest(),
            keys=b"".join(keys),
            prompt_tokens=len(keys) * BLOCK + 1 + rng.randrange(BLOCK)
            if rng.random() < 0.8
            else rng.randrange(1, 5000),
            max_tokens=rng.randrange(1, 50),
            slo=Slo(rng.choice([None, 0.5, 9.0]), rng.choice([None, 0.01, 0.2]), rng.choice([None, 8.0, 60.0])),
            exclude=tuple(rng.sample([*self.alive, "stranger"], rng.randrange(2))),
            waited=rng.random(),
            tenant=rng.choice(["", "one", "other"]),
            priority=rng.randrange(-1, 2),
            admitted=attempt > 0,
        )
        # Fewer tokens than its keys say is a gateway's mistake that must hurt nobody.
        self.asked[request, attempt] = route
        before = self.answers
        self.tell(FromGateway("g", route))
        assert self.answers == before + 1, "a request has one answer"

    def end(self) -> None:
        if self.open:
            request = self.rng.choice([*self.open])
            attempt, plan = self.open.pop(request)
            rng = self.rng
            how = RouteEnded(
                request=request,
                # Of an attempt that is over the end means nothing; the next one of the request ends it.
                attempt=attempt - (rng.random() < 0.05),
                ttft=rng.choice([-1.0, rng.random() * 10]),
                tbt=rng.random(),
                generated=rng.randrange(50),
                finished=rng.random() < 0.7,
            )
            if how.attempt != attempt:
                self.open[request] = (attempt, plan)
            self.tell(FromGateway("g", how))

    def gateway_lost(self) -> None:
        """All it asked for is forgotten; it dials in again, in the same life or another."""
        event = FromGateway("g", GatewayHello(gateway="g", incarnation=self.lives + 1))
        if self.rng.random() < 0.5:
            self.tell(GatewayLost("g"))
        self.lives += 1
        self.open.clear()
        self.tell(event)

    def switch(self) -> None:
        """A worker takes on another role in the same life; what it was given goes on."""
        if self.alive:
            name = self.rng.choice([*self.alive])
            info = msgspec.structs.replace(self.alive[name], role=self.rng.choice([*Role]))
            self.alive[name] = info
            self.tell(FromWorker(WorkerHello(info=info)))

    def lose(self) -> None:
        if not self.alive:
            return
        name = self.rng.choice([*self.alive])
        event = WorkerLost(name) if self.rng.random() < 0.5 else FromWorker(WorkerLeaving(worker=name))
        del self.alive[name]
        self.tell(event)

    def silence(self) -> None:
        """Everybody but one is heard for a while."""
        quiet = self.rng.choice([*self.alive]) if self.alive else ""
        for _ in range(8):
            self.now += 0.5
            self.tell(FromGateway("g", GatewayAlive(gateway="g")))
            for name in [*self.alive]:
                if name != quiet:
                    self.tell(
                        FromWorker(
                            WorkerAlive(
                                worker=name,
                                progress=0,
                                queued_requests=0,
                                queued_tokens=0,
                                running=0,
                                free_pages=9,
                                cost=CostFit((0.0,) * 5),
                                counters={},
                            )
                        )
                    )
        self.alive.pop(quiet, None)
        self.tell(Tick())

    def noise(self) -> None:
        """From who is unknown, or over."""
        self.beat("stranger")
        old = Node(self.rng.choice(["node-0", "nowhere"]), "x:1", 1)
        self.tell(BlocksChanged(old, 0, pack([Change(False, 1, b"k" * 16)])))
        self.tell(BlockDump(old, 0, 0, b"", True))
        self.tell(Replicated(old, 3, 1, 0))
        self.tell(Cleared(old, 3, 1, 0, True))
        self.tell(WorkerLost("stranger"))
        self.tell(
            FromGateway(
                "nobody",
                Route(request=1, attempt=0, model="model", namespace=b"", keys=b"", prompt_tokens=1, max_tokens=1),
            )
        )
        self.tell(GatewayLost("nobody"))

    def step(self) -> None:
        self.now += self.rng.random() * 0.4
        if self.rng.random() < 0.05:
            self.tell(Tick(), at=self.now - 20.0)
        for name in [*self.alive]:
            if self.rng.random() < 0.4:
                self.beat(name)
        what = [self.publish, self.publish, self.evict, self.pages, self.end, self.noise]
        what += [self.ask] * 6
        draw = self.rng.random()
        if draw < 0.04:
            self.lose()
        elif draw < 0.08:
            self.born(self.rng.randrange(8))
        elif draw < 0.1:
            self.daemon(self.rng.choice([*self.pools]))
        elif draw < 0.11:
            self.silence()
        elif draw < 0.12:
            self.gateway_lost()
        elif draw < 0.15:
            self.switch()
        else:
            self.rng.choice(what)()
        for node in [*self.late]:
            self.deliver(node, faulty=True)
        self.tell(FromGateway("g", GatewayAlive(gateway="g")))
        self.tell(Tick())
        self.conductor.check()

    # -- what must hold --------------------------------------------------------------------------------------------

    def planned(self, plan: Plan) -> None:
        self.answers += 1
        route = self.asked[plan.request, plan.attempt]
        self.open[plan.request] = (plan.attempt, plan)
        prefill, decode = (self.alive.get(ref.worker) for ref in (plan.prefill, plan.decode))
        assert prefill is not None, "a dead worker was chosen"
        assert decode is not None, "a dead worker was chosen"
        assert (prefill.incarnation, decode.incarnation) == (plan.prefill.incarnation, plan.decode.incarnation)
        for info in (prefill, decode):
            assert (info.model, info.namespace.digest()) == (route.model, route.namespace), "another model's"
        if prefill is decode:
            # A decode worker may take it whole if a gap was promised that bounds its steps.
            assert prefill.role is Role.BOTH or (prefill.role is Role.DECODE and route.slo.tbt is not None)
            assert prefill.pages * BLOCK > route.prompt_tokens, "too small to decode it"
        else:
            assert (prefill.role, decode.role.decodes) == (Role.PREFILL, True)
            assert prefill.pages * BLOCK >= route.prompt_tokens, "too small to prefill it"
            assert min(decode.pages * BLOCK, decode.pool_slots * BLOCK) > route.prompt_tokens, "too small to decode it"
        blocks = min(len(route.keys) // 16, (route.prompt_tokens - 1) // BLOCK)
        assert 0 <= plan.cached_blocks <= blocks
        for source in plan.sources:
            assert 0 <= source.first < source.last <= blocks
            if not source.ready:
                assert self.conductor.cluster.daemons[source.node.node].node == source.node, "a source of an old life"
            assert source.node.node in self.up
        assert 0 <= plan.predicted_ttft < float("inf")
        assert 0 <= plan.predicted_tbt < float("inf")

    def settle(self) -> None:
        """Every link heals: heartbeats show what is missing, dumps bring it."""
        for _ in range(3):
            self.now += 11.0
            for node in sorted(self.up):
                self.say(node, self.pools[node].heartbeat())
                self.deliver(node, faulty=False)
                self.deliver(node, faulty=False)
        index = self.conductor.index
        for node, pool in self.pools.items():
            told = {(change.tier, change.key) for change in unpack(index.dump(node))}
            assert told == {(TIER[medium], key) for key, medium in pool.blocks}, f"{node} is not known as it is"
        while self.open:
            self.end()
        assert not any(each.assigned for each in self.conductor.cluster.workers.values()), "charged for nothing"
        assert len(self.conductor.router.inflight) == 0
        assert len(self.conductor.outlook.forecast) == 0, "foreseen for ever"
        assert not self.conductor.outlook._known, "remembered for ever"
        assert not self.conductor.router.gateways(), "planned for ever"


def play(seed: int) -> str:
    truth = Truth(seed)
    for _ in range(STEPS):
        truth.step()
    truth.settle()
    return truth.digest.hexdigest()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_a_random_world(seed: int) -> None:
    play(seed)


def test_the_same_world_twice() -> None:
    assert [play(seed) for seed in range(3)] == [play(seed) for seed in range(3)]
