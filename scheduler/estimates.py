"""How long each worker would take with one request: the columns that policies compare.

from pages     0
from DRAM      copied into pages, if that was ever measured
from SSD       read from the node's own
from a peer    the queues of sender and receiver, a delay, bytes over the link's rate, and the sender's SSD if it must
coming         the time until whoever computes it just now is through, as far as one's own queue is shorter
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .cluster import Bools, Ints, View, some
from .cost import F64
from .link_cost import LINK_DELAY, LinkCost
from .messages import Route
from .overlap import Overlap
from .policies.base import Ask, ttft

#: Of those who wait for somebody else's prefill, if nobody does.
NOBODY: Bools = np.zeros(0, dtype=bool)
#: To wait for somebody else's prefill is worth it if it takes longer by this share of the computing that it spares: the
#: first of a burst finds idle workers, and they are not to compute its prefix once each.
SHARING = 0.1
#: Seconds from the predicted end of a prefill until its last block can be fetched: grants, messages, copies.
SETTLING = 0.01


@dataclass(slots=True, eq=False)
class Estimate:
    """The ask that a policy gets. awaited: [W] who has the longest prefix only once somebody has computed it; of length
    0: nobody. fetch_ready: when what is to be fetched is there; 0: it is. fetch_row: who computes it meanwhile.
    """

    ask: Ask
    awaited: Bools
    fetch_ready: float = 0.0
    fetch_row: int = 0


def estimate(view: View, route: Route, overlap: Overlap, links: LinkCost, output_tokens: float, now: float) -> Estimate:
    """See the module. output_tokens: predicted length of the answer."""
    ssd = overlap.ssd[view.node]
    load = transfer = np.zeros(len(ssd))
    if overlap.best:
        load = _load(view, overlap, ssd, links)
        transfer = _transfer(view, overlap, overlap.best - overlap.has, links, now)
    ask = Ask(
        route.prompt_tokens,
        overlap.has,
        overlap.best,
        load,
        transfer,
        route.slo,
        device=overlap.device,
        ssd=ssd,
        output_tokens=output_tokens,
        handoff_seconds=_handoff(view, route.prompt_tokens, overlap, links, now),
        tenant=route.tenant,
        priority=route.priority,
    )
    if not overlap.some_coming:
        return Estimate(ask, NOBODY)
    awaited = _await_coming(view, overlap, ask, now)
    return _fetch_coming(view, overlap, Estimate(ask, awaited), links, now)


def _load(view: View, overlap: Overlap, ssd: Ints, links: LinkCost) -> F64:
    """[W] to bring what the worker's node holds into its pages. ssd: [W] blocks of that which only the SSD has."""
    seconds: F64 = np.zeros(len(ssd))
    reads = np.count_nonzero(ssd) > 0
    if not (reads or links.copies_measured):
        return seconds
    beyond = np.maximum(overlap.held[view.node] - overlap.device, 0)
    if links.copies_measured:
        seconds = beyond * view.block_bytes * links.device_seconds(view.nodes)[view.node]
    if reads:
        seconds += np.minimum(ssd, beyond) * view.block_bytes / links.ssd_rates(view.nodes)[view.node]
    return seconds


def _transfer(view: View, overlap: Overlap, blocks: Ints, links: LinkCost, now: float) -> F64:
    """[W] to fetch so many blocks, from whoever holds most of the prefix."""
    source, node = overlap.source, view.node
    size = blocks * view.block_bytes
    wait = links.queues(source, view.nodes, now)[node]
    seconds = wait + LINK_DELAY + size / links.rates(source, view.nodes)[node]
    if overlap.source_ssd:
        # Which of its blocks are on SSD is not asked: those that are fetched, at worst.
        read = view.block_bytes / links.rate(source, source)
        seconds = seconds + np.minimum(blocks, overlap.source_ssd) * read
    # Where nothing is moved, nothing is waited for.
    seconds *= size > 0
    return seconds


