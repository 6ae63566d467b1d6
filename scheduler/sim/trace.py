"""Requests of a trace: what comes, when, and which blocks its prompt shares with others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """arrival: seconds from the trace's start. blocks: 16-byte keys of the prompt's full blocks, equal prefix: equal
    keys. output_tokens: length of the answer, 1 or more (a simulator knows it, no scheduler does).
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[bytes, ...]
    tenant: str = ""
    priority: int = 0
