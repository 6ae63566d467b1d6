"""What a page shows, as plain data: pure, from the cluster's counters and the latest requests."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from pyengine.dashboard.figures import seconds
from pyengine.gateway.recent import Record
from pyengine.scheduler.messages import HotPrefix
from pyengine.scheduler.types import WorkerInfo

#: The order of places where cached tokens are found: the nearer first.
TIERS = ("device", "dram", "ssd", "peer_dram", "peer_ssd")
#: Points of a curve: two minutes of a page that is looked at.
HISTORY = 120
#: Seconds over which a rate is a mean.
WINDOW = 10.0
#: Seconds over which requests are looked back at.
LATELY = 300.0

_SAMPLE = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    """One counter of the cluster."""

    labels: dict[str, str]
    value: float


class Counters:
    """The cluster's counters, by family."""

    def __init__(self, counters: Mapping[str, float]) -> None:
        self._families: dict[str, list[Sample]] = {}
        for name, value in counters.items():
            family, _, labels = name.partition("{")
            pairs = {key: _plain(text) for key, text in _SAMPLE.findall(labels)}
            self._families.setdefault(family, []).append(Sample(pairs, value))

    def of(self, family: str, **labels: str) -> Iterator[Sample]:
        """Those with these labels."""
        for sample in self._families.get(family, ()):
            if all(sample.labels.get(name) == value for name, value in labels.items()):
                yield sample

    def sum(self, family: str, **labels: str) -> float:
        return sum(sample.value for sample in self.of(family, **labels))


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """dram: slots of its pool by state. ssd_used, ssd_limit: bytes. received, sent: bytes per second."""

    name: str
    up: bool
    dram: dict[str, int]
    ssd_used: int
    ssd_limit: int
    ssd_trouble: int
    known_blocks: int
    grants_waiting: int
    received: float
    sent: float


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """rate: tokens per second. stalled: seconds for which its loop has not turned."""

    name: str
    role: str
    node: str
    backend: str
    dtype: str
    up: bool
    running: int
    waiting: int
    pages: float
    rate: float
    stalled: float


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """What came to, or went from, a node by one transport. rate: bytes per second."""

    node: str
    transport: str
    direction: str
    blocks: int
    bytes: int
    rate: float


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that came to nothing, by who said so and why."""

    who: str
    reason: str
    count: int


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of the head of the page: what it is now, and how it was. unit: behind the number."""

    name: str
    value: float
    unit: str
    points: tuple[float, ...] = ()
    hint: str = ""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """All of it at one moment. trouble: what is wrong, "" if nothing is. tiers: tokens of prompts by where they were
    found, "computed" for those that were not.
    """

    models: tuple[str, ...]
    trouble: str
    curves: tuple[Curve, ...]
    nodes: tuple[Node, ...]
    workers: tuple[Worker, ...]
    tiers: dict[str, int]
    transfers: tuple[Transfer, ...]
    hot: tuple[HotPrefix, ...]
    block_tokens: int
    promised: int
    kept: int
    refusals: tuple[Refusal, ...]
    requests: tuple[Record, ...]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway knows of itself. at: seconds on any clock. finished: answers by how they ended. promised, kept: as
    in `Recent`.
    """

    at: float
    conductor_up: bool
    servable: dict[str, bool]
    under_way: int
    prompt_tokens: int
    generated_tokens: int
    finished: dict[str, int]
    promised: int
    kept: int


class Meter:
    """What grows, as a rate over the last WINDOW seconds."""

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[float, float]]] = {}

    def rate(self, name: str, value: float, at: float) -> float:
        """Per second; 0 until there are two moments, and when it has begun anew."""
        seen = self._seen.setdefault(name, [])
        if seen and value < seen[-1][1]:
            seen.clear()
        if not seen or at > seen[-1][0]:
            seen.append((at, value))
        while len(seen) > 2 and seen[1][0] <= at - WINDOW:
            seen.pop(0)
        (since, before), (until, now) = seen[0], seen[-1]
        return (now - before) / (until - since) if until > since else 0.0


class Observer:
    """Makes views, one after the other. hot: as the conductor said last."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._points: dict[str, list[float]] = {}

    def view(
        self,
        infos: Sequence[WorkerInfo],
        samples: Mapping[str, float],
        told: float,
        facts: Facts,
        hot: Sequence[HotPrefix],
        requests: Sequence[Record],
        wall: float,
    ) -> View:
        """samples: counters by Prometheus sample name. told: when they came, on the clock of `facts.at`. wall: now,
        since 1970, as records have it.
        """
        counters = Counters(samples)
        workers = tuple(self._workers(infos, counters, told))
        nodes = tuple(self._nodes(counters, told))
        return View(
            models=tuple(sorted(facts.servable)),
            trouble=_trouble(facts, workers),
            curves=tuple(self._curves(facts, requests, workers, nodes, wall)),
            nodes=nodes,
            workers=workers,
            tiers=_tiers(counters),
            transfers=tuple(self._transfers(counters, told)),
            hot=tuple(hot),
            block_tokens=infos[0].namespace.kv.block_tokens if infos else 0,
            promised=facts.promised,
            kept=facts.kept,
            refusals=tuple(_refusals(counters, facts)),
            requests=tuple(requests),
        )

    # -- parts -----------------------------------------------------------------------------------------------------

    def _workers(self, infos: Sequence[WorkerInfo], counters: Counters, told: float) -> Iterator[Worker]:
        known = {info.worker: info for info in infos}
        names = {sample.labels.get("worker", "") for sample in counters.of("pyengine_worker_up")} | known.keys()
        for name in sorted(names):
            info = known.get(name)
            kind = next(iter(counters.of("pyengine_worker_info", worker=name)), Sample({}, 0.0)).labels
            up = counters.sum("pyengine_worker_up", worker=name) > 0.0 or info is not None
            yield Worker(
                name=name,
                role="" if info is None else info.role.value,
                node="" if info is None else info.node.node,
                backend=kind.get("backend", ""),
                dtype=kind.get("dtype", ""),
                up=up,
                running=int(counters.sum("vllm:num_requests_running", worker=name)),
                waiting=int(counters.sum("vllm:num_requests_waiting", worker=name)),
                pages=counters.sum("vllm:kv_cache_usage_perc", worker=name),
                rate=self._meter.rate(
                    f"worker {name}", counters.sum("pyengine_worker_tokens_total", worker=name), told
                ),
                stalled=counters.sum("pyengine_worker_stalled_seconds", worker=name) if up else 0.0,
            )

    def _nodes(self, counters: Counters, told: float) -> Iterator[Node]:
        for up in sorted(counters.of("pyengine_node_up"), key=lambda sample: sample.labels.get("node", "")):
            name = up.labels.get("node", "")
            slots = {
                sample.labels.get("state", ""): int(sample.value)
                for sample in counters.of("pyengine_pool_blocks", node=name, tier="dram")
            }
            rates = {
                direction: self._meter.rate(
                    f"node {name} {direction}",
                    counters.sum("pyengine_transfer_bytes_total", node=name, direction=direction),
                    told,
                )
                for direction in ("in", "out")
            }
            yield Node(
                name=name,
                up=up.value > 0.0,
                dram=slots,
                ssd_used=int(counters.sum("pyengine_tier_used_bytes", node=name, tier="ssd")),
                ssd_limit=int(counters.sum("pyengine_tier_limit_bytes", node=name, tier="ssd")),
                ssd_trouble=int(counters.sum("pyengine_tier_trouble", node=name, tier="ssd")),
                known_blocks=int(counters.sum("pyengine_index_blocks", node=name)),
                grants_waiting=int(counters.sum("pyengine_pool_grants", node=name, state="waiting")),
                received=rates["in"],
                sent=rates["out"],
            )

    def _transfers(self, counters: Counters, told: float) -> Iterator[Transfer]:
        samples = counters.of("pyengine_transfer_blocks_total")
        for sample in sorted(samples, key=lambda sample: sorted(sample.labels.items(), reverse=True)):
            labels = {name: sample.labels.get(name, "") for name in ("node", "transport", "direction")}
            size = counters.sum("pyengine_transfer_bytes_total", **labels)
            if sample.value:
                rate = self._meter.rate("transfer " + " ".join(labels.values()), size, told)
                yield Transfer(**labels, blocks=int(sample.value), bytes=int(size), rate=rate)

    def _curves(
        self,
        facts: Facts,
        requests: Sequence[Record],
        workers: Sequence[Worker],
        nodes: Sequence[Node],
        wall: float,
    ) -> Iterator[Curve]:
        rates = {
            "requests": self._meter.rate("requests", sum(facts.finished.values()), facts.at),
            "prompt": self._meter.rate("prompt", facts.prompt_tokens, facts.at),
            "generated": self._meter.rate("generated", facts.generated_tokens, facts.at),
        }
        late = [record for record in requests if record.end and wall - record.when <= LATELY]
        firsts = sorted(
            choice.parts["ttft"] for record in late for choice in record.choices[:1] if "ttft" in choice.parts
        )
        prompts = sum(record.prompt for record in late)
        cached = sum(record.cached for record in late)
        moved = sum(node.sent for node in nodes)
        waiting = sum(worker.waiting for worker in workers)
        yield self._curve("Requests under way", facts.under_way, "", f"{waiting} wait at workers")
        yield self._curve("Requests ended", rates["requests"] * 60.0, "/min", "of this gateway")
        yield self._curve("Tokens generated", rates["generated"], "/s", f"{rates['prompt']:,.0f}/s of prompts")
        half = firsts[len(firsts) // 2] if firsts else math.nan
        tail = firsts[min(len(firsts) - 1, int(0.95 * len(firsts)))] if firsts else math.nan
        yield self._curve("Time to first token", half, "s", f"p50 of 5 min; p95 {seconds(tail)}")
        share = cached / prompts if prompts else math.nan
        yield self._curve("Prompt tokens reused", share * 100.0, "%", "of the last 5 min")
        yield self._curve("KV between nodes", moved, "B/s", "sent by all nodes")

    def _curve(self, name: str, value: float, unit: str, hint: str) -> Curve:
        points = self._points.setdefault(name, [])
        points.append(0.0 if math.isnan(value) else value)
        del points[:-HISTORY]
        return Curve(name=name, value=value, unit=unit, points=tuple(points), hint=hint)


def _plain(text: str) -> str:
    """A label's value without the text format's escapes."""
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], text) if "\\" in text else text


