"""What a modelled worker knows of a part of an attempt, and what its prompts and answers are made of.

A request's tokens are its number, so that the keys of blocks which answers fill are its own; the last is EOS, so that
nobody knows an answer's length before its end.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..batcher import Sequence
from ..types import KEY_BYTES, SamplingParams, tenant_number
from .node import TIERS

if TYPE_CHECKING:
    from .gateway import Work

#: The token that ends an answer.
EOS = 1 << 31
#: The parent of every first block.
ROOT = bytes(KEY_BYTES)


@dataclass(slots=True, eq=False)
class Job:
    """One part of one attempt here.

    tag: of what it holds in this node's pool, for which a load waits; kept: of what it has stored there while that is
    pushed. coming_at: when all that the plan's sources offer is expected to be there. sent, lacking: tokens of the
    prompt on their way to the decode node, and those from which on it lacks them. flows: transfers under way; there_at:
    not earlier is all of it there. joined: it decodes. tiers: by block, where it was found.
    """

    work: Work
    sequence: Sequence
    tag: int = 0
    kept: list[int] = field(default_factory=list)
    brought: bool = False
    opened: bool = False
    coming_at: float = 0.0
    sent: int = 0
    lacking: int = 0
    flows: set[int] = field(default_factory=set)
    there_at: float = 0.0
    computed: bool = False
    joined: bool = False
    stored: int = 0
    tiers: bytearray = field(default_factory=bytearray)
    reused: list[int] = field(default_factory=lambda: [0] * len(TIERS))
    #: Ranges of ends of this worker's steps at which it got a token: [first, last) each.
    tokens: list[list[int]] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens of its answer that are still to come."""
        return self.work.request.output_tokens - self.sequence.generated


def sequence_of(work: Work, limit: int) -> Sequence:
    """A part as the Batcher knows it. limit: tokens that the client allows."""
    slo, arrived = work.slo, work.request.request.arrival
    return Sequence(
        id=work.id,
        tokens=[work.request.number] * work.prompt_tokens,
        prompt_tokens=work.prompt_tokens,
        generated_before=work.generated,
        keys=[work.keys[i : i + KEY_BYTES] for i in range(0, len(work.keys), KEY_BYTES)],
        root=ROOT,
        sampling=sampling(limit),
        first_only=work.part == "prefill",
        handed_off=work.part == "decode",
        arrived=arrived,
        ttft=math.inf if slo.ttft is None else slo.ttft,
        tbt=math.inf if slo.tbt is None else slo.tbt,
        deadline=math.inf if slo.deadline is None else arrived + slo.deadline,
        priority=work.priority,
        tenant=tenant_number(work.tenant),
    )


def times(ends: array[float], tokens: Items[Items[int]]) -> npt.NDArray[np.float64]:
    """When the tokens of these ranges of steps came."""
    return np.concatenate([np.frombuffer(ends, np.float64)[first:last] for first, last in tokens])


def token(work: Work, index: int) -> int:
    """The token of that number of an answer."""
    return EOS if index + 1 >= work.request.output_tokens else work.request.number


def own_key(parent: bytes, number: int) -> bytes:
    """Of a full block behind `parent` that only the request of this number has."""
    return hashlib.blake2b(parent + number.to_bytes(8, "little"), digest_size=KEY_BYTES).digest()


def key_of(parent: bytes, tokens: list[int]) -> bytes:
    """Of a block that fills while a request decodes: all its tokens are the request's number."""
    return own_key(parent, tokens[0])


@lru_cache
def sampling(limit: int) -> SamplingParams:
    """All answers are sampled alike; only their end differs, and that is known to nobody."""
    return SamplingParams(temperature=0.0, seed=0, max_tokens=limit)
