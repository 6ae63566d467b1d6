"""Logprobs of prompts: what the model thought of each prompt token, told while the prompt is computed.

A chunk of a prompt has one row of logits, that of its last token. Here each of its tokens is a slice of its own, all
in one step: the slice of token i computes the same KV as the chunk does, and chooses token i + 1, to which it is
forced; what is told of a choice is told before anything shapes it. So every backend can do it that can decode, with
the same kernels. It costs a row of logits for each token, so chunks are small.
"""

from __future__ import annotations

import msgspec
import numpy as np

from pyengine.backend import I32, U32, Shaping, Slice
from pyengine.scheduler.batcher import Planned, Sequence
from pyengine.scheduler.messages import Work
from pyengine.scheduler.types import Logprobs, SamplingParams

#: Prompt tokens of one such sequence in a step: 64 rows of 150,000 logits are 38 MB, three times over.
AT_ONCE = 64
GREEDY = SamplingParams(temperature=0.0)
#: Added to a logit, it is the largest.
FORCE = np.full(1, 1e30, np.float32)
NONE = np.empty(0, np.int32)


class Told(msgspec.Struct, frozen=True):
    """Of the prompt tokens from position `first` on."""

    first: int
    logprobs: tuple[Logprobs, ...]


def wanted(work: Work) -> int | None:
    """How many of the likeliest tokens are told beside each of the prompt's; None: nothing is told by this worker."""
    return None if work.part == "decode" or work.generated else work.sampling.prompt_logprobs


def spread(planned: Planned, sequence: Sequence, wish: int | None) -> int:
    """Slices that it becomes: one, or one for each token, if these are the prompt's and are to be told of."""
    return 1 if wish is None or planned.start >= sequence.prompt_tokens else planned.count


def forced(planned: Planned, sequence: Sequence, ids: U32, table: I32, wish: int) -> list[Slice]:
    """All but the last slice of the sequence's own choice; that one too, if it chooses nothing.

    ids: of its tokens, uint32 [count]. table: its pages.
    """
    slices = []
    for at in range(planned.count - planned.sample):
        position = planned.start + at
        target = np.array([sequence.tokens[position + 1]], np.int32)
        shaping = Shaping(ids=target, add=FORCE, seen=NONE, repetition=1.0, mask=None, logprobs=wish)
        slices.append(Slice(ids[at : at + 1], position, table, GREEDY, None, shaping))
    return slices


def told(planned: Planned, sequence: Sequence, tokens: list[int], logprobs: list[Logprobs | None]) -> Told | None:
    """What the slices of `forced` have told. Raises ValueError if one of them chose what it was not forced to."""
    if not tokens:
        return None
    first = planned.start + 1
    if tokens != sequence.tokens[first : first + len(tokens)]:
        raise ValueError("the backend chose another token than the one it was forced to")
    found = [one for one in logprobs if one is not None]
    if len(found) != len(tokens):
        raise ValueError(f"the backend told of {len(found)} of {len(tokens)} tokens")
    return Told(first, tuple(found))
