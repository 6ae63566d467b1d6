"""The contracts as JAX has them. What each computes stands in `kernels/reference.py`, under the same names.

Everything is traced: a step is one jitted function with shapes of few sizes, so what the host tells (`Sequences`,
`Draws`) comes as arrays that are padded (`padding.py`), and is checked before. Padding changes no result: sequences of
length 0, slots and pages of -1, rows that belong to nobody.

Nothing is written in place. Who calls hands `cache` over donated and goes on with the one that is returned: XLA then
writes into the same memory. The page tensor is whole, [layers, 2 (k, v), K, P, B, D], with the layer as an argument,
so that a scan over layers carries it: one that had a layer's part as its input would copy it in every step. It and
strips have the type of the pages (`pages.page_dtype`).

Arrays are those of one device. With heads over several, a step is a `jax.shard_map`: no kernel needs another's heads.
"""

from __future__ import annotations

from typing import Protocol

import jax
from pyengine.kernels.inputs import Draws, Sequences, Shapes

ALL = slice(None)


class Attend(Protocol):
    """Attention of one step, planned; the same for each of its layers. A pytree, so that it may go through a jit."""

    def __call__(self, query: jax.Array, cache: jax.Array, layer: jax.Array | int) -> jax.Array:
        """query: [T, H, D]; cache: [layers, 2, K, P, B, D] -> [T, H, D]."""
        ...


class Kernels(Protocol):
    """One implementation of every contract: a module, or a choice of several.

    Types are fp32, bf16 and fp16; sums are made in float32. Statements about size are static: the number of rows T that
    a plan of attention is for, the window, the ranges of layers and heads.
    """

    def multiply(
        self, x: jax.Array, weights: jax.Array, layer: jax.Array | int, outputs: int, wide: bool = False
    ) -> jax.Array:
        """x @ W.T for one of several constant matrices W [outputs, inputs], in x's type or, if wide, in float32.

        x: [T, inputs]; weights: that one's, [inputs, outputs], or all of them as an implementation packs them (`ffi`).
        """
        ...

    def rms_norm(
        self, x: jax.Array, weight: jax.Array, eps: float, residual: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """(normed, stream)."""
        ...

    def rope_write(
        self,
        qkv: jax.Array,
        cache: jax.Array,
        layer: jax.Array | int,
        cosines: jax.Array,
        sines: jax.Array,
        slots: jax.Array,
        norms: tuple[jax.Array, jax.Array, float] | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """(queries, cache). slots: int32 [T]."""
        ...

    def swiglu(self, gate_up: jax.Array) -> jax.Array: ...

    def prefill_attention(self, sequences: Sequences, rows: int, window: int | None = None) -> Attend: ...

    def decode_attention(self, sequences: Sequences, rows: int, window: int | None = None) -> Attend: ...

    def gather(self, cache: jax.Array, pages: jax.Array, layers: slice = ALL, heads: slice = ALL) -> jax.Array:
        """Strips [N, layers of the range, 2, heads of the range, B, D]; anything for pages of -1."""
        ...

    def scatter(
        self, cache: jax.Array, pages: jax.Array, strips: jax.Array, layers: slice = ALL, heads: slice = ALL
    ) -> jax.Array:
        """The cache. Strips of pages of -1 go nowhere. Raises ValueError for strips of another range."""
        ...

    def sample(self, logits: jax.Array, draws: Draws) -> jax.Array:
        """int32 [S]. logits: float32 [S, vocab]; draws: float32 and int32."""
        ...

    def shape_logits(self, logits: jax.Array, shapes: Shapes) -> jax.Array:
        """The logits."""
        ...

    def logprobs(
        self, logits: jax.Array, tokens: jax.Array, count: int
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """count is static; ids and ranks are int32."""
        ...


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
