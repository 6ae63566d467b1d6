"""Traces made here: sessions of chat and of agents. Seeded and endless; few parameters.

A session's requests come one after the other; each prompt is the one before, its answer, and something new. All
sessions of a kind begin with the same system prompt. Lengths are log-normal, numbers of turns geometric, sessions come
at random (Poisson), and so does what its user says next (exponential, from request to request).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from .chains import ROOT, chain
from .trace import Request, Trace, TraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Log-normal, in tokens, 1 or more. sigma: of the logarithm; 0: all alike."""

    mean: float
    sigma: float = 0.0

    def draw(self, random: random.Random) -> int:
        return max(round(self.mean * math.exp(random.gauss(0.0, self.sigma) - self.sigma**2 / 2)), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Sessions of one kind. share: of all requests, as a weight. system: tokens of the prompt that all begin with.
    first: of what the first turn adds to it, turn: later ones, output: of answers. turns: mean number. think: mean
    seconds from a request to the session's next. longest: tokens of a prompt; a session that would pass it is over.
    """

    name: str
    share: float
    system: int
    first: Lengths
    output: Lengths
    turn: Lengths = Lengths(mean=1)
    turns: float = 1.0
    think: float = 60.0
    longest: int = 131_072

    def __post_init__(self) -> None:
        if not (
            self.share > 0 and self.system >= 0 and self.turns >= 1 and self.think > 0 and self.longest > self.system
        ):
            raise TraceError(
                f"sessions of kind {self.name!r} are impossible: share and think must be above 0, turns 1 or more, and "
                "longest above system"
            )


#: The repository's own small trace: chat with short turns, and agents whose long prompts get short answers.
CHAT = Kind(
    name="chat",
    share=0.6,
    system=256,
    first=Lengths(mean=600, sigma=1.0),
    turn=Lengths(mean=200, sigma=0.8),
    output=Lengths(mean=150, sigma=0.6),
    turns=4.0,
    think=20.0,
    longest=8192,
)
AGENT = Kind(
    name="agent",
    share=0.4,
    system=2048,
    first=Lengths(mean=700, sigma=0.5),
    turn=Lengths(mean=300, sigma=0.8),
    output=Lengths(mean=12, sigma=0.8),
    turns=2.0,
    think=4.0,
    longest=8192,
)

#: The paper's tool&agent trace (23,608 requests in an hour) was not published: only the first 1,000 requests of an
#: earlier one, with the same three kinds. Two are agents of one turn behind a system prompt of 12 and of 5 blocks;
#: shares, lengths and answers are those of these requests. The third is chat, whose first prompts and turns are as long
#: as in the conversation trace of the same authors, and whose number of turns is what gives the whole the hit rate that
#: the paper states.
TOOL_AGENT = (
    Kind(
        name="chat",
        share=0.49,
        system=512,
        first=Lengths(mean=10_000, sigma=1.2),
        turn=Lengths(mean=2_270, sigma=1.3),
        output=Lengths(mean=343, sigma=0.8),
        turns=1.7,
        think=100.0,
    ),
    Kind(
        name="agent a",
        share=0.36,
        system=12 * 512,
        first=Lengths(mean=608, sigma=0.6),
        output=Lengths(mean=14, sigma=1.75),
    ),
    Kind(
        name="agent b",
        share=0.15,
        system=5 * 512,
        first=Lengths(mean=791, sigma=0.45),
        output=Lengths(mean=20, sigma=0.2),
    ),
)
TOOL_AGENT_RATE = 23_608 / 3_600


def sessions(
    kinds: Sequence[Kind] = (CHAT, AGENT), *, rate: float, seed: int, block_tokens: int = 16, name: str = ""
) -> Trace:
    """An endless trace with so many requests per second: use `limit` or `duration`. Same arguments, same trace."""
    if not kinds or not 0.0 < rate < math.inf or block_tokens < 1:
        raise TraceError("sessions need a kind, a rate above 0 requests per second, and blocks of 1 token or more")
    kinds = tuple(kinds)
    about = f"{rate:g} requests/s, seed {seed}"
    what = name or f"generated sessions of {', '.join(kind.name for kind in kinds)}"
    return Trace(what, block_tokens, lambda: _generate(kinds, rate, seed, block_tokens), (about,))


def tool_agent(seed: int, block_tokens: int = 512) -> Trace:
    """An hour like the paper's tool&agent trace, reconstructed (see TOOL_AGENT): what it says of that trace holds for
    this one only as far as the two are alike.
    """
    name = "RECONSTRUCTION of the tool&agent trace"
    trace = sessions(TOOL_AGENT, rate=TOOL_AGENT_RATE, seed=seed, block_tokens=block_tokens, name=name)
    return trace.duration(3600.0)


class _Session:
    """keys: of full blocks so far. tokens: of the prompts and answers so far."""

    def __init__(self, kind: Kind, number: int, keys: list[bytes]) -> None:
        self.kind = kind
        self.keys = keys
        self.tokens = kind.system
        self.number = number
        self.begun = False

    def request(self, at: float, draw: random.Random, block_tokens: int) -> Request | None:
        """The next one; None if it would be longer than prompts may be. A first one is cut."""
        kind = self.kind
        prompt = self.tokens + (kind.turn if self.begun else kind.first).draw(draw)
        if prompt > kind.longest:
            if self.begun:
                return None
            prompt = kind.longest
        self.begun = True
        full = prompt // block_tokens
        while len(self.keys) < full:
            # Number and index name a block; those of system prompts have number 0.
            self.keys.append(chain(self.keys[-1] if self.keys else ROOT, self.number << 32 | len(self.keys)))
        output = kind.output.draw(draw)
        self.tokens = prompt + output
        return Request(at, prompt, output, tuple(self.keys[:full]), kind.name)


def _generate(kinds: tuple[Kind, ...], rate: float, seed: int, block_tokens: int) -> Iterator[Request]:
    shares = sum(kind.share for kind in kinds)
    draw = random.Random(seed)
    numbers = count(1)
    # Ties go to whoever was put in first.
    order = count()
    upcoming: list[tuple[float, int, _Session | int]] = []
    systems: list[list[bytes]] = []
    gaps: list[float] = []
    for index, kind in enumerate(kinds):
        keys: list[bytes] = []
        for position in range(kind.system // block_tokens):
            keys.append(chain(keys[-1] if keys else ROOT, index << 32 | position))
        systems.append(keys)
        gaps.append(kind.turns * shares / (rate * kind.share))
        heapq.heappush(upcoming, (draw.expovariate(1.0) * gaps[index], next(order), index))
    while True:
        at, _, what = heapq.heappop(upcoming)
        if isinstance(what, int):
            heapq.heappush(upcoming, (at + draw.expovariate(1.0) * gaps[what], next(order), what))
            session = _Session(kinds[what], len(kinds) + next(numbers), list(systems[what]))
        else:
            session = what
        request = session.request(at, draw, block_tokens)
        if request is None:
            continue
        yield request
        if draw.random() >= 1.0 / session.kind.turns:
            heapq.heappush(upcoming, (at + draw.expovariate(1.0) * session.kind.think, next(order), session))
