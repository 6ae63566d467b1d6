"""The engine loop of one model replica: Batcher + Backend + KvMover, one visible `step`.

It knows no sockets: the shell (`service`) and `LLM` hand it Work and Abort, call `step`, and send what it returns.
One round of `step`:

    pool events -> plan -> copy pooled KV into pages -> forward pass -> tokens out, KV handed on -> sequences end
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from typing import NamedTuple

import numpy as np

from pyengine import _native
from pyengine.backend import Backend, Slice
from pyengine.kv_mover import KvMover, Pool
from pyengine.scheduler.batcher import Batcher, Busy, Outcome, Sequence, SequenceId, Step
from pyengine.scheduler.blocks import BlockPool
from pyengine.scheduler.messages import Abort, Failed, Message, Note, PrefillReport, StepSample, Tokens, Work
from pyengine.scheduler.types import KEY_BYTES, FinishReason

#: Attempts that have ended are remembered, so that an Abort which overtakes its Work still counts.
REMEMBERED_ENDS = 4096
#: A hand-off that lost KV is recomputed at decode up to this many steps' worth of tokens, else it is sent back.
RECOMPUTE_STEPS = 4


class Load(NamedTuple):
    """How much is here, as of the last step: for heartbeats, which are made on another thread."""

    running: int
    waiting: int
    queued_tokens: int


class Worker:
    """One replica. Not thread-safe.

    Args:
        backend: loaded model with its pages allocated.
        pages, max_tokens, max_sequences, max_queue: limits, see WorkerConfig.
        hash_key: 32 bytes, for the keys of blocks that fill while decoding.
        incarnation: of this process; part of every tag.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        *,
        pages: int,
        max_tokens: int,
        max_sequences: int,
        max_queue: int,
        hash_key: bytes,
        incarnation: int,
    ) -> None:
        self.name = name
        self.backend = backend
        self.namespace = backend.namespace.digest()
        spec = backend.namespace.kv
        self.block_tokens = spec.block_tokens
        self.batcher = Batcher(
            BlockPool(pages, spec.block_tokens),
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            max_queue=max_queue,
            max_positions=backend.max_positions,
            eos=backend.eos_token_ids,
            key_of=lambda parent, tokens: _native.block_keys(
                np.asarray(tokens, np.uint32), spec.block_tokens, parent, hash_key
            ),
        )
        self.mover = KvMover(backend, self.batcher, spec, incarnation)
        self.recompute_limit = RECOMPUTE_STEPS * max_tokens
        self.work: dict[SequenceId, Work] = {}
        self.samples: list[StepSample] = []
        self.progress = 0
        self.busy = False
        self.load = Load(0, 0, 0)
        self.counters = {"prefill": 0, "decode": 0, "recomputed": 0, "cached": 0, "preempted": 0, "steps": 0}
        self._sequences: dict[SequenceId, Sequence] = {}
        self._ended: OrderedDict[SequenceId, None] = OrderedDict()
        self._out: list[Message] = []
        self._just_ended: deque[SequenceId] = deque(maxlen=REMEMBERED_ENDS)

    # -- requests come and go -------------------------------------------------------------------------------------

    def accept(self, work: Work) -> None:
        """Takes one attempt of a request; what goes wrong is answered by a Failed message from `step`."""
        identity = (work.request, work.attempt)
        if identity in self.work:
            return
        if identity in self._ended:
            self._remember(identity)
            return
        self.progress += 1
        if work.namespace != self.namespace:
            self._refuse(work, "retry", "the keys belong to another model or KV layout than this worker's")
            return
        tokens = np.frombuffer(work.token_ids, np.uint32).tolist()
        sequence = Sequence(
            id=identity,
            tokens=tokens,
            prompt_tokens=len(tokens),
            generated_before=work.generated,
            keys=[work.keys[i : i + KEY_BYTES] for i in range(0, len(work.keys), KEY_BYTES)],
            root=work.root,
            sampling=work.sampling,
            first_only=work.part == "prefill",
            handed_off=work.part == "decode",
        )
        try:
            self.batcher.add(sequence)
        except Busy as error:
            self._refuse(work, "retry", str(error))
            return
        except ValueError as error:
            self._refuse(work, "too_large", str(error))
            return
        self.work[identity] = work
        self._sequences[identity] = sequence
        self.mover.begin(sequence, work)

    def abort(self, abort: Abort) -> None:
        """Ends an attempt and releases all it holds. Idempotent."""
        self._end((abort.request, abort.attempt))

    def attach(self, pool: Pool) -> None:
        """Takes a (new) link to the node's pool."""
        self.mover.connect(pool)

    def step(self) -> list[Message]:
        """One round; returns what gateways must be told, in order."""
        self.mover.pump()
        self._forget_copied_out()
        while self.mover.handed_off:
            self._end(self.mover.handed_off.popleft())
        self._report_failures()
        step = self.batcher.plan()
        for sequence_id in step.preempted:
            self.counters["preempted"] += 1
            self.mover.resume(sequence_id)
        for load in step.loads:
            self.mover.load(load)
            self._bound_recompute(load.id)
        if step.slices:
            self._forward(step)
            self._forget_copied_out()
        out, self._out = self._out, []
        #: Whether the next step may find something to do without an event from a gateway or the pool.
        self.busy = bool(out) or not step.empty
        self.load = Load(self.batcher.running, self.batcher.waiting, self.batcher.queued_tokens)
        return out

    def take_ended(self) -> list[SequenceId]:
        """Attempts that have ended since the last call: no message of theirs follows those that `step` has returned."""
        return [self._just_ended.popleft() for _ in range(len(self._just_ended))]

    @property
    def idle(self) -> bool:
        """No request, nothing held on device or in pools."""
        return not self.work and self.mover.idle()

    def check(self) -> None:
        """Asserts the invariants of all parts; with nothing to do, that nothing is held."""
        self.batcher.check()
        if not self.work:
            assert self.batcher.idle, "pages are referenced although no request is here"

    # -- one forward pass -----------------------------------------------------------------------------------------

    def _forward(self, step: Step) -> None:
        slices = []
        prefill = prefill_context = decode = decode_context = 0
        for planned in step.slices:
            sequence = self._sequences[planned.id]
            end = planned.start + planned.count
            slices.append(
                Slice(
                    tokens=np.asarray(sequence.tokens[planned.start : end], np.uint32),
                    start=planned.start,
                    pages=np.asarray(planned.pages, np.int32),
                    sampling=sequence.sampling if planned.sample else None,
                )
            )
            self.counters["recomputed"] += max(min(end, sequence.high_water) - planned.start, 0)
            if planned.start >= sequence.prompt_tokens:
                decode += planned.count
                decode_context += end
            else:
                prefill += planned.count
                prefill_context += planned.count * planned.start + planned.count * (planned.count + 1) // 2
        self.progress += 1
        began = time.perf_counter()
        tokens = self.backend.execute(slices)
        seconds = time.perf_counter() - began
        self.counters["prefill"] += prefill
        self.counters["decode"] += decode
        self.counters["steps"] += 1
        if len(self.samples) < 256:
            self.samples.append(StepSample(prefill, prefill_context, decode, decode_context, seconds))
        for outcome in self.batcher.finish(step, tokens):
            self._outcome(outcome)

    def _outcome(self, outcome: Outcome) -> None:
        work = self.work[outcome.id]
        sequence = self._sequences[outcome.id]
        if outcome.prefilled and work.part != "decode":
            self.counters["cached"] += sequence.cached
            self._out.append(
                PrefillReport(
                    request=work.request,
                    attempt=work.attempt,
                    cached=sequence.cached,
                    computed=sequence.prompt_tokens - sequence.cached,
                )
            )
        if outcome.token is not None:
            self._emit(work, outcome.index, outcome.token, outcome.finish)
        if work.part != "prefill":
            self.mover.write_through(sequence, outcome.filled)
        if outcome.finish is not None:
            self._end(outcome.id)
            return
        if work.part == "prefill" and outcome.token is not None:
            note = Note(
                first_token=outcome.token,
                cached=sequence.cached,
                computed=sequence.prompt_tokens - sequence.cached,
            )
            self.mover.hand_off(outcome.id, note)
            return
        self.mover.computed(outcome.id)

    def _emit(self, work: Work, index: int, token: int, finish: FinishReason | None) -> None:
        self._out.append(
            Tokens(request=work.request, attempt=work.attempt, first=index, tokens=(token,), finish=finish)
        )

    def _forget_copied_out(self) -> None:
        while self.mover.copied_out:
            self.batcher.remove(self.mover.copied_out.popleft())

    # -- endings --------------------------------------------------------------------------------------------------

    def _bound_recompute(self, sequence_id: SequenceId) -> None:
        """A decode worker mends small losses itself; a prompt lost as a whole goes back for a new plan."""
        sequence = self._sequences[sequence_id]
        lost = sequence.high_water - sequence.computed
        if sequence.handed_off and lost > self.recompute_limit:
            self._fail(sequence_id, "need_prefill", f"{lost} tokens of handed-off KV were lost")

    def _report_failures(self) -> None:
        while self.mover.failures:
            failure = self.mover.failures.popleft()
            self._fail(failure.id, failure.kind, failure.reason)

    def _fail(self, sequence_id: SequenceId, kind: str, reason: str) -> None:
        work = self.work.get(sequence_id)
        if work is not None:
            self._end(sequence_id)
            self._refuse(work, kind, reason)

    def _refuse(self, work: Work, kind: str, reason: str) -> None:
        self._remember((work.request, work.attempt))
        self._out.append(Failed(request=work.request, attempt=work.attempt, worker=self.name, kind=kind, reason=reason))

    def _end(self, sequence_id: SequenceId) -> None:
        self._remember(sequence_id)
        self.batcher.remove(sequence_id)
        self.mover.end(sequence_id)
        self.work.pop(sequence_id, None)
        self._sequences.pop(sequence_id, None)

    def _remember(self, sequence_id: SequenceId) -> None:
        self._ended[sequence_id] = None
        self._just_ended.append(sequence_id)
        if len(self._ended) > REMEMBERED_ENDS:
            self._ended.popitem(last=False)
