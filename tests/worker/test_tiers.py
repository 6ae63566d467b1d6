"""Goal: a worker takes its prefix from wherever the pools have it, in whatever slot it comes to lie, counts where it
found it, and computes the rest; whatever a plan believed, the answer is right.

Method: a pool in Python in the place of the daemon's, whose DRAM, SSD and peers hold what hypothesis wants, and which
may say no to anything; the fake backend's answer depends on every byte that comes out of it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pyengine import _native
from pyengine._native import NodeAddress, Tag
from pyengine.backend import U8
from pyengine.backends.fake import FakeBackend, chain, fake_tokens, kv_rows
from pyengine.kv_mover import TIERS
from pyengine.scheduler.batcher import SequenceId
from pyengine.scheduler.types import KEY_BYTES, Medium, Node, Source, cacheable_blocks
from tests.worker.harness import HASH_KEY, Cluster
from tests.worker.test_worker import BLOCK, backend, prompt

HERE = NodeAddress("a", "127.0.0.1:1", 1)
#: Where a block may be, beside nowhere. Peers are asked in the order of the sources.
PLACES = ("dram", "ssd", "b dram", "b ssd", "c dram", "c ssd")
LENGTH = 8 * BLOCK + 5
PROMPT = prompt(LENGTH)


@dataclasses.dataclass(frozen=True)
class Slot:
    slot: int
    generation: int
    committed: bool


@dataclasses.dataclass(frozen=True)
class Granted:
    tag: Tag
    slots: list[Slot]


@dataclasses.dataclass(frozen=True)
class Located:
    tag: Tag
    slots: list[Slot]
    behind: int


@dataclasses.dataclass(frozen=True)
class Refused:
    tag: Tag
    refusal: str


@dataclasses.dataclass(frozen=True)
class Fetched:
    tag: Tag
    index: int
    refusal: str | None
    slot: Slot | None
    origin: str | None


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The events of _native cannot be made in Python: here they are these."""
    for event in (Granted, Located, Refused, Fetched):
        monkeypatch.setattr(_native, event.__name__, event)


