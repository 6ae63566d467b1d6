"""Prompts for a trace that has none: equal block keys give equal tokens, so a live cluster meets the same prefixes."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from ..sim.trace import Request

#: Token ids: printable ASCII of a byte tokenizer, ordinary tokens of any other, and special ones of none.
FIRST, COUNT = 32, 95


def prompt(request: Request, number: int, block_tokens: int, salt: bytes = b"") -> npt.NDArray[np.int64]:
    """[prompt_tokens] ids. What no full block covers is this request's alone: drawn from its number in the trace.

    salt: another one makes other tokens throughout, so that a cluster which has seen the trace finds nothing of it.
    """
    parts = [_tokens(salt + key, block_tokens) for key in request.blocks]
    missing = request.prompt_tokens - block_tokens * len(parts)
    if missing > 0:
        parts.append(_tokens(salt + b"the end of request %d" % number, missing))
    return np.concatenate(parts)[: request.prompt_tokens] if parts else np.zeros(0, np.int64)


def _tokens(key: bytes, count: int) -> npt.NDArray[np.int64]:
    # 16 bits for each: the ids are uniform to 2 in a thousand, and blocks differ as their keys do.
    words = np.frombuffer(hashlib.shake_128(key).digest(2 * count), dtype="<u2")
    return FIRST + words.astype(np.int64) % COUNT