def _handoff(view: View, prompt_tokens: int, overlap: Overlap, links: LinkCost, now: float) -> Callable[[int], F64]:
    blocks = -(-prompt_tokens // view.block_tokens)
    #: By prefill worker. What a choice rested on stays the same for who asks later, when links are not as they were.
    known: dict[int, F64] = {}

    def seconds(prefill: int) -> F64:
        if (told := known.get(prefill)) is not None:
            return told
        source = view.nodes[view.node[prefill]]
        size = (blocks - overlap.held) * view.block_bytes
        by_node = links.queues(source, view.nodes, now) + LINK_DELAY + size / links.rates(source, view.nodes)
        by_node[view.node[prefill]] = 0.0
        moved = known[prefill] = by_node[view.node]
        return moved

    return seconds


def _await_coming(view: View, overlap: Overlap, ask: Ask, now: float) -> Bools:
    """Who computes a longer prefix just now need not compute it twice, if waiting for it is shorter: then the ask says
    so. [W] who waits; of length 0: nobody.
    """
    tokens = ask.prompt_tokens
    wait = np.maximum(overlap.ready - now - view.queue_seconds, 0.0)
    coming = np.maximum(overlap.coming, ask.prefix)
    computed, left = view.prefill_seconds(tokens, np.array((ask.prefix, coming)) * view.block_tokens)
    then_seconds = wait + left
    spared = computed - (then_seconds - wait)
    shorter = then_seconds < ask.load_seconds + computed + SHARING * spared
    awaited: Bools = (coming > ask.prefix) & shorter
    if not some(awaited):
        return NOBODY
    # What is still fetched, is fetched beyond that.
    ask.transfer_seconds = np.where(awaited & (coming >= ask.best), 0.0, ask.transfer_seconds)
    ask.load_seconds = np.where(awaited, wait, ask.load_seconds)
    ask.prefix = np.where(awaited, coming, ask.prefix)
    return awaited


def _fetch_coming(view: View, overlap: Overlap, estimate: Estimate, links: LinkCost, now: float) -> Estimate:
    """Others can fetch what is computed just now, once it is there: if the first token comes hardly later by that."""
    ask = estimate.ask
    best = int(overlap.coming[overlap.coming.argmax()])
    if best <= ask.best:
        return estimate
    (rows,) = (overlap.coming == best).nonzero()
    row = int(rows[np.argmin(overlap.ready[rows])])
    source = view.nodes[view.node[row]]
    # Whoever looks a moment too early finds nothing of the last chunk, which may be all of it.
    ready = now + (float(overlap.ready[row]) - now) * (1.0 + float(view.error[row])) + SETTLING
    size = (best - ask.prefix) * view.block_bytes
    wait = np.maximum(ready - now - view.queue_seconds, 0.0)
    move = links.queues(source, view.nodes, now) + LINK_DELAY
    seconds = wait + move[view.node] + size / links.rates(source, view.nodes)[view.node]
    # On the node itself nothing is moved.
    seconds = np.where(view.node == view.node[row], wait, seconds)
    later = replace(ask, best=best, transfer_seconds=np.where(size > 0, seconds, 0.0))
    shared = float(ttft(view, later, np.ones(len(view.workers), dtype=bool))[view.prefills].min(initial=np.inf))
    alone = soonest(view, ask)
    computed = view.prefill_seconds(ask.prompt_tokens, np.maximum(ask.prefix, ask.best) * view.block_tokens)
    left = view.prefill_seconds(ask.prompt_tokens, np.maximum(ask.prefix, best) * view.block_tokens)
    spared = float((computed - left)[view.prefills].max(initial=0.0))
    if shared > alone + SHARING * spared:
        return estimate
    return Estimate(later, estimate.awaited, ready, row)


def soonest(view: View, ask: Ask) -> float:
    """Seconds to the first token at the worker that has it first, with or without fetching."""
    everybody = np.ones(len(view.workers), dtype=bool)
    seconds = np.minimum(ttft(view, ask, everybody), ttft(view, ask, ~everybody))
    return float(seconds[view.prefills | view.inlines].min(initial=np.inf))


def inlines(view: View, ask: Ask) -> Bools:
    """[W] decode workers that can compute what is missing of the prompt in one step, and keep its objective by that."""
    gap = ask.slo.tbt
    if gap is None:
        return np.zeros(len(view.workers), dtype=bool)
    rest = ask.prompt_tokens - ask.prefix * view.block_tokens
    context = rest * (2 * ask.prompt_tokens - rest + 1) / 2
    step = view.tbt + rest * view.token_seconds + context * view.context_seconds
    able: Bools = view.decodes & ~view.both & view.takes & (rest <= view.max_tokens_per_step) & (step <= gap)
    return able