class TieredPool:
    """A pool that has PROMPT's blocks at these places.

    moves: a fetched block comes to lie in another slot than granted, as when another's fetch of it was there first.
    full: no grant is given. broken: blocks that no fetch brings.
    """

    node = HERE

    def __init__(self, places: Sequence[set[str]], *, moves: bool, full: bool, broken: set[int]) -> None:
        tokens = np.asarray(PROMPT, np.uint32)
        spec = FakeBackend().namespace
        root = _native.root_key(spec.digest(), b"", b"", HASH_KEY)
        keys = _native.block_keys(tokens, BLOCK, root, HASH_KEY)
        self.keys = [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
        rows = kv_rows(chain(0, PROMPT), spec.kv.strips, spec.kv.strip_bytes // BLOCK // 8)
        self._bytes = {
            key: rows[i * BLOCK : (i + 1) * BLOCK].swapaxes(0, 1).copy().view(np.uint8).reshape(spec.kv.strips, -1)
            for i, key in enumerate(self.keys)
        }
        self.places = {key: set(place) for key, place in zip(self.keys, places, strict=True)}
        self.moves, self.full, self.broken = moves, full, {self.keys[i] for i in broken}
        self.held: dict[Tag, list[bytes]] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.tenants: set[int] = set()
        self._content: list[U8 | None] = []
        self._slots: dict[Tag, list[Slot]] = {}
        self._events: list[Any] = []

    def events(self) -> list[Any]:
        events, self._events = self._events, []
        return events

    def _slot(self, key: bytes | None) -> Slot:
        """A fresh one, with this block or with garbage."""
        self._content.append(self._bytes[key] if key is not None else None)
        return Slot(len(self._content) - 1, 1, key is not None)

    def grant(
        self, tag: Tag, keys: bytes, private: bool, parent: bytes, position: int, mode: str, tenant: int = 0
    ) -> None:
        self.tenants.add(tenant)
        self.held[tag] = [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
        if self.full:
            self._events.append(Refused(tag, "full"))
            return
        here = [key if "dram" in self.places.get(key, ()) else None for key in self.held[tag]]
        self._slots[tag] = [self._slot(key) for key in here]
        self._events.append(Granted(tag, self._slots[tag]))

    def lookup(self, tag: Tag, keys: bytes) -> None:
        wanted = [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
        places = [self.places.get(key, set()) for key in wanted]
        count, behind = here(places)
        self.held[tag] = wanted[:count]
        self._events.append(Located(tag, [self._slot(key) for key in self.held[tag]], behind))

    def fetch(self, tag: Tag, indices: Sequence[int], sources: Sequence[NodeAddress]) -> None:
        self.asked.append(("fetch", list(indices), [source.node for source in sources]))
        for index in reversed(indices):
            key = self.held[tag][index]
            tier = found(self.places[key], [source.node for source in sources])
            if tier is None or key in self.broken:
                self._events.append(Fetched(tag, index, "missing", None, None))
                continue
            slot = self._slots[tag][index]
            if self.moves:
                slot = self._slot(key)
            else:
                self._content[slot.slot] = self._bytes[key]
            self.places[key].add("dram")
            self._events.append(Fetched(tag, index, None, dataclasses.replace(slot, committed=True), tier))

    def prefetch(self, keys: bytes, parent: bytes, position: int, sources: Sequence[NodeAddress]) -> None:
        self.asked.append(("prefetch", keys, parent, position, [source.node for source in sources]))

    def open(self, tag: Tag, to: NodeAddress, within: float) -> None:
        self.asked.append(("open", to.node))

    def store(
        self, slot: int, generation: int, source: U8, first_strip: int = 0, run: int = 1, stride: int = 1
    ) -> None:
        self._content[slot] = source.copy()

    def load(self, slot: int, generation: int, into: U8, first_strip: int = 0, run: int = 1, stride: int = 1) -> bool:
        content = self._content[slot]
        assert content is not None, "a slot is read that holds nothing"
        into[:] = content
        return True

    def commit(self, tag: Tag, indices: Sequence[int]) -> None:
        pass

    def corrupt(self, tag: Tag, index: int) -> None:
        pytest.fail("nothing is corrupt here")

    def push(self, *arguments: Any, **named: Any) -> None:
        pytest.fail("nothing is handed off here")

    def end(self, tag: Tag) -> None:
        self.held.pop(tag, None)

    def fileno(self) -> int:
        return 0

    def close(self) -> None:
        pass


def here(places: Sequence[set[str]]) -> tuple[int, int]:
    """Leading blocks that are in DRAM, and how many behind these are on this node, if any is on its SSD only."""
    dram = next((i for i, place in enumerate(places) if "dram" not in place), len(places))
    own = next((i for i, place in enumerate(places) if not place & {"dram", "ssd"}), len(places))
    return dram, own - dram


def found(places: set[str], nodes: list[str]) -> str | None:
    """The tier where a daemon finds a block: its own before any peer's, a peer's DRAM before that peer's SSD."""
    if "dram" in places:
        return "dram"
    if "ssd" in places:
        return "ssd"
    for node in nodes:
        for medium in ("dram", "ssd"):
            if f"{node} {medium}" in places:
                return f"peer_{medium}"
    return None


def sources_of(plan: Sequence[tuple[str, int, int]]) -> tuple[Source, ...]:
    nodes = {name: Node(name, f"127.0.0.1:{i}", 1) for i, name in enumerate("abc", 1)}
    made = []
    for place, first, last in plan:
        node, _, medium = place.rpartition(" ")
        made.append(Source(nodes[node or "a"], first, last, Medium(medium)))
    return tuple(made)


def cluster_over(pool: TieredPool) -> Cluster:
    cluster = Cluster()
    cluster.add_node("a", 4, backend())
    cluster.add_worker("both", "a", backend(), wrap=lambda _: pool)
    return cluster


BLOCKS = cacheable_blocks(LENGTH, BLOCK)
spans = st.tuples(st.integers(0, BLOCKS), st.integers(0, BLOCKS + 2)).map(sorted)


# A block that the SSD names and does not give is asked for once.
@example(
    places=[{"dram"}, {"dram"}, {"ssd"}, {"ssd"}, set(), set(), set(), set()],
    plan=[("ssd", 0, 4)],
    cached=0,
    moves=False,
    full=False,
    broken={3},
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    places=st.lists(st.sets(st.sampled_from(PLACES)), min_size=BLOCKS, max_size=BLOCKS),
    plan=st.lists(st.tuples(st.sampled_from(PLACES[1:]), spans).map(lambda it: (it[0], *it[1])), max_size=4),
    cached=st.integers(0, BLOCKS + 2),
    moves=st.booleans(),
    full=st.booleans(),
    broken=st.sets(st.integers(0, BLOCKS - 1), max_size=2),
)
def test_a_prefix_comes_from_wherever_it_is(
    events: None,
    places: list[set[str]],
    plan: list[tuple[str, int, int]],
    cached: int,
    moves: bool,
    full: bool,
    broken: set[int],
) -> None:
    pool = TieredPool(places, moves=moves, full=full, broken=broken)
    with cluster_over(pool) as cluster:
        changes = {"tenant": 7, "cached_blocks": cached}
        request = cluster.submit(PROMPT, "both", "both", sources=sources_of(plan), changes=changes)
        cluster.run(request)
        assert request.ids == fake_tokens(PROMPT, 8)

        # With no source a lookup, and without room too; else the grant covers what anybody is believed to have. What a
        # lookup finds on the node's own SSD is granted, too.
        believed = min(max(cached, *(last for *_, last in plan)), BLOCKS) if plan else 0
        dram, behind = here(places)
        if not believed and behind:
            believed = dram + behind
        wanted = 0 if full else believed
        tiers: Counter[str] = Counter()
        for block in range(wanted or BLOCKS):
            peers = [place[0] for place, first, last in plan if " " in place and first <= block < last]
            tier = "dram" if "dram" in places[block] else None
            if tier is None and wanted and block not in broken:
                tier = found(places[block], peers)
            if tier is None:
                break
            tiers[tier] += BLOCK
        assert request.tiers == dict(tiers)
        assert request.cached == tiers.total()
        counters = cluster.workers["both"].counters
        assert {tier: counters[f"cached_{tier}"] for tier in TIERS if counters[f"cached_{tier}"]} == dict(tiers)
        # No grant is asked for if nothing is to be fetched and no block is computed whole.
        assert pool.tenants <= {7}
        assert pool.tenants or not believed
        cluster.workers["both"].step()
        assert not pool.held, "tags were not ended"


def test_what_others_have_is_prefetched_before_decodes_grant_stands(events: None) -> None:
    """A prefill part may hold no slots yet; what it finds in DRAM afterwards counts as found where it was."""
    pool = TieredPool([{"ssd"}, {"ssd"}, {"dram"}, {"b dram"}, *[set()] * 4], moves=False, full=False, broken=set())
    with cluster_over(pool) as cluster:
        worker = cluster.workers["both"]
        sources = sources_of([("ssd", 0, 2), ("b dram", 3, 4), ("c ssd", 3, 5)])
        changes = {"part": "prefill", "cached_blocks": 5}
        request = cluster.submit(PROMPT, "both", "both", sources=sources, changes=changes)
        worker.mover.flush()
        keys = pool.keys
        assert pool.asked == [
            ("prefetch", keys[0] + keys[1], bytes(16), 0, []),
            ("prefetch", keys[3], keys[2], 3, ["b", "c"]),
            ("prefetch", keys[4], keys[3], 4, ["c"]),
            ("open", "a"),
        ]
        job = worker.mover.jobs[request.number, 1]
        pool.places[keys[0]].add("dram")
        pool.asked.clear()
        worker.mover._opened(job, [False] * 9, [])
        worker.mover.flush()
        # It comes after the grant, and before the fetch.
        pool.places[keys[1]].add("dram")
        cluster.until(lambda: job.sequence.started, "both")
        assert pool.asked == [("fetch", [1], []), ("fetch", [3], ["b", "c"]), ("fetch", [4], ["c"])]
        assert worker.mover.cached_by_tier(job.sequence) == {"ssd": 2 * BLOCK, "dram": BLOCK, "peer_dram": BLOCK}
        cluster.abort(request)


class Draining(TieredPool):
    """It gives nothing new; what has been granted before it lets be filled."""

    def __init__(self) -> None:
        super().__init__([{"dram"}] * BLOCKS, moves=False, full=True, broken=set())
        self.pushed: list[int] = []

    def lookup(self, tag: Tag, keys: bytes) -> None:
        self.held[tag] = []
        self._events.append(Refused(tag, "full"))

    def push(self, local: Tag, tag: Tag, indices: Sequence[int], first: int = 0, note: bytes | None = None) -> None:
        self.pushed += indices


def test_a_prefill_that_is_refused_all_reads_what_decodes_grant_holds(events: None) -> None:
    """On one node, when the daemon drains between the decode worker's grant and the prefill worker's."""
    pool = Draining()
    with cluster_over(pool) as cluster:
        worker = cluster.workers["both"]
        sources = sources_of([("ssd", 0, BLOCKS)])
        request = cluster.submit(PROMPT, "both", "both", sources=sources, changes={"part": "prefill"})
        job = worker.mover.jobs[request.number, 1]
        slots: list[Any] = [pool._slot(key) for key in (*pool.keys[:3], *[None] * (BLOCKS - 2))]
        worker.mover._opened(job, [slot.committed for slot in slots], slots)
        cluster.until(lambda: BLOCKS in pool.pushed, "both")
        assert pool.pushed == list(range(3, BLOCKS + 1))
        # They were asked for ahead, from SSD.
        assert worker.mover.cached_by_tier(job.sequence) == {"ssd": 3 * BLOCK}
        cluster.abort(request)


def test_a_fetch_that_a_prefetch_was_ahead_of_is_measured_from_when_that_began(events: None) -> None:
    """And with what that has brought by then. Where part of it was prefetched only, nobody knows what took how long."""
    places: list[set[str]] = [{"ssd"}, {"ssd"}, {"b dram"}, {"b dram"}, {"c dram"}, {"c dram"}, set(), set()]
    pool = TieredPool(places, moves=False, full=False, broken=set())
    with cluster_over(pool) as cluster:
        worker = cluster.workers["both"]
        sources = sources_of([("ssd", 0, 2), ("b dram", 2, 4), ("c dram", 4, 6)])
        request = cluster.submit(PROMPT, "both", "both", sources=sources, changes={"part": "prefill"})
        job = worker.mover.jobs[request.number, 1]
        # The first from b has come already, and one from c is asked for with what nobody has asked for before.
        pool.places[pool.keys[2]].add("dram")
        del job.prefetched[5]
        job.prefetched_at -= 100.0
        worker.mover._opened(job, [False] * 9, [])
        cluster.until(lambda: job.sequence.started, "both")
        assert worker.mover.cached_by_tier(job.sequence) == {"ssd": 2 * BLOCK, "peer_dram": 4 * BLOCK}
        size = backend().namespace.kv.block_bytes
        loads = [load for load in worker.mover.loads if not load.device]
        assert [(load.source, load.size) for load in loads] == [("a", 2 * size), ("b", 2 * size)]
        assert all(100.0 < load.seconds < 200.0 for load in loads)
        cluster.abort(request)


@pytest.mark.parametrize("found", [0, 3, BLOCKS])
def test_slots_for_what_no_source_had_are_let_go_before_it_is_computed(
    events: None, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or they would keep others from caching, and be of no use."""
    places: list[set[str]] = [{"ssd"}] * found + [set()] * (BLOCKS - found)
    pool = TieredPool(places, moves=False, full=False, broken=set())
    with cluster_over(pool) as cluster:
        worker = cluster.workers["both"]
        batcher = worker.batcher
        ready, held = batcher.ready, []

        def ready_with(sequence: SequenceId, tokens: int) -> None:
            worker.mover.flush()
            held.append((sum(map(len, pool.held.values())), tokens))
            ready(sequence, tokens)

        monkeypatch.setattr(batcher, "ready", ready_with)
        request = cluster.submit(PROMPT, "both", "both", sources=sources_of([("ssd", 0, BLOCKS)]))
        cluster.run(request)
        assert held == [(found, found * BLOCK)]
        assert request.ids == fake_tokens(PROMPT, 8)
        assert request.tiers == ({"ssd": found * BLOCK} if found else {})


def test_fetches_are_measured_if_all_came_from_one_place(events: None) -> None:
    places: list[set[str]] = [{"ssd"}, {"ssd"}, {"b dram"}, {"b dram"}, {"b dram"}, {"b ssd"}, set(), set()]
    plan = [("ssd", 0, 2), ("b dram", 2, 5), ("c dram", 5, 7), ("b ssd", 5, 7)]
    pool = TieredPool(places, moves=False, full=False, broken=set())
    with cluster_over(pool) as cluster:
        cluster.run(cluster.submit(PROMPT, "both", "both", sources=sources_of(plan)))
        measured = cluster.workers["both"].mover.loads
        size = backend().namespace.kv.block_bytes
        (copied,) = [load for load in measured if load.device]
        assert copied.size % size == 0
        loads = [load for load in measured if not load.device]
        assert [(load.source, load.size) for load in loads] == [("a", 2 * size), ("b", 3 * size)]
        assert all(load.seconds > 0 for load in loads)
