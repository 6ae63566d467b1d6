"""Moves KV between a worker's device pages and its node's pool, and from prefill to decode worker.

The worker's loop calls it; it never blocks for longer than ANSWER. What it asks of the pool is answered by events,
which `pump` turns into calls of the Batcher (`ready`, `first_token`) and into `Failure`s. Of each sequence it keeps
one `Job`:

    both      seek --> ready --> load pages --> [compute, write through]
    prefill   prefetch, open(decode's grant) --> seek --> ready --> load --> [compute chunk, stage, push]* --> note
    decode    grant --> complete(note) --> first token, ready --> load --> end(grant) --> [decode, write through]

To seek is to pin what this node has of the prefix in DRAM (lookup), and if the plan names sources beyond that, or
the lookup finds more on this node's SSD, to grant slots for the rest and fetch it into them. A prefill part may not
hold slots before decode's grant stands; it has what it will want brought into DRAM meanwhile (prefetch), which
holds nothing. Slots that no source filled are let go before anything is computed.

A chunk that is large enough leaves while it is computed (`stream`): strips of its blocks are stored, and between nodes
pushed, layer by layer; the blocks are committed when the step has succeeded. A prefix that is large enough is loaded
beside the step that goes on from it (`readable`); prefill's is loaded before, as it is handed on as well.

On one node prefill writes into the slots of the decode worker's grant, and a push commits them. Between nodes each
block is *staged*: granted one slot of the own pool, stored, published (so it stays cached) and pushed; the slot is let
go when the block has arrived. Nobody who waits for something else may hold a pool's last slot, so staging always goes
on, and nodes that prefill for each other cannot wait for each other in a circle.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import select
import time
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Run
from functools import partial
from typing import ParamSpec, Protocol

import msgspec

from pyengine import _native
from pyengine._native import NodeAddress, Slot, Tag
from pyengine.backend import U8, Backend, Readable, WorkerBroken, Written
from pyengine.copier import Copied, Copier
from pyengine.group_copier import GroupCopier
from pyengine.loading import Loader, Loading
from pyengine.ranks import Ranked
from pyengine.scheduler.batcher import Batcher, Filled, Load, Planned, Sequence, SequenceId, State
from pyengine.scheduler.messages import LoadSample, Note, Work
from pyengine.scheduler.types import KEY_BYTES, KvSpec, Medium, Node, cacheable_blocks
from pyengine.streaming import Stream, Streamer

logger = logging.getLogger(__name__)

#: Blocks that may wait, copied out of their pages, for a free slot to be cached in; beyond it they are not cached.
WRITE_THROUGH_BLOCKS = 256
#: Blocks of one sequence on their way through the own pool at once; the others wait in their pages. A long prefix that
#: comes from the pool would else fill the daemon's queues.
STAGED_BLOCKS = 64
#: Tags with this attempt never leave their worker; no request is tried so often.
LOCAL_ATTEMPT = 2**32 - 1
#: Longest wait for a decode worker's grant, seconds; what LLM and tests call "for ever" must fit a number of ms.
LONGEST_WAIT = 86400.0

#: Seconds for which a question is waited for that the daemon answers at once. It takes 0.1 to 0.2 ms; an answer that
#: came a moment after a step was planned would be seen when that step is over, 10 to 200 ms later.
ANSWER = 1e-3

#: Bytes a second at which blocks are copied out of pages into the arena, at most: 24 MB of SmolLM2 took 18 ms.
COPY_RATE = 2e9

#: Measured loads kept for the next heartbeat.
LOADS = 256

#: Where reused KV is found: in pages of this worker, in this node's pool, in that of another.
TIERS = ("device", "dram", "ssd", "peer_dram", "peer_ssd")

NO_PARENT = bytes(KEY_BYTES)

Arguments = ParamSpec("Arguments")


class Pool(Protocol):
    """The part of PoolClient that a mover uses (tests put misbehaving twins here)."""

    @property
    def node(self) -> NodeAddress: ...
    def events(self) -> list[_native.PoolEvent]: ...
    def grant(
        self, tag: Tag, keys: bytes, private: bool, parent: bytes, position: int, mode: str, tenant: int = 0
    ) -> None: ...
    def lookup(self, tag: Tag, keys: bytes) -> None: ...
    def commit(self, tag: Tag, indices: Run[int]) -> None: ...
    def fetch(self, tag: Tag, indices: Run[int], sources: Run[NodeAddress]) -> None: ...
    def prefetch(self, keys: bytes, parent: bytes, position: int, sources: Run[NodeAddress]) -> None: ...
    def open(self, tag: Tag, to: NodeAddress, within: float) -> None: ...
    def push(
        self,
        local: Tag,
        tag: Tag,
        indices: Run[int],
        first: int = 0,
        note: bytes | None = None,
        strips: tuple[int, int] | None = None,
    ) -> None: ...
    def corrupt(self, tag: Tag, index: int) -> None: ...
    def end(self, tag: Tag) -> None: ...
    def store(
        self, slot: int, generation: int, source: U8, first_strip: int = 0, run: int = 1, stride: int = 1
    ) -> None: ...
    def load(
        self, slot: int, generation: int, into: U8, first_strip: int = 0, run: int = 1, stride: int = 1
    ) -> bool: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class Failure(msgspec.Struct, frozen=True):
    """A sequence that cannot go on here. kind and reason as in messages.Failed."""

    id: SequenceId
    kind: str
    reason: str


@dataclasses.dataclass
class Holding:
    """Leading blocks held in the pool under one tag: block k of the sequence lies in slots[k]."""

    tag: Tag
    slots: list[Slot] = dataclasses.field(default_factory=list)
    committed: list[bool] = dataclasses.field(default_factory=list)
    #: The tier where each block was found.
    tiers: list[str] = dataclasses.field(default_factory=list)

    def take(self, slots: list[Slot]) -> None:
        """The pool's answer. Blocks whose tier is known were fetched before; the others were in DRAM."""
        self.slots = slots
        self.committed = [slot.committed for slot in slots]
        self.tiers = self.tiers[: len(slots)] + ["dram"] * (len(slots) - len(self.tiers))

    def found(self, block: int, slot: Slot, tier: str) -> None:
        """A fetch has brought the block, into this slot."""
        self.slots[block], self.committed[block], self.tiers[block] = slot, True, tier

    def readable(self, block: int) -> Slot | None:
        """The slot of a block of the sequence, if it is held here and readable."""
        return self.slots[block] if block < len(self.slots) and self.committed[block] else None


