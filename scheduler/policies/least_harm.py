"""Ours: where a request does the least harm, to itself and to all others, in seconds.

Algorithm 1 asks when this request's first token comes. That is right for one request alone; under load what matters is
what it costs everybody. So each choice of a prefill worker p and a decode worker d is charged with

    own seconds      first(p) + tokens · gap(d)                              until its last token
    others' seconds  local(p) · waiting(p)                                   prompts behind it wait so much longer
                   + running(d) · tokens · slower(d)                         each of its steps delays all in the batch
                   + running(d) · compute(d)     if d = p                    a prefill among decodes halts them
                   + room(p) + room(d)                                       KV that goes for its KV is computed again
    promises         worth · (own chance to break one + what those of others rise by)

    first(p)  = max(queue, transfer of the prefix) + prefill of the rest: a prefix is fetched while the prompt waits.
                The shorter of fetching and computing it. Of what p has, the SSD's part is read meanwhile as well.
    gap(d)    = predicted gap between tokens with it in the batch; slower(d): the part of it that is this sequence.
    second(d) = hand-off of the KV less the prefill it hides behind: it shows in the second token's gap, and so in the
                mean of the longest tenth of the gaps, which is what an objective for gaps is held against.
    chance    = of a predicted time x to exceed an objective s: 1 / (1 + exp((s − x) / (doubt · s)))

Why this wins where others lose:

* A promise is kept or broken, nothing between. Who balances load lets every batch pass the objective together, when
  demand passes it: all lose. Here a sequence that would push a batch of B over the line costs B promises, and one more
  in a batch that is over it already costs its own: what cannot be served well is kept together, and the rest is well.
* Of a queue of prompts the longest break theirs, as the shortest go first: one more costs as many of those as it is
  long, in a queue that is beyond the objective.
* local · waiting is LMetric's product, in seconds, and with the attention's cost and the tiers in it: a hit saves
  time to everybody behind (as many as wait now, in the mean), so it is worth a longer own wait where there is a queue,
  and not where there is none. local(p) computes what p has not, as if nothing were fetched: whoever comes next of the
  same session finds its blocks, or who is about to compute them, at one place. A prefix that another worker is still to
  compute often never comes: there it is overtaken by all that are shorter, and only who waits at the same worker makes
  it more urgent (`underway.py`).
* A decode worker with time to spare takes short prompts whole (`View.inlines`) when that is cheaper than the queue: a
  split of roles that does not fit the hour costs less. It is the same formula, with d = p.
* What is fetched or computed makes other KV go where a node is full: copies are made where there is room.

p is chosen by its own terms, then d for it, so that the cost is that of W workers and not of W² pairs; both are then
held against the best worker that takes it whole. Without objectives the promises are nothing, and the sum of all
requests' times is what is least.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..cluster import Bools, Ints, View
from ..cost import F64
from .base import Ask, Choice, lacks_pages, lowest

#: How well the end of a whole queue is known, relative to the objective: others come before, and some are refused.
CROWDED = 0.2


@dataclass(frozen=True, slots=True)
class LeastHarm:
    """worth: seconds that a kept promise is worth. doubt: how far predictions are off, relative to the objective.
    reuse: chance that a block which makes room would have been wanted again. gather: what others are promised counts,
    which gathers what cannot be served well. With an admission that lets nobody break a promise even batches are
    better: who is sent to the worker that is given up is refused, though others have room. even: decode goes to the
    worker with the fewest sequences, for an admission that judges decode by those that decode now (`at-arrival`).
    """

    worth: float = 3000.0
    doubt: float = 0.05
    reuse: float = 0.05
    gather: bool = True
    even: bool = False
    replicates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.worth < 0 or not 0 <= self.reuse <= 1:
            raise ValueError("worth must be at least 0, and reuse between 0 and 1")
        if self.doubt <= 0:
            raise ValueError("doubt must be above 0: no prediction is exact")

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        first, compute, fetch, local = self._first(view, ask)
        room = self._room(view, ask)
        waiting = view.queued_requests
        broken = self._chance(first, ask.slo.ttft)
        prefill = first + local * waiting + room + self.worth * (broken + self._behind(view, ask, compute))

        tokens = max(ask.output_tokens, 1.0)
        slower = view.sequence_seconds + view.history_seconds * (ask.prompt_tokens + tokens / 2)
        before = self._chance(view.tbt - slower, ask.slo.tbt)
        others = view.running * (self._chance(view.tbt, ask.slo.tbt) - before)
        decode = tokens * (view.tbt + view.running * slower) + room
        # Without pages it waits there, for nobody knows how long.
        decode = decode + self.worth * (others * self.gather + lacks_pages(view, ask))
        terms = {"first": first, "compute": compute, "prefill": prefill, "decode": decode, "room": room}

        choices: list[tuple[float, int, int]] = []
        alone = (view.prefills & view.both) | view.inlines
        if alone.any():
            whole = prefill + decode + view.running * compute + self.worth * self._chance(view.tbt, ask.slo.tbt) - room
            row = lowest(whole, alone, rng)
            choices.append((float(whole[row]), row, row))
            terms["whole"] = whole
        apart = view.prefills & ~view.both
        if apart.any() and view.decodes.any():
            p = lowest(prefill, apart, rng)
            # A tenth of the gaps, and one at least, is what the objective is about: the hand-off is one of them.
            second = np.maximum(ask.handoff_seconds(p) - compute[p], 0.0)
            gap = view.tbt + second / max(tokens / 10, 1.0)
            cost = decode + second + self.worth * self._chance(gap, ask.slo.tbt)
            ending = cost
            if self.even:
                ending = view.running + lacks_pages(view, ask) * (view.running.max() + 1.0)
            d = lowest(ending, view.decodes, rng)
            choices.append((float(prefill[p] + cost[d]), p, d))
            terms["ending"] = ending
        # An endless time on both sides compares with nothing: the first will do.
        _, p, d = min(choices, key=lambda choice: (choice[0] != choice[0], choice[0]))
        return Choice(p, d, bool(fetch[p]), terms)

    def _first(self, view: View, ask: Ask) -> tuple[F64, F64, Bools, F64]:
        """[W] seconds to the first token, those of computing in it, whether to fetch what others have, and seconds of
        computing if nothing is fetched.
        """
        own = view.prefill_seconds(ask.prompt_tokens, ask.prefix * view.block_tokens)
        local = np.maximum(view.queue_seconds, ask.load_seconds) + own
        if not ask.best:
            return local, own, np.zeros(len(own), dtype=bool), own
        longest: Ints = np.maximum(ask.best, ask.prefix)
        rest = view.prefill_seconds(ask.prompt_tokens, longest * view.block_tokens)
        remote = np.maximum(view.queue_seconds, ask.load_seconds + ask.transfer_seconds) + rest
        # Equal times: nothing is to be had elsewhere.
        fetch = (remote < local) & (longest > ask.prefix)
        return np.where(fetch, remote, local), np.where(fetch, rest, own), fetch, own

    def _behind(self, view: View, ask: Ask, compute: F64) -> F64:
        """[W] promises that those who wait will not be kept, for that it is computed there as well.

        The shortest go first, so it is always the longest who are late: of a queue beyond the objective as many fall
        out as together take as long as this one, as long as the mean of the queue each.
        """
        queue = view.queued_tokens * view.token_seconds
        share = np.minimum(compute, queue) / np.maximum(queue, 1e-9)
        return share * view.queued_requests * self._chance(queue + compute, ask.slo.ttft, CROWDED)

    def _room(self, view: View, ask: Ask) -> F64:
        """[W] seconds to compute again what goes to make room for the prompt's blocks, as far as it is wanted again."""
        missing = ask.prompt_tokens // view.block_tokens - ask.prefix
        goes = np.minimum(np.maximum(view.cached_blocks + missing - view.pool_slots, 0), np.maximum(missing, 0))
        again: F64 = goes * (view.token_seconds * (self.reuse * view.block_tokens))
        return again

    def _chance(self, seconds: F64, objective: float | None, doubt: float | None = None) -> F64:
        """[W] that a predicted time exceeds the objective; nothing is promised without one."""
        if objective is None:
            return np.zeros(len(seconds))
        half = 0.5 / max((doubt or self.doubt) * objective, 1e-9)
        # The logistic curve as a tanh, which never overflows.
        chance: F64 = 0.5 + 0.5 * np.tanh((seconds - objective) * half)
        return chance
