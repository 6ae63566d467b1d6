"""What `pyengine bench` asks for: made-up requests at a rate, or a trace with its lengths scaled."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import msgspec

from pyengine.config import ConfigError
from pyengine.scheduler.sim.trace import Request, Trace

Arrivals = Literal["poisson", "constant"]


class Wish(msgspec.Struct, frozen=True):
    """What is made up. rate: requests a second. count: of them. prompt, output: (least, most) tokens, drawn evenly.
    shared: share of the shortest prompt with which all begin. seed: of arrivals, lengths and prompts.
    """

    rate: float
    count: int
    arrivals: Arrivals
    prompt: tuple[int, int]
    output: tuple[int, int]
    shared: float
    seed: int


def made_up(wish: Wish, block_tokens: int) -> Trace:
    """Equal wishes make equal requests. What is shared is shared by whole blocks."""
    share = f", {wish.shared:.0%} of the shortest prompt shared" if wish.shared else ""
    name = (
        f"{wish.count} requests, {wish.rate:g}/s {wish.arrivals}, prompts of {_span(wish.prompt)} tokens{share},"
        f" answers of {_span(wish.output)}, seed {wish.seed}"
    )
    return Trace(name, block_tokens, lambda: _requests(wish, block_tokens))


def _requests(wish: Wish, block_tokens: int) -> Iterator[Request]:
    draw = random.Random(wish.seed)
    common = tuple(draw.randbytes(16) for _ in range(int(wish.shared * wish.prompt[0]) // block_tokens))
    at = 0.0
    for _ in range(wish.count):
        length = draw.randint(*wish.prompt)
        blocks = (*common, *(draw.randbytes(16) for _ in range(length // block_tokens - len(common))))
        yield Request(at, length, draw.randint(*wish.output), blocks)
        at += draw.expovariate(wish.rate) if wish.arrivals == "poisson" else 1 / wish.rate


def scaled(trace: Trace, factor: float) -> Trace:
    """All lengths times `factor`, above 0 and at most 1: for a model that takes shorter prompts than the trace has.

    Prompts that have a beginning in common have so much of it still: block i is made of what was at its place.
    """
    if not 0 < factor <= 1:
        raise ConfigError(f"--scale is a share of each length, above 0 and at most 1, not {factor:g}")
    if factor == 1:
        return trace
    size = trace.block_tokens

    def one(row: Request) -> Request:
        prompt = max(1, math.floor(row.prompt_tokens * factor))
        # floor(i / factor) grows with i, so no two blocks get one key; and depends on i alone, so equal stays equal.
        wanted = (math.floor(index / factor) for index in range(prompt // size))
        blocks = tuple(row.blocks[index] for index in wanted if index < len(row.blocks))
        output = max(1, math.floor(row.output_tokens * factor))
        return replace(row, prompt_tokens=prompt, output_tokens=output, blocks=blocks)

    return replace(
        trace, open=lambda: (one(row) for row in trace), changes=(*trace.changes, f"lengths times {factor:g}")
    )


def span(flag: str, text: str) -> tuple[int, int]:
    """ "128" or "64-192". Raises ConfigError."""
    least, _, most = text.partition("-")
    try:
        pair = int(least), int(most or least)
    except ValueError:
        pair = 0, 0
    if not 1 <= pair[0] <= pair[1]:
        raise ConfigError(f"{flag} is a number of tokens, or a range like 64-192, not {text}")
    return pair


def _span(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}-{pair[1]}"
