"""What one worker computes next: continuous batching with chunked prefill, preemption, and waiting for KV as a state.

    add ──> HELD ──ready──> WAITING ──plan──> LOADING ──loaded──> RUNNING ──finish──> FINISHED ──remove──> gone
             ^                 └────plan, nothing to load───────────^  │
             └──────────────────── preempted by plan ─────────────────┘

HELD sequences hold nothing: the worker is asking pools for their KV. Pages are taken at admission, in `plan`.
Everything here is pure bookkeeping: no clock, no device, no socket. `remove` ends a sequence in any state.

The loop around it: `step = plan(now)`; copy `step.loads` into their pages and report `loaded`; run `step.slices`
through the backend; `observe` how long that took; `finish(step, tokens)` says what became of each.
"""

from __future__ import annotations

import enum
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from .blocks import BlockPool
from .cost import StepCost, StepWork
from .types import FinishReason, SamplingParams, cacheable_blocks

SequenceId: TypeAlias = tuple[int, int]


class Busy(Exception):
    """Not now; the same call may succeed later."""


class QueueFull(Busy):
    """The worker's queue is at its limit; the text is for the client."""


class TooLarge(ValueError):
    """The sequence can never fit here; the text is for the client."""


class State(enum.Enum):
    HELD = "held"
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One attempt of one request on one worker. Lengths and positions in tokens, block indices from the prompt's head.

    tokens: the prompt and what was generated behind it; the last one's KV is never computed yet while RUNNING.
    prompt_tokens: length at arrival, tokens of earlier attempts included, of which `generated_before` were generated.
    keys: of the full blocks, extended as blocks fill; root: the parent of keys[0].
    first_only: the prefill part, over once its first token is sampled. handed_off: the decode part, whose prompt KV
    and first token come from elsewhere.
    computed: positions whose KV is in `pages`. high_water: positions whose KV has existed before; to compute one of
    them again counts as `recomputed`. cached: tokens reused when it first ran.
    """

    id: SequenceId
    tokens: list[int]
    prompt_tokens: int
    keys: list[bytes]
    root: bytes
    sampling: SamplingParams
    generated_before: int = 0
    first_only: bool = False
    handed_off: bool = False
    high_water: int = 0
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    recomputed: int = 0
    state: State = State.HELD
    # The Batcher's own: place in line, what a pool can supply; whether it was preempted, ran, had its prompt complete.
    arrival: int = 0
    available: int = 0
    preempted: bool = False
    started: bool = False
    prefilled: bool = False

    @property
    def generated(self) -> int:
        """Tokens generated since the request's start, over all attempts: the index of the next one."""
        return self.generated_before + len(self.tokens) - self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Load:
    """Copy blocks `first_block` … `first_block + blocks - 1` of the sequence into `pages`, then report `loaded`."""

    id: SequenceId
    first_block: int
    blocks: int
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Planned:
    """Compute `count` tokens from position `start`; sample: and choose the next one. pages: up to the last position."""

    id: SequenceId
    start: int
    count: int
    pages: list[int]
    sample: bool


@dataclass(frozen=True, slots=True)
class Step:
    """loads first, slices in one forward pass. preempted: HELD again, without pages; ask the pool and call `ready`."""

    loads: list[Load]
    slices: list[Planned]
    preempted: list[SequenceId]

    @property
    def empty(self) -> bool:
        return not (self.loads or self.slices or self.preempted)


