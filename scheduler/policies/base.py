"""What a policy sees, what it answers, and the few pieces that most policies share.

A policy is a pure function from (view, ask, random numbers) to a choice. Who cannot serve the request (dead, too small,
excluded) is already masked out of `view.prefills` and `view.decodes`; a policy only prefers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..cluster import Bools, Ints, View, some
from ..cost import F64
from ..types import Slo


def _nothing(prefill: int) -> F64:
    return np.zeros(1)


# Neither is frozen: to build a frozen one takes several times as long, and both are built for each request.
@dataclass(slots=True, eq=False)
class Ask:
    """One request against a view. Columns [W] over its workers.

    prefix: leading blocks of the prompt that the worker's node holds. best: leading blocks that somebody holds. Both
    leave at least one token to compute. load_seconds: to read from the node's SSD what of `prefix` its DRAM has not.
    transfer_seconds: to fetch what `best` has beyond `prefix`. device: leading blocks in the worker's own pages; ssd:
    how many of `prefix` only the node's SSD has. output_tokens: predicted length of the answer. handoff_seconds: given
    the row of the prefill worker, [W] to bring the prompt's KV from there to each worker. priority: higher goes first.
    """

    prompt_tokens: int
    prefix: Ints
    best: int
    load_seconds: F64
    transfer_seconds: F64
    slo: Slo
    device: Ints
    ssd: Ints
    output_tokens: float
    handoff_seconds: Callable[[int], F64] = _nothing
    tenant: str = ""
    priority: int = 0


@dataclass(slots=True)
class Choice:
    """Rows of the view. fetch: the prefill node is to fetch the blocks it lacks from whoever holds them.

    terms: columns [W] that led to the choice, by name, for `conductor explain`.
    """

    prefill: int
    decode: int
    fetch: bool = True
    terms: Mapping[str, F64 | Ints] = field(default_factory=dict)


class Policy(Protocol):
    """`replicates`: hot prefixes are to be copied to more nodes than the requests themselves bring them to."""

    @property
    def replicates(self) -> bool: ...

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice: ...


def pair(view: View, pick_prefill: Callable[[Bools], int], pick_decode: Callable[[Bools], int]) -> tuple[int, int]:
    """Picks a prefill worker, then a decode worker; one of role both does both parts, so nothing is handed off."""
    prefill = pick_prefill(view.prefills)
    return prefill, prefill if view.both[prefill] else pick_decode(view.decodes)


def lowest(scores: F64 | Ints, mask: Bools, rng: random.Random) -> int:
    """Row of the lowest score within the mask; ties are drawn, or the first name would get all of an idle cluster.

    NaN, as of an endless time that counts for nobody, is worse than any number.
    """
    (rows,) = mask.nonzero()
    within = scores[rows]
    # Of a NaN, `argmin` takes it for the lowest: then the slower way.
    least = within[within.argmin()]
    best = rows[within == (least if least == least else np.fmin.reduce(within))]
    if len(best) == 1:
        return int(best[0])
    return int(rng.choice(best if len(best) else rows))


def requests(view: View) -> Ints:
    """[W] requests at each worker, in whatever stage."""
    return np.maximum(view.running, view.queued_requests)


def ttft(view: View, ask: Ask, fetch: Bools) -> F64:
    """[W] predicted seconds to the first token, where `fetch` [W] says who fetches the longer prefix."""
    # `where` takes twice as long as these, and most policies come here.
    prefix = np.maximum(ask.best * fetch, ask.prefix)
    transfer = ask.transfer_seconds.copy()
    np.putmask(transfer, ~fetch, 0.0)
    compute = view.prefill_seconds(ask.prompt_tokens, prefix * view.block_tokens)
    return ask.load_seconds + transfer + view.queue_seconds + compute


def ttft_of(view: View, ask: Ask, row: int, fetch: bool) -> float:
    """The same of one worker."""
    prefix = int(ask.prefix[row])
    cached = (max(ask.best, prefix) if fetch else prefix) * view.block_tokens
    waited = float(ask.load_seconds[row]) + (float(ask.transfer_seconds[row]) if fetch else 0.0)
    return waited + float(view.queue_seconds[row]) + view.prefill_seconds_of(row, ask.prompt_tokens, cached)


def decode_load(view: View, ask: Ask) -> F64:
    """[W] predicted gap between tokens; workers without pages for the prompt come after all others: it would wait."""
    lacks = lacks_pages(view, ask)
    return view.tbt + np.where(lacks, view.tbt.max() + 1.0, 0.0) if some(lacks) else view.tbt


def lacks_pages(view: View, ask: Ask) -> Bools:
    """[W] whether the prompt and a token more find no pages there now."""
    return view.free_pages <= ask.prompt_tokens // view.block_tokens
