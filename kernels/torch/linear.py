"""Matrix products with constant weights.

On AVX2 CPUs the BLAS behind `F.linear` packs the whole weight at every call; for the 2 to 128 rows of a decode batch or
a prefill chunk that costs as much as the product. oneDNN takes weights packed once: 1.2 to 2 times faster when measured
(SmolLM2's head at 16 rows: 68 -> 30 ms on one core). For a single row nothing is packed, but a packed copy is read at
twice the rate of a mapped file all the same: all products of a step of SmolLM2 32 -> 17.5 ms, two rows 54 -> 18.5 ms.
So a batch of one costs what the line through larger ones says, as `scheduler/cost.py` has it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """x -> x @ W.T, where W is several weights one above the other (Q, K and V; gate and up)."""

    def __init__(self, *weights: torch.Tensor) -> None:
        """weights: [out, in] each; where they can be packed, only the packed copy is kept."""
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._packed = _can_pack(whole)
        self._weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(whole, None) if self._packed else whole

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, in], dense -> [rows, out]."""
        if self._packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
            return out
        return F.linear(x, self._weight)


def _can_pack(weight: torch.Tensor) -> bool:
    """The packing operators are private to PyTorch (its compiler uses them): without them all still works."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
