"""The nouns of a worker's batch: a sequence and its states, and what a step asks for and leads to.

Steps are made some hundred times a second, so what they consist of are structs that cost next to nothing to make.
"""

from __future__ import annotations

import enum
import math
import sys
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from .types import FinishReason, SamplingParams

SequenceId: TypeAlias = tuple[int, int]


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
    arrived: when the client's request did, on the clock of `Batcher.plan`. ttft, tbt: seconds it was promised to its
    first token, between tokens. deadline: when the answer becomes worthless, on the same clock. priority: higher goes
    first. tenant: whose it is, for fairness.
    most: prompt tokens that one step computes of it.
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
    arrived: float = 0.0
    ttft: float = math.inf
    tbt: float = math.inf
    deadline: float = math.inf
    priority: int = 0
    tenant: int = 0
    most: int = sys.maxsize
    high_water: int = 0
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    recomputed: int = 0
    state: State = State.HELD
    # The Batcher's own: number of arrival, what a pool can supply; what steps under way add to `computed`, and to the
    # length of `tokens`; whether it was preempted, ran, had its prompt complete; the length and the tokens that end it;
    # whether what shapes a choice follows from the token before; its prompt tokens still to compute and their summed
    # context; what it counts in `Batcher.expected_tokens`; the urgency of those who wait for its blocks.
    arrival: int = 0
    available: int = 0
    under_way: int = 0
    coming: int = 0
    preempted: bool = False
    started: bool = False
    prefilled: bool = False
    limit: int = 0
    stops: frozenset[int] = frozenset()
    follows: bool = False
    owed: int = 0
    owed_context: int = 0
    expected: int = 0
    lent_priority: int | None = None
    lent_latest: float = math.inf
    lent_seconds: float = math.inf
    #: `started`, `cached` and `high_water` as they were before KV was believed to be in its pages.
    believed: tuple[bool, int, int] | None = None

    @property
    def planned(self) -> int:
        """Positions whose KV is in `pages` when all steps under way are over."""
        return self.computed + self.under_way

    @property
    def generated(self) -> int:
        """Tokens generated since the request's start, over all attempts: the index of the next one."""
        return self.generated_before + len(self.tokens) - self.prompt_tokens


class Load(msgspec.Struct, frozen=True, gc=False):
    """Copy blocks `first_block` … `first_block + blocks - 1` of the sequence into `pages`, then report `loaded`."""

    id: SequenceId
    first_block: int
    blocks: int
    pages: list[int]


class Planned(msgspec.Struct, frozen=True, gc=False):
    """Compute `count` tokens from position `start`; sample: and choose the next one. pages: up to the last position.

    decodes: the one token is behind the prompt. pages may be the sequence's own list: read it before the next `plan`.
    """

    id: SequenceId
    start: int
    count: int
    pages: list[int]
    sample: bool
    decodes: bool


@dataclass(frozen=True, slots=True)
class Step:
    """loads first, slices in one forward pass. preempted: HELD again, without pages; ask the pool and call `ready`."""

    loads: list[Load]
    slices: list[Planned]
    preempted: list[SequenceId]

    @property
    def empty(self) -> bool:
        return not (self.loads or self.slices or self.preempted)


class Filled(msgspec.Struct, frozen=True, gc=False):
    """Block `index` became full by this step: its KV is in `page`. After a preemption an index may be filled again."""

    index: int
    key: bytes
    parent: bytes
    page: int


class Outcome(msgspec.Struct, frozen=True, gc=False):
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
    filled: tuple[Filled, ...] = ()
    recomputed: int = 0
