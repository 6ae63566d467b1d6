"""What one worker computes next: continuous batching with chunked prefill, preemption, and waiting for KV as a state.

    add ──> HELD ──ready──> WAITING ──plan──> LOADING ──loaded──> RUNNING ──finish──> FINISHED ──remove──> gone
             ^                 └────plan, nothing to load───────────^  │
             └──────────────────── preempted by plan ─────────────────┘

HELD sequences hold nothing: the worker is asking pools for their KV, or has their grammar compiled before it asks.
WAITING ones stand in line (`order.py`), or wait for a sequence that computes the same blocks (`underway.py`). Pages are
taken at admission, in `plan`.
Everything here is pure bookkeeping: no clock, no device, no socket. `remove` ends a sequence in any state.

The loop around it: `step = plan(now)`; copy `step.loads` into their pages and report `loaded`; run `step.slices`
through the backend; `observe` how long that took; `finish(step, tokens)` says what became of each.

Where a device computes beside the host, the next step is planned while one is under way:

    plan(1)  begin(1)  plan(2)  begin(2)  finish(1)  plan(3)  begin(3)  finish(2)  ...

A sequence then goes on with a token that nobody knows yet. Whoever ends by that token is in one step too many: what
that writes lies behind its end, in a page that only it has, and nobody is told of it. Pages of sequences that are
removed are used by nobody else before the steps under way are over. So nobody is preempted meanwhile: who lacks a page
is planned when nothing is under way.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from .ahead import NOTHING, tell
from .blocks import BlockPool
from .cost import StepCost, StepWork, context_of
from .room import Room
from .sequence import Filled, Load, Outcome, Planned, Sequence, SequenceId, State, Step
from .types import FinishReason, cacheable_blocks
from .urgency import Urgency
from .waiting import Waiting

__all__ = ["Batcher", "Busy", "Filled", "Load", "Outcome", "Planned", "QueueFull", "Sequence", "SequenceId", "State"]
__all__ += ["Step", "TooLarge"]

_arrival = attrgetter("arrival")


class Busy(Exception):
    """Not now; the same call may succeed later."""


class QueueFull(Busy):
    """The worker's queue is at its limit; the text is for the client."""


class TooLarge(ValueError):
    """The sequence can never fit here; the text is for the client."""


def _have(sequence: Sequence) -> int:
    """Tokens it need not compute any more, as far as is known."""
    return sequence.computed if sequence.state is State.RUNNING else max(sequence.computed, sequence.available)


@dataclass(slots=True, eq=False)
class _Begun:
    """A step under way: whom it computes, in the order of its slices, and pages that are let go when it is over."""

    step: Step
    sequences: list[Sequence | None]
    leaving: list[list[int]] = field(default_factory=list)


