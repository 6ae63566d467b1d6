"""What the host tells the kernels of a step, in numpy: which sequences look at which pages, how tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sequences:
    """S sequences, whose new tokens are rows of one query, one sequence after the other.

    rows: int32 [S + 1], begins with 0: sequence s has the rows rows[s] .. rows[s + 1] - 1, maybe none. What the query
    has behind rows[S] belongs to nobody.
    lengths: int32 [S], tokens whose KV is in the pages, the new ones included: they are the last of them. 0 is a
    sequence that is not there, whose rows see nothing (a captured step keeps its shape).
    tables: int32 [S, N], each one's pages in order; what is not needed for its length may be anything.
    """

    rows: I32
    lengths: I32
    tables: I32

    @classmethod
    def of(cls, counts: Sequence[int], lengths: Sequence[int], pages: Sequence[npt.NDArray[np.integer]]) -> Sequences:
        """counts: new tokens of each sequence; pages: each one's pages, as many as there are."""
        tables = np.zeros((len(counts), max(map(len, pages), default=0)), np.int32)
        for row, own in zip(tables, pages, strict=True):
            row[: len(own)] = own
        sequences = cls(np.cumsum([0, *counts], dtype=np.int32), np.array(lengths, np.int32), tables)
        sequences.check()
        return sequences

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def counts(self) -> I32:
        """New tokens of each sequence: int32 [S]."""
        return np.diff(self.rows)

    def check(self) -> None:
        """Asserts that the three arrays fit each other."""
        assert self.rows.shape == (len(self) + 1,) and self.tables.ndim == 2 and len(self.tables) == len(self)
        assert self.rows[0] == 0 and (self.counts >= 0).all(), f"rows must begin with 0 and never fall: {self.rows}"
        fits = (self.lengths >= self.counts) | (self.lengths == 0)
        assert fits.all(), f"{self.lengths} tokens with {self.counts} new ones among them"

    def check_pages(self, pages: int, page_tokens: int) -> None:
        """Raises ValueError if a sequence has too few pages, or names one that does not exist."""
        needed = -(-self.lengths // page_tokens)
        width = self.tables.shape[1]
        if len(self) and needed.max() > width:
            raise ValueError(
                f"{self.lengths.max()} tokens need {needed.max()} pages of {page_tokens}; the table has {width}"
            )
        used = self.tables[np.arange(width) < needed[:, None]]
        if used.size and not 0 <= used.min() <= used.max() < pages:
            raise ValueError(f"pages {used.min()}..{used.max()} are named, there are 0..{pages - 1}")


@dataclass(frozen=True)
class Draws:
    """How S rows of logits become tokens. All [S]; see `reference.sample`.

    temperature: 0 takes the likeliest; min_p: 0 is off; top_k: 0 is off; top_p: 1 is off; uniform: random numbers in
    [0, 1), one per row.
    """

    temperature: F64
    min_p: F64
    top_k: I32
    top_p: F64
    uniform: F64

    def __len__(self) -> int:
        return len(self.temperature)


def _no_ids() -> I32:
    return np.empty(0, np.int32)


def _nothing() -> F32:
    return np.empty(0, np.float32)


@dataclass(frozen=True, eq=False)
class Shaping:
    """What is done to one row of logits before a token is chosen, in this order: see `reference.shape_logits`.

    seen: int32 [m], ids whose logits are divided by `repetition` where they are positive, else multiplied by it.
    ids: int32 [n], add: float32 [n]: what is added to their logits, -inf for one that may not be chosen.
    mask: uint32 [ceil(vocab / 32)], allowed ids: bit i of word i // 32, from the lowest bit on; None: all are.
    No id is twice in `seen`, or in `ids`.

    logprobs: how many of the likeliest tokens are told beside the chosen one, by the logits as they were before.
    """

    ids: I32 = field(default_factory=_no_ids)
    add: F32 = field(default_factory=_nothing)
    seen: I32 = field(default_factory=_no_ids)
    repetition: float = 1.0
    mask: U32 | None = None
    logprobs: int | None = None


@dataclass(frozen=True)
class Shapes:
    """What is done to S rows of logits: their `Shaping`s as arrays, in which rows that ask for nothing are not named.

    seen_rows, seen: int32 [M], logits by row and id that `factors`, float32 [M], divide or multiply. rows, ids: int32
    [N], those to which `add`, float32 [N], is added. masked: int32 [K], rows that have a mask; masks: uint32 [K,
    words]. A row of S (in padded arrays) names none.
    """

    seen_rows: I32
    seen: I32
    factors: F32
    rows: I32
    ids: I32
    add: F32
    masked: I32
    masks: U32

    @classmethod
    def of(cls, shapings: Sequence[Shaping], vocab: int) -> Shapes:
        """Raises ValueError for an id or a mask that the vocabulary does not have."""
        masked = [row for row, shaping in enumerate(shapings) if shaping.mask is not None]
        shapes = cls(
            seen_rows=_rows_of([len(shaping.seen) for shaping in shapings]),
            seen=_joined([shaping.seen for shaping in shapings], np.int32),
            factors=np.repeat(
                np.array([shaping.repetition for shaping in shapings], np.float32),
                [len(shaping.seen) for shaping in shapings],
            ),
            rows=_rows_of([len(shaping.ids) for shaping in shapings]),
            ids=_joined([shaping.ids for shaping in shapings], np.int32),
            add=_joined([shaping.add for shaping in shapings], np.float32),
            masked=np.array(masked, np.int32),
            masks=np.zeros((len(masked), words(vocab)), np.uint32),
        )
        for ids in (shapes.seen, shapes.ids):
            if ids.size and not 0 <= ids.min() <= ids.max() < vocab:
                raise ValueError(f"ids {ids.min()}..{ids.max()} are to be shaped, the vocabulary has 0..{vocab - 1}")
        for number, row in enumerate(masked):
            mask = shapings[row].mask
            if mask is None or mask.shape != shapes.masks[number].shape:
                raise ValueError(f"a mask of a vocabulary of {vocab} has {words(vocab)} words: one has another shape")
            shapes.masks[number] = mask
        return shapes


def words(vocab: int) -> int:
    """Of a mask over so many ids."""
    return -(-vocab // 32)


def _rows_of(counts: list[int]) -> I32:
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def _joined(parts: Sequence[npt.NDArray[Any]], kind: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([*parts, np.empty(0, kind)], dtype=kind)
