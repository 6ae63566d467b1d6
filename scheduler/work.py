"""What a request costs, in seconds of workers: the common measure of fairness and of roles.

Prefill: the seconds its prompt takes, without what is cached. Decode: a worker that decodes as many sequences as it may
hold for their objective gives each a token per gap; one token then costs gap / sequences of it. So a worker's load is
work per second, whatever runs on it now, and 1 is as much as it can do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from .cluster import View
from .cost import F64

#: Gap between tokens (seconds) that is aimed at for who was promised none: five times as fast as people read.
EASY_GAP = 0.05


@dataclass(slots=True)
class Work:
    """Seconds of a prefill worker, and of a decode worker."""

    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.prefill + self.decode


Number = TypeVar("Number", float, F64)


def decode_gap(view: View, row: int, sequences: Number, context: Number) -> Number:
    """Seconds of a step of this worker that decodes so many sequences with `context` tokens together, and no prompt."""
    sequence, history = view.sequence_seconds.item(row), view.history_seconds.item(row)
    return view.base_seconds.item(row) + sequence * sequences + history * context


def most_sequences(view: View, row: int, context: float, gap: float) -> float:
    """Sequences of `context` tokens each that the worker can decode, a token per `gap` seconds for each; at least 1."""
    each = view.sequence_seconds.item(row) + view.history_seconds.item(row) * context
    by_time = max(gap - view.base_seconds.item(row), 0.0) / each if each > 0.0 else math.inf
    by_room = view.pages.item(row) * view.block_tokens / max(context, 1.0)
    return max(min(by_time, by_room, float(view.max_sequences.item(row))), 1.0)


def decode_seconds(view: View, row: int, context: float, output: float, tbt: float | None) -> float:
    """Work of decoding `output` tokens at this mean context, among others like it that fill the worker."""
    most = most_sequences(view, row, context, EASY_GAP if tbt is None else tbt)
    return output * decode_gap(view, row, most, most * context) / most
