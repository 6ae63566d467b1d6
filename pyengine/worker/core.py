"""The engine loop of one model replica: Batcher + Backend + KvMover, one visible `step`.

It knows no sockets: the shell (`service`) and `LLM` hand it Work and Abort, call `step`, and send what it returns.
One round of `step`:

    pool events -> plan -> copy pooled KV into pages -> forward pass -> tokens out, KV handed on -> sequences end

With a backend that overlaps, a round plans and submits step n + 1 while n runs, then waits for n. The device goes from
one to the other, and all that the host does about n, sending its tokens too, falls into n + 1:

    device  [   step n   ][  step n + 1  ][
    host    ..plan n+1..wait][n: tokens, KV][plan n+2..wait][n+1: ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import llguidance
import msgspec
import numpy as np

from pyengine import _native
from pyengine.backend import I32, NOTHING_LEFT, Backend, Pending, Shaping, Slice, WorkerBroken
from pyengine.grammar import GrammarError, Grammars
from pyengine.kv_mover import LOCAL_ATTEMPT, TIERS, KvMover, Pool
from pyengine.loading import Unreadable
from pyengine.scheduler.batcher import Batcher, Busy, Outcome, Planned, Sequence, SequenceId, State, Step, TooLarge
from pyengine.scheduler.blocks import BlockPool
from pyengine.scheduler.messages import (
    HEARTBEAT_EVERY,
    Abort,
    CostFit,
    Failed,
    Handoff,
    Message,
    Note,
    PrefillReport,
    PromptTold,
    Tokens,
    Work,
)
from pyengine.scheduler.types import KEY_BYTES, FinishReason, Logprobs, Role
from pyengine.worker import prompts
from pyengine.worker.shaping import Shaper
from pyengine.worker.stages import Stages

logger = logging.getLogger(__name__)

#: Attempts that have ended are remembered, so that an Abort which overtakes its Work still counts.
REMEMBERED_ENDS = 4096
#: A hand-off that lost KV is recomputed at decode up to this many steps' worth of tokens, else it is sent back.
RECOMPUTE_STEPS = 4
#: So many steps in a row in which the backend could compute nothing at all, and the worker is broken.
HOPELESS_STEPS = 3
#: What a client hears whose own wishes leave no token to choose.
STUCK = "no token is left to choose: min_tokens forbids all that its grammar or its logit_bias allows"
#: Attempts told of in one heartbeat; of others the conductor forgets after two what they were expected to bring.
ACCEPTED = 4096
#: Seconds between two looks at who waits how long: a part of a heartbeat.
TELL_EVERY = HEARTBEAT_EVERY / 5


class Load(NamedTuple):
    """How much is here, as of the last step: for heartbeats, which are made on another thread."""

    running: int
    waiting: int
    queued_tokens: int
    queue_seconds: float
    running_context: int
    expected_tokens: int
    cost: CostFit
    queue_ahead: tuple[float, ...]


@dataclasses.dataclass(slots=True)
class Flight:
    """A step under way. pending: None if it could not be submitted, or the step before it has failed. rows: of its
    sequences. widths: slices of each of these; None: one. began: when it was submitted (time.perf_counter). loads: it
    may wait for KV that is still on its way.
    """

    step: Step
    pending: Pending | None
    rows: dict[SequenceId, int]
    widths: list[int] | None
    began: float
    loads: bool = False


class Chosen(msgspec.Struct, gc=False):
    """By a step. tokens: parallel to its slices, -1 where there is none. logprobs: of those that asked. stuck: to whom
    what they asked for leaves no token. prompts: what is told of prompt tokens.
    """

    tokens: list[int]
    logprobs: dict[SequenceId, Logprobs]
    stuck: list[SequenceId]
    prompts: dict[SequenceId, prompts.Told] = {}


class Worker:
    """One replica. Not thread-safe.

    Args:
        backend: loaded model with its pages allocated.
        pages, max_tokens, max_sequences, max_queue: limits, see WorkerConfig.
        hash_key: 32 bytes, for the keys of blocks.
        incarnation: of this process; part of every tag.
        role: parts of requests that it takes; others are answered "wrong_role".
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
        role: Role = Role.BOTH,
    ) -> None:
        self.name = name
        self.role = role
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
        self.progress = 0
        self.busy = False
        self._ahead: tuple[float, ...] = ()
        self._tells = 0.0
        self.load = self._load()
        #: Attempts that `load` counts since the last heartbeat; whoever sends them puts an empty list here.
        self.accepted: list[SequenceId] = []
        self._taken: list[SequenceId] = []
        #: Seconds so far: in the model, as predicted just before each step, and beside the model in the rounds of the
        #: loop that had a step (`WorkerService.serve`).
        self.model_seconds = self.predicted_seconds = self.loop_seconds = 0.0
        self.counters = {"prompt": 0, "prefill": 0, "decode": 0, "recomputed": 0, "preempted": 0, "steps": 0}
        self.counters |= {f"cached_{tier}": 0 for tier in TIERS}
        self._hash_key = hash_key
        self._hopeless = 0
        self._flights: deque[Flight] = deque()
        #: When the last step was over (time.perf_counter).
        self._over = 0.0
        self._sequences: dict[SequenceId, Sequence] = {}
        #: Of sequences whose choices are shaped or told of.
        self._shapers: dict[SequenceId, Shaper] = {}
        #: How many of the likeliest tokens are told beside each of a prompt's.
        self._telling: dict[SequenceId, int] = {}
        self.grammars = Grammars(backend.tokenizer, backend.vocab_size, backend.eos_token_ids)
        #: Of sequences that cannot begin before: no step waits for a grammar.
        self._compiling: dict[SequenceId, Future[llguidance.LLMatcher]] = {}
        #: Called by another thread when one of them can begin, so that `step` is called.
        self.wake: Callable[[], None] = lambda: None
        self._stages = Stages()
        self._tables: dict[SequenceId, I32] = {}
        self._due: dict[SequenceId, float] = {}
        self._next_due = float("inf")
        self._ended: OrderedDict[SequenceId, None] = OrderedDict()
        self._out: list[Message] = []
        self._just_ended: list[SequenceId] = []

    # -- requests come and go -------------------------------------------------------------------------------------

    def accept(self, work: Work) -> None:
        """Takes one attempt of a request; what goes wrong is answered by a Failed message from `step`."""
        identity = (work.request, work.attempt)
        if identity in self.work:
            return
        if identity in self._ended:
            self._remember(identity)
            return
        if self._turned_away(work):
            return
        tokens = np.frombuffer(work.token_ids, np.uint32).tolist()
        now = time.monotonic()
        arrived, slo = now - work.waited, work.slo
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
            arrived=arrived,
            ttft=math.inf if slo.ttft is None else slo.ttft,
            tbt=math.inf if slo.tbt is None else slo.tbt,
            deadline=math.inf if slo.deadline is None else arrived + slo.deadline,
            priority=work.priority,
            tenant=work.tenant,
            most=sys.maxsize if prompts.wanted(work) is None else prompts.AT_ONCE,
        )
        grammar = work.sampling.grammar
        try:
            compiled = None if grammar is None else self.grammars.prepare(grammar)
            self.batcher.add(sequence)
        except (Busy, BufferError) as error:
            self._refuse(work, "retry", str(error))
            return
        except TooLarge as error:
            self._refuse(work, "too_large", str(error))
            return
        except ValueError as error:
            self._refuse(work, "bug", str(error))
            return
        self.work[identity] = work
        self._sequences[identity] = sequence
        if (wish := prompts.wanted(work)) is not None:
            self._telling[identity] = wish
        if (shaper := Shaper.of(sequence, self.backend.vocab_size, self.grammars, compiled)) is not None:
            self._shapers[identity] = shaper
        self._due[identity] = due = now + work.deadline
        self._next_due = min(self._next_due, due)
        self._taken.append(identity)
        self._stages.accepted(identity, now)
        if compiled is None:
            self.mover.begin(sequence, work)
            return
        self._compiling[identity] = compiled
        if not compiled.done():
            compiled.add_done_callback(lambda _: self.wake())

    def _begin_compiled(self) -> None:
        """Who was HELD while its grammar was compiled, beside the loop, asks the pools for its KV now."""
        for sequence_id, compiled in [each for each in self._compiling.items() if each[1].done()]:
            del self._compiling[sequence_id]
            error = compiled.exception()
            if error is None or isinstance(error, GrammarError):  # that one the matcher tells
                self.mover.begin(self._sequences[sequence_id], self.work[sequence_id])
            else:
                logger.error("request %d, attempt %d: its grammar", *sequence_id, exc_info=error)
                self._fail(sequence_id, "bug", f"its grammar could not be compiled: {error}")

    def _turned_away(self, work: Work) -> bool:
        """Answers work that is not for this worker, or that nobody could do."""
        # A decode worker computes short prompts in its decode batches, if the conductor sends it any.
        needs = {"prefill": self.role.prefills, "decode": self.role.decodes, "both": self.role.decodes}
        if work.part in needs and not needs[work.part]:
            self._refuse(work, "wrong_role", f"a {self.role.value} worker does not take the part {work.part!r}")
        elif work.namespace != self.namespace:
            self._refuse(work, "retry", "the keys belong to another model or KV layout than this worker's")
        elif work.part not in needs:
            self._refuse(work, "bug", f"no worker takes the part {work.part!r}")
        elif (flaw := self._flaw(work)) is not None:
            self._refuse(work, "bug", f"malformed work: {flaw}")
        elif work.part == "decode" and work.decode_incarnation != self.mover.incarnation:
            self._refuse(work, "retry", "the work is meant for an earlier life of this worker")
        else:
            return False
        return True

    def _flaw(self, work: Work) -> str | None:
        """What makes this work impossible, if anything does. Everything is looked at before anything is begun."""
        nodes = (work.decode_node, *(source.node for source in work.sources))
        numbers = (work.decode_incarnation, *(node.incarnation for node in nodes))
        if not (0 <= work.request < 2**63 and 0 <= work.attempt < LOCAL_ATTEMPT):
            return "its number or attempt is out of range"
        if not all(0 <= number < 2**64 for number in numbers):
            return "an incarnation is out of range"
        if not all(0 <= source.first <= source.last for source in work.sources):
            return "a source has no range of blocks"
        if not all(0.0 <= source.ready < math.inf for source in work.sources):
            return "a source is ready at no time"
        if not 0 <= work.tenant < 2**64:
            return "its tenant is out of range"
        if work.cached_blocks < 0:
            return f"{work.cached_blocks} of its blocks are cached"
        promised = [each for each in (work.slo.ttft, work.slo.tbt, work.slo.deadline) if each is not None]
        if not work.deadline >= 0.0 or not all(0.0 <= each < math.inf for each in (work.waited, *promised)):
            return "its deadline, its objectives or how long it has waited are no numbers of seconds"
        if not -(2**31) <= work.priority < 2**31:
            return "its priority is out of range"
        if not work.token_ids or len(work.token_ids) % 4:
            return f"{len(work.token_ids)} bytes are no token ids"
        tokens = np.frombuffer(work.token_ids, np.uint32)
        if int(tokens.max()) >= self.backend.vocab_size:
            return f"token id {tokens.max()} is not below {self.backend.vocab_size}, the size of the vocabulary"
        if not 0 <= work.generated < len(tokens):
            return f"{work.generated} of its {len(tokens)} tokens were generated"
        if any(token >= self.backend.vocab_size for token, _ in work.sampling.logit_bias):
            return f"it biases an id that is not below {self.backend.vocab_size}, the size of the vocabulary"
        if len(work.root) != KEY_BYTES:
            return "the root key has a wrong length"
        if work.keys != _native.block_keys(tokens, self.block_tokens, work.root, self._hash_key):
            return "the block keys do not belong to the tokens"
        return None

    def abort(self, abort: Abort) -> None:
        """Ends an attempt and releases all it holds. Idempotent."""
        self._end((abort.request, abort.attempt))

    def attach(self, pool: Pool) -> None:
        """Takes a (new) link to the node's pool."""
        self.mover.connect(pool)

    def step(self) -> list[Message]:
        """One round; returns what gateways must be told, in order.

        Raises WorkerBroken if the backend fails whatever it is given. A request that alone makes it fail is answered
        by Failed; the others go on.
        """
        self.progress += 1
        self._begin_compiled()
        self.mover.pump()
        self._forget_copied_out()
        while self.mover.restarted:
            self._tables.pop(self.mover.restarted.popleft(), None)
        while self.mover.handed_off:
            self._end(self.mover.handed_off.popleft())
        self._report_failures()
        self._end_late()
        step = self.batcher.plan(time.monotonic())
        within = self._within_recompute_limit(step)
        # First, as to begin a step may take the pool's events: by then the mover must know whose pages are gone.
        for sequence_id in step.preempted:
            self.counters["preempted"] += 1
            self._tables.pop(sequence_id, None)
            self.mover.resume(sequence_id)
        self._stages.begun(step.loads, within.slices)
        if within.slices:
            self._begin(within)
        for load in step.loads:
            self.mover.load(load)
        self.mover.flush()
        self._end_steps(1 if self.backend.overlaps and within.slices else 0)
        out, self._out = self._out, []
        #: Whether the next step may find something to do without an event from a gateway or the pool.
        self.busy = bool(out or self._flights) or not step.empty or self.mover.lost is not None
        self.load = self._load()
        self.accepted.extend(self._taken[: ACCEPTED - len(self.accepted)])
        self._taken.clear()
        return out

    def _load(self) -> Load:
        batcher = self.batcher
        now = time.monotonic()
        if now >= self._tells or not batcher.queued_tokens:
            # To look at all that waits is not for every step.
            self._ahead = batcher.queue_ahead(now)
            self._tells = now + TELL_EVERY
        return Load(
            running=batcher.running,
            waiting=batcher.waiting,
            queued_tokens=batcher.queued_tokens,
            queue_seconds=batcher.queue_seconds,
            running_context=batcher.running_context,
            expected_tokens=batcher.expected_tokens,
            cost=batcher.cost.fit(),
            queue_ahead=self._ahead,
        )

    @property
    def due(self) -> float:
        """When `step` will find somebody late (time.monotonic), if nothing happens before."""
        return min(self._next_due, self.batcher.next_late, self.mover.due)

    def take_ended(self) -> list[SequenceId]:
        """Attempts that have ended since the last call: no message of theirs follows those that `step` has returned."""
        ended, self._just_ended = self._just_ended, []
        return ended

    @property
    def idle(self) -> bool:
        """No request, nothing held on device or in pools."""
        return not self.work and not self._flights and self.mover.idle()

    def check(self) -> None:
        """Asserts the invariants of all parts; with nothing to do, that nothing is held."""
        self.batcher.check()
        if not self.work:
            assert self.batcher.idle, "pages are referenced although no request is here"

    # -- forward passes -------------------------------------------------------------------------------------------

    @property
    def computing(self) -> bool:
        """A step is under way."""
        return bool(self._flights)

    def _begin(self, step: Step) -> None:
        pending = None
        written = self.mover.stream(step.slices)
        readable = self.mover.readable(step.slices)
        widths = self._widths(step.slices)
        try:
            pending = self.backend.submit(self._slices(step.slices), written, readable)
        except WorkerBroken:
            raise
        except Exception:
            logger.exception("a step of %d sequences could not be submitted", len(step.slices))
        ends = itertools.accumulate(widths or itertools.repeat(1, len(step.slices)))
        rows = {planned.id: end - 1 for planned, end in zip(step.slices, ends, strict=True)}
        self._flights.append(Flight(step, pending, rows, widths, time.perf_counter(), readable is not None))
        self.batcher.begin(step)

    def _end_steps(self, left: int) -> None:
        """Waits until so many steps are under way. Behind one that has no meaning any more nothing is submitted."""
        while len(self._flights) > left or (self._flights and self._flights[-1].pending is None):
            self._end_step()
            self._forget_copied_out()
            self.mover.flush()

    def _end_step(self) -> None:
        """Waits for the first of the steps under way."""
        flight = self._flights[0]
        # On a device it began when it was submitted, or when the one before was over; else it begins now.
        began = max(flight.began, self._over) if self.backend.overlaps else time.perf_counter()
        chosen = self._chosen(flight)
        self._over = time.perf_counter()
        self._flights.popleft()
        seconds = self._over - began
        work = self.batcher.work(flight.step)
        self.model_seconds += seconds
        self.predicted_seconds += self.batcher.cost.seconds(work)
        self.counters["prefill"] += work.prefill_tokens
        self.counters["decode"] += work.decode_sequences
        self.counters["steps"] += work.prefill_tokens + work.decode_sequences > 0
        if not flight.loads:  # what copies take is told apart, see `KvMover.loads`
            self.batcher.observe(work, seconds)
        for sequence_id in chosen.stuck:
            shaper = self._shapers.get(sequence_id)
            self._fail(sequence_id, "refused", (shaper.flaw if shaper is not None else None) or STUCK)
        for sequence_id, told_of in chosen.prompts.items():
            if (work_of := self.work.get(sequence_id)) is not None:
                request, attempt = work_of.request, work_of.attempt
                first, tokens = told_of.first, told_of.logprobs
                self._out.append(PromptTold(request=request, attempt=attempt, first=first, logprobs=tokens))
        logprobs = chosen.logprobs
        for outcome in self.batcher.finish(flight.step, chosen.tokens):
            told = logprobs.get(outcome.id) if logprobs else None
            self._outcome(outcome, None if told is None else (told,))

    def _chosen(self, flight: Flight) -> Chosen:
        """What a step has chosen. If it fails, each of its sequences is tried alone."""
        planned = flight.step.slices
        if flight.pending is not None:
            try:
                chosen = self._read(planned, flight.widths, flight.pending)
            except WorkerBroken:
                raise
            except Unreadable as error:
                # What has left is good: layers are told of in order, and this one nobody has computed.
                logger.warning("a step of %d sequences is computed again, each alone: %s", len(planned), error)
                self._void_later(flight)
            except Exception:
                logger.exception("a step of %d sequences failed: computing each alone", len(planned))
                self._void_later(flight)
                for sequence_id in self.mover.void_streams(planned):
                    self._fail(sequence_id, "retry", "a part of its KV had left when the step failed")
            else:
                self._hopeless = 0
                return chosen
            finally:
                self.mover.streamed()
                self.mover.end_loads(planned)
        else:
            self.mover.end_loads(planned)
        return self._each_alone(planned)

    def _void_later(self, failed: Flight) -> None:
        """What follows a failed step has computed from tokens that do not exist."""
        for flight in self._flights:
            if flight is not failed and flight.pending is not None:
                with contextlib.suppress(Exception):
                    flight.pending.tokens()
                flight.pending = None

    def _each_alone(self, planned: list[Planned]) -> Chosen:
        """Who fails is ended, who has ended or lost its pages since the step was planned is left out. KV is written
        twice: harmless.
        """
        chosen = Chosen([-1] * len(planned), {}, [], {})
        here = [
            (row, each)
            for row, each in enumerate(planned)
            if each.id in self.work and self._sequences[each.id].state is State.RUNNING
        ]
        failed: dict[SequenceId, Exception] = {}
        for row, each in here:
            try:
                alone = self._read([each], self._widths([each]), self.backend.submit(self._slices([each])))
            except WorkerBroken:
                raise
            except Exception as error:  # noqa: BLE001 (whatever a model raises, it is this request's)
                failed[each.id] = error
            else:
                (chosen.tokens[row],) = alone.tokens
                chosen.logprobs.update(alone.logprobs)
                chosen.stuck.extend(alone.stuck)
                chosen.prompts.update(alone.prompts)
        if here:
            self._hopeless = self._hopeless + 1 if len(failed) == len(here) else 0
        if self._hopeless >= HOPELESS_STEPS:
            raise WorkerBroken(f"the backend failed in {HOPELESS_STEPS} steps in a row") from failed[here[0][1].id]
        for sequence_id, failure in failed.items():
            logger.error("request %d, attempt %d cannot be computed", *sequence_id, exc_info=failure)
            self._fail(sequence_id, "bug", f"the model failed on this request: {failure}")
        return chosen

    def _slices(self, planned: list[Planned]) -> list[Slice]:
        """A sequence whose token is still to come continues it from its row of the step under way."""
        tokens: list[int] = []
        for each in planned:
            tokens += self._sequences[each.id].tokens[each.start : each.start + each.count] or [0]
        ids = np.array(tokens, np.uint32)
        shaped = bool(self._shapers)
        if shaped:
            self._mask(planned)
        slices, end = [], 0
        for each in planned:
            begin, end = end, end + each.count
            sequence = self._sequences[each.id]
            after = self._flights[-1].rows[each.id] if each.start == len(sequence.tokens) else None
            sampling = sequence.sampling if each.sample else None
            shaping = self._shaping(each) if shaped and each.sample else None
            wish = self._telling.get(each.id) if self._telling else None
            if wish is not None and each.start < sequence.prompt_tokens:
                slices += prompts.forced(each, sequence, ids[begin:end], self._table(each), wish)
                if not each.sample:
                    continue
                begin = end - 1
            start = each.start + each.count - (end - begin)
            slices.append(Slice(ids[begin:end], start, self._table(each), sampling, after, shaping))
        return slices

    def _widths(self, planned: list[Planned]) -> list[int] | None:
        """How many of `_slices` each becomes; None: one, as nobody is to be told of prompts."""
        if not self._telling:
            return None
        telling = self._telling
        return [prompts.spread(each, self._sequences[each.id], telling.get(each.id)) for each in planned]

    def _mask(self, planned: list[Planned]) -> None:
        """The masks of all grammars in a step are made together, as several threads can make them."""
        shapers = [shaper for each in planned if each.sample and (shaper := self._shapers.get(each.id)) is not None]
        matchers = [matcher for shaper in shapers if (matcher := shaper.matcher()) is not None]
        if matchers:
            self.grammars.fill(matchers)

    def _shaping(self, planned: Planned) -> Shaping | None:
        shaper = self._shapers.get(planned.id)
        return shaper.shaping(planned.start + planned.count) if shaper is not None else None

    def _table(self, planned: Planned) -> I32:
        """Its pages as an array. A sequence decodes 16 steps in the same ones, and a long one has hundreds."""
        table = self._tables.get(planned.id)
        if table is None or len(table) != len(planned.pages):
            table = self._tables[planned.id] = np.array(planned.pages, np.int32)
        return table

    def _read(self, planned: list[Planned], widths: list[int] | None, pending: Pending) -> Chosen:
        """The backend's answer. Raises ValueError for one that cannot be."""
        tokens = pending.tokens()
        slices = len(planned) if widths is None else sum(widths)
        if len(tokens) != slices:
            raise ValueError(f"the backend gave {len(tokens)} tokens for {slices} slices")
        if widths is None:
            return self._read_tokens(planned, tokens, pending.logprobs)
        return self._read_prompts(planned, widths, tokens, pending.logprobs())

    def _read_prompts(
        self, planned: list[Planned], widths: list[int], tokens: list[int], logprobs: list[Logprobs | None]
    ) -> Chosen:
        """Of slices of which some are single tokens of a prompt, see prompts.py."""
        logprobs = logprobs or [None] * len(tokens)
        last, told_last, found, end = list[int](), list[Logprobs | None](), {}, 0
        for each, width in zip(planned, widths, strict=True):
            begin, end = end, end + width
            sequence = self._sequences.get(each.id)
            if each.id in self._telling and sequence is not None and each.start < sequence.prompt_tokens:
                behind = end - each.sample
                if (told := prompts.told(each, sequence, tokens[begin:behind], logprobs[begin:behind])) is not None:
                    found[each.id] = told
            last.append(tokens[end - 1] if each.sample else -1)
            told_last.append(logprobs[end - 1] if each.sample else None)
        chosen = self._read_tokens(planned, last, lambda: told_last)
        chosen.prompts = found
        return chosen

    def _read_tokens(
        self, planned: list[Planned], tokens: list[int], logprobs: Callable[[], list[Logprobs | None]]
    ) -> Chosen:
        """tokens: one for each."""
        stuck = False
        for token, each in zip(tokens, planned, strict=True):
            if not (0 <= token < self.backend.vocab_size if each.sample else token == -1):
                if token != NOTHING_LEFT or not each.sample:
                    raise ValueError(f"the backend chose token {token} of {self.backend.vocab_size}")
                stuck = True
        if not (stuck or self._shapers):
            return Chosen(tokens, {}, [])
        told = {each.id: one for each, one in zip(planned, logprobs(), strict=False) if one is not None}
        ids = [each.id for token, each in zip(tokens, planned, strict=True) if token == NOTHING_LEFT]
        return Chosen([max(token, -1) for token in tokens], told, ids)

    def close(self) -> None:
        """Waits for what is under way on the device, and lets go of the pool."""
        while self._flights and self.backend.overlaps:
            flight = self._flights.popleft()
            if flight.pending is not None:
                with contextlib.suppress(Exception):
                    flight.pending.tokens()
        self.grammars.close()
        self.mover.close()

    def _outcome(self, outcome: Outcome, logprobs: tuple[Logprobs] | None) -> None:
        work = self.work[outcome.id]
        sequence = self._sequences[outcome.id]
        self.counters["recomputed"] += outcome.recomputed
        if outcome.prefilled and work.part != "decode":
            tiers = self.mover.cached_by_tier(sequence)
            self.counters["prompt"] += sequence.prompt_tokens
            for tier, tokens in tiers.items():
                self.counters[f"cached_{tier}"] += tokens
            self._out.append(
                PrefillReport(
                    request=work.request,
                    attempt=work.attempt,
                    cached=sequence.cached,
                    computed=sequence.prompt_tokens - sequence.cached,
                    tiers=tiers,
                    **self._stages.complete(outcome.id)._asdict(),
                )
            )
        if outcome.token is not None:
            self._emit(work, outcome.index, outcome.token, outcome.finish, logprobs)
        if outcome.filled and work.part != "prefill":
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

    def _emit(
        self, work: Work, index: int, token: int, finish: FinishReason | None, logprobs: tuple[Logprobs] | None
    ) -> None:
        self._out.append(
            Tokens(
                request=work.request,
                attempt=work.attempt,
                first=index,
                tokens=(token,),
                finish=finish,
                logprobs=logprobs,
                handoff=self._handoff(work) if work.part == "decode" else None,
            )
        )

    def _handoff(self, work: Work) -> Handoff | None:
        identity = (work.request, work.attempt)
        return self._stages.handed(identity, *self.mover.handed(identity)) if identity in self._stages else None

    def _forget_copied_out(self) -> None:
        while self.mover.copied_out:
            self.batcher.remove(self.mover.copied_out.popleft())

    # -- endings --------------------------------------------------------------------------------------------------

    def _within_recompute_limit(self, step: Step) -> Step:
        """A decode worker mends small losses itself; a prompt lost as a whole goes back for a new plan."""
        lost = [
            (planned.id, missing)
            for planned in step.slices
            if not planned.decodes
            and (sequence := self._sequences[planned.id]).handed_off
            and (missing := sequence.high_water - planned.start) > self.recompute_limit
        ]
        if not lost:
            return step
        for sequence_id, missing in lost:
            self._fail(sequence_id, "need_prefill", f"KV of {missing} tokens was lost")
        return dataclasses.replace(step, slices=[planned for planned in step.slices if planned.id in self.work])

    def _end_late(self) -> None:
        """Ends what cannot be in time any more for its client, and attempts that are worthless by now, should their
        gateway have forgotten to.
        """
        now = time.monotonic()
        for sequence_id in self.batcher.late(now):
            self._fail(sequence_id, "late", "the answer cannot be complete by its deadline")
        if now < self._next_due:
            return
        for sequence_id in [sequence_id for sequence_id, due in self._due.items() if due <= now]:
            self._fail(sequence_id, "retry", "the attempt's deadline has passed")
        self._next_due = min(self._due.values(), default=float("inf"))

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
        self._shapers.pop(sequence_id, None)
        self._telling.pop(sequence_id, None)
        self._compiling.pop(sequence_id, None)
        self._stages.forget(sequence_id)
        self._tables.pop(sequence_id, None)
        self._due.pop(sequence_id, None)

    def _remember(self, sequence_id: SequenceId) -> None:
        self._ended[sequence_id] = None
        self._just_ended.append(sequence_id)
        if len(self._ended) > REMEMBERED_ENDS:
            self._ended.popitem(last=False)