class Offer(msgspec.Struct, frozen=True):
    """Who has a block that this node's DRAM lacks: nodes in order of preference. tier: where the first of them, or this
    node's SSD, has it. coming: some of them will have it later only.
    """

    nodes: tuple[Node, ...]
    tier: str
    coming: bool = False


NOBODY = Offer((), "")


@dataclasses.dataclass
class Fetch:
    """Blocks asked for together: how many are still to come, and where the others were. began: None: not all together.

    ahead: those that were prefetched from the same nodes, at the same time, and have come before.
    """

    nodes: tuple[Node, ...]
    began: float | None
    left: int
    ahead: int = 0
    tiers: Counter[str | None] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass
class Job:
    """What the mover knows of one sequence."""

    sequence: Sequence
    work: Work
    #: Blocks pinned or reserved here for this sequence: the local grant, or what a lookup found.
    local: Holding | None = None
    #: Prefill: the decode worker's grant (slots only if it lies in this arena). Decode: the own grant.
    handoff: Holding | None = None
    #: Blocks whose fetch has no outcome yet.
    fetching: dict[int, Fetch] = dataclasses.field(default_factory=dict)
    #: Blocks that were prefetched, and the tier where they were planned to be; and when they were asked for.
    prefetched: dict[int, str] = dataclasses.field(default_factory=dict)
    prefetched_at: float = 0.0
    #: Blocks that the sequence took over when it first started, by the tier of the pools where they were found.
    reused: Counter[str] = dataclasses.field(default_factory=Counter)
    #: True while `local` is a grant to fetch into, False while it is a lookup.
    reserving: bool = False
    #: Leading blocks that a lookup has found on this node's SSD, behind those in DRAM. It is believed once, and only
    #: before anything was granted.
    found: range | None = None
    #: Prefill: blocks on their way (or committed at the decode node before).
    delivered: set[int] = dataclasses.field(default_factory=set)
    #: Prefill: blocks that wait in their pages until fewer are staged.
    unstaged: deque[int] = dataclasses.field(default_factory=deque)
    #: Prefill: blocks that wait for a slot of the own pool, by the tag of their grant; their pages must stay.
    staging: dict[Tag, int] = dataclasses.field(default_factory=dict)
    #: Prefill: tags of slots being pushed, by block.
    staged: dict[int, Tag] = dataclasses.field(default_factory=dict)
    #: Prefill: blocks that leave while the step computes them.
    stream: Stream | None = None
    #: Blocks that are copied into their pages, beside steps or before the first; and what the batcher believes of them.
    loading: Loading | None = None
    load: Load | None = None
    #: Prefill: encoded, once the prompt is computed.
    note: bytes | None = None
    opened: bool = False
    adopted: bool = False
    #: When all that the plan's sources offer is expected to be there (time.monotonic).
    not_before: float = 0.0
    #: Decode: when the first KV came, and when all of it was there with the note (time.monotonic); 0: not yet.
    came: float = 0.0
    whole: float = 0.0

    @property
    def id(self) -> SequenceId:
        return self.sequence.id

    @property
    def same_arena(self) -> bool:
        return self.opened and self.handoff is not None and bool(self.handoff.slots)

    def holdings(self) -> list[Holding]:
        return [holding for holding in (self.local, self.handoff) if holding is not None]

    def find(self, block: int) -> tuple[Holding, Slot] | None:
        """Where a block can be read from the pool."""
        for holding in self.holdings():
            slot = holding.readable(block)
            if slot is not None:
                return holding, slot
        return None

    def leading(self, limit: int) -> int:
        """Length of the run of leading blocks, at most `limit`, that can be read."""
        return next((block for block in range(limit) if self.find(block) is None), limit)


