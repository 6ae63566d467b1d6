"""The conductor's decisions: how many a second on one core, messages included, over ten million indexed blocks.

A frame with a Route comes in, is decoded, goes through `Conductor.on`, and the Planned is encoded: what the service
does but for the sockets. Half of the nodes have a prefill worker, half a decode worker. Prompts are a stored prefix
(popular ones more often) and a tail that is new; each request ends when some hundred others have come. Three cases:

    decisions          routes, and the ends of requests
    with events        and what pools publish and evict because of them (one batch of changes at the prefill node)
    with all messages  and heartbeats of all workers and daemons, at the rate of the decisions that is aimed at

One process, pinned to one core. `per_second_of_work` counts its own work only: where others use the core as well, the
clock says nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from bench.common import line, note, percentile
from bench.conductor_parts import clocks, table
from bench.index import packed_chains
from pyengine import _native
from pyengine.scheduler.changes import Change, pack
from pyengine.scheduler.conductor import Conductor
from pyengine.scheduler.events import (
    BlocksChanged,
    DaemonHeartbeat,
    DaemonHello,
    FromGateway,
    FromWorker,
    SendToGateway,
    Tick,
)
from pyengine.scheduler.messages import (
    HEARTBEAT_EVERY,
    Codec,
    ConductorToGateway,
    CostFit,
    GatewayHello,
    LoadSample,
    Message,
    Planned,
    Route,
    RouteEnded,
    ToConductor,
    WorkerAlive,
    WorkerHello,
)
from pyengine.scheduler.native_index import NativeIndex
from pyengine.scheduler.prefix_index import DRAM
from pyengine.scheduler.types import KEY_BYTES, KvGroup, KvSpec, Namespace, Node, Role, WorkerInfo

#: Nodes, and the decisions a second that are aimed at.
SIZES = ((64, 5000), (1000, 1500))
BLOCKS, QUICK_BLOCKS = 10_000_000, 1_000_000
#: Blocks of a stored prefix and of a prompt; how often that many are asked for.
STORED, PROMPT = 128, 160
DECISIONS, QUICK_DECISIONS = 5000, 2000
#: Requests that run at once.
RUNNING = 400
NAMESPACE = Namespace(
    "weights", "config", "bfloat16", "none", KvSpec((KvGroup(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16"),))
)
FIT = CostFit(coefficients=(8e-3, 2e-5, 1e-9, 2e-4, 2e-8), samples=1000, error=0.05)
#: Counters that a worker, and a daemon, report.
COUNTERS = 40


@dataclass
class Asked:
    """One request as it will be: its frame, and how many of its blocks nobody has."""

    frame: bytes
    end: bytes
    keys: bytes
    request: int


def info(number: int) -> WorkerInfo:
    node = Node(f"node-{number}", f"10.0.{number >> 8}.{number & 255}:7000", 1)
    return WorkerInfo(
        worker=f"worker-{number}",
        incarnation=1,
        role=Role.DECODE if number % 2 else Role.PREFILL,
        node=node,
        work=f"tcp://10.0.{number >> 8}.{number & 255}:7001",
        model="model",
        tokenizer="bytes",
        namespace=NAMESPACE,
        vocab_size=32000,
        max_positions=131072,
        pages=40_000,
        pool_slots=200_000,
        max_tokens_per_step=8192,
        max_sequences=256,
    )


class Cluster:
    """A conductor to which everybody has dialled in, and whose index is full."""

    def __init__(self, nodes: int, blocks: int, policy: str, seed: int = 0) -> None:
        self.draw = random.Random(seed)
        self.conductor = Conductor(policy=policy, index=NativeIndex(), inflight=_native.Inflight())
        self.now = 1000.0
        self.infos = [info(number) for number in range(nodes)]
        self.codec = Codec(ToConductor)
        self.answers = Codec(ConductorToGateway)
        #: By node: the next number of its changes, and the prefixes it holds.
        self.sequence = [0] * nodes
        self.chains: list[bytes] = []
        each = blocks // nodes
        for number, worker in enumerate(self.infos):
            self.on(FromWorker(WorkerHello(info=worker)))
            self.on(DaemonHello(worker.node, 0))
            for part in range(0, each, STORED * 64):
                keys, changes = packed_chains(min(STORED * 64, each - part), STORED, number * 1_000_003 + part)
                self.publish(number, changes)
                self.chains.append(keys[: STORED * KEY_BYTES])
            self.alive(self.heartbeat(number))
            self.daemon_alive(number)
        # Last, or it would be told of each worker that comes.
        self.on(FromGateway("gateway", GatewayHello(gateway="gateway", incarnation=1)))
        self.draw.shuffle(self.chains)
        self.fresh = np.random.default_rng(seed + 1)

    def on(self, event: object) -> list[object]:
        return self.conductor.on(event, self.now)  # type: ignore[arg-type,return-value]

    def publish(self, number: int, changes: bytes) -> None:
        self.on(BlocksChanged(self.infos[number].node, self.sequence[number], changes))
        self.sequence[number] += len(changes) // 40

    def heartbeat(self, number: int) -> bytes:
        loads = (LoadSample(self.infos[number].node.node, 1 << 20, 1e-3),)
        message = WorkerAlive(
            worker=self.infos[number].worker,
            progress=int(self.now * 100),
            queued_requests=self.draw.randrange(4),
            queued_tokens=self.draw.randrange(20_000),
            running=self.draw.randrange(64),
            free_pages=20_000,
            cost=FIT,
            queue_seconds=self.draw.random(),
            running_context=self.draw.randrange(100_000),
            counters={
                f'pyengine_worker_counter_{i}_total{{worker="worker-{number}"}}': float(i) for i in range(COUNTERS)
            },
            loads=loads,
        )
        return self.codec.encode([message])

    def alive(self, frame: bytes) -> None:
        for message in self.codec.decode(frame):
            self.on(FromWorker(message))  # type: ignore[arg-type]

    def daemon_alive(self, number: int) -> None:
        node = self.infos[number].node
        index = self.conductor.index
        counters = {f'pyengine_pool_counter_{i}{{node="{node.node}"}}': i for i in range(COUNTERS)}
        name = node.node
        self.on(DaemonHeartbeat(node, self.sequence[number], index.count(name), index.digest(name), counters))

    def asked(self, count: int) -> list[Asked]:
        """Popular prefixes more often: the n-th in proportion to 1/n."""
        weights = [1 / (1 + at) for at in range(len(self.chains))]
        chosen = self.draw.choices(self.chains, weights, k=count)
        asked = []
        for chain in chosen:
            known = self.draw.randint(1, STORED) * KEY_BYTES
            keys = chain[:known] + self.fresh.bytes(PROMPT * KEY_BYTES - known)
            number = self.draw.getrandbits(62)
            route = Route(
                request=number,
                attempt=0,
                model="model",
                namespace=NAMESPACE.digest(),
                keys=keys,
                prompt_tokens=PROMPT * 16 + 5,
                max_tokens=256,
                tenant="tenant",
            )
            frame, end = self.codec.encode([route]), self.codec.encode([RouteEnded(request=number, attempt=0)])
            asked.append(Asked(frame, end, keys, number))
        return asked

    def decide(self, frame: bytes) -> list[Message]:
        """What the service does between two sockets."""
        sent = []
        for message in self.codec.decode(frame):
            for action in self.conductor.on(FromGateway("gateway", message), self.now):  # type: ignore[arg-type]
                if isinstance(action, SendToGateway):
                    self.answers.encode([action.message])
                    sent.append(action.message)
        return sent  # type: ignore[return-value]


class Watch:
    """Seconds, by the clock and of this thread's work."""

    def __init__(self) -> None:
        self.seconds = self.worked = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.last = time.perf_counter() - self._start[0]
        self.seconds += self.last
        self.worked += time.thread_time() - self._start[1]


