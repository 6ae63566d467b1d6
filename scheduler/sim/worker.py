"""A worker, modelled around the production Batcher: what `pyengine/worker/core.py` and `kv_mover.py` do, without bytes.

    accept ──> prefill: prefix brought, grant at the decode node opened ──> Batcher.ready ──> steps ──> hand-off
               decode:  grant held ─────────── hand-off complete ────────> Batcher.ready ──> steps ──> end

Steps take what `StepTime` says. KV goes to the decode node layer by layer while a chunk is computed: it has arrived
when all bytes have flowed, and not before the chunk's end plus one layer's transfer. KV of the pool is copied into
pages beside the steps, one request after the other.

Like the loop that serves, it looks at messages and at what comes to its pool between two steps only. What the pool
answers at once it waits for before it plans, so a question costs no step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from ..batcher import Busy, Outcome, SequenceId, TooLarge
from ..blocks import BlockPool
from ..calibration import Probe, calibrate, probes
from ..messages import LoadSample, WorkerAlive, WorkerToConductor
from ..types import KEY_BYTES, Role, Source, WorkerInfo, cacheable_blocks
from .baselines import find_discipline
from .compute import StepTime
from .jobs import EOS, Job, key_of, sequence_of, token
from .node import DEVICE, DRAM, LOADS, NodeModel
from .spec import WorkerSpec
from .steps import Steps

if TYPE_CHECKING:
    from .cluster import Simulation
    from .gateway import Handoff, Work


#: Seconds between two reports of changed pages.
PAGES_EVERY = 0.1
#: The discipline that serves.
OURS = "ours"


class WorkerModel(Steps):
    """One worker on its node. info: as it describes itself; role: of requests that it takes from now on."""

    def __init__(
        self, sim: Simulation, info: WorkerInfo, number: int, node: NodeModel, time: StepTime, spec: WorkerSpec
    ) -> None:
        #: The models of others know no pool beside their pages.
        self._pooled = spec.discipline == OURS
        super().__init__(
            sim.loop, number, time, spec.stages, overhead=spec.step_overhead, fast_forward=sim.run_spec.fast_forward
        )
        self.sim = sim
        self.info = info
        self.node = node
        self._spec = spec
        self._open()

    def _open(self) -> None:
        spec = self._spec
        self.batcher = find_discipline(spec.discipline)(
            BlockPool(self.info.pages, self.sim.block_tokens),
            max_tokens=spec.max_tokens_per_step,
            max_sequences=spec.max_sequences,
            max_queue=spec.max_queue,
            max_positions=self.info.max_positions,
            eos=frozenset({EOS}),
            key_of=key_of,
        )
        self.info = msgspec.structs.replace(self.info, max_tokens_per_step=self.batcher.max_tokens)
        self.role = self.info.role
        #: Attempts taken in since the last heartbeat.
        self._accepted: list[SequenceId] = []
        self._rounds = 0
        self._pages_free = 0.0
        self._pages_due = 0.0
        self._telling = False
        self._calibrate()

    def _calibrate(self) -> None:
        """As a worker does at start-up."""
        spec = self._spec
        most, pages = self.batcher.max_tokens, self.info.pages
        steps = [
            probe
            for probe in probes(most, spec.max_sequences)
            if probe.sequences * -(-probe.length // self.sim.block_tokens) <= pages
        ]
        calibrate(self.batcher.cost, steps, self._probed)

    def _probed(self, probe: Probe) -> float:
        if probe.start:
            return self.time.seconds((), probe.sequences, probe.work.decode_context)
        return self.time.seconds([(0, probe.count)] * probe.sequences, 0, 0)

    @property
    def name(self) -> str:
        return self.info.worker

    # -- requests come and go --------------------------------------------------------------------------------------

    def accept(self, work: Work) -> None:
        """Takes one part of an attempt, or has it refused."""
        self._between(self._accept, work)

    def _accept(self, work: Work) -> None:
        if not self.alive or work.incarnation != self.info.incarnation:
            return  # the gateway hears of it by itself
        needs = {"prefill": self.role.prefills, "decode": self.role.decodes, "both": self.role.decodes}
        if not needs[work.part]:
            self._refuse(work, "wrong_role")
            return
        self.touch()
        sequence = sequence_of(work, self.sim.limit_of(work.request.request))
        try:
            self.batcher.add(sequence)
        except Busy:
            self._refuse(work, "retry")
            return
        except TooLarge:
            self._refuse(work, "too_large")
            return
        job = self.jobs[work.id] = Job(work, sequence)
        self._accepted.append(work.id)
        work.request.begun(self, job)
        if self.node.draining is not None and work.part != "both":
            self._fail(job, "retry")  # no grant is given, and none is opened elsewhere
            return
        if work.part == "decode":
            job.tag = self.sim.tag()
            keys, private = work.keys, int(len(work.keys) // KEY_BYTES * self.sim.block_tokens < work.prompt_tokens)
            if len(work.keys) // KEY_BYTES + private > self.node.dram - 1:
                self._fail(job, "too_large")
                return
            self.node.grant(job.tag, keys, private, lambda here: self._granted(job, here))
            return
        limit = min(cacheable_blocks(work.prompt_tokens, self.sim.block_tokens), len(work.keys) // KEY_BYTES)
        job.tiers = bytearray([DRAM]) * limit
        if self._pooled:
            job.coming_at = self.loop.now + max((source.ready for source in work.sources), default=0.0)
        if work.handoff is None:
            job.brought = job.opened = True
            self._seek(job)
            return
        self.loop.after(self.sim.delay, work.handoff.open, job)
        if self._pooled:
            # What somebody computes just now cannot be had ahead.
            there = tuple(source for source in work.sources if not source.ready)
            self._bring(job, there, self._brought)
        else:
            self._brought(job, {})

    def _bring(self, job: Job, sources: tuple[Source, ...], then: Callable[[Job, dict[int, int]], None]) -> None:
        keys = job.work.keys[: len(job.tiers) * KEY_BYTES]
        self.node.bring(keys, sources, lambda tiers: self._between(then, job, tiers))

    def _refuse(self, work: Work, kind: str) -> None:
        self.loop.after(self.sim.delay, work.request.on_failed, work.attempt, self.name, kind)

    def _fail(self, job: Job, kind: str) -> None:
        self.end(job.work.id)
        self._refuse(job.work, kind)

    def end(self, id: SequenceId) -> None:
        """Ends an attempt here and releases all it holds. Idempotent."""
        job = self.jobs.get(id)
        if job is None:
            # It may not have been looked at yet.
            self._unseen = [each for each in self._unseen if each[0] != self._accept or each[1][0].id != id]
            return
        self.touch()
        del self.jobs[id]
        self.batcher.remove(id)
        # Whoever still knows the job wants none of its tokens: a long prompt's take a megabyte.
        job.sequence.tokens = []
        for flow in list(job.flows):
            self.sim.stop_sending(flow)
        job.flows.clear()
        self._release(job)
        for tag in job.kept:
            self.node.end(tag)
        job.kept.clear()
        self._wake()

    def _release(self, job: Job) -> None:
        if job.tag:
            tag, job.tag = job.tag, 0
            self.node.end(tag)

    def set_role(self, role: Role) -> None:
        """By order of the conductor. What was accepted is finished."""
        if self.alive and role is not self.role:
            self.touch()
            self.role = role
            self.sim.hello(self, role)

    def fail(self) -> None:
        """The process dies, and with it all its connections: nothing stays held for it."""
        self.touch()
        self.alive = False
        for id in list(self.jobs):
            self.end(id)
        self._forget()

    def revive(self, info: WorkerInfo) -> None:
        self.info = info
        self.alive = True
        self._open()

    # -- KV of prompts ---------------------------------------------------------------------------------------------

    def _here(self, job: Job) -> bool:
        return self.jobs.get(job.work.id) is job

    def _granted(self, job: Job, here: int) -> None:
        """Decode: all slots are held; the first `here` blocks are there already."""
        assert job.work.handoff is not None, "only a hand-off has a grant"
        job.work.handoff.granted(self, job, here)

    def open(self, job: Job, here: int) -> None:
        """Prefill: the decode node has slots for all, and the first `here` blocks."""
        self._between(self._opened, job, here)

    def _opened(self, job: Job, here: int) -> None:
        if self._here(job):
            job.lacking = job.sent = here * self.sim.block_tokens
            job.opened = True
            self._seek(job)

    def _brought(self, job: Job, tiers: dict[int, int]) -> None:
        if self._here(job):
            job.brought = True
            for block, tier in tiers.items():
                job.tiers[block] = tier
            self._seek(job)

    def _seek(self, job: Job) -> None:
        """Has the rest of the prefix brought, but not before all of it is expected to be where it is to come from."""
        if not (job.brought and job.opened and self._here(job)):
            return
        sources = job.work.sources
        if self.loop.now < job.coming_at:
            self.loop.at(job.coming_at, self._between, self._seek, job)
        elif self._pooled and (job.work.handoff is None or any(source.ready for source in sources)):
            self._bring(job, sources, self._found)
        else:
            self._found(job, {})

    def _found(self, job: Job, tiers: dict[int, int]) -> None:
        """All that can be had is here: pins it, and lets the Batcher have it."""
        if not self._here(job):
            return
        self.touch()
        for block, tier in tiers.items():
            job.tiers[block] = tier
        self._pin(job)
        self._wake()

    def _pin(self, job: Job) -> None:
        sequence = job.sequence
        limit = min(cacheable_blocks(len(sequence.tokens), self.sim.block_tokens), len(sequence.keys))
        keys = b"".join(sequence.keys[:limit])
        finds = self.node.up and self.node.draining is None and self._pooled
        here = self.node.leading(keys)[0] if finds else 0
        if here:
            tag = self.sim.tag()
            if self.node.take(tag, keys[: here * KEY_BYTES], 0):
                job.tag = tag
            else:
                here = 0  # all but the last slot are in use
        self.batcher.ready(job.work.id, here * self.sim.block_tokens)

    def complete(self, job: Job) -> None:
        """Decode: all KV of the prompt is here, and the first token is known."""
        if not self._here(job):
            return
        self.touch()
        self.node.pool.commit(job.tag, job.work.keys)
        self.node.report()
        self.batcher.first_token(job.work.id, token(job.work, job.work.generated))
        self.batcher.ready(job.work.id, job.work.prompt_tokens)
        self._wake()

    def _loaded(self, job: Job, first: int, blocks: int) -> None:
        """What the pool had is in pages."""
        if not self._here(job):
            return
        self.touch()
        if len(self.node.loads) < LOADS:
            size = blocks * self.sim.block_bytes
            self.node.loads.append(LoadSample(self.node.name, size, size / self.node.device_rate, device=True))
        tokens = (first + blocks) * self.sim.block_tokens
        if job.work.part == "decode":
            tokens = min(tokens, job.work.prompt_tokens)
        if not job.sequence.started:
            for tier in job.tiers[first : first + blocks]:
                job.reused[tier] += 1
        self.batcher.loaded(job.work.id, tokens)
        self._release(job)
        self._wake()

    def _late(self, job: Job) -> None:
        self._fail(job, "late")

    def _lost(self, job: Job) -> None:
        self._fail(job, "need_prefill")

    def _resume(self, job: Job) -> None:
        """Preempted: looks again for what the pool still has."""
        self._release(job)
        self._pin(job)

    def _load(self, job: Job, first: int, blocks: int) -> None:
        seconds = blocks * self.sim.block_bytes / self.node.device_rate
        self._pages_free = max(self._pages_free, self.loop.now) + seconds
        if job.work.part != "decode":
            job.work.request.prefill_seconds += seconds
        self.loop.at(self._pages_free, self._loaded, job, first, blocks)

    def _computes(self, job: Job, until: int, seconds: float) -> None:
        job.work.request.prefill_seconds += seconds
        self._deliver(job, until)

    def _outcome(self, job: Job, outcome: Outcome) -> None:
        # What computes has all in its pages.
        self._release(job)
        if job.work.part != "decode":
            self._prefilled(job, outcome)
        elif not job.joined:
            job.joined = True
            self.loop.after(self.sim.delay, job.work.request.on_second_token, job.work.attempt)
        if self.sim.run_spec.write_through and self._pooled and job.work.part != "prefill" and outcome.filled:
            tag = self.sim.tag()
            self.node.store(tag, b"".join(job.sequence.keys[: outcome.filled[-1].index + 1]))
            self.node.end(tag)
        if outcome.finish is not None:
            self._finished(job)

    def _prefilled(self, job: Job, outcome: Outcome) -> None:
        """A chunk was computed: its blocks are cached here and go on to the decode node."""
        if job.computed:
            return
        work, sequence = job.work, job.sequence
        # With stages, the Batcher is ahead of what has left the last.
        full = min(outcome.filled[-1].index + 1 if outcome.filled else 0, len(work.keys) // KEY_BYTES)
        if full > job.stored and self.node.up and self._pooled:
            tag = self.sim.tag()
            self.node.store(tag, work.keys[: full * KEY_BYTES])
            if work.handoff is None:
                self.node.end(tag)
            else:
                job.kept.append(tag)
            job.stored = full
        if not outcome.prefilled:
            return
        job.computed = True
        device = sequence.cached // self.sim.block_tokens - sum(job.reused)
        job.reused[DEVICE] += device
        work.request.on_prefilled(work.attempt, sequence.cached, job.reused)
        if work.part == "prefill":
            if outcome.finish is None and self.sim.turned_away(work.request.number):
                # It ends the attempt everywhere, here as well.
                self.batcher.remove(work.id)
                work.request.on_turned_away(work.attempt)
                return
            self.loop.after(self.sim.delay, work.request.on_tokens, work.attempt, self, job, outcome.finish is not None)
            if outcome.finish is None:
                self.batcher.remove(work.id)
                self._hand_off(job)
        elif outcome.token is not None:
            self.loop.after(self.sim.delay, work.request.on_first_token, work.attempt, self, job)

    def _finished(self, job: Job) -> None:
        work = job.work
        self.end(work.id)
        if work.part != "prefill":
            self.loop.after(self.sim.delay, work.request.on_tokens, work.attempt, self, job, True)

    # -- device pages -----------------------------------------------------------------------------------------------

    def _planned(self) -> None:
        if self.batcher.pool.changed and not self._telling:
            self._telling = True
            self.loop.at(max(self._pages_due, self.loop.now + self.sim.delay), self._tell_pages, self.info.incarnation)

    def _tell_pages(self, incarnation: int) -> None:
        """Tells the conductor which blocks came to device pages and went from there."""
        if self.alive and incarnation == self.info.incarnation:
            self._telling = False
            self._pages_due = self.loop.now + PAGES_EVERY
            self.sim.tell_pages(self, self.batcher.pool.take_changes(), first=False)

    # -- the hand-off ----------------------------------------------------------------------------------------------

    def _deliver(self, job: Job, until: int) -> None:
        """The KV of the prompt up to token `until` goes to the decode node, as far as that lacks it."""
        handoff: Handoff | None = job.work.handoff
        if handoff is None:
            return
        tokens = self.sim.block_tokens
        if until >= job.work.prompt_tokens:
            until = -(-until // tokens) * tokens  # the partial block is sent whole
        if until <= job.sent:
            return
        size = (until - job.sent) * self.sim.spec.kv_bytes
        job.sent = until
        if handoff.node is self.node:
            return
        layer = size / self.sim.spec.layers / self.sim.spec.node.link_rate
        job.there_at = layer + self.sim.spec.handoff_delay
        if (rate := self.sim.spec.handoff_rate) is not None:
            job.there_at += size / rate
        flow = self.sim.send(self.node, handoff.node, size, lambda done: self._flowed(job, flow, done))
        job.flows.add(flow)

    def _flowed(self, job: Job, flow: int, done: bool) -> None:
        job.flows.discard(flow)
        if not self._here(job):
            return
        if not done:
            self._fail(job, "retry")
        elif job.computed and not job.flows:
            self._handed_off(job)

    def _hand_off(self, job: Job) -> None:
        """All is computed. What flows still ends when the last layer is there."""
        job.there_at += self.loop.now
        if not job.flows:
            self._handed_off(job)

    def _handed_off(self, job: Job) -> None:
        """All bytes have flowed."""
        if self.loop.now < job.there_at:
            self.loop.at(job.there_at, self._handed_off, job)
            return
        if not self._here(job):
            return
        assert job.work.handoff is not None, "there was something to hand off"
        self.loop.after(self.sim.delay, job.work.handoff.complete)
        self.end(job.work.id)

    # -- asking ----------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> int:
        """Steps, and rounds of the loop without one: it turns every second at least."""
        return super().progress + self._rounds

    def heartbeat(self) -> list[WorkerToConductor]:
        """What it says of itself, twice a second."""
        batcher = self.batcher
        self._rounds += self._step is None and self._run is None
        loads, self.node.loads = self.node.loads, []
        accepted, self._accepted = self._accepted, []
        return [
            WorkerAlive(
                worker=self.name,
                progress=self.progress,
                queued_requests=batcher.waiting,
                queued_tokens=batcher.queued_tokens,
                running=batcher.running,
                free_pages=batcher.pool.free,
                cost=batcher.cost.fit(),
                counters={},
                loads=tuple(loads),
                queue_seconds=self.queue_seconds(),
                running_context=self.running_context(),
                expected_tokens=batcher.expected_tokens,
                accepted=tuple(accepted),
                queue_ahead=batcher.queue_ahead(self.loop.now),
            )
        ]

    def check(self) -> None:
        """Raises AssertionError if the Batcher contradicts itself, or holds something for nobody."""
        self.batcher.check()
        assert set(self.jobs) >= set(self.batcher.sequences), "the batcher has a sequence that nobody wants"
        if not self.jobs:
            assert self.batcher.idle and not self.batcher.pool.referenced, "pages are held for nobody"
