"""Matrix products with constant weights: x -> x @ W.T, where W is several weights one above the other (Q, K and V).

Three implementations keep one contract. The first that can do it on this machine is taken, which is logged once. They
are not chosen by measuring at start: that would give other bits at the next one (`bench/kernels.py` compares them).

* `Native`: ours in Rust (`rust/linear`), on CPUs with AVX2, AVX-512 or NEON. Weights are packed once and streamed at
  the speed of memory for a few rows. A row of the result does not depend on the rows beside it, to the last bit.
* `OneDnn`: PyTorch's library with weights packed once, by operators that are private to PyTorch.
* `Plain`: `F.linear`, on any device.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, ClassVar, Literal, Protocol

import numpy.typing as npt

import torch
import torch.nn.functional as F
from pyengine._native import LINEAR_LEVELS, LinearWeights
from pyengine.kernels.torch import threads

log = logging.getLogger(__name__)


class Product(Protocol):
    """One implementation, holding its weights."""

    name: ClassVar[str]

    @staticmethod
    def can(weight: torch.Tensor) -> bool:
        """True if it computes with such weights on this machine."""

    def __init__(self, weights: tuple[torch.Tensor, ...], packed: torch.dtype) -> None:
        """weights: [out, in] each, float32 or `packed`; packed: what they are rounded to."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor: ...


class Native:
    """`rust/linear`. The weights given are not kept."""

    name: ClassVar[str] = "native"

    @staticmethod
    def can(weight: torch.Tensor) -> bool:
        return (
            weight.device.type == "cpu"
            and weight.dtype in (torch.float32, torch.bfloat16)
            and LINEAR_LEVELS[-1] != "scalar"
        )

    def __init__(self, weights: tuple[torch.Tensor, ...], packed: torch.dtype, level: str | None = None) -> None:
        """level: one of LINEAR_LEVELS, None: the best."""
        self._threads = threads.pool()
        parts = [(_numbers(weight.detach().contiguous()), weight.shape[0]) for weight in weights]
        dtype: Literal["bfloat16", "float32"] = "bfloat16" if packed == torch.bfloat16 else "float32"
        self._weights = LinearWeights(parts, weights[0].shape[1], dtype, self._threads)
        self._inputs, self._outputs = self._weights.inputs, self._weights.outputs
        self._level = level

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        rows = x.shape[0]
        if x.dtype is torch.bfloat16:
            # It sums in float32 anyway, and rounds once.
            product = self(x.float(), None).to(x.dtype)
            return product if out is None else out.copy_(product)
        if out is None:
            out = torch.empty((rows, self._outputs))
        # Addresses carry no shapes: what is wrong here would be read or written beyond the end.
        if x.shape[1] != self._inputs or out.shape != (rows, self._outputs):
            raise ValueError(f"[{self._inputs}] -> [{self._outputs}], not {tuple(x.shape)} -> {tuple(out.shape)}")
        if x.dtype is not torch.float32 or out.dtype is not torch.float32 or not x.is_cpu or not out.is_cpu:
            raise ValueError(f"float32 on the CPU, not {x.dtype} on {x.device} -> {out.dtype} on {out.device}")
        if x.stride(1) != 1 and self._inputs > 1:
            x = x.contiguous()
        if out.stride(1) != 1 and self._outputs > 1:
            raise ValueError("the rows of the result are not dense")
        self._weights.multiply(
            x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), rows, self._threads, self._level
        )
        return out


class OneDnn:
    """PyTorch's oneDNN. On AVX2 CPUs the BLAS behind `F.linear` packs the whole weight at every call, for the 2 to 128
    rows of a decode batch as dear as the product. For a single row nothing is packed, but a packed copy is read at
    twice the rate of a mapped file.
    """

    name: ClassVar[str] = "onednn"

    @staticmethod
    def can(weight: torch.Tensor) -> bool:
        """The packing operators are private to PyTorch (its compiler uses them): without them all still works."""
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        )

    def __init__(self, weights: tuple[torch.Tensor, ...], packed: torch.dtype) -> None:
        whole = torch.cat([_rounded(weight, packed) for weight in weights])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(whole, None)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return product if out is None else out.copy_(product)


class Plain:
    """`F.linear`."""

    name: ClassVar[str] = "torch"

    @staticmethod
    def can(weight: torch.Tensor) -> bool:
        return True

    def __init__(self, weights: tuple[torch.Tensor, ...], packed: torch.dtype) -> None:
        self._weight = torch.cat([_rounded(weight, packed) for weight in weights])

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        product = F.linear(x, self._weight)
        return product if out is None else out.copy_(product)


#: The best first.
PRODUCTS: tuple[type[Native] | type[OneDnn] | type[Plain], ...] = (Native, OneDnn, Plain)


class Scratch:
    """Memory for the results of products that follow one another, each from the one before: two pieces in turn.

    So nothing is allocated once a step has had as many rows. A result is there until the product after the next.
    """

    #: Shapes whose views are kept: a model's products for some numbers of rows.
    VIEWS = 256

    def __init__(self) -> None:
        self._pieces = [torch.empty(0), torch.empty(0)]
        self._views: dict[tuple[int, int, int], torch.Tensor] = {}
        self._turn = 0

    def take(self, rows: int, width: int) -> torch.Tensor:
        """float32 [rows, width], holding anything."""
        self._turn ^= 1
        key = (self._turn, rows, width)
        view = self._views.get(key)
        return self._view(key) if view is None else view

    def _view(self, key: tuple[int, int, int]) -> torch.Tensor:
        turn, rows, width = key
        if self._pieces[turn].numel() < rows * width:
            # Up to the next power of two of rows: a decode batch that grows by one does not allocate each time.
            self._pieces[turn] = torch.empty((1 << (rows - 1).bit_length()) * width)
            self._views.clear()
        if len(self._views) >= self.VIEWS:
            self._views.clear()
        self._views[key] = self._pieces[turn][: rows * width].view(rows, width)
        return self._views[key]


class Linear:
    """x -> x @ W.T by the first of PRODUCTS that can."""

    def __init__(
        self, *weights: torch.Tensor, packed: torch.dtype | None = None, scratch: Scratch | None = None
    ) -> None:
        """weights: [out, in] each, of one dtype. packed: the dtype that they are rounded to, their own by default.
        scratch: where results go, if the product chosen can write there (`Native`).
        """
        chosen = next(product for product in PRODUCTS if product.can(weights[0]))
        _log_once(chosen.name)
        self._product: Product = chosen(weights, packed or weights[0].dtype)
        self._scratch = scratch if chosen is Native else None
        self._outputs = sum(len(weight) for weight in weights)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [rows, in] -> [rows, out], written to `out` if there is one."""
        if out is None and self._scratch is not None:
            out = self._scratch.take(len(x), self._outputs)
        return self._product(x, out)


@functools.cache
def _log_once(name: str) -> None:
    detail = f" ({LINEAR_LEVELS[-1]})" if name == Native.name else ""
    log.info("products with constant weights: %s%s, %d threads", name, detail, threads.pool().count)


def _numbers(weight: torch.Tensor) -> npt.NDArray[Any]:
    """The weight's memory; numpy knows no bfloat16."""
    numbers: npt.NDArray[Any] = (weight.view(torch.int16) if weight.dtype == torch.bfloat16 else weight).numpy()
    return numbers


def _rounded(weight: torch.Tensor, packed: torch.dtype) -> torch.Tensor:
    return weight.to(packed).to(weight.dtype)