@dataclass(frozen=True, slots=True)
class Filled:
    """Block `index` became full by this step: its KV is in `page`. After a preemption an index may be filled again."""

    index: int
    key: bytes
    parent: bytes
    page: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did for one sequence.

    token: the sampled one, of number `index` since the request's start; None if the prompt goes on.
    finish: the request has ended with it. A `first_only` sequence that is to be handed off is FINISHED without one.
    prefilled: the prompt was complete with this step, for the first time.
    recomputed: positions computed by it whose KV had existed before.
    """

    id: SequenceId
    token: int | None
    index: int
    finish: FinishReason | None
    prefilled: bool
    filled: list[Filled]
    recomputed: int


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
        self._key_of = key_of
        self._observed: tuple[int, int, int] | None = None
        self._in: dict[State, dict[SequenceId, Sequence]] = {state: {} for state in State}
        self._arrivals = 0
        # In order of admission: those that ran before come first, then by arrival.
        self._waiting: list[tuple[bool, int, SequenceId]] = []

    # -- counts ----------------------------------------------------------------------------------------------------

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens accepted and still to be computed here."""
        return sum(
            max(sequence.prompt_tokens - sequence.computed, 0)
            for sequence in self.sequences.values()
            if sequence.state is not State.FINISHED and (sequence.started or not sequence.handed_off)
        )

    @property
    def queue_seconds(self) -> float:
        """Predicted, until all prompts accepted so far are computed beside what decodes now."""
        tokens = self.queued_tokens
        step, token, context, sequence, history = self.cost.fit().coefficients
        decodes = [s for s in self._in[State.RUNNING].values() if s.computed >= s.prompt_tokens]
        step += sequence * len(decodes) + history * sum(s.computed for s in decodes)
        return -(-tokens // self.max_tokens) * step + tokens * token + self._queued_context() * context

    def _queued_context(self) -> int:
        """Summed context of the tokens that `queued_tokens` counts."""
        return (
            sum(
                max(
                    sequence.prompt_tokens * (sequence.prompt_tokens + 1) - sequence.computed * (sequence.computed + 1),
                    0,
                )
                for sequence in self.sequences.values()
                if sequence.state is not State.FINISHED and (sequence.started or not sequence.handed_off)
            )
            // 2
        )

    @property
    def running_context(self) -> int:
        """Tokens whose KV is in the pages of what runs."""
        return sum(sequence.computed for sequence in self._in[State.RUNNING].values())

    @property
    def running(self) -> int:
        """Sequences that hold pages and are not finished."""
        return len(self._in[State.LOADING]) + len(self._in[State.RUNNING])

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
        self.sequences[sequence.id] = sequence
        sequence.state = State.HELD
        self._in[State.HELD][sequence.id] = sequence

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

    def first_token(self, id: SequenceId, token: int) -> FinishReason | None:
        """A handed-off sequence learns token 0 of its attempt; to be called before `ready`.

        Returns why the sequence is FINISHED by it, if it is (the prefill side hands no such sequence off).
        """
        sequence = self._expect(id, State.HELD)
        if not sequence.handed_off or len(sequence.tokens) != sequence.prompt_tokens:
            raise ValueError(f"sequence {id} expects no first token")
        return self._append(sequence, token)

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
        insort(self._waiting, self._place(sequence))

    def loaded(self, id: SequenceId, good: int) -> None:
        """LOADING -> RUNNING: KV of the first `good` tokens is in the pages now, the rest is computed."""
        sequence = self._expect(id, State.LOADING)
        self._start(sequence, max(sequence.computed, min(good, sequence.available)))
        # Blocks the pool supplied are full like computed ones: later prompts may reuse their pages.
        for index in range(min(sequence.computed // self.pool.block_tokens, len(sequence.keys))):
            self.pool.publish(sequence.pages[index], sequence.keys[index])

    def remove(self, id: SequenceId) -> None:
        """Ends a sequence in any state and releases its pages. Idempotent."""
        sequence = self.sequences.pop(id, None)
        if sequence is None:
            return
        if sequence.state is State.WAITING:
            self._waiting.remove(self._place(sequence))
        self._release(sequence)
        del self._in[sequence.state][id]
        sequence.state = State.FINISHED

    # -- a step ----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Step:
        """Decodes first, then chunks in arrival order, then newly admitted sequences, under the token budget.

        now: seconds on the caller's clock, the one that arrivals and deadlines are on.
        """
        step = Step([], [], [])
        budget = self.max_tokens
        running = self._by_arrival(State.RUNNING)
        for sequence in running:
            decodes = sequence.state is State.RUNNING and len(sequence.tokens) - sequence.computed == 1
            if budget and decodes and self._reserve_next(sequence, step):
                budget -= self._slice(sequence, 1, step)
        for sequence in running:
            if budget and sequence.state is State.RUNNING and len(sequence.tokens) - sequence.computed > 1:
                budget -= self._slice(sequence, budget, step)
        # A sequence that was just preempted shows that pages are short: admit nobody in the same step.
        while not step.preempted and self._waiting and self.running < self.max_sequences:
            sequence = self.sequences[self._waiting[0][2]]
            if not self._admit(sequence, step):
                break
            if budget and sequence.state is State.RUNNING:
                budget -= self._slice(sequence, budget, step)
        return step

    def work(self, step: Step) -> StepWork:
        """What the step computes, as the cost model counts it; sequences removed since `plan` count no more.

        A token decodes that is computed alone behind its prompt; of what was preempted, the answer is recomputed like a
        prompt.
        """
        prefill = prefill_context = decode = decode_context = 0
        for planned in step.slices:
            sequence = self.sequences.get(planned.id)
            if sequence is None:
                continue
            end = planned.start + planned.count
            if planned.count == 1 and planned.start >= sequence.prompt_tokens:
                decode += 1
                decode_context += end
            else:
                prefill += planned.count
                prefill_context += planned.count * planned.start + planned.count * (planned.count + 1) // 2
        return StepWork(prefill, prefill_context, decode, decode_context)

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long. Of a run of steps that decode the same number of sequences the first counts: the others
        would say the same again, and a thousand of them would drown what else was learnt.
        """
        alike = work[:3]
        if alike != self._observed:
            self._observed = alike
            self.cost.observe(work, seconds)

    def finish(self, step: Step, tokens: list[int]) -> list[Outcome]:
        """The step was computed; `tokens` parallel to `step.slices`, -1 where none was sampled.

        Sequences removed since `plan` have no outcome.
        """
        if len(tokens) != len(step.slices):
            raise ValueError(f"{len(tokens)} tokens for {len(step.slices)} slices")
        outcomes = []
        for planned, token in zip(step.slices, tokens, strict=True):
            sequence = self.sequences.get(planned.id)
            if sequence is None or sequence.state is not State.RUNNING:
                continue
            if (token >= 0) != planned.sample:
                raise ValueError(f"token {token} for a slice with sample={planned.sample}")
            outcomes.append(self._computed(sequence, planned, token))
        return outcomes

    def _reserve_next(self, sequence: Sequence, step: Step) -> bool:
        """Sees to it that a page is there for the token computed next; False: not in this step."""
        if len(sequence.pages) * self.pool.block_tokens >= len(sequence.tokens):
            return True
        while (pages := self.pool.allocate(1)) is None:
            youngest = self._by_arrival(State.RUNNING)[-1]
            if youngest is sequence and (self._in[State.LOADING] or self._in[State.FINISHED]):
                # Those end by events of their own; to wait for their pages is cheaper than to recompute.
                return False
            self._preempt(youngest, step)
            if youngest is sequence:
                return False
        sequence.pages += pages
        return True

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        # Progress: victims are the youngest, so the oldest keeps its pages to its end, and another becomes the oldest.
        self._release(sequence)
        self._move(sequence, State.HELD)
        sequence.preempted = True
        step.preempted.append(sequence.id)

    def _admit(self, sequence: Sequence, step: Step) -> bool:
        """Gives the head of the line its pages, or leaves it there."""
        block_tokens = self.pool.block_tokens
        total = -(-len(sequence.tokens) // block_tokens)
        hit = self.pool.match(sequence.keys[: cacheable_blocks(len(sequence.tokens), block_tokens)])
        # One page is left for each sequence that grows, or the newcomer would be preempted in the next step.
        growing = sum(not s.first_only for s in self._in[State.RUNNING].values())
        fresh = self.pool.allocate(total - len(hit)) if self.pool.free - (total - len(hit)) >= growing else None
        if fresh is None:
            self.pool.release(hit)
            return False
        self._waiting.pop(0)
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
        self._move(sequence, State.RUNNING)
        sequence.computed = computed
        sequence.high_water = max(sequence.high_water, computed)
        if not sequence.started:
            sequence.started = True
            sequence.cached = computed

    def _slice(self, sequence: Sequence, most: int, step: Step) -> int:
        count = min(most, len(sequence.tokens) - sequence.computed)
        end = sequence.computed + count
        used = -(-end // self.pool.block_tokens)
        step.slices.append(
            Planned(sequence.id, sequence.computed, count, sequence.pages[:used], sample=end == len(sequence.tokens))
        )
        return count

    def _computed(self, sequence: Sequence, planned: Planned, token: int) -> Outcome:
        block_tokens = self.pool.block_tokens
        end = planned.start + planned.count
        recomputed = max(min(end, sequence.high_water) - planned.start, 0)
        sequence.recomputed += recomputed
        sequence.computed = end
        sequence.high_water = max(sequence.high_water, end)
        prefilled = not sequence.prefilled and end >= sequence.prompt_tokens
        sequence.prefilled |= prefilled
        filled = [self._fill(sequence, i) for i in range(planned.start // block_tokens, end // block_tokens)]
        index = sequence.generated
        if not planned.sample:
            return Outcome(sequence.id, None, index, None, prefilled, filled, recomputed)
        finish = self._append(sequence, token)
        if sequence.first_only:
            self._move(sequence, State.FINISHED)
        return Outcome(sequence.id, token, index, finish, prefilled, filled, recomputed)

    def _fill(self, sequence: Sequence, index: int) -> Filled:
        """Block `index` is full: names it, and lets later prompts reuse its page."""
        block_tokens = self.pool.block_tokens
        parent = sequence.keys[index - 1] if index else sequence.root
        if index == len(sequence.keys):
            block = sequence.tokens[index * block_tokens : (index + 1) * block_tokens]
            sequence.keys.append(self._key_of(parent, block))
        key, page = sequence.keys[index], sequence.pages[index]
        self.pool.publish(page, key)
        return Filled(index, key, parent, page)

    def _append(self, sequence: Sequence, token: int) -> FinishReason | None:
        sequence.tokens.append(token)
        finish = self._why_over(sequence, token)
        if finish is not None:
            self._move(sequence, State.FINISHED)
        return finish

    def _why_over(self, sequence: Sequence, token: int) -> FinishReason | None:
        sampling = sequence.sampling
        if (token in self.eos and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            return FinishReason.STOP
        length = len(sequence.tokens)
        # The last token would be computed next: it needs a position and, but for a prefill part, a place in a page.
        full = length > self.pool.pages * self.pool.block_tokens and not sequence.first_only
        if sequence.generated >= sampling.max_tokens or length >= self.max_positions or full:
            return FinishReason.LENGTH
        return None

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _expect(self, id: SequenceId, state: State) -> Sequence:
        """KeyError for an unknown id, ValueError for another state than the caller believes."""
        sequence = self.sequences[id]
        if sequence.state is not state:
            raise ValueError(f"sequence {id} is {sequence.state.value}, not {state.value}")
        return sequence

    def _by_arrival(self, state: State) -> list[Sequence]:
        return sorted(self._in[state].values(), key=lambda s: s.arrival)

    def _move(self, sequence: Sequence, state: State) -> None:
        del self._in[sequence.state][sequence.id]
        sequence.state = state
        self._in[state][sequence.id] = sequence

    @staticmethod
    def _place(sequence: Sequence) -> tuple[bool, int, SequenceId]:
        return (not sequence.preempted, sequence.arrival, sequence.id)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.computed = 0

    def check(self) -> None:
        """Raises AssertionError if a sequence or the pool contradicts itself."""
        self.pool.check()
        for state, sequences in self._in.items():
            mine = {id: s for id, s in self.sequences.items() if s.state is state}
            assert mine == sequences, f"the {state.value} sequences are not those listed"
        assert self._waiting == sorted(map(self._place, self._in[State.WAITING].values())), "the line is out of order"
        assert self.running <= self.max_sequences, "more sequences run than may"
        uses = Counter(page for sequence in self.sequences.values() for page in sequence.pages)
        assert self.pool.referenced == len(uses), "pages are held for nobody"
        for sequence in self.sequences.values():
            self._check_sequence(sequence, uses)

    def _check_sequence(self, sequence: Sequence, uses: Counter[int]) -> None:
        block_tokens, length = self.pool.block_tokens, len(sequence.tokens)
        whole = sequence.computed // block_tokens
        assert 0 <= sequence.computed < length, "the last token was computed"
        assert whole <= len(sequence.keys) <= length // block_tokens, "a full block has no key, or a key no block"
        assert len(sequence.pages) <= -(-length // block_tokens), "a sequence holds pages it does not need"
        if sequence.state in (State.HELD, State.WAITING):
            assert not sequence.pages, "a sequence that waits holds pages"
        if sequence.state in (State.LOADING, State.RUNNING):
            assert len(sequence.pages) * block_tokens >= length - 1, "pages are missing"
        if sequence.state is State.RUNNING:
            assert sequence.computed <= sequence.high_water
        # A page that is still to be written may be used by nobody else, and once only.
        assert all(uses[page] == 1 for page in sequence.pages[whole:]), "a page to be written is shared"
