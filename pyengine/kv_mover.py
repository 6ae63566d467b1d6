"""Moves KV between a worker's device pages and its node's pool, and from prefill to decode worker.

The worker's loop calls it; it never blocks. What it asks of the pool is answered by events, which `pump` turns into
calls of the Batcher (`ready`, `first_token`) and into `Failure`s. One `Job` is kept per sequence:

    both      lookup (and fetch from other nodes) --> ready --> load pages --> [compute, write through]
    prefill   open(decode's grant) --> local grant, fetch --> ready --> load --> [compute chunk, store, push]* --> note
    decode    grant --> complete(note) --> first token, ready --> load --> end(grant) --> [decode, write through]

On one node prefill has no local grant: it writes into the slots of the decode worker's grant, and a push commits them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence as Run
from typing import Protocol

import msgspec
import numpy as np

from pyengine import _native
from pyengine._native import NodeAddress, PoolClient, Slot, Tag
from pyengine.backend import U8, Backend
from pyengine.scheduler.batcher import Batcher, Filled, Load, Sequence, SequenceId, State
from pyengine.scheduler.messages import Note, Work
from pyengine.scheduler.types import KEY_BYTES, KvSpec, Node, Source, cacheable_blocks

#: Blocks copied per call between pages and arena: 32 blocks of a small model are 24 MiB, which bounds the scratch buffer.
COPY_BLOCKS = 32
#: Blocks that may wait, copied out of their pages, for a free slot to be cached in; beyond it they are not cached.
WRITE_THROUGH_BLOCKS = 256

NO_PARENT = bytes(KEY_BYTES)


class Pool(Protocol):
    """The part of PoolClient that a mover uses (tests put misbehaving twins here)."""

    @property
    def node(self) -> NodeAddress: ...
    def events(self) -> list[_native.PoolEvent]: ...
    def grant(self, tag: Tag, keys: bytes, private: bool, parent: bytes, position: int, wait: bool) -> None: ...
    def lookup(self, tag: Tag, keys: bytes) -> None: ...
    def commit(self, tag: Tag, indices: Run[int]) -> None: ...
    def fetch(self, tag: Tag, indices: Run[int], source: NodeAddress) -> None: ...
    def open(self, tag: Tag, to: NodeAddress, within: float) -> None: ...
    def push(self, local: Tag, tag: Tag, indices: Run[int], note: bytes | None = None) -> None: ...
    def corrupt(self, tag: Tag, index: int) -> None: ...
    def end(self, tag: Tag) -> None: ...
    def store(self, slot: int, generation: int, source: U8, first_strip: int = 0) -> None: ...
    def load(self, slot: int, generation: int, into: U8, first_strip: int = 0) -> bool: ...
    def close(self) -> None: ...


class Failure(msgspec.Struct, frozen=True):
    """A sequence that cannot go on here. kind and reason as in messages.Failed."""

    id: SequenceId
    kind: str
    reason: str


@dataclasses.dataclass
class Holding:
    """Blocks held in the pool under one tag: block `first + k` of the sequence lies in slots[k]."""

    tag: Tag
    first: int
    slots: list[Slot] = dataclasses.field(default_factory=list)
    committed: list[bool] = dataclasses.field(default_factory=list)

    def take(self, slots: list[Slot]) -> None:
        self.slots = slots
        self.committed = [slot.committed for slot in slots]

    def readable(self, block: int) -> Slot | None:
        """The slot of a block of the sequence, if it is held here and readable."""
        index = block - self.first
        if 0 <= index < len(self.slots) and self.committed[index]:
            return self.slots[index]
        return None


@dataclasses.dataclass
class Job:
    """What the mover knows of one sequence."""

    sequence: Sequence
    work: Work
    #: Blocks pinned or reserved here for this sequence: the local grant, or what a lookup found.
    local: Holding | None = None
    #: Prefill: the decode worker's grant (slots only if it lies in this arena). Decode: the own grant.
    handoff: Holding | None = None
    #: Indices whose fetch has no outcome yet.
    fetching: set[int] = dataclasses.field(default_factory=set)
    #: Prefill: blocks handed to `push` (or committed at the decode node before).
    delivered: set[int] = dataclasses.field(default_factory=set)
    opened: bool = False
    adopted: bool = False

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


@dataclasses.dataclass
class WriteThrough:
    """Blocks copied out of their pages that wait for the answer to their grant."""

    tag: Tag
    strips: U8


class KvMover:
    """Owned by one worker's loop; see the module's text. `connect` again after a daemon's death.

    counters: cumulative counts by name, for the worker's heartbeat.
    """

    def __init__(
        self,
        backend: Backend,
        batcher: Batcher,
        spec: KvSpec,
        incarnation: int,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.backend = backend
        self.batcher = batcher
        self.spec = spec
        self.incarnation = incarnation
        self.pool: Pool | None = None
        self.jobs: dict[SequenceId, Job] = {}
        self.failures: deque[Failure] = deque()
        #: Prefill parts whose KV and note have arrived at the decode node: nothing is left to do for them.
        self.handed_off: deque[SequenceId] = deque()
        self.counters = {"checksum_failures": 0, "stored_blocks": 0, "loaded_blocks": 0, "uncached_blocks": 0}
        self._on_lost = on_lost
        self._by_tag: dict[Tag, Job] = {}
        self._write_through: dict[Tag, WriteThrough] = {}
        self._next_local = 0

    # -- the pool comes and goes ----------------------------------------------------------------------------------

    def connect(self, pool: Pool) -> None:
        """Takes a fresh link to the node's daemon. Requires that none is connected."""
        assert self.pool is None, "a mover has one pool at a time"
        self.pool = pool

    def _disconnected(self) -> None:
        """The daemon died. What decodes goes on from its pages; what needed the pool is failed or goes on without."""
        if self.pool is not None:
            self.pool.close()
        self.pool = None
        self._write_through.clear()
        self._by_tag.clear()
        for job in list(self.jobs.values()):
            needs_pool = job.work.part == "prefill" or (job.work.part == "decode" and not job.adopted)
            waiting = self._held(job)
            job.local = job.handoff = None
            job.fetching.clear()
            if needs_pool:
                self.failures.append(Failure(job.id, "retry", "the node's daemon died"))
            elif waiting:
                self.batcher.ready(job.id, 0)
        self._on_lost()

    def close(self) -> None:
        if self.pool is not None:
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
        if work.part == "both":
            self._seek_prefix(job)
            return
        job.handoff = Holding(Tag(work.request, work.attempt, work.decode_incarnation), 0)
        self._by_tag[job.handoff.tag] = job
        if work.part == "decode":
            private = len(sequence.tokens) % self.spec.block_tokens != 0
            self.pool.grant(job.handoff.tag, work.keys, private, NO_PARENT, 0, True)
        else:
            self.pool.open(job.handoff.tag, address(work.decode_node), work.deadline)

    def end(self, sequence_id: SequenceId) -> None:
        """The sequence is over (ended, failed or aborted): releases all it holds in pools. Idempotent."""
        job = self.jobs.pop(sequence_id, None)
        if job is not None:
            for holding in job.holdings():
                self._release(holding)

    def resume(self, sequence_id: SequenceId) -> None:
        """The sequence was preempted (HELD): looks again for what the pool still has of it."""
        job = self.jobs[sequence_id]
        if self.pool is None:
            self.batcher.ready(sequence_id, 0)
            return
        if job.local is not None:
            self._release(job.local)
        self._lookup(job)

    def _held(self, job: Job) -> bool:
        """True while the batcher waits for this mover's word."""
        sequence = self.batcher.sequences.get(job.id)
        return sequence is not None and sequence.state is State.HELD

    def _seek_prefix(self, job: Job) -> None:
        """Pins what this node has of the prefix, and fetches what the plan's sources have beyond it."""
        limit = self._prefix_limit(job)
        wanted = min(max((source.last for source in self._sources(job)), default=0), limit)
        if wanted:
            self._grant_local(job, job.work.keys[: wanted * KEY_BYTES], private=False, wait=False)
        else:
            self._lookup(job)

    def _lookup(self, job: Job) -> None:
        assert self.pool is not None, "callers check"
        keys = b"".join(job.sequence.keys[: self._prefix_limit(job)])
        if not keys:
            self.batcher.ready(job.id, 0)
            return
        job.local = Holding(self._local_tag(), 0)
        self._by_tag[job.local.tag] = job
        self.pool.lookup(job.local.tag, keys)

    def _grant_local(self, job: Job, keys: bytes, *, private: bool, wait: bool) -> None:
        assert self.pool is not None, "callers check"
        job.local = Holding(self._local_tag(), 0)
        self._by_tag[job.local.tag] = job
        self.pool.grant(job.local.tag, keys, private, NO_PARENT, 0, wait)

    def _prefix_limit(self, job: Job) -> int:
        return min(cacheable_blocks(len(job.sequence.tokens), self.spec.block_tokens), len(job.sequence.keys))

    def _sources(self, job: Job) -> list[Source]:
        assert self.pool is not None, "callers check"
        return [source for source in job.work.sources if source.node.node != self.pool.node.node]

    def _local_tag(self) -> Tag:
        """Attempts of requests count from 1, so attempt 0 marks tags that never leave this worker."""
        self._next_local += 1
        return Tag(self._next_local, 0, self.incarnation)

    def _release(self, holding: Holding) -> None:
        if self._by_tag.pop(holding.tag, None) is not None and self.pool is not None:
            self.pool.end(holding.tag)

    # -- events of the pool ---------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Takes the pool's events and moves every job on."""
        if self.pool is None:
            return
        for event in self.pool.events():
            match event:
                case _native.Disconnected():
                    self._disconnected()
                    return
                case _native.Granted(tag, slots):
                    if tag in self._write_through:
                        self._store_through(self._write_through.pop(tag), slots)
                    elif job := self._by_tag.get(tag):
                        self._granted(job, tag, slots)
                case _native.Located(tag, slots):
                    if job := self._by_tag.get(tag):
                        assert job.local is not None and job.local.tag == tag, "one lookup per job at a time"
                        job.local.take(slots)
                        self._ready(job)
                case _native.Opened(tag, committed, slots):
                    if job := self._by_tag.get(tag):
                        self._opened(job, committed, slots)
                case _native.Arrived(tag, indices):
                    if (job := self._by_tag.get(tag)) and job.handoff is not None and job.handoff.tag == tag:
                        for index in indices:
                            if index < len(job.handoff.committed):
                                job.handoff.committed[index] = True
                case _native.Complete(tag, note):
                    if job := self._by_tag.get(tag):
                        self._complete(job, note)
                case _native.Fetched(tag, index, refusal):
                    if job := self._by_tag.get(tag):
                        self._fetched(job, index, refusal)
                case _native.Pushed(tag, _, True):
                    if job := self._by_tag.get(tag):
                        self.handed_off.append(job.id)
                case _native.Refused(tag, refusal):
                    self._refused(tag, refusal)
                case _:
                    pass

    def _granted(self, job: Job, tag: Tag, slots: list[Slot]) -> None:
        if job.handoff is not None and job.handoff.tag == tag:
            job.handoff.take(slots)
            return
        assert job.local is not None, "a grant of this job is its local one or its hand-off"
        job.local.take(slots)
        assert self.pool is not None, "the event came from it"
        for source in self._sources(job):
            limit = min(source.last, self._prefix_limit(job), len(slots))
            wanted = [i for i in range(source.first, limit) if job.find(i) is None and i not in job.fetching]
            if wanted:
                job.fetching.update(wanted)
                self.pool.fetch(tag, wanted, address(source.node))
        if not job.fetching:
            self._ready(job)

    def _opened(self, job: Job, committed: list[bool], slots: list[Slot]) -> None:
        """The decode worker's grant stands: now prefill may take slots of its own."""
        assert job.handoff is not None, "only prefill opens, and it has a hand-off"
        job.opened = True
        job.handoff.slots = slots
        job.handoff.committed = list(committed)
        job.delivered = {index for index, done in enumerate(committed) if done}
        if job.same_arena:
            self._seek_prefix(job)
        else:
            private = len(job.sequence.tokens) % self.spec.block_tokens != 0
            self._grant_local(job, job.work.keys, private=private, wait=True)

    def _fetched(self, job: Job, index: int, refusal: str | None) -> None:
        job.fetching.discard(index)
        if refusal is None and job.local is not None:
            job.local.committed[index] = True
        if not job.fetching:
            self._ready(job)

    def _complete(self, job: Job, note: bytes) -> None:
        """Decode: all KV of the prompt is here. `Complete` is the authority: a late `Arrived` adds nothing."""
        assert job.handoff is not None, "only decode waits for a hand-off"
        job.handoff.committed = [True] * len(job.handoff.slots)
        self.batcher.first_token(job.id, msgspec.msgpack.decode(note, type=Note).first_token)
        self.batcher.ready(job.id, job.sequence.prompt_tokens)

    def _ready(self, job: Job) -> None:
        if self._held(job):
            self.batcher.ready(job.id, job.leading(self._prefix_limit(job)) * self.spec.block_tokens)

    def _refused(self, tag: Tag, refusal: str) -> None:
        if self._write_through.pop(tag, None) is not None:
            self.counters["uncached_blocks"] += 1
            if self.pool is not None:
                self.pool.end(tag)
            return
        job = self._by_tag.get(tag)
        if job is None:
            return
        if job.local is not None and job.local.tag == tag and refusal == "full":
            self._release(job.local)
            self._lookup(job)
            return
        if refusal == "too_large":
            reason = (
                f"the request's KV needs {len(job.work.keys) // KEY_BYTES + 1} blocks, more than a node's whole pool: "
                "shorten the prompt or start the nodes with a larger --dram-bytes"
            )
            self.failures.append(Failure(job.id, "too_large", reason))
        else:
            self.failures.append(Failure(job.id, "retry", f"KV hand-off failed: {refusal}"))

    # -- between pages and slots ----------------------------------------------------------------------------------

    def load(self, load: Load) -> None:
        """Copies pooled blocks into the sequence's pages and tells the batcher how far they are good."""
        job = self.jobs[load.id]
        good = 0
        for begin in range(0, len(load.pages), COPY_BLOCKS):
            pages = load.pages[begin : begin + COPY_BLOCKS]
            strips = np.empty((len(pages), self.spec.strips, self.spec.strip_bytes), np.uint8)
            verified = self._load_blocks(job, load.first_block + begin, strips)
            self.backend.write_pages(pages[:verified], strips[:verified])
            good += verified
            if verified < len(pages):
                break
        self.counters["loaded_blocks"] += good
        tokens = (load.first_block + good) * self.spec.block_tokens
        if job.work.part == "decode" and not job.adopted:
            tokens = min(tokens, job.sequence.prompt_tokens)  # the last block may be the partial one
        self.batcher.loaded(job.id, tokens)
        self._in_pages(job)

    def _load_blocks(self, job: Job, first_block: int, strips: U8) -> int:
        """Fills leading rows of `strips` from the pool; returns how many hold verified blocks."""
        for row in range(len(strips)):
            found = job.find(first_block + row)
            if found is None or self.pool is None:
                return row
            holding, slot = found
            if not self.pool.load(slot.slot, slot.generation, strips[row]):
                self.counters["checksum_failures"] += 1
                self.pool.corrupt(holding.tag, first_block + row - holding.first)
                return row
        return len(strips)

    def _in_pages(self, job: Job) -> None:
        """The blocks are in pages: whoever held them only for that lets go; prefill hands on what decode lacks."""
        if job.work.part == "decode" and not job.adopted:
            job.adopted = True
            if job.handoff is not None:
                self._release(job.handoff)
                job.handoff = None
        if job.work.part == "prefill":
            self._push_computed(job)
        elif job.local is not None:
            self._release(job.local)
            job.local = None

    def computed(self, sequence_id: SequenceId) -> None:
        """A step has computed part of the sequence. Prefill pushes what is complete; pins for loading serve no more."""
        self._in_pages(self.jobs[sequence_id])

    def _push_computed(self, job: Job) -> None:
        """Prefill: stores and pushes every computed block that the decode worker's grant lacks."""
        if job.handoff is None or self.pool is None:
            return
        full = min(job.sequence.computed // self.spec.block_tokens, len(job.work.keys) // KEY_BYTES)
        blocks = [index for index in range(full) if index not in job.delivered]
        self._deliver(job, blocks, None)

    def hand_off(self, sequence_id: SequenceId, note: Note) -> None:
        """Prefill: the prompt is computed. Pushes the rest, the partial block and the note; pages are free afterwards."""
        job = self.jobs[sequence_id]
        if job.handoff is None or self.pool is None:
            return
        blocks = [index for index in range(len(job.handoff.committed)) if index not in job.delivered]
        self._deliver(job, blocks, msgspec.msgpack.encode(note))

    def _deliver(self, job: Job, blocks: list[int], note: bytes | None) -> None:
        assert self.pool is not None and job.handoff is not None, "callers check"
        target = job.handoff if job.same_arena else job.local
        assert target is not None, "prefill holds slots before it has pages"
        unstored = [index for index in blocks if not target.committed[index]]
        for begin in range(0, len(unstored), COPY_BLOCKS):
            batch = unstored[begin : begin + COPY_BLOCKS]
            for index, strips in zip(batch, self._read_blocks(job.sequence, batch), strict=True):
                slot = target.slots[index]
                self.pool.store(slot.slot, slot.generation, strips)
                target.committed[index] = True
        self.counters["stored_blocks"] += len(unstored)
        if unstored and not job.same_arena:
            self.pool.commit(target.tag, unstored)
        if blocks or note is not None:
            self.pool.push(target.tag, job.handoff.tag, blocks, note)
            job.delivered.update(blocks)

    def _read_blocks(self, sequence: Sequence, blocks: list[int]) -> U8:
        """Canonical strips of some blocks of a sequence; a partial one is zeroed beyond its tokens."""
        strips = np.empty((len(blocks), self.spec.strips, self.spec.strip_bytes), np.uint8)
        self.backend.read_pages([sequence.pages[index] for index in blocks], strips)
        for row, index in enumerate(blocks):
            tokens = sequence.computed - index * self.spec.block_tokens
            if tokens < self.spec.block_tokens:
                strips[row, :, tokens * self.spec.strip_bytes // self.spec.block_tokens :] = 0
        return strips

    # -- write-through --------------------------------------------------------------------------------------------

    def write_through(self, sequence: Sequence, filled: list[Filled]) -> None:
        """Caches blocks that this worker computed, if the pool has room at once; it never makes a step wait."""
        waiting = sum(len(entry.strips) for entry in self._write_through.values())
        if not filled or self.pool is None or waiting + len(filled) > WRITE_THROUGH_BLOCKS:
            self.counters["uncached_blocks"] += len(filled)
            return
        tag = self._local_tag()
        self._write_through[tag] = WriteThrough(tag, self._read_blocks(sequence, [block.index for block in filled]))
        keys = b"".join(block.key for block in filled)
        parent = filled[0].parent if filled[0].index else NO_PARENT
        self.pool.grant(tag, keys, False, parent, filled[0].index, False)

    def _store_through(self, entry: WriteThrough, slots: list[Slot]) -> None:
        assert self.pool is not None, "the event came from it"
        wanted = [index for index, slot in enumerate(slots) if not slot.committed]
        for index in wanted:
            self.pool.store(slots[index].slot, slots[index].generation, entry.strips[index])
        if wanted:
            self.pool.commit(entry.tag, wanted)
        self.counters["stored_blocks"] += len(wanted)
        self.pool.end(entry.tag)

    def idle(self) -> bool:
        """Nothing held, nothing waited for."""
        return not self.jobs and not self._by_tag and not self._write_through


def address(node: Node) -> NodeAddress:
    """A node as messages carry it, as the engine takes it."""
    return NodeAddress(node.node, node.address, node.incarnation)
