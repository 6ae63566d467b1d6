"""Matrix products with constant weights.

On AVX2 CPUs the BLAS behind `F.linear` packs the whole weight at every call; for the 2 to 128 rows of a decode batch or
a prefill chunk that costs as much as the product. oneDNN takes weights packed once: 1.2 to 2 times faster when measured
(SmolLM2's head at 16 rows: 68 -> 30 ms on one core). For a single row nothing is packed, and `F.linear` is faster.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """x -> x @ W.T, where W is several weights one above the other (Q, K and V; gate and up)."""

    def __init__(self, *weights: torch.Tensor) -> None:
        """weights: [out, in] each; on the CPU they are kept as they are (mapped) beside their packed copy."""
        self._packed: torch.Tensor | None = None
        if _can_pack(weights[0]):
            self._parts = weights
            self._packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(weights), None)
        else:
            self._parts = (weights[0] if len(weights) == 1 else torch.cat(weights),)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, in], dense -> [rows, out]."""
        if self._packed is not None and x.shape[0] > 1:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
            return out
        parts = [F.linear(x, part) for part in self._parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _can_pack(weight: torch.Tensor) -> bool:
    """The packing operators are private to PyTorch (its compiler uses them): without them all still works."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