def run(cluster: Cluster, count: int, rate: int, events: bool, heartbeats: bool) -> tuple[Watch, list[float]]:
    """The time for all that belongs to `count` decisions, and what each of them took."""
    requests = cluster.asked(count)
    number = {worker.worker: at for at, worker in enumerate(cluster.infos)}
    running: deque[Asked] = deque()
    beats = 0.0
    beating = 0
    told = cluster.now
    latencies = []
    watch = Watch()
    for asked in requests:
        cluster.now += 1 / rate
        with watch:
            sent = cluster.decide(asked.frame)
        latencies.append(watch.last)
        planned = sent[0]
        assert isinstance(planned, Planned), planned
        running.append(asked)
        changes = b""
        if events:
            # The prefill node has what it fetched or computed now, and evicts as much of what it had.
            plan = planned.plan
            keys = [asked.keys[i : i + KEY_BYTES] for i in range(0, len(asked.keys), KEY_BYTES)]
            parents = [bytes(KEY_BYTES), *keys]
            stored = [Change(False, DRAM, key, parents[at], at) for at, key in enumerate(keys)]
            first = max(0, plan.cached_blocks)
            gone = [Change(True, DRAM, key) for key in keys[first:]]
            changes = pack([*stored[first:], *gone])
        with watch:
            if changes:
                cluster.publish(number[planned.plan.prefill.worker], changes)
            if len(running) > RUNNING:
                cluster.decide(running.popleft().end)
            if cluster.now - told > 0.25:
                told = cluster.now
                cluster.on(Tick())
        if heartbeats:
            beats += len(cluster.infos) / HEARTBEAT_EVERY / rate
            while beats >= 1:
                beats -= 1
                frame = cluster.heartbeat(beating % len(cluster.infos))
                with watch:
                    cluster.alive(frame)
                    if beating // len(cluster.infos) % 2:
                        cluster.daemon_alive(beating % len(cluster.infos))
                beating += 1
        else:
            # Nobody is to be taken for dead meanwhile.
            for worker in cluster.conductor.cluster.workers.values():
                worker.heard = cluster.now
        cluster.conductor._gateways["gateway"].heard = cluster.now
    return watch, latencies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the blocks, fewer decisions")
    parser.add_argument("--policy", default="kvcache-centric")
    parser.add_argument("--nodes", type=int, help="one size only")
    parser.add_argument("--parts", action="store_true", help="what a decision is made of, instead of figures")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    # As the service does: nobody looks for garbage among what was imported.
    gc.freeze()
    blocks = QUICK_BLOCKS if arguments.quick else BLOCKS
    count = QUICK_DECISIONS if arguments.quick else DECISIONS
    for nodes, rate in SIZES:
        if arguments.nodes not in (None, nodes):
            continue
        start = time.perf_counter()
        cluster = Cluster(nodes, blocks, arguments.policy)
        note(f"{nodes} nodes, {blocks} blocks: made in {time.perf_counter() - start:.1f} s")
        run(cluster, 200, rate, False, False)
        if arguments.parts:
            with clocks() as taken:
                run(cluster, count, rate, True, True)
            note("\n".join(table(taken, count)))
            continue
        for case, events, heartbeats in (
            ("decisions", False, False),
            ("with events", True, False),
            ("with all messages", True, True),
        ):
            watch, latencies = run(cluster, count, rate, events, heartbeats)
            rates = {"value": count / watch.seconds, "per_second_of_work": count / watch.worked}
            line(
                "conductor", f"{case} {nodes} nodes", unit="1/s", against="target", ratio=rates["value"] / rate, **rates
            )
            millis = [latency * 1e3 for latency in latencies]
            for percent in (50, 99):
                line("conductor", f"{case} p{percent} {nodes} nodes", percentile(millis, percent), "ms")


if __name__ == "__main__":
    main()
