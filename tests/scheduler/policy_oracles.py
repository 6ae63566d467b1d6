"""What each policy must choose: written from its formula, one worker at a time, without numpy.

An oracle gives the rows that may be chosen: for prefill, and for decode given the prefill row. More than one: a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from pyengine.scheduler.cluster import View
from pyengine.scheduler.policies.base import Ask

Key: TypeAlias = tuple[float, ...]


@dataclass(frozen=True)
class Expected:
    """prefill: rows. decode: by prefill row. fetch: by prefill row."""

    prefill: list[int]
    decode: Callable[[int], list[int]]
    fetch: Callable[[int], bool]


Oracle: TypeAlias = Callable[[View, Ask], Expected]


def least(rows: Iterable[int], key: Callable[[int], Key]) -> list[int]:
    """Rows whose key is the least, but for rounding in its last part."""
    keys = {row: key(row) for row in rows}
    lowest = min(keys.values())
    return [row for row, k in keys.items() if k[:-1] == lowest[:-1] and math.isclose(k[-1], lowest[-1], rel_tol=1e-9)]


def cheapest(costs: dict[int, float]) -> list[int]:
    return least(costs, lambda row: (costs[row],))


def prefillers(view: View) -> list[int]:
    return [i for i in range(len(view.workers)) if view.prefills[i]]


def decoders(view: View) -> list[int]:
    return [i for i in range(len(view.workers)) if view.decodes[i]]


def paired(view: View, decode: Callable[[int], list[int]]) -> Callable[[int], list[int]]:
    """Who is of role both takes both parts."""
    return lambda p: [p] if view.both[p] else decode(p)


def compute(view: View, ask: Ask, i: int, cached: int) -> float:
    """Seconds of prefill at worker i with so many blocks cached: step by step, token by token."""
    block = view.block_tokens
    rest = ask.prompt_tokens - cached * block
    seconds = math.ceil(rest / int(view.max_tokens_per_step[i])) * float(view.step_seconds[i])
    seconds += rest * float(view.token_seconds[i])
    # Token j of the rest attends to all before it and to itself.
    return seconds + sum(cached * block + j + 1 for j in range(rest)) * float(view.context_seconds[i])


def short(view: View, ask: Ask, i: int) -> bool:
    return int(view.free_pages[i]) * view.block_tokens <= ask.prompt_tokens


def by_gap(view: View, ask: Ask) -> Callable[[int], list[int]]:
    """The decode worker with the shortest gap, of those with pages if there are any."""
    return paired(view, lambda _: least(decoders(view), lambda i: (short(view, ask, i), float(view.tbt[i]))))


def random(view: View, ask: Ask) -> Expected:
    return Expected(prefillers(view), paired(view, lambda _: decoders(view)), lambda _: True)


def round_robin(view: View, ask: Ask) -> Expected:
    def turn(rows: list[int]) -> list[int]:
        return [rows[view.turn % len(rows)]]

    return Expected(turn(prefillers(view)), paired(view, lambda _: turn(decoders(view))), lambda _: True)


def least_loaded(view: View, ask: Ask) -> Expected:
    def queue(i: int) -> Key:
        return (float(view.queue_seconds[i]) + (float(view.running[i] * view.tbt[i]) if view.both[i] else 0.0),)

    decode = paired(view, lambda _: least(decoders(view), lambda i: (float(view.running[i]),)))
    return Expected(least(prefillers(view), queue), decode, lambda _: True)


def least_queue_time(view: View, ask: Ask) -> Expected:
    prefill = least(prefillers(view), lambda i: (float(view.queue_seconds[i]),))
    return Expected(prefill, by_gap(view, ask), lambda _: True)


def cache_aware(view: View, ask: Ask) -> Expected:
    def first(i: int) -> Key:
        return (
            float(ask.load_seconds[i]) + float(view.queue_seconds[i]) + compute(view, ask, i, int(ask.prefix[i])),
        )  # fmt: skip

    return Expected(least(prefillers(view), first), by_gap(view, ask), lambda _: False)


def kvcache_centric(view: View, ask: Ask, threshold: float = 1.0) -> Expected:
    """As in the paper."""

    def longer(i: int) -> bool:
        own = int(ask.prefix[i])
        return ask.best / own > threshold if own else ask.best > 0

    def first(i: int) -> Key:
        transfer = float(ask.transfer_seconds[i]) if longer(i) else 0.0
        cached = ask.best if longer(i) else int(ask.prefix[i])
        queue = float(view.queue_seconds[i])
        return (float(ask.load_seconds[i]) + transfer + queue + compute(view, ask, i, cached),)

    return Expected(least(prefillers(view), first), by_gap(view, ask), longer)


def dynamo(view: View, ask: Ask) -> Expected:
    def keep(i: int) -> float:
        return (int(view.running_context[i]) + ask.prompt_tokens) / view.block_tokens

    def cost(i: int) -> float:
        device = int(ask.device[i])
        lower = max(int(ask.prefix[i]) - device, 0)
        disk = min(int(ask.ssd[i]), lower)
        credit = 1.0 * device + 0.75 * (lower - disk) + 0.25 * disk
        blocks = max((int(view.queued_tokens[i]) + ask.prompt_tokens) / view.block_tokens - credit, 0.0)
        return blocks + (keep(i) if view.both[i] else 0.0)

    def pick(rows: list[int], score: Callable[[int], float]) -> list[int]:
        return least(least(rows, lambda i: (score(i),)), lambda i: (float(view.cached_blocks[i]),))

    return Expected(pick(prefillers(view), cost), paired(view, lambda _: pick(decoders(view), keep)), lambda _: False)


def at_worker(view: View, i: int) -> int:
    return max(int(view.running[i]), int(view.queued_requests[i]))


def sglang(view: View, ask: Ask) -> Expected:
    rows = prefillers(view)
    loads = [at_worker(view, i) for i in rows]
    matches = [int(ask.prefix[i]) for i in rows]
    if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
        prefill = [i for i, load in zip(rows, loads, strict=True) if load == min(loads)]
    elif max(matches) * view.block_tokens / ask.prompt_tokens > 0.3:
        prefill = [i for i, match in zip(rows, matches, strict=True) if match == max(matches)]
    else:
        prefill = least(rows, lambda i: (float(view.cached_blocks[i]),))
    decode = paired(view, lambda _: least(decoders(view), lambda i: (float(at_worker(view, i)),)))
    return Expected(prefill, decode, lambda _: False)


def llm_d(view: View, ask: Ask) -> Expected:
    def load(i: int, rows: list[int]) -> float:
        queues = [int(view.queued_requests[j]) for j in rows]
        span = max(queues) - min(queues)
        queue = (max(queues) - int(view.queued_requests[i])) / span if span else 1.0
        used = min(1.0 - int(view.free_pages[i]) / int(view.pages[i]), 1.0)
        return queue + (1.0 - used)

    def score(i: int) -> Key:
        blocks = math.ceil(ask.prompt_tokens / view.block_tokens)
        return (-(2.0 * int(ask.prefix[i]) / blocks + load(i, prefillers(view))),)

    decode = paired(view, lambda _: least(decoders(view), lambda i: (-load(i, decoders(view)),)))
    return Expected(least(prefillers(view), score), decode, lambda _: False)


def lmetric(view: View, ask: Ask) -> Expected:
    def score(i: int) -> Key:
        fresh = int(view.queued_tokens[i]) + ask.prompt_tokens - int(ask.prefix[i]) * view.block_tokens
        return (float(fresh * (at_worker(view, i) + 1)),)

    decode = paired(view, lambda _: least(decoders(view), lambda i: (float(at_worker(view, i)),)))
    return Expected(least(prefillers(view), score), decode, lambda _: False)


def preble(view: View, ask: Ask) -> Expected:
    block = view.block_tokens

    def load(i: int) -> float:
        prefill = int(view.recent_computed[i]) * float(view.token_seconds[i])
        return prefill + int(view.recent_output[i]) * float(view.tbt[i])

    def cost(i: int) -> Key:
        missing = math.ceil(ask.prompt_tokens / block) - int(ask.prefix[i])
        goes = min(max(int(view.cached_blocks[i]) + missing - int(view.pool_slots[i]), 0), missing)
        prompt = int(view.recent_prompt[i])
        reused = 1.0 - int(view.recent_computed[i]) / prompt if prompt else 0.0
        evicted = goes * block * float(view.token_seconds[i]) * reused
        return (load(i) + evicted + compute(view, ask, i, int(ask.prefix[i])),)

    rows = prefillers(view)
    matched = max(int(ask.prefix[i]) for i in rows)
    if matched * block > ask.prompt_tokens - matched * block:
        prefill = least([i for i in rows if int(ask.prefix[i]) == matched], lambda i: (load(i),))
    else:
        prefill = least(rows, cost)
    loads = [load(i) for i in rows]
    if max(loads) > 1.5 * min(loads):
        calm = least(rows, lambda i: (load(i),))
        prefill = [j for i in prefill for j in (calm if load(i) == max(loads) else [i])]
    return Expected(prefill, paired(view, lambda _: least(decoders(view), lambda i: (load(i),))), lambda _: False)


def netkv(view: View, ask: Ask) -> Expected:
    def decode(p: int) -> list[int]:
        links = ask.handoff_seconds(p)
        return least(
            decoders(view),
            lambda i: (short(view, ask, i), float(links[i]) + float(view.queue_seconds[i]) + float(view.tbt[i])),
        )

    return Expected(cache_aware(view, ask).prefill, paired(view, decode), lambda _: False)


def least_harm(view: View, ask: Ask, worth: float = 3000.0, doubt: float = 0.05, reuse: float = 0.05) -> Expected:
    """Seconds that it costs itself and others, worker by worker; then the best pair against the best single worker."""

    def chance(seconds: float, objective: float | None, doubt: float = doubt) -> float:
        if objective is None:
            return 0.0
        return 1.0 / (1.0 + math.exp(min(max((objective - seconds) / (doubt * objective), -50), 50)))

    def first(i: int) -> tuple[float, float, bool]:
        """To the first token, of that compute, and whether by fetching."""
        queue, load = float(view.queue_seconds[i]), float(ask.load_seconds[i])
        own = compute(view, ask, i, int(ask.prefix[i]))
        rest = compute(view, ask, i, max(ask.best, int(ask.prefix[i])))
        local = max(queue, load) + own
        remote = max(queue, load + float(ask.transfer_seconds[i])) + rest
        return (remote, rest, True) if remote < local and ask.best > ask.prefix[i] else (local, own, False)

    def room(i: int) -> float:
        missing = max(ask.prompt_tokens // view.block_tokens - int(ask.prefix[i]), 0)
        goes = min(max(int(view.cached_blocks[i]) + missing - int(view.pool_slots[i]), 0), missing)
        return goes * view.block_tokens * float(view.token_seconds[i]) * reuse

    def prefill_part(i: int) -> float:
        seconds, busy, _ = first(i)
        waiting = int(view.queued_requests[i])
        queue = int(view.queued_tokens[i]) * float(view.token_seconds[i])
        share = min(busy / queue, 1.0) if queue > 0 else 0.0
        fall = share * waiting * chance(queue + busy, ask.slo.ttft, 0.2)
        alone = compute(view, ask, i, int(ask.prefix[i]))
        return seconds + alone * waiting + room(i) + worth * (chance(seconds, ask.slo.ttft) + fall)

    def decode_part(i: int, second: float) -> float:
        gap, running = float(view.tbt[i]), int(view.running[i])
        context = ask.prompt_tokens + ask.output_tokens / 2
        slower = float(view.sequence_seconds[i]) + float(view.history_seconds[i]) * context
        others = running * (chance(gap, ask.slo.tbt) - chance(gap - slower, ask.slo.tbt))
        mine = chance(gap + second / max(ask.output_tokens / 10, 1.0), ask.slo.tbt)
        seconds = ask.output_tokens * gap + running * ask.output_tokens * slower
        return seconds + second + worth * (mine + others + short(view, ask, i))

    def ending(p: int, i: int) -> float:
        second = max(float(ask.handoff_seconds(p)[i]) - first(p)[1], 0.0)
        return decode_part(i, second) + room(i)

    def ending_key(p: int, i: int) -> Key:
        return (ending(p, i),)

    def whole(i: int) -> float:
        return prefill_part(i) + decode_part(i, 0.0) + int(view.running[i]) * first(i)[1]

    alone = [i for i in range(len(view.workers)) if (view.both[i] and view.prefills[i]) or view.inlines[i]]
    apart = [i for i in prefillers(view) if not view.both[i]]
    starts = least(apart, lambda i: (prefill_part(i),)) if apart and decoders(view) else []
    pairs = {p: least(decoders(view), partial(ending_key, p)) for p in starts}
    singles = {i: whole(i) for i in alone}
    # Equal beginnings are drawn before their ends are known, so each is held against the single workers.
    chosen = {
        row
        for p in starts or [-1]
        for row in cheapest(singles | ({p: prefill_part(p) + ending(p, pairs[p][0])} if p >= 0 else {}))
    }
    return Expected(sorted(chosen), lambda p: pairs.get(p, [p]), lambda p: first(p)[2])


ORACLES: dict[str, Oracle] = {
    "random": random,
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "least-queue-time": least_queue_time,
    "cache-aware": cache_aware,
    "kvcache-centric": kvcache_centric,
    "least-harm": least_harm,
    "dynamo": dynamo,
    "sglang": sglang,
    "llm-d": llm_d,
    "lmetric": lmetric,
    "preble": preble,
    "netkv": netkv,
}