class KvMover:
    """Owned by one worker's loop; see the module's text. `connect` again after a daemon's death.

    counters: cumulative counts by name, for the worker's heartbeat: blocks copied to and from the pool, blocks that
    found no room there, copies out of the pool that were not intact.
    loads: measured fetches, for the heartbeat too; whoever sends them puts an empty list here.
    lost: why the pool can take no more requests, though it has not said goodbye yet; the next `pump` lets go of it.
    """

    def __init__(
        self,
        backend: Backend,
        batcher: Batcher,
        spec: KvSpec,
        incarnation: int,
    ) -> None:
        self.backend = backend
        self.batcher = batcher
        self.spec = spec
        self.incarnation = incarnation
        self.copier = (
            GroupCopier(backend, spec, backend.heads, backend.ranks)
            if isinstance(backend, Ranked)
            else Copier(backend, spec)
        )
        self.streamer = Streamer(self.copier, spec, self._send_strips)
        self.loader = Loader(self.copier, spec)
        self.pool: Pool | None = None
        self.lost: str | None = None
        self.jobs: dict[SequenceId, Job] = {}
        self.failures: deque[Failure] = deque()
        #: Prefill parts whose KV and note have arrived at the decode node: nothing is left to do for them.
        self.handed_off: deque[SequenceId] = deque()
        #: Prefill parts that are computed and copied out of their pages: the batcher may forget them.
        self.copied_out: deque[SequenceId] = deque()
        #: Who had pages and has them no more, as what was to be loaded into them is not intact, or not there any more.
        self.restarted: deque[SequenceId] = deque()
        self.counters = {"checksum_failures": 0, "stored_blocks": 0, "loaded_blocks": 0, "uncached_blocks": 0}
        self.loads: list[LoadSample] = []
        self._by_tag: dict[Tag, Job] = {}
        #: Whose blocks are copied into pages, and who is HELD since they were found not to be intact.
        self._loading: dict[SequenceId, Job] = {}
        self._again: list[Job] = []
        #: Blocks copied out of their pages that wait for the answer to their grant, by its tag.
        self._write_through: dict[Tag, Copied] = {}
        self._requests: list[Callable[[], None]] = []
        #: Questions of this round that the daemon answers at once.
        self._asked: set[Tag] = set()
        self._answers = select.poll()
        self._next_local = 0
        #: When to look for the prefix of those who wait until somebody has computed it (time.monotonic).
        self._later: dict[SequenceId, float] = {}

    @property
    def due(self) -> float:
        """When `pump` has something to do without an event (time.monotonic)."""
        return min(self._later.values(), default=math.inf)

    # -- the pool comes and goes ----------------------------------------------------------------------------------

    def connect(self, pool: Pool) -> None:
        """Takes a fresh link to the node's daemon. Requires that none is connected."""
        assert self.pool is None, "a mover has one pool at a time"
        self.pool = pool
        self._answers = select.poll()
        self._answers.register(pool.fileno(), select.POLLIN)
        self.lost = None
        # It may be gone again: then `pump` lets go of it.
        self._try(partial(self.copier.connect, pool))

    def _ask(self, request: Callable[Arguments, None], *arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        """A request of the pool, to be made by `flush`."""
        self._requests.append(partial(request, *arguments, **named))

    def flush(self) -> None:
        """Makes the requests of the pool, together: the first wakes the daemon's thread, which costs ten times as much
        as each further one. To be called before anything that lasts.

        A request that finds the daemon dead, or too far behind to take it, does nothing, and neither do those after it:
        what was held is let go as a whole by `pump`.
        """
        requests, self._requests = self._requests, []
        for request in requests:
            self._try(request)

    def _try(self, request: Callable[[], None]) -> None:
        if self.lost is None:
            try:
                request()
            except _native.RetryError as error:
                self.lost = str(error)

    def _disconnected(self, reason: str) -> None:
        """The daemon died. What decodes goes on from its pages; what needed the pool is failed or goes on without."""
        self.close()
        self._again.clear()
        self._requests.clear()
        self._asked.clear()
        self._write_through.clear()
        self._by_tag.clear()
        self._later.clear()
        for job in list(self.jobs.values()):
            needs_pool = job.work.part == "prefill" or (job.work.part == "decode" and not job.adopted)
            if job.id in self._loading:
                self._stop_loading(job)
                self._unreadable(job)
            waiting = self._held(job)
            job.local = job.handoff = None
            job.fetching.clear()
            job.unstaged.clear()
            job.staging.clear()
            job.staged.clear()
            job.stream = None
            if needs_pool:
                self.failures.append(Failure(job.id, "retry", f"the node's daemon is lost: {reason}"))
            elif waiting:
                self.batcher.ready(job.id, 0)

    def close(self) -> None:
        if self.pool is not None:
            for job in self._loading.values():
                if job.loading is not None:
                    job.loading.cancel()
            self.loader.close()
            self.streamer.close()
            self.copier.disconnect()
            self.pool.close()
            self.pool = None

    # -- requests begin and end -----------------------------------------------------------------------------------

    def begin(self, sequence: Sequence, work: Work) -> None:
        """The sequence was added to the batcher (HELD): asks the pools for its KV."""
        job = Job(sequence, work)
        self.jobs[job.id] = job
        if self.pool is None:
            if work.part == "both":
                self.batcher.ready(job.id, 0)
            else:
                self.failures.append(Failure(job.id, "retry", "the node's daemon is away"))
            return
        job.not_before = time.monotonic() + max((source.ready for source in work.sources), default=0.0)
        if work.part == "both":
            self._seek_in_time(job)
            return
        job.handoff = Holding(Tag(work.request, work.attempt, work.decode_incarnation))
        self._by_tag[job.handoff.tag] = job
        if work.part == "decode":
            private = len(sequence.tokens) % self.spec.block_tokens != 0
            self._ask(self.pool.grant, job.handoff.tag, work.keys, private, NO_PARENT, 0, "wait", work.tenant)
        else:
            self._prefetch(job)
            within = min(work.deadline, LONGEST_WAIT)
            self._ask(self.pool.open, job.handoff.tag, address(work.decode_node), within)

    def end(self, sequence_id: SequenceId) -> None:
        """The sequence is over (ended, failed or aborted): releases all it holds in pools. Idempotent."""
        job = self.jobs.pop(sequence_id, None)
        self._later.pop(sequence_id, None)
        if job is not None:
            self._stop_loading(job)
            for holding in job.holdings():
                self._release(holding.tag)
            for tag in (*job.staging, *job.staged.values()):
                self._release(tag)

    def resume(self, sequence_id: SequenceId) -> None:
        """The sequence was preempted (HELD): looks again for what the pool still has of it."""
        job = self.jobs[sequence_id]
        self._stop_loading(job)
        # The pages of blocks not copied out yet are gone: they are delivered when computed again.
        job.delivered.difference_update(job.unstaged, job.staging.values())
        for tag in job.staging:
            self._release(tag)
        job.unstaged.clear()
        job.staging.clear()
        if job.local is not None:
            self._release(job.local.tag)
            job.local = None
        job.found = None
        if self.pool is None:
            self.batcher.ready(sequence_id, 0)
        else:
            self._lookup(job)

    def _held(self, job: Job) -> bool:
        """True while the batcher waits for this mover's word."""
        sequence = self.batcher.sequences.get(job.id)
        return sequence is not None and sequence.state is State.HELD

    def _seek_in_time(self, job: Job) -> None:
        """As `_seek_prefix`, but not before the plan expects all of it to be there."""
        if job.not_before > time.monotonic():
            self._later[job.id] = job.not_before
        else:
            self._seek_prefix(job)

    def _seek_prefix(self, job: Job) -> None:
        """Pins what this node has of the prefix, and has the rest of what the plan's sources offer fetched."""
        assert self.pool is not None, "callers check"
        wanted = len(self._offers(job))
        if wanted:
            # What a lookup says after this was asked for, or refused.
            job.found = job.found or range(0)
            tag, keys = self._reuse_tag(job, reserving=True), b"".join(job.sequence.keys[:wanted])
            self._ask(self.pool.grant, tag, keys, False, NO_PARENT, 0, "now", job.work.tenant)
        else:
            self._lookup(job)

    def _prefetch(self, job: Job) -> None:
        """Has what the plan's sources offer brought into this node's DRAM, as far as there is room."""
        assert self.pool is not None, "callers check"
        offers, first = self._offers(job), 0
        job.prefetched_at = time.monotonic()
        for last in range(1, len(offers) + 1):
            if last < len(offers) and offers[last] == offers[first]:
                continue
            offer, keys = offers[first], job.work.keys
            # What somebody computes just now cannot be had ahead.
            if offer != NOBODY and not offer.coming:
                parent = keys[(first - 1) * KEY_BYTES : first * KEY_BYTES] if first else NO_PARENT
                sources = [address(node) for node in offer.nodes]
                self._ask(self.pool.prefetch, keys[first * KEY_BYTES : last * KEY_BYTES], parent, first, sources)
                job.prefetched.update(dict.fromkeys(range(first, last), offer.tier))
            first = last

    def _offers(self, job: Job) -> list[Offer]:
        """Who has each block of the prefix, by the plan; NOBODY for what lies in DRAM here; empty if all does."""
        assert self.pool is not None, "callers check"
        here = self.pool.node.node
        sources = [source for source in job.work.sources if source.node.node != here or source.medium is Medium.SSD]
        found = job.found or range(0)
        known = max(job.work.cached_blocks, *(source.last for source in sources)) if sources else 0
        offers = [NOBODY] * min(max(known, found.stop), self._prefix_limit(job))
        for source in sources:
            own = source.node.node == here
            nodes, tier = ((), source.medium.value) if own else ((source.node,), f"peer_{source.medium.value}")
            for block in range(source.first, min(source.last, len(offers))):
                offer = offers[block]
                others = tuple(node for node in nodes if node not in offer.nodes)
                # Whatever is preferred among peers, this node's own SSD is read first.
                coming = offer.coming or source.ready > 0
                offers[block] = Offer(offer.nodes + others, tier if own else offer.tier or tier, coming)
        for block in range(found.start, min(found.stop, len(offers))):
            offers[block] = Offer(offers[block].nodes, Medium.SSD.value)
        return offers

    def _lookup(self, job: Job, tiers: Run[str] = ()) -> None:
        """Pins what this node's DRAM has of the prefix. tiers: where blocks were found that have come there since."""
        assert self.pool is not None, "callers check"
        keys = b"".join(job.sequence.keys[: self._prefix_limit(job)])
        if not keys:
            self.batcher.ready(job.id, 0)
            return
        self._ask(self.pool.lookup, self._reuse_tag(job, reserving=False, tiers=tiers), keys)

    def _reuse_tag(self, job: Job, *, reserving: bool, tiers: Run[str] = ()) -> Tag:
        """A fresh tag for what the job may reuse of this node's pool."""
        job.reserving = reserving
        job.local = Holding(self._local_tag(), tiers=list(tiers))
        self._by_tag[job.local.tag] = job
        self._asked.add(job.local.tag)
        return job.local.tag

    def _prefix_limit(self, job: Job) -> int:
        return min(cacheable_blocks(len(job.sequence.tokens), self.spec.block_tokens), len(job.sequence.keys))

    def _local_tag(self) -> Tag:
        """A tag that never leaves this worker."""
        self._next_local += 1
        return Tag(self._next_local, LOCAL_ATTEMPT, self.incarnation)

    def _release(self, tag: Tag) -> None:
        self._asked.discard(tag)
        if self._by_tag.pop(tag, None) is not None and self.pool is not None:
            self._ask(self.pool.end, tag)

    # -- events of the pool ---------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Takes the pool's events and moves every job on; what the daemon answers at once, in this round. Who does not
        answer within ANSWER is heard in a later one, and not waited for again.
        """
        self._take_events()
        for job in [job for job in self._loading.values() if job.loading is not None and job.loading.over]:
            self._end_load(job)
        again, self._again = self._again, []
        for job in again:
            if self.jobs.get(job.id) is job:
                self._ready(job)
        self.flush()
        until = time.monotonic() + ANSWER
        while self._asked and self.lost is None and (left := until - time.monotonic()) > 0.0:
            self._answers.poll(left * 1000)
            self._take_events()
            self.flush()
        self._asked.clear()

    def _take_events(self) -> None:
        if self.pool is None:
            return
        if self.lost is not None:
            self._disconnected(self.lost)
            return
        now = time.monotonic()
        for sequence_id in [sequence_id for sequence_id, due in self._later.items() if due <= now]:
            del self._later[sequence_id]
            self._seek_prefix(self.jobs[sequence_id])
        granted: dict[SequenceId, list[tuple[Tag, Slot]]] = {}
        for event in self.pool.events():
            if isinstance(event, _native.Granted | _native.Located | _native.Refused):
                self._asked.discard(event.tag)
            match event:
                case _native.Disconnected(reason):
                    self._disconnected(reason)
                    return
                case _native.Granted(tag, slots):
                    if tag in self._write_through:
                        self._store_through(tag, self._write_through.pop(tag), slots)
                    elif job := self._by_tag.get(tag):
                        if tag in job.staging:
                            granted.setdefault(job.id, []).append((tag, slots[0]))
                        else:
                            self._granted(job, tag, slots)
                case _native.Located(tag, slots, behind):
                    if job := self._by_tag.get(tag):
                        self._located(job, tag, slots, behind)
                case _native.Opened(tag, committed, slots):
                    if job := self._by_tag.get(tag):
                        self._opened(job, committed, slots)
                case _native.Arrived(tag, indices):
                    if (job := self._by_tag.get(tag)) and job.handoff is not None and job.handoff.tag == tag:
                        job.came = job.came or time.monotonic()
                        for index in indices:
                            if index < len(job.handoff.committed):
                                job.handoff.committed[index] = True
                case _native.Complete(tag, note):
                    if job := self._by_tag.get(tag):
                        self._complete(job, note)
                case _native.Fetched(tag, index, _, slot, tier):
                    if job := self._by_tag.get(tag):
                        self._fetched(job, index, slot, tier)
                case _native.Pushed(tag, indices, note):
                    if job := self._by_tag.get(tag):
                        self._pushed(job, indices, note)
                case _native.Refused(tag, refusal):
                    self._refused(tag, refusal)
                case _:
                    pass
        for sequence_id, staged in granted.items():
            if job := self.jobs.get(sequence_id):
                self._store_staged(job, staged)

    def _located(self, job: Job, tag: Tag, slots: list[Slot], behind: int) -> None:
        assert job.local is not None and job.local.tag == tag, "one lookup per job at a time"
        if behind and job.found is None and self._held(job):
            job.found = range(len(slots), len(slots) + behind)
            self._seek_prefix(job)
            # Only now: what it has pinned stays where it is.
            self._release(tag)
            return
        job.local.take(slots)
        self._ready(job)

    def _granted(self, job: Job, tag: Tag, slots: list[Slot]) -> None:
        if job.handoff is not None and job.handoff.tag == tag:
            job.handoff.take(slots)
            return
        assert job.local is not None, "a grant of this job is its local one or its hand-off"
        job.local.take(slots)
        assert self.pool is not None, "the event came from it"
        wanted: dict[tuple[Node, ...], list[int]] = {}
        ahead: Counter[tuple[Node, ...]] = Counter()
        for block, offer in enumerate(self._offers(job)[: len(slots)]):
            if slots[block].committed:
                job.local.tiers[block] = job.prefetched.get(block, "dram")
                ahead[offer.nodes] += block in job.prefetched
            elif job.find(block) is None:
                # Nobody offers it if it was in DRAM here when the plan was made: the SSD may have it since.
                wanted.setdefault(offer.nodes, []).append(block)
        for nodes, blocks in wanted.items():
            early = [block in job.prefetched for block in blocks]
            if all(early):
                fetch = Fetch(nodes, job.prefetched_at, len(blocks), ahead[nodes])
            else:
                fetch = Fetch(nodes, None if any(early) else time.monotonic(), len(blocks))
            job.fetching.update(dict.fromkeys(blocks, fetch))
            self._ask(self.pool.fetch, tag, blocks, [address(node) for node in nodes])
        if not job.fetching:
            self._ready(job)

    def _opened(self, job: Job, committed: list[bool], slots: list[Slot]) -> None:
        """The decode worker's grant stands: now prefill may take slots and pages of its own."""
        assert job.handoff is not None, "only prefill opens, and it has a hand-off"
        job.opened = True
        job.handoff.slots = slots
        job.handoff.committed = list(committed)
        job.handoff.tiers = [job.prefetched.get(block, "dram") for block in range(len(slots))]
        job.delivered = {index for index, done in enumerate(committed) if done}
        self._seek_in_time(job)

    def _fetched(self, job: Job, index: int, slot: Slot | None, tier: str | None) -> None:
        if slot is not None and tier is not None and job.local is not None:
            # What a prefetch has brought into DRAM since the grant was where it was planned to be.
            job.local.found(index, slot, job.prefetched.get(index, tier) if tier == "dram" else tier)
        fetch = job.fetching.pop(index, None)
        if fetch is not None:
            fetch.tiers[tier] += 1
            fetch.left -= 1
            if not fetch.left:
                self._measure(fetch)
        if not job.fetching:
            self._keep_found(job)

    def _keep_found(self, job: Job) -> None:
        """All fetches are over. Slots that nothing came into are let go before the rest is computed: what is computed
        is cached in slots of its own. A tag ends as a whole, so what did come is pinned by a lookup first.
        """
        granted = job.local
        if granted is None or all(granted.committed) or not self._held(job):
            self._ready(job)
            return
        if granted.committed[0]:
            self._lookup(job, granted.tiers)
            self._release(granted.tag)
        else:
            self._release(granted.tag)
            job.local = None
            self._ready(job)

    def _measure(self, fetch: Fetch) -> None:
        """A fetch is over. It tells something of a source if all came from there, and not before it was asked for."""
        assert self.pool is not None, "the event came from it"
        if fetch.began is None:
            return
        (tier, blocks), *more = fetch.tiers.items()
        source = None
        if tier == "ssd":
            source = self.pool.node.node
        elif tier == "peer_dram" and len(fetch.nodes) == 1:
            source = fetch.nodes[0].node
        if source is not None and not more and len(self.loads) < LOADS:
            size, seconds = (blocks + fetch.ahead) * self.spec.block_bytes, time.monotonic() - fetch.began
            self.loads.append(LoadSample(source=source, size=size, seconds=seconds))

    def _complete(self, job: Job, note: bytes) -> None:
        """Decode: all KV of the prompt is here. `Complete` is the authority: a late `Arrived` adds nothing."""
        assert job.handoff is not None, "only decode waits for a hand-off"
        job.whole = time.monotonic()
        job.came = job.came or job.whole
        job.handoff.committed = [True] * len(job.handoff.slots)
        try:
            token = msgspec.msgpack.decode(note, type=Note).first_token
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.failures.append(Failure(job.id, "bug", f"the prefill worker's note cannot be read: {error}"))
            return
        if not 0 <= token < self.backend.vocab_size:
            self.failures.append(
                Failure(job.id, "bug", f"the prefill worker chose token {token}, which this model has not")
            )
        elif self.batcher.first_token(job.id, token) is not None:
            reason = "the prefill worker handed on a request that its first token ends"
            self.failures.append(Failure(job.id, "bug", reason))
        else:
            self.batcher.ready(job.id, job.sequence.prompt_tokens)

    def _ready(self, job: Job) -> None:
        if self._held(job):
            self.batcher.ready(job.id, job.leading(self._prefix_limit(job)) * self.spec.block_tokens)

    def _refused(self, tag: Tag, refusal: str) -> None:
        if (copied := self._write_through.pop(tag, None)) is not None:
            self.copier.store_copied(copied, [], [])
            self.counters["uncached_blocks"] += copied.blocks
            if self.pool is not None:
                self._ask(self.pool.end, tag)
            return
        job = self._by_tag.get(tag)
        if job is None:
            return
        if job.local is not None and job.local.tag == tag:
            # What could be reused is a gift: without it the prompt is computed.
            self._release(tag)
            job.local = None
            job.fetching.clear()
            if job.reserving and self._held(job):
                self._lookup(job)
            else:
                self._ready(job)
            return
        if refusal == "too_large":
            reason = (
                f"the request's KV needs {len(job.work.keys) // KEY_BYTES + 1} blocks, more than a node's pool may "
                "ever give it: shorten the prompt, start the nodes with a larger --dram-bytes, or raise its tenant's"
                " limit"
            )
            self.failures.append(Failure(job.id, "too_large", reason))
        else:
            self.failures.append(Failure(job.id, "retry", f"KV hand-off failed: {refusal}"))

    # -- between pages and slots ----------------------------------------------------------------------------------

    def load(self, load: Load) -> None:
        """Copies pooled blocks into the sequence's pages and tells the batcher how far they are good; or begins to, and
        tells it that they are believed to be.
        """
        job = self.jobs[load.id]
        began = time.monotonic()
        slots: list[Slot] = []
        while len(slots) < len(load.pages) and (found := job.find(load.first_block + len(slots))) is not None:
            slots.append(found[1])
        if self.pool is None:
            slots.clear()
        pages = load.pages[: len(slots)]
        # Where steps overlap a load is beside one in any case.
        beside = self.backend.layerwise and not self.backend.overlaps and job.work.part != "prefill"
        if beside and self.loader.gains(len(slots)):
            job.loading, job.load = self.loader.begin(slots, pages, load.first_block), load
            self._loading[job.id] = job
            self.batcher.loaded(job.id, self._tokens_in(job, load.first_block + len(slots)), verified=False)
            return
        good = 0
        try:
            good = self.copier.load(slots, pages) if slots else 0
            if good < len(slots):
                self._rotten(job, load.first_block + good)
        except WorkerBroken:
            raise
        except Exception:  # noqa: BLE001 (whatever was raised, only this job needs it)
            self._not_loaded(job)
        self._loaded(job, load, good, time.monotonic() - began, first=not job.sequence.started)
        self.batcher.loaded(job.id, self._tokens_in(job, load.first_block + good))
        self._in_pages(job)

    def readable(self, planned: Run[Planned]) -> Readable | None:
        """What `Backend.submit` is to call for a step that goes on from KV which is still loaded; None: it does not."""
        loadings = [job.loading for each in planned if (job := self._loading.get(each.id)) and job.loading is not None]
        if not loadings:
            return None

        def wait(layer: int) -> None:
            for loading in loadings:
                loading.wait(layer)

        return wait

    def end_loads(self, planned: Run[Planned]) -> None:
        """The step is over, well or not: what it has gone on from is in the pages, or its sequence is HELD again."""
        for each in planned:
            if (job := self._loading.get(each.id)) is not None:
                self._end_load(job)

    def _end_load(self, job: Job) -> None:
        """Waits for what is copied into pages of the job."""
        loading, load = job.loading, job.load
        assert loading is not None and load is not None, "callers check"
        rotten = False
        try:
            loading.join()
            rotten = not loading.whole
        except WorkerBroken:
            raise
        except Exception:  # noqa: BLE001 (as in `load`)
            self._not_loaded(job)
        self._stop_loading(job)
        if loading.whole:
            believed = job.sequence.believed
            self._loaded(job, load, loading.good, loading.seconds, first=believed is not None and not believed[0])
            self.batcher.verified(job.id)
            self._in_pages(job)
            return
        block = load.first_block + loading.good
        if rotten:
            self._rotten(job, block)
        if (found := job.find(block)) is not None:
            found[0].committed[block] = False
        self._unreadable(job)
        # Not before the step is over for the batcher as well.
        self._again.append(job)

    def _not_loaded(self, job: Job) -> None:
        """Called where copying has raised. What is in the pool may be intact: it is computed anew all the same."""
        logger.exception("request %d, attempt %d: its reused prefix could not be loaded", *job.id)

    def _unreadable(self, job: Job) -> None:
        self.batcher.unreadable(job.id)
        self.restarted.append(job.id)

    def _stop_loading(self, job: Job) -> None:
        """Returns when nothing is copied into pages of the job any more."""
        if (loading := job.loading) is not None:
            loading.cancel()
            job.loading = job.load = None
            del self._loading[job.id]

    def _loaded(self, job: Job, load: Load, good: int, seconds: float, *, first: bool) -> None:
        """So many blocks are in their pages. first: the sequence starts with them."""
        self.counters["loaded_blocks"] += good
        if good and self.pool is not None and len(self.loads) < LOADS:
            self.loads.append(LoadSample(self.pool.node.node, good * self.spec.block_bytes, seconds, device=True))
        if first:
            for block in range(load.first_block, load.first_block + good):
                if (found := job.find(block)) is not None:
                    job.reused[found[0].tiers[block]] += 1

    def _rotten(self, job: Job, block: int) -> None:
        """A block that the pool holds for the job is not intact."""
        assert self.pool is not None, "callers have one"
        self.counters["checksum_failures"] += 1
        if (found := job.find(block)) is not None:
            self._ask(self.pool.corrupt, found[0].tag, block)

    def _tokens_in(self, job: Job, blocks: int) -> int:
        """How many tokens the job's leading blocks hold."""
        tokens = blocks * self.spec.block_tokens
        if job.work.part == "decode" and not job.adopted:
            tokens = min(tokens, job.sequence.prompt_tokens)  # the last block may be the partial one
        return tokens

    def cached_by_tier(self, sequence: Sequence) -> dict[str, int]:
        """Where the tokens were found that the sequence reused when it first started; in all, `sequence.cached`."""
        reused = self.jobs[sequence.id].reused
        tokens = {tier: blocks * self.spec.block_tokens for tier, blocks in reused.items()}
        device = sequence.cached - sum(tokens.values())
        return {"device": device, **tokens} if device else tokens

    def _in_pages(self, job: Job) -> None:
        """The blocks are in pages: whoever held them only for that lets go; prefill hands on what decode lacks."""
        if job.local is not None:
            self._release(job.local.tag)
            job.local = None
        if job.work.part == "decode" and not job.adopted:
            job.adopted = True
            if job.handoff is not None:
                self._release(job.handoff.tag)
                job.handoff = None
        if job.work.part == "prefill":
            full = min(job.sequence.computed // self.spec.block_tokens, len(job.work.keys) // KEY_BYTES)
            self._deliver(job, full)

    def computed(self, sequence_id: SequenceId) -> None:
        """A step has computed part of the sequence. Prefill pushes what is complete; pins for loading serve no more."""
        self._in_pages(self.jobs[sequence_id])

    def handed(self, sequence_id: SequenceId) -> tuple[float, float]:
        """When the first KV of a hand-off came here, and when all was there (time.monotonic); 0: it did not."""
        job = self.jobs.get(sequence_id)
        return (job.came, job.whole) if job is not None else (0.0, 0.0)

    def hand_off(self, sequence_id: SequenceId, note: Note) -> None:
        """Prefill: the prompt is computed. Pushes the rest, the partial block and the note; see `copied_out`."""
        job = self.jobs[sequence_id]
        if job.handoff is not None:
            job.note = msgspec.msgpack.encode(note)
            self._deliver(job, len(job.handoff.committed))
            self._note_if_copied_out(job)

    def stream(self, planned: Run[Planned]) -> Written | None:
        """Before a step: has KV that it completes leave while it computes, where that is enough to gain.

        Returns what `Backend.submit` is to call; None: all leaves after the step.
        """
        if not self.backend.layerwise or self.backend.overlaps:
            # Behind a step that is under way another may be submitted: nobody keeps their streams apart yet.
            return None
        jobs = [job for each in planned if (job := self._streams(each)) is not None]
        # The own daemon answers at once if it has room and is not sending what left before; blocks whose slots come
        # later leave after the step. To wait for longer than their copying takes would gain nothing.
        self.flush()
        waiting = sum(len(job.staging) for job in jobs) * self.spec.block_bytes
        until = time.monotonic() + max(ANSWER, waiting / COPY_RATE)
        while any(job.staging for job in jobs) and self.pool is not None and (left := until - time.monotonic()) > 0.0:
            self._answers.poll(left * 1000)
            self._take_events()
            self.flush()
        streams = [job.stream for job in jobs if job.stream is not None]
        return self.streamer.begin(streams) if streams else None

    def streamed(self) -> None:
        """The step is over, well or not: nothing of it is copied any more."""
        try:
            self.streamer.join()
        except _native.RetryError as error:
            self.lost = self.lost or str(error)

    def void_streams(self, planned: Run[Planned]) -> list[SequenceId]:
        """The step has failed, and nobody knows what KV it has made. What has left of it is stored once more, where it
        is still in this arena; returns whose strips are at another node already, and cannot be called back.
        """
        self.streamed()
        gone = []
        for each in planned:
            job = self.jobs.get(each.id)
            if job is None or job.stream is None or not job.stream.layers:
                continue
            if job.stream.to is None:
                job.stream.layers = 0
            else:
                gone.append(each.id)
        return gone

    def _streams(self, planned: Planned) -> Job | None:
        """The job of this part of a step, if its blocks are to leave meanwhile."""
        job = self.jobs[planned.id]
        if self.pool is None or job.handoff is None or not job.opened:
            return None
        end = planned.start + planned.count
        whole = min(end // self.spec.block_tokens, len(job.work.keys) // KEY_BYTES)
        missing = self._missing(job, len(job.handoff.committed) if planned.sample else whole)
        if self.streamer.parts(len(missing)) < 2:
            return None
        job.delivered.update(missing)
        job.stream = Stream(end, [], [], [], [], [])
        if job.same_arena:
            for index in missing:
                self._flow(job, index, job.handoff.slots[index])
        else:
            job.unstaged.extend(missing)
            self._stage(job)
        return job

    def _flow(self, job: Job, index: int, slot: Slot, tag: Tag | None = None) -> None:
        """One more block of the job's stream, into this slot."""
        stream = job.stream
        assert stream is not None, "callers check"
        stream.blocks.append(index)
        stream.pages.append(job.sequence.pages[index])
        stream.tokens.append(min(stream.end - index * self.spec.block_tokens, self.spec.block_tokens))
        stream.slots.append(slot)
        if tag is not None:
            stream.tags.append(tag)
            stream.to = job.handoff.tag if job.handoff is not None else None

    def _send_strips(self, stream: Stream, first: int, end: int) -> None:
        """Strips of a stream are in their slots; between nodes they go on. On the streamer's thread."""
        pool = self.pool
        if pool is None or stream.to is None:
            return
        for tag, index in zip(stream.tags, stream.blocks, strict=True):
            pool.push(tag, stream.to, [index], first=index, strips=(first, end))

    def _finish_stream(self, job: Job, stream: Stream) -> None:
        """The step has succeeded: what is left goes after the rest, and all is committed."""
        assert self.pool is not None and job.handoff is not None, "callers check"
        self._try(partial(self.streamer.finish, stream))
        if self.lost is None:
            self.counters["stored_blocks"] += len(stream.blocks)
        for tag in stream.tags:
            self._ask(self.pool.commit, tag, [0])
        if stream.blocks and not stream.tags:
            self._ask(self.pool.push, job.handoff.tag, job.handoff.tag, stream.blocks)

    def _missing(self, job: Job, blocks: int) -> list[int]:
        return [index for index in range(blocks) if index not in job.delivered]

    def _deliver(self, job: Job, blocks: int) -> None:
        """Sends those of the first `blocks` blocks on their way that the decode worker's grant lacks."""
        if self.pool is None or job.handoff is None:
            return
        if (stream := job.stream) is not None:
            job.stream = None
            self._finish_stream(job, stream)
        missing = self._missing(job, blocks)
        job.delivered.update(missing)
        if job.same_arena:
            self._store(job.sequence, {index: job.handoff.slots[index] for index in missing})
            if missing:
                self._ask(self.pool.push, job.handoff.tag, job.handoff.tag, missing)
            return
        job.unstaged.extend(missing)
        self._stage(job)

    def _stage(self, job: Job) -> None:
        """Asks for slots of the own pool for blocks that wait in their pages, a bounded number at a time."""
        assert self.pool is not None, "callers check"
        while job.unstaged and len(job.staging) + len(job.staged) < STAGED_BLOCKS:
            index = job.unstaged.popleft()
            tag = self._local_tag()
            job.staging[tag] = index
            self._by_tag[tag] = job
            key = job.work.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            parent = job.work.keys[(index - 1) * KEY_BYTES : index * KEY_BYTES] if index else NO_PARENT
            self._ask(self.pool.grant, tag, key, not key, parent, index, "staging", job.work.tenant)

    def _store_staged(self, job: Job, granted: list[tuple[Tag, Slot]]) -> None:
        """Slots for staged blocks have come: fills those that are not cached here, and pushes all."""
        if self.pool is None or job.handoff is None:
            return
        index_of = {tag: job.staging.pop(tag) for tag, _ in granted}
        job.staged.update({index: tag for tag, index in index_of.items()})
        if job.stream is not None:
            # Before the step that computes them.
            for tag, slot in granted:
                if not slot.committed:
                    self._flow(job, index_of[tag], slot, tag)
            granted = [(tag, slot) for tag, slot in granted if slot.committed]
        self._store(job.sequence, {index_of[tag]: slot for tag, slot in granted if not slot.committed})
        for tag, slot in granted:
            if not slot.committed:
                self._ask(self.pool.commit, tag, [0])
            self._ask(self.pool.push, tag, job.handoff.tag, [index_of[tag]], first=index_of[tag])
        self._note_if_copied_out(job)

    def _note_if_copied_out(self, job: Job) -> None:
        if self.pool is None or job.handoff is None:
            return
        if job.note is not None and not job.staging and not job.unstaged:
            self._ask(self.pool.push, job.handoff.tag, job.handoff.tag, [], note=job.note)
            self.copied_out.append(job.id)

    def _pushed(self, job: Job, indices: list[int], note: bool) -> None:
        for index in indices:
            if tag := job.staged.pop(index, None):
                self._release(tag)
        if self.pool is not None:
            self._stage(job)
        if note:
            self.handed_off.append(job.id)

    def _store(self, sequence: Sequence, slots: dict[int, Slot]) -> None:
        """Copies blocks of a sequence from its pages into slots of the arena."""
        pages, tokens = self._filled(sequence, list(slots))
        # At once: whoever is told of a block later is told of what is there.
        self._try(partial(self.copier.store, pages, tokens, list(slots.values())))
        if self.lost is None:
            self.counters["stored_blocks"] += len(slots)

    def _filled(self, sequence: Sequence, blocks: list[int]) -> tuple[list[int], list[int]]:
        """The pages of some blocks of a sequence, and how many positions of each are computed."""
        tokens = [min(sequence.computed - index * self.spec.block_tokens, self.spec.block_tokens) for index in blocks]
        return [sequence.pages[index] for index in blocks], tokens

    # -- write-through --------------------------------------------------------------------------------------------

    def write_through(self, sequence: Sequence, filled: Run[Filled]) -> None:
        """Caches blocks that this worker computed, if the pool has room at once; it never makes a step wait."""
        waiting = sum(copied.blocks for copied in self._write_through.values())
        room = WRITE_THROUGH_BLOCKS - waiting if self.pool is not None else 0
        self.counters["uncached_blocks"] += len(filled[room:])
        filled = filled[:room]
        if not filled or self.pool is None:
            return
        tag = self._local_tag()
        self._write_through[tag] = self.copier.copy_out(*self._filled(sequence, [block.index for block in filled]))
        keys = b"".join(block.key for block in filled)
        parent = filled[0].parent if filled[0].index else NO_PARENT
        tenant = self.jobs[sequence.id].work.tenant
        self._ask(self.pool.grant, tag, keys, False, parent, filled[0].index, "now", tenant)

    def _store_through(self, tag: Tag, copied: Copied, slots: list[Slot]) -> None:
        assert self.pool is not None, "the event came from it"
        wanted = [index for index, slot in enumerate(slots) if not slot.committed]
        self._try(partial(self.copier.store_copied, copied, wanted, [slots[index] for index in wanted]))
        if wanted:
            self.counters["stored_blocks"] += len(wanted) if self.lost is None else 0
            self._ask(self.pool.commit, tag, wanted)
        self._ask(self.pool.end, tag)

    def idle(self) -> bool:
        """Nothing held, nothing waited for."""
        return not self.jobs and not self._by_tag and not self._write_through


def address(node: Node) -> NodeAddress:
    """A node as messages carry it, as the engine takes it."""
    return NodeAddress(node.node, node.address, node.incarnation)