class Batcher:
    """Sequences of one worker over one BlockPool.

    max_tokens: computed in one step. max_sequences: LOADING and RUNNING together. max_queue: HELD and WAITING together,
    beyond which new ones are refused (preempted ones are not). max_positions: of the model. eos: ids that end a
    sequence unless it ignores them. key_of: key of a full block from its parent's key and its tokens.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_tokens: int,
        max_sequences: int,
        max_queue: int,
        max_positions: int,
        eos: frozenset[int],
        key_of: Callable[[bytes, list[int]], bytes],
    ) -> None:
        if min(max_tokens, max_sequences, max_queue, max_positions) < 1:
            raise ValueError("max_tokens, max_sequences, max_queue and max_positions must be at least 1")
        self.pool = pool
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self.max_queue = max_queue
        self.max_positions = max_positions
        self.eos = eos
        self.sequences: dict[SequenceId, Sequence] = {}
        #: Of this worker's steps, as `observe` has seen them.
        self.cost = StepCost()
        #: Prompt tokens accepted and still to be computed here: what pools supply is not, once that is known.
        self.queued_tokens = 0
        #: Tokens that will lie in pages here while those decode that hold no pages yet.
        self.expected_tokens = 0
        #: Tokens whose KV is in the pages of RUNNING sequences.
        self.running_context = 0
        #: No sequence is late before then, unless one is added.
        self.next_late = math.inf
        self._queued_context = 0
        self._key_of = key_of
        self._observed: tuple[int, ...] | None = None
        self._in: dict[State, dict[SequenceId, Sequence]] = {state: {} for state in State}
        self._loading = self._in[State.LOADING]
        self._begun: deque[_Begun] = deque()
        # RUNNING ones, by arrival.
        self._running: list[Sequence] = []
        self._arrivals = 0
        self._urgency = Urgency(self.cost, max_tokens)
        self._queue = Waiting(pool, self._urgency)

    # -- counts ----------------------------------------------------------------------------------------------------

    @property
    def queue_seconds(self) -> float:
        """Predicted, until all prompts accepted so far are computed beside what decodes now."""
        if not self.queued_tokens:
            return 0.0
        step, token, context = self._step_costs()
        tokens = self.queued_tokens
        return -(-tokens // self.max_tokens) * step + tokens * token + self._queued_context * context

    def queue_ahead(self, now: float) -> tuple[float, ...]:
        """How long a newcomer waits, by its length: see `ahead.py`. Empty: for all of the queue."""
        if not self.queued_tokens:
            return NOTHING
        waiting = (self._in[State.HELD].values(), self._in[State.WAITING].values(), self._loading.values())
        return tell(itertools.chain(*waiting, self._running), self._step_costs(), self.max_tokens, now)

    def _step_costs(self) -> tuple[float, float, float]:
        """Of a step beside what decodes now, of a prompt's token, of one of its context."""
        step, token, context, sequence, history = self.cost.fit().coefficients
        decodes = [s for s in self._running if s.computed >= s.prompt_tokens]
        return step + sequence * len(decodes) + history * sum(s.computed for s in decodes), token, context

    @property
    def running(self) -> int:
        """Sequences that hold pages and are not finished."""
        return len(self._loading) + len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that hold nothing yet, or nothing any more."""
        return len(self._in[State.HELD]) + len(self._in[State.WAITING])

    @property
    def idle(self) -> bool:
        return not self.sequences

    # -- what happens to sequences ---------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Accepts a new sequence as HELD. Raises QueueFull, TooLarge, or ValueError for one that is not well formed."""
        if sequence.id in self.sequences:
            raise ValueError(f"sequence {sequence.id} is here already")
        if sequence.prompt_tokens != len(sequence.tokens) or not sequence.tokens or sequence.pages:
            raise ValueError("a new sequence has a prompt, nothing behind it, and no pages")
        if len(sequence.keys) > len(sequence.tokens) // self.pool.block_tokens:
            raise ValueError("a sequence has more keys than full blocks")
        if sequence.generated >= sequence.sampling.max_tokens:
            raise ValueError(f"all {sequence.sampling.max_tokens} tokens were generated by earlier attempts")
        self._check_size(sequence)
        if self.waiting >= self.max_queue:
            raise QueueFull(f"the worker's queue is full ({self.max_queue} requests): try again later")
        if sequence.handed_off:
            sequence.high_water = max(sequence.high_water, sequence.prompt_tokens)
            sequence.prefilled = True
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self._set_ends(sequence)
        self.sequences[sequence.id] = sequence
        sequence.state = State.HELD
        self._in[State.HELD][sequence.id] = sequence
        self._owe(sequence)
        self._expect_tokens(sequence)
        if sequence.deadline < math.inf:
            self.next_late = min(self.next_late, self._urgency.last_chance(sequence))

    def _check_size(self, sequence: Sequence) -> None:
        prompt, capacity = sequence.prompt_tokens, self.pool.pages * self.pool.block_tokens
        if prompt + 1 > self.max_positions:
            raise TooLarge(
                f"the prompt has {prompt} tokens, one too many for the model's {self.max_positions} positions: "
                "shorten it"
            )
        # A prefill part never stores the KV of a generated token.
        needed = prompt if sequence.first_only else prompt + 1
        if needed > capacity:
            raise TooLarge(
                f"the prompt has {prompt} tokens, but this worker's KV space holds {capacity} in all: "
                "shorten it, or give the worker more pages"
            )

    def _set_ends(self, sequence: Sequence) -> None:
        sampling = sequence.sampling
        ends = sequence.prompt_tokens + sampling.max_tokens - sequence.generated_before
        limit = min(ends, self.max_positions)
        # The last token would be computed next: it needs a position and, but for a prefill part, a place in a page.
        full = self.pool.pages * self.pool.block_tokens + 1
        sequence.limit = limit if sequence.first_only else min(limit, full)
        stops = frozenset() if sampling.ignore_eos else self.eos
        sequence.stops = stops.union(sampling.stop_token_ids) if sampling.stop_token_ids else stops
        sequence.follows = sampling.follows_itself

    def first_token(self, id: SequenceId, token: int) -> FinishReason | None:
        """A handed-off sequence learns token 0 of its attempt; to be called before `ready`.

        Returns why the sequence is FINISHED by it, if it is (the prefill side hands no such sequence off).
        """
        sequence = self._expect(id, State.HELD)
        if not sequence.handed_off or len(sequence.tokens) != sequence.prompt_tokens:
            raise ValueError(f"sequence {id} expects no first token")
        finish = self._append(sequence, token)
        self._expect_tokens(sequence)
        return finish

    def ready(self, id: SequenceId, available: int) -> None:
        """HELD -> WAITING: KV of the first `available` tokens can be copied from the node's pool into pages.

        More than may be reused is cut off: whole blocks, and one token at least is left to compute. Only the prompt of
        a handed-off sequence is available to its last token.
        """
        sequence = self._expect(id, State.HELD)
        if sequence.handed_off and not sequence.started and len(sequence.tokens) == sequence.prompt_tokens:
            raise ValueError(f"sequence {id} was handed off and has no first token yet")
        block_tokens = self.pool.block_tokens
        if sequence.handed_off and available == sequence.prompt_tokens < len(sequence.tokens):
            sequence.available = available
        else:
            whole = min(available // block_tokens, cacheable_blocks(len(sequence.tokens), block_tokens))
            sequence.available = whole * block_tokens
        self._move(sequence, State.WAITING)
        self._queue.join(sequence)

    def loaded(self, id: SequenceId, good: int, *, verified: bool = True) -> None:
        """LOADING -> RUNNING: KV of the first `good` tokens is in the pages now, the rest is computed.

        verified: False: it is on its way there and believed to be good. Before its first step is over `verified` or
        `unreadable` must be told.
        """
        sequence = self._expect(id, State.LOADING)
        if not verified:
            sequence.believed = (sequence.started, sequence.cached, sequence.high_water)
        self._start(sequence, max(sequence.computed, min(good, sequence.available)))
        if verified:
            self._publish(sequence)
        self._queue.short = False

    def verified(self, id: SequenceId) -> None:
        """What was believed to be in the pages is there."""
        sequence = self._expect(id, State.RUNNING)
        assert sequence.believed is not None, "somebody loads into its pages"
        sequence.believed = None
        self._publish(sequence)

    def unreadable(self, id: SequenceId) -> None:
        """RUNNING -> HELD: what was believed to be in the pages is not. It is as if it had never been admitted."""
        sequence = self._expect(id, State.RUNNING)
        assert sequence.believed is not None, "somebody loads into its pages"
        self._hold(sequence)

    def _publish(self, sequence: Sequence) -> None:
        """Blocks the pool supplied are full like computed ones: later prompts may reuse their pages."""
        parent = sequence.root
        for index in range(min(sequence.computed // self.pool.block_tokens, len(sequence.keys))):
            self.pool.publish(sequence.pages[index], sequence.keys[index], parent, index)
            parent = sequence.keys[index]

    def remove(self, id: SequenceId) -> None:
        """Ends a sequence in any state and releases its pages. Idempotent."""
        sequence = self.sequences.pop(id, None)
        if sequence is None:
            return
        if sequence.state is State.WAITING:
            self._queue.leave(sequence)
        self._move(sequence, State.FINISHED)
        del self._in[State.FINISHED][id]
        self._release(sequence)

    def late(self, now: float) -> list[SequenceId]:
        """Sequences that cannot end by their deadline any more, and are to be removed: it has passed, or the rest of
        the prompt alone takes longer by a prediction from which its usual error is taken off.
        """
        if now < self.next_late:
            return []
        late = []
        # Who is late stays so until removed.
        self.next_late = math.inf
        for sequence in self.sequences.values():
            if sequence.deadline < math.inf and sequence.state is not State.FINISHED:
                chance = self._urgency.last_chance(sequence)
                self.next_late = min(self.next_late, chance)
                if chance <= now:
                    late.append(sequence.id)
        return late

    # -- a step ----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Step:
        """Decodes first, then prompts in the line's order, those that are begun and new ones alike, under the token
        budget and the strictest promise about the gap between tokens.

        now: seconds on the caller's clock, the one that arrivals and deadlines are on. It does not go back.
        Empty with a step under way: whoever is short of a page takes it when that is over.
        """
        step = Step([], [], [])
        slices, block_tokens = step.slices, self.pool.block_tokens
        budget, prompts = self.max_tokens, []
        for sequence in tuple(self._running):
            if sequence.state is not State.RUNNING:  # preempted for one before it
                continue
            start, length = sequence.computed + sequence.under_way, len(sequence.tokens) + sequence.coming
            if length - start > 1:
                prompts.append(sequence)
            elif sequence.coming and (sequence.first_only or length >= sequence.limit):
                pass  # its end is under way
            elif sequence.coming and sequence.follows:
                pass  # how it chooses follows from the token under way
            elif budget:
                if len(sequence.pages) * block_tokens < length and not self._reserve_next(sequence, step):
                    if self._begun:
                        return Step([], [], [])
                    continue
                decodes = start >= sequence.prompt_tokens
                slices.append(Planned(sequence.id, start, 1, sequence.pages, True, decodes))
                budget -= 1
        prompts = [sequence for sequence in prompts if sequence.state is State.RUNNING]
        if prompts or (self._queue.looks and self.running < self.max_sequences):
            self._plan_prompts(step, prompts, budget, now)
        return step

    def _plan_prompts(self, step: Step, prompts: list[Sequence], budget: int, now: float) -> None:
        strictest = min((self.sequences[each.id].tbt for each in step.slices if each.decodes), default=math.inf)
        room = Room(self.cost, self.work(step), strictest, self.max_tokens)
        queue = self._queue
        prompts = queue.by_urgency(prompts, now)[::-1] if len(prompts) > 1 else prompts
        # Tokens to compute of those whose KV is on its way into pages: enough for a step ahead is enough.
        ahead = sum(len(s.tokens) - s.available for s in self._loading.values())
        # A sequence that was just preempted shows that pages are short: admit nobody in the same step.
        admitting = not step.preempted
        while budget or (admitting and ahead < self.max_tokens):
            head = queue.head(now) if admitting and self.running < self.max_sequences else None
            if prompts and budget and (head is None or queue.before(prompts[-1], head, now)):
                sequence = prompts.pop()
            elif head is None or not (budget or head.available):
                break
            else:
                sequence = head
                if not self._admit(sequence, step):
                    queue.short, admitting = True, False
                    continue
                if sequence.state is State.LOADING:
                    ahead += len(sequence.tokens) - sequence.available
                    continue
            if budget:
                start = sequence.planned
                count = room.take(start, min(budget, len(sequence.tokens) - start, sequence.most))
                if not count:
                    break
                budget -= count
                queue.computed(sequence, count, now)
                self._slice(sequence, count, step)

    def work(self, step: Step) -> StepWork:
        """What the step computes, as the cost model counts it; sequences removed since `plan` count no more.

        Of what was preempted, the answer is recomputed like a prompt.
        """
        prefill = prefill_context = decode = decode_context = 0
        for planned in step.slices:
            if planned.id not in self.sequences:
                continue
            start, count = planned.start, planned.count
            if planned.decodes:
                decode += 1
                decode_context += start + 1
            else:
                prefill += count
                prefill_context += count * start + count * (count + 1) // 2
        return StepWork(prefill, prefill_context, decode, decode_context)

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long. Of a run of steps that decode the same number of sequences the first counts: the others
        would say the same again, and a thousand of them would drown what else was learnt.
        """
        alike = work[:3]
        if alike != self._observed:
            self._observed = alike
            self.cost.observe(work, seconds)

    def begin(self, step: Step) -> None:
        """The step is under way: `plan` may be asked for the next one before `finish`. Two are under way at most."""
        if len(self._begun) > 1:
            raise ValueError("two steps are under way: `finish` the first of them")
        sequences = [self.sequences.get(planned.id) for planned in step.slices]
        self._begun.append(_Begun(step, sequences))
        for planned, sequence in zip(step.slices, sequences, strict=True):
            if sequence is not None:
                sequence.under_way += planned.count
                sequence.coming += planned.sample

    def finish(self, step: Step, tokens: list[int]) -> list[Outcome]:
        """The step was computed; `tokens` parallel to `step.slices`, -1 where none was sampled.

        Sequences removed or FINISHED since `plan` have no outcome. Of two steps under way the first ends first.
        """
        if len(tokens) != len(step.slices):
            raise ValueError(f"{len(tokens)} tokens for {len(step.slices)} slices")
        sequences = self._over(step) if self._begun else [self.sequences.get(planned.id) for planned in step.slices]
        outcomes = []
        for planned, token, sequence in zip(step.slices, tokens, sequences, strict=True):
            if sequence is None or sequence.state is not State.RUNNING:
                continue
            if (token >= 0) != planned.sample:
                raise ValueError(f"token {token} for a slice with sample={planned.sample}")
            outcomes.append(self._computed(sequence, planned, token))
        return outcomes

    def _over(self, step: Step) -> list[Sequence | None]:
        """A step is under way no more; returns whom it computed."""
        begun = self._begun.popleft()
        if begun.step is not step:
            raise ValueError("another step began before this one, and has not ended")
        for planned, sequence in zip(step.slices, begun.sequences, strict=True):
            if sequence is not None:
                sequence.under_way -= planned.count
                sequence.coming -= planned.sample
        for pages in begun.leaving:
            self.pool.release(pages)
            self._queue.short = False
        return begun.sequences

    # -- many steps at once ----------------------------------------------------------------------------------------

    @property
    def runs(self) -> list[Sequence]:
        """The RUNNING sequences, by arrival."""
        return self._running

    def run_length(self) -> int:
        """How many further steps do nothing but compute one token of each RUNNING sequence, if nobody comes or goes:
        none takes a page, fills a block, ends a sequence, admits or preempts one, or is observed.

        0 if the step observed last was not such, or if somebody waits of whom `plan` has not seen yet that pages are
        short for it. Exact for tokens that end no sequence. `late` may want somebody gone from `next_late` on.
        """
        running = self._running
        count = len(running)
        if self._begun:
            return 0
        if self._observed != (0, 0, count) or count > self.max_tokens or not count or self._loading:
            return 0
        if self._queue.looks and count < self.max_sequences:
            return 0
        block_tokens = self.pool.block_tokens
        most = self.max_positions
        for sequence in running:
            length = len(sequence.tokens)
            if length - sequence.computed != 1 or length <= sequence.prompt_tokens:
                return 0
            most = min(
                most,
                block_tokens - 1 - sequence.computed % block_tokens,
                sequence.limit - 1 - length,
                len(sequence.pages) * block_tokens - length + 1,
            )
        return max(most, 0)

    def run(self, count: int, token: int = 0) -> None:
        """The state after `count` rounds of `plan` and `finish` that all sample `token`, of `run_length` at most."""
        if not 0 <= count <= self.run_length():
            raise ValueError(f"{count} steps are not alike, only {self.run_length()}")
        more = [token] * count
        for sequence in self._running:
            sequence.tokens += more
            sequence.computed += count
            sequence.high_water = max(sequence.high_water, sequence.computed)
        self.running_context += count * len(self._running)

    # -- pages and places ------------------------------------------------------------------------------------------

    def _reserve_next(self, sequence: Sequence, step: Step) -> bool:
        """Takes a page for the token computed next; False: not in this step."""
        while (pages := self.pool.allocate(1)) is None:
            if self._begun:
                return False
            youngest = self._running[-1]
            if youngest is sequence and (self._loading or self._in[State.FINISHED]):
                # Those end by events of their own; to wait for their pages is cheaper than to recompute.
                return False
            self._preempt(youngest, step)
            if youngest is sequence:
                return False
        sequence.pages += pages
        return True

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        # Progress: victims are the youngest, so the oldest keeps its pages to its end, and another becomes the oldest.
        self._hold(sequence)
        step.preempted.append(sequence.id)

    def _hold(self, sequence: Sequence) -> None:
        self._move(sequence, State.HELD)
        if sequence.believed is not None:
            (sequence.started, sequence.cached, sequence.high_water), sequence.believed = sequence.believed, None
        self._release(sequence)
        sequence.preempted = True

    def _admit(self, sequence: Sequence, step: Step) -> bool:
        """Gives the head of the line its pages, or leaves it there."""
        block_tokens = self.pool.block_tokens
        total = -(-len(sequence.tokens) // block_tokens)
        hit = self.pool.match(sequence.keys[: cacheable_blocks(len(sequence.tokens), block_tokens)])
        # One page is left for each sequence that grows, or the newcomer would be preempted in the next step.
        growing = sum(not s.first_only for s in self._running)
        fresh = self.pool.allocate(total - len(hit)) if self.pool.free - (total - len(hit)) >= growing else None
        if fresh is None:
            self.pool.release(hit)
            return False
        have = max(len(hit) * block_tokens, sequence.available)
        self._queue.admitted(sequence, have)
        sequence.pages = hit + fresh
        sequence.computed = len(hit) * block_tokens
        if sequence.available > sequence.computed:
            first, last = len(hit), -(-sequence.available // block_tokens)
            self._move(sequence, State.LOADING)
            step.loads.append(Load(sequence.id, first, last - first, sequence.pages[first:last]))
        else:
            self._start(sequence, sequence.computed)
        return True

    def _start(self, sequence: Sequence, computed: int) -> None:
        sequence.computed = computed
        sequence.high_water = max(sequence.high_water, computed)
        if not sequence.started:
            sequence.started = True
            sequence.cached = computed
        self._move(sequence, State.RUNNING)

    def _slice(self, sequence: Sequence, count: int, step: Step) -> None:
        start = sequence.planned
        end = start + count
        pages = sequence.pages[: -(-end // self.pool.block_tokens)]
        decodes = count == 1 and start >= sequence.prompt_tokens
        step.slices.append(Planned(sequence.id, start, count, pages, end == len(sequence.tokens), decodes))

    def _computed(self, sequence: Sequence, planned: Planned, token: int) -> Outcome:
        assert sequence.believed is None, "its first step is over before its KV is known to be good"
        block_tokens = self.pool.block_tokens
        start, count = planned.start, planned.count
        end = start + count
        recomputed = 0
        if sequence.high_water > start:
            recomputed = min(end, sequence.high_water) - start
            sequence.recomputed += recomputed
        if sequence.high_water < end:
            sequence.high_water = end
        sequence.computed = end
        self.running_context += count
        if sequence.owed:
            self._owe(sequence)
        prefilled = not sequence.prefilled and end >= sequence.prompt_tokens
        if prefilled:
            sequence.prefilled = True
        filled: tuple[Filled, ...] = ()
        if end // block_tokens > start // block_tokens:
            filled = tuple(self._fill(sequence, i) for i in range(start // block_tokens, end // block_tokens))
        index = sequence.generated_before + len(sequence.tokens) - sequence.prompt_tokens
        if not planned.sample:
            return Outcome(planned.id, None, index, None, prefilled, filled, recomputed)
        finish = self._append(sequence, token)
        if sequence.first_only and finish is None:
            self._move(sequence, State.FINISHED)
        return Outcome(planned.id, token, index, finish, prefilled, filled, recomputed)

    def _fill(self, sequence: Sequence, index: int) -> Filled:
        """Block `index` is full: names it, and lets later prompts reuse its page."""
        block_tokens = self.pool.block_tokens
        parent = sequence.keys[index - 1] if index else sequence.root
        if index == len(sequence.keys):
            block = sequence.tokens[index * block_tokens : (index + 1) * block_tokens]
            sequence.keys.append(self._key_of(parent, block))
        key, page = sequence.keys[index], sequence.pages[index]
        self.pool.publish(page, key, parent, index)
        self._queue.filled(sequence, key)
        return Filled(index, key, parent, page)

    def _append(self, sequence: Sequence, token: int) -> FinishReason | None:
        sequence.tokens.append(token)
        finish = None
        if token in sequence.stops:
            finish = FinishReason.STOP
        elif len(sequence.tokens) >= sequence.limit:
            finish = FinishReason.LENGTH
        if finish is not None:
            self._move(sequence, State.FINISHED)
        return finish

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _expect(self, id: SequenceId, state: State) -> Sequence:
        """KeyError for an unknown id, ValueError for another state than the caller believes."""
        sequence = self.sequences[id]
        if sequence.state is not state:
            raise ValueError(f"sequence {id} is {sequence.state.value}, not {state.value}")
        return sequence

    def _move(self, sequence: Sequence, state: State) -> None:
        """To another state, before its pages are released."""
        if sequence.state is State.RUNNING:
            self._running.remove(sequence)
            self.running_context -= sequence.computed
            self._queue.short = False
        del self._in[sequence.state][sequence.id]
        sequence.state = state
        self._in[state][sequence.id] = sequence
        if state is State.RUNNING:
            insort(self._running, sequence, key=_arrival)
            self.running_context += sequence.computed
        self._owe(sequence)
        self._expect_tokens(sequence)

    def _expect_tokens(self, sequence: Sequence) -> None:
        """Counts what will lie in its pages, if it has none yet."""
        waits = sequence.state in (State.HELD, State.WAITING) and not sequence.first_only
        expected = len(sequence.tokens) + 1 if waits else 0
        self.expected_tokens += expected - sequence.expected
        sequence.expected = expected

    def _owe(self, sequence: Sequence) -> None:
        """Counts what of its prompt is still to be computed here."""
        owed = context = 0
        if sequence.state is not State.FINISHED and (sequence.started or not sequence.handed_off):
            have = _have(sequence)
            owed = max(sequence.prompt_tokens - have, 0)
            context = context_of(have, sequence.prompt_tokens) if owed else 0
        self.queued_tokens += owed - sequence.owed
        self._queued_context += context - sequence.owed_context
        sequence.owed, sequence.owed_context = owed, context

    def _release(self, sequence: Sequence) -> None:
        """Lets go of its pages; who waited for blocks it has not computed looks again."""
        if not sequence.pages:
            return
        self._queue.released(sequence)
        if sequence.under_way:
            self._begun[-1].leaving.append(sequence.pages)
        else:
            self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.computed = 0
        sequence.lent_priority, sequence.lent_latest, sequence.lent_seconds = None, math.inf, math.inf
        self._owe(sequence)

    def check(self) -> None:
        """Raises AssertionError if a sequence or the pool contradicts itself."""
        self.pool.check()
        for state, sequences in self._in.items():
            mine = {id: s for id, s in self.sequences.items() if s.state is state}
            assert mine == sequences, f"the {state.value} sequences are not those listed"
        computing = [*self._loading.values(), *self._running]
        self._queue.check(list(self._in[State.WAITING].values()), computing)
        assert self._running == sorted(self._in[State.RUNNING].values(), key=_arrival), "who runs is told in two ways"
        assert self.running_context == sum(s.computed for s in self._running), "running tokens are miscounted"
        owed = [s for s in self.sequences.values() if s.state is not State.FINISHED and (s.started or not s.handed_off)]
        assert self.queued_tokens == sum(max(s.prompt_tokens - _have(s), 0) for s in owed), "the queue is miscounted"
        context = sum(context_of(min(_have(s), s.prompt_tokens), s.prompt_tokens) for s in owed)
        assert self._queued_context == context, "the queue's context is miscounted"
        waiting = [*self._in[State.HELD].values(), *self._in[State.WAITING].values()]
        expected = sum(len(s.tokens) + 1 for s in waiting if not s.first_only)
        assert self.expected_tokens == expected, "what is expected in pages is miscounted"
        assert self.running <= self.max_sequences, "more sequences run than may"
        uses = Counter(page for sequence in self.sequences.values() for page in sequence.pages)
        leaving = {page for begun in self._begun for pages in begun.leaving for page in pages}
        assert self.pool.referenced == len(uses.keys() | leaving), "pages are held for nobody"
        for sequence in self.sequences.values():
            self._check_sequence(sequence, uses)

    def _check_sequence(self, sequence: Sequence, uses: Counter[int]) -> None:
        block_tokens, length = self.pool.block_tokens, len(sequence.tokens)
        whole = sequence.computed // block_tokens
        assert 0 <= sequence.computed < length, "the last token was computed"
        assert whole <= len(sequence.keys) <= length // block_tokens, "a full block has no key, or a key no block"
        coming = length + sequence.coming
        assert len(sequence.pages) <= -(-coming // block_tokens), "a sequence holds pages it does not need"
        assert self._begun or not (sequence.under_way or sequence.coming), "a step is under way that has ended"
        if sequence.state in (State.HELD, State.WAITING):
            assert not sequence.pages, "a sequence that waits holds pages"
        if sequence.state in (State.LOADING, State.RUNNING):
            assert len(sequence.pages) * block_tokens >= length - 1, "pages are missing"
        if sequence.state is State.RUNNING:
            assert sequence.computed <= sequence.high_water
        # A page that is still to be written may be used by nobody else, and once only.
        assert all(uses[page] == 1 for page in sequence.pages[whole:]), "a page to be written is shared"
