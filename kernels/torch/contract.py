"""The contracts as PyTorch has them. What each computes stands in `kernels/reference.py`, under the same names.

Tensors are dense in their last axis; an implementation takes other strides or raises ValueError. `kv`, `cache`,
`strips`, the residual and logits that are shaped are written in place. Types are fp32, bf16 and fp16; sums are made in
float32 at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from pyengine.kernels.inputs import Draws, Sequences, Shapes

ALL = slice(None)


@dataclass(frozen=True)
class Tables:
    """`Sequences` on a device: rows int32 [S + 1], lengths int32 [S], tables int32 [S, N], as there."""

    rows: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor


class Attend(Protocol):
    """Attention of one step, planned; the same for each of its layers."""

    def __call__(self, query: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """query: [T, H, D]; kv: [2, K, P, B, D] -> [T, H, D]."""
        ...


class DecodeTables(Protocol):
    """`decode_tables`: what kernels have beside the contracts whose launches a graph can repeat.

    It plans decode attention of sequences that have one row each, one behind the other. The host knows nothing else of
    them: `tables` is read when attention is computed, so it may hold something else each time. What it computes is
    what `decode_attention` does for `Sequences` with these numbers. Nobody has checked the pages.
    """

    def __call__(self, tables: Tables, kv: torch.Tensor, window: int | None = None) -> Attend: ...


class Kernels(Protocol):
    """One implementation of every contract: a module, or a choice of several."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rope_write(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        slots: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    ) -> torch.Tensor: ...

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    def prefill_attention(self, sequences: Sequences, kv: torch.Tensor, window: int | None = None) -> Attend: ...

    def decode_attention(self, sequences: Sequences, kv: torch.Tensor, window: int | None = None) -> Attend: ...

    def gather(
        self, cache: torch.Tensor, pages: torch.Tensor, strips: torch.Tensor, layers: slice = ALL, heads: slice = ALL
    ) -> None: ...

    def scatter(
        self, cache: torch.Tensor, pages: torch.Tensor, strips: torch.Tensor, layers: slice = ALL, heads: slice = ALL
    ) -> None: ...

    def sample(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor: ...

    def shape_logits(self, logits: torch.Tensor, shapes: Shapes) -> None: ...

    def logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]: ...


CONTRACTS = (
    "rms_norm",
    "rope_write",
    "swiglu",
    "prefill_attention",
    "decode_attention",
    "gather",
    "scatter",
    "sample",
    "shape_logits",
    "logprobs",
)
