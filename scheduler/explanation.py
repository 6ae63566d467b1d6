"""Why a request went where it went, as plain data: what `conductor explain` shows, live or simulated."""

from __future__ import annotations

import msgspec

#: As the attempt of a request that nobody has sent.
UNSENT = -1


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the decision saw it. Seconds, tokens and pages as in `View` and `Ask`; blocks of this prompt.

    prefills, decodes, inlines: which parts it might have been given. masked: why not the others, "" if nothing was in
    the way. device, dram, ssd: leading blocks in its pages, and of its node's leading blocks those in DRAM and on SSD
    only. coming: leading blocks that it will have after `coming_seconds`, as it computes them just now; 0: none. ttft:
    to the first token, were it chosen to prefill, of which load, transfer, queue and compute are the parts. handoff: to
    move the prompt's KV there from the worker that was chosen to prefill. terms: the policy's own, by name.
    """

    worker: str
    node: str
    role: str
    prefills: bool
    decodes: bool
    inlines: bool
    masked: str
    device: int
    dram: int
    ssd: int
    coming: int
    coming_seconds: float
    load: float
    transfer: float
    queue: float
    compute: float
    ttft: float
    tbt: float
    handoff: float
    running: int
    free_pages: int
    measured: bool
    correction: float
    terms: dict[str, float]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One decision. at: seconds on the conductor's clock. blocks: of the prompt that may be reused; best: of these,
    leading ones that somebody holds. prefill, decode: the choice; "" if the request was refused, and `refused` says
    why. fetch: the prefill node fetches what it lacks. predicted_ttft, predicted_tbt: seconds. why: the plan's own
    words.
    """

    gateway: str
    request: int
    attempt: int
    at: float
    policy: str
    prompt_tokens: int
    blocks: int
    best: int
    prefill: str = ""
    decode: str = ""
    fetch: bool = False
    refused: str = ""
    predicted_ttft: float = -1.0
    predicted_tbt: float = -1.0
    why: str = ""
    candidates: tuple[Candidate, ...] = ()