def _trouble(facts: Facts, workers: Iterable[Worker]) -> str:
    if not facts.conductor_up:
        return "the conductor is away: nothing new is planned, what follows may be old"
    if not facts.servable:
        return "no worker has come yet"
    if lacking := sorted(name for name, servable in facts.servable.items() if not servable):
        return f"{', '.join(lacking)}: no worker to prefill, or none to decode"
    if missing := sorted(worker.name for worker in workers if not worker.up):
        return f"{', '.join(missing)}: away without a word"
    return ""


def _tiers(counters: Counters) -> dict[str, int]:
    found = {tier: int(counters.sum("pyengine_cached_tokens_total", tier=tier)) for tier in TIERS}
    computed = int(counters.sum("pyengine_worker_tokens_total", phase="prefill"))
    return {**found, "computed": computed}


def _refusals(counters: Counters, facts: Facts) -> Iterator[Refusal]:
    for sample in counters.of("pyengine_conductor_rejections_total"):
        yield Refusal(who="conductor", reason=sample.labels.get("reason", "") or "load", count=int(sample.value))
    for reason, count in sorted(facts.finished.items()):
        if reason not in ("stop", "length", "tool_calls"):
            yield Refusal(who="gateway", reason=reason, count=count)
    for sample in counters.of("pyengine_tenant_refused_total"):
        reason = f"{sample.labels.get('tenant', '')}: {sample.labels.get('limit', '')}"
        yield Refusal(who="limits", reason=reason, count=int(sample.value))
