"""A conductor with a scripted world around it: workers, daemons and gateways say what the test wants, when it wants."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field

from pyengine.scheduler.changes import Change, pack
from pyengine.scheduler.conductor import Conductor
from pyengine.scheduler.cost import UNMEASURED, StepCost, StepWork
from pyengine.scheduler.events import (
    Action,
    BlockDump,
    BlocksChanged,
    DaemonHeartbeat,
    DaemonHello,
    Event,
    FromGateway,
    FromWorker,
    SendToGateway,
    Tick,
)
from pyengine.scheduler.messages import (
    GatewayAlive,
    GatewayHello,
    Planned,
    Rejected,
    Route,
    RouteEnded,
    WorkerAlive,
    WorkerHello,
)
from pyengine.scheduler.prefix_index import TIER
from pyengine.scheduler.types import KvGroup, KvSpec, Medium, Namespace, Node, Plan, Rejection, Role, Slo, WorkerInfo

BLOCK = 16
SPEC = KvSpec((KvGroup(layers=2, kv_heads=2, head_dim=16, dtype="float32"),), BLOCK)
NAMESPACE = Namespace("weights", "config", "float32", "none", SPEC)


def chain(*path: int) -> list[bytes]:
    """Keys of a prefix; paths that begin alike share keys."""
    keys: list[bytes] = []
    for step in path:
        parent = keys[-1] if keys else b"root"
        keys.append(hashlib.blake2b(parent + step.to_bytes(4, "little"), digest_size=16).digest())
    return keys


def worker(name: str, role: Role, node: str, **changes: object) -> WorkerInfo:
    fields: dict[str, object] = {
        "worker": name,
        "incarnation": 1,
        "role": role,
        "node": Node(node, f"{node}:1", 1),
        "work": f"ipc://{name}",
        "model": "model",
        "tokenizer": "bytes",
        "namespace": NAMESPACE,
        "vocab_size": 258,
        "max_positions": 4096,
        "pages": 128,
        "pool_slots": 128,
        "max_tokens_per_step": 512,
        "max_sequences": 32,
    }
    return WorkerInfo(**(fields | changes))  # type: ignore[arg-type]


@dataclass
class Pool:
    """The truth that a daemon reports: its blocks, and the number of its next event."""

    node: Node
    blocks: dict[tuple[bytes, Medium], tuple[bytes, int]] = field(default_factory=dict)
    sequence: int = 0
    draining: bool = False
    #: Slots of its DRAM.
    slots: int = 10_000

    def store(self, key: bytes, parent: bytes, position: int, medium: Medium = Medium.DRAM) -> BlocksChanged:
        self.blocks[key, medium] = (parent, position)
        self.sequence += 1
        return self.changed(Change(False, TIER[medium], key, parent, position))

    def remove(self, key: bytes, medium: Medium = Medium.DRAM) -> BlocksChanged:
        del self.blocks[key, medium]
        self.sequence += 1
        return self.changed(Change(True, TIER[medium], key))

    def changed(self, change: Change) -> BlocksChanged:
        return BlocksChanged(self.node, self.sequence - 1, pack([change]))

    def heartbeat(self) -> DaemonHeartbeat:
        xor = 0
        for key, medium in self.blocks:
            xor ^= int.from_bytes(key if medium is Medium.DRAM else key[1:] + key[:1], "little")
        cached = sum(medium is Medium.DRAM for _, medium in self.blocks)
        states = {"free": self.slots - cached, "cached": cached}
        counters = {
            f'pyengine_pool_blocks{{node="{self.node.node}",tier="dram",state="{state}"}}': count
            for state, count in states.items()
        }
        digest = xor.to_bytes(16, "little")
        return DaemonHeartbeat(self.node, self.sequence, len(self.blocks), digest, counters, self.draining)

    def dump(self, parts: int = 1) -> list[BlockDump]:
        blocks = [Change(False, TIER[medium], key, *where) for (key, medium), where in self.blocks.items()]
        cuts = [len(blocks) * i // parts for i in range(parts + 1)]
        return [
            BlockDump(self.node, self.sequence, i, pack(blocks[a:b]), i == parts - 1)
            for i, (a, b) in enumerate(itertools.pairwise(cuts))
        ]


class World:
    """Everything dialled in to one conductor; `now` moves only by `wait`."""

    def __init__(self, *workers: WorkerInfo, policy: str = "kvcache-centric", **settings: object) -> None:
        self.conductor = Conductor(policy=policy, **settings)  # type: ignore[arg-type]
        self.now = 100.0
        self.workers = {info.worker: info for info in workers}
        self.pools: dict[str, Pool] = {}
        self.requests = 0
        for info in workers:
            self.pools.setdefault(info.node.node, Pool(info.node))
        self.dial_in()

    def dial_in(self) -> list[Action]:
        """Gateway, workers and daemons say hello, as they do whenever their link stands anew."""
        actions = self.on(FromGateway("gateway", GatewayHello(gateway="gateway", incarnation=1)))
        for info in self.workers.values():
            actions += self.on(FromWorker(WorkerHello(info=info)))
        for pool in self.pools.values():
            actions += self.on(DaemonHello(pool.node, pool.sequence))
        return actions

    def on(self, event: Event) -> list[Action]:
        actions = self.conductor.on(event, self.now)
        self.conductor.check()
        return actions

    def store(self, node: str, keys: list[bytes], medium: Medium = Medium.DRAM) -> None:
        """The node's pool publishes this prefix."""
        pool = self.pools[node]
        for position, key in enumerate(keys):
            if (key, medium) not in pool.blocks:
                self.on(pool.store(key, keys[position - 1] if position else bytes(16), position, medium))

    def alive(self, name: str, **changes: object) -> list[Action]:
        """A worker's heartbeat."""
        fields: dict[str, object] = {
            "worker": name,
            "progress": 0,
            "queued_requests": 0,
            "queued_tokens": 0,
            "running": 0,
            "free_pages": self.workers[name].pages,
            "cost": UNMEASURED,
            "counters": {},
        }
        return self.on(FromWorker(WorkerAlive(**(fields | changes))))  # type: ignore[arg-type]

    def wait(self, seconds: float, silent: tuple[str, ...] = ()) -> list[Action]:
        """Time passes, everybody's heart beats but that of the silent."""
        actions: list[Action] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 0.5, end)
            self.on(FromGateway("gateway", GatewayAlive(gateway="gateway")))
            for name in self.workers:
                if name not in silent:
                    self.alive(name)
            actions += self.on(Tick())
        return actions

    def measured(self, name: str, seconds_per_token: float) -> None:
        """The worker's steps have been measured: this many seconds per prompt token and per decoding sequence."""
        cost = StepCost()
        for _ in range(5):
            for n in (64, 128, 256, 512):
                cost.observe(StepWork(n, 0, 0, 0), n * seconds_per_token)
            for n in (1, 2, 4, 8):
                cost.observe(StepWork(0, 0, n, 0), n * seconds_per_token)
        self.alive(name, cost=cost.fit())

    def route(self, keys: list[bytes], tokens: int | None = None, **changes: object) -> list[Action]:
        return self.on(FromGateway("gateway", self.asked(keys, tokens, **changes)))

    def asked(self, keys: list[bytes], tokens: int | None = None, **changes: object) -> Route:
        fields: dict[str, object] = {
            "request": self.requests,
            "attempt": 0,
            "model": "model",
            "namespace": NAMESPACE.digest(),
            "keys": b"".join(keys),
            "prompt_tokens": len(keys) * BLOCK + 5 if tokens is None else tokens,
            "max_tokens": 16,
            "slo": Slo(),
        }
        self.requests += 1
        return Route(**(fields | changes))  # type: ignore[arg-type]

    def plan(self, keys: list[bytes], tokens: int | None = None, **changes: object) -> Plan:
        answer = self.route(keys, tokens, **changes)[0]
        assert isinstance(answer, SendToGateway)
        assert isinstance(answer.message, Planned), answer.message
        return answer.message.plan

    def end(self, request: int, **how: object) -> list[Action]:
        """The gateway says that the request's first attempt is over."""
        fields: dict[str, object] = {"request": request, "attempt": 0}
        return self.on(FromGateway("gateway", RouteEnded(**(fields | how))))  # type: ignore[arg-type]

    def planned_alone(self, keys: list[bytes], tokens: int | None = None, **changes: object) -> Plan:
        """A plan for a request that is over at once: nobody waits for what it computes."""
        plan = self.plan(keys, tokens, **changes)
        self.end(plan.request)
        return plan

    def refusal(self, keys: list[bytes], tokens: int | None = None, **changes: object) -> Rejection:
        (answer,) = self.route(keys, tokens, **changes)
        assert isinstance(answer, SendToGateway)
        assert isinstance(answer.message, Rejected), answer.message
        return answer.message.rejection
