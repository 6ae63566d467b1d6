"""What is sent: single requests that tell what one costs, and sessions at several loads, one after the other."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

from pyengine.scheduler.sim.sessions import Kind, sessions
from pyengine.scheduler.sim.trace import Request, Trace


@dataclasses.dataclass(frozen=True)
class Part:
    """Requests come from `start` seconds on. Those of [first, last) count; the others bring the cluster to its load."""

    name: str
    rate: float
    start: float
    first: float
    last: float


def parts_of(rates: Sequence[tuple[str, float]], warm: float, seconds: float, rest: float) -> list[Part]:
    """One after the other: `warm` seconds that do not count, `seconds` that do, and `rest` in which all ends."""
    found, start = [], 0.0
    for name, rate in rates:
        found.append(Part(name, rate, start, start + warm, start + warm + seconds))
        start += warm + seconds + rest
    return found


def made(parts: Sequence[Part], kinds: Sequence[Kind], seed: int, block_tokens: int) -> Trace:
    """All parts as one trace. Different parts share no block."""

    def rows() -> Iterator[Request]:
        for index, part in enumerate(parts):
            trace = sessions(kinds, rate=part.rate, seed=1000 * seed + index, block_tokens=block_tokens)
            for request in trace.duration(part.last - part.start):
                blocks = tuple(_renamed(key, index) for key in request.blocks)
                yield dataclasses.replace(request, arrival=part.start + request.arrival, blocks=blocks)

    about = ", ".join(f"{part.rate:.3g} requests/s until {part.last:.0f} s" for part in parts)
    name = f"generated sessions of {', '.join(kind.name for kind in kinds)}"
    return Trace(name, block_tokens, rows, (about, f"seed {seed}"))


def singles(count: int, every: float, prompts: Sequence[int], output_tokens: int, block_tokens: int) -> Trace:
    """Alone each, `every` seconds apart, nothing shared; prompts as long as these, by turns."""

    def rows() -> Iterator[Request]:
        for number in range(count):
            prompt_tokens = prompts[number % len(prompts)]
            blocks = tuple(_key(b"single %d %d" % (number, i)) for i in range(prompt_tokens // block_tokens))
            yield Request(number * every, prompt_tokens, output_tokens, blocks)

    return Trace("single requests", block_tokens, rows, (f"{count}, one every {every:g} s",))


def _renamed(key: bytes, part: int) -> bytes:
    return _key(key + b"%d" % part)


def _key(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
