"""How rows that are shaped choose their tokens, and what is told of the choices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pyengine.backend import NOTHING_LEFT, Shaping
from pyengine.kernels.inputs import Draws, Shapes
from pyengine.kernels.torch.contract import Kernels
from pyengine.scheduler.types import Logprobs

AS_IT_IS = Shaping()


class Told:
    """Logprobs of some rows on their device, in one tensor, so that they come to the host in one copy.

    numbers: float64 [rows, 2 + 2 * most] (ids are exact in it): chosen, rank, ids, values. counts: by row of the
    logits, how many of the likeliest each wants.
    """

    def __init__(self, numbers: torch.Tensor, counts: dict[int, int]) -> None:
        self.numbers = numbers
        self.counts = counts

    def read(self, numbers: torch.Tensor) -> dict[int, Logprobs]:
        """By row of the logits. numbers: the same on the host."""
        most = (numbers.shape[-1] - 2) // 2
        read = {}
        for (row, count), (chosen, rank, *top) in zip(self.counts.items(), numbers.tolist(), strict=True):
            ids, values = top[:count], top[most : most + count]
            read[row] = Logprobs(chosen, int(rank), tuple(zip(map(int, ids), values, strict=True)))
        return read


def choose_shaped(
    kernels: Kernels, logits: torch.Tensor, draws: Draws, shapings: Sequence[Shaping | None]
) -> tuple[torch.Tensor, Told | None]:
    """(tokens int64 [S], what is told). logits: float32 [S, vocab], written; shapings: one for each row."""
    vocab = logits.shape[-1]
    counts = {
        row: min(shaping.logprobs, vocab)
        for row, shaping in enumerate(shapings)
        if shaping is not None and shaping.logprobs is not None
    }
    asking = torch.tensor([*counts], dtype=torch.int64, device=logits.device)
    own = logits[asking] if counts else None  # a copy: what is told is of the logits as the model made them
    kernels.shape_logits(logits, Shapes.of([shaping or AS_IT_IS for shaping in shapings], vocab))
    tokens = kernels.sample(logits, draws)
    nothing_left = (tokens < 0) & (logits.amax(-1) == float("-inf"))
    tokens = tokens.masked_fill(nothing_left, NOTHING_LEFT)
    if own is None:
        return tokens, None
    chosen, ranks, ids, values = kernels.logprobs(own, tokens[asking], max(counts.values()))
    columns = (chosen.unsqueeze(-1), ranks.unsqueeze(-1), ids, values)
    return tokens, Told(torch.cat([column.double() for column in columns], -1), counts)
