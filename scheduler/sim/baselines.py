"""Models of others: vLLM 0.5.1 as the paper's baselines ran it, on the Batcher's seam. Not its code.

What is modelled is which work a step combines (its `Scheduler._schedule_default` and `_schedule_chunked_prefill`):

    name          a step does                                              prompts                   prefixes
    vllm          prompts if any can begin, else one token of each answer  whole, as many as fit     computed anew
    vllm-pc       the same                                                 the same                  reused in pages
    vllm-cp       one token of each answer, then prompts                   chunks, 2048 tokens a step  computed anew

All are coupled (role both), first come, first served, and hold KV in device pages only (the paper's nodes: about
1.33 M tokens, 256 sequences). Admission, preemption by recomputing the youngest, and paging are the production
Batcher's. Where the two differ in detail: vLLM keeps 1 % of the pages free when it admits, we one for each sequence
that grows; its pages have 16 tokens, ours a block of the simulation. How requests were spread over nodes the paper does
not say: any policy that knows no caches will do ("round-robin").
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import Any

from ..batcher import Batcher
from ..blocks import BlockPool
from ..sequence import Planned, Sequence, State, Step
from ..types import Role
from .spec import WorkerSpec

#: `max_num_batched_tokens` of the paper's chunked runs: its curves fit 2048 and not 512.
CHUNK_BUDGET = 2048
#: KV that such a node has in its devices, in tokens.
KV_TOKENS = 1_330_000


class Vllm(Batcher):
    """Prompts first: a step that computes prompts decodes nothing, so each answer pauses while any prompt can begin.

    A prompt is never cut, so max_tokens is what vLLM makes it then: the longest that the model takes.
    """

    reuses = False

    def __init__(self, pool: BlockPool, *, max_positions: int, **settings: Any) -> None:
        settings["max_tokens"] = self.budget(max_positions)
        super().__init__(pool, max_positions=max_positions, **settings)

    @classmethod
    def budget(cls, max_positions: int) -> int:
        """Tokens of a step."""
        return max(max_positions, CHUNK_BUDGET)

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        if not self.reuses:
            # Nobody has asked for these keys, so nobody finds what fills under them.
            sequence.keys.clear()

    def queue_ahead(self, now: float) -> tuple[float, ...]:
        """First come, first served."""
        return ()

    def ready(self, id: tuple[int, int], available: int) -> None:
        """There is no pool beside the device's pages."""
        super().ready(id, 0)

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        super()._preempt(sequence, step)
        if not self.reuses:
            sequence.keys.clear()

    def plan(self, now: float) -> Step:
        step = Step([], [], [])
        budget = self.max_tokens
        for sequence in tuple(self._running):
            if len(sequence.tokens) - sequence.computed > 1:
                budget -= self._whole(sequence, step)
        while (head := self._first()) is not None and len(head.tokens) <= budget:
            if not self._admit(head, step):
                self._queue.short = True
                break
            budget -= self._whole(head, step)
        if not step.slices:
            self._decode(step)
        return step

    def _first(self) -> Sequence | None:
        """Who came first of those that wait, if one may begin."""
        if not self._queue.looks or self.running >= self.max_sequences:
            return None
        return self._queue.first

    def _whole(self, sequence: Sequence, step: Step) -> int:
        count = len(sequence.tokens) - sequence.computed
        self._slice(sequence, count, step)
        return count

    def _decode(self, step: Step) -> None:
        for sequence in tuple(self._running):
            if sequence.state is State.RUNNING and len(sequence.tokens) - sequence.computed == 1:
                room = len(sequence.pages) * self.pool.block_tokens >= len(sequence.tokens)
                if room or self._reserve_next(sequence, step):
                    start = sequence.computed
                    decodes = start >= sequence.prompt_tokens
                    step.slices.append(Planned(sequence.id, start, 1, sequence.pages, True, decodes))


class VllmPrefixCaching(Vllm):
    """As Vllm; full blocks of earlier prompts that are still in pages are not computed again."""

    reuses = True


class VllmChunked(Vllm):
    """Answers first, then prompts, in chunks, in what is left of 2048 tokens."""

    @classmethod
    def budget(cls, max_positions: int) -> int:
        return CHUNK_BUDGET

    def plan(self, now: float) -> Step:
        step = Step([], [], [])
        self._decode(step)
        budget = self.max_tokens - len(step.slices)
        for sequence in tuple(self._running):
            if budget and len(sequence.tokens) - sequence.computed > 1:
                budget -= self._chunk(sequence, budget, step)
        # Who was just preempted shows that pages are short.
        while budget and not step.preempted and (head := self._first()) is not None:
            if not self._admit(head, step):
                self._queue.short = True
                break
            budget -= self._chunk(head, budget, step)
        return step

    def _chunk(self, sequence: Sequence, budget: int, step: Step) -> int:
        count = min(budget, len(sequence.tokens) - sequence.computed)
        self._slice(sequence, count, step)
        return count


class FirstCome(Batcher):
    """The production Batcher with the order of the field's queues: prompts as they came, whatever was promised to whom.

    For routing policies of others, whose own workers do not know of objectives, tenants or priorities.
    """

    def add(self, sequence: Sequence) -> None:
        sequence.ttft = sequence.tbt = math.inf
        sequence.tenant = sequence.priority = 0
        super().add(sequence)

    def queue_ahead(self, now: float) -> tuple[float, ...]:
        """Of no use to who is shorter."""
        return ()


#: By the name that a cluster file gives. "ours" is what serves.
DISCIPLINES: dict[str, Callable[..., Batcher]] = {
    "ours": Batcher,
    "first-come": FirstCome,
    "vllm": Vllm,
    "vllm-pc": VllmPrefixCaching,
    "vllm-cp": VllmChunked,
}


def find_discipline(name: str) -> Callable[..., Batcher]:
    """A Batcher's maker by name. Raises ValueError."""
    if name in DISCIPLINES:
        return DISCIPLINES[name]
    near = difflib.get_close_matches(name, DISCIPLINES, 1, 0.4)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"there is no discipline {name!r}: known are {', '.join(DISCIPLINES)}{guess}")


def baseline(name: str, nodes: int, *, model: str, block_tokens: int) -> WorkerSpec:
    """So many of the paper's nodes with one of the baselines: all figures use these, none is tuned for one."""
    if name not in DISCIPLINES or name in ("ours", "first-come"):
        find_discipline(name)
        raise ValueError(f"{name!r} is no baseline")
    return WorkerSpec(
        role=Role.BOTH, count=nodes, model=model, pages=KV_TOKENS // block_tokens, max_sequences=256, discipline=name
    )
