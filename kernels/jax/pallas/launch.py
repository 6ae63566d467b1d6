"""How kernels are run, and what they may take of a TensorCore's memory."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

#: What the blocks of a kernel may take of VMEM, both buffers of each counted: half of what XLA gives one on a v5e, the
#: smallest (16 MiB of 128), as what is computed from them needs room too.
VMEM_BYTES = 8 << 20
#: Lanes of a register: a last axis is cut only at multiples of it.
LANES = 128


def interpreted() -> bool:
    """Whether kernels are interpreted, as on every device they are not for."""
    return jax.default_backend() != "tpu"


def rows_of(rows: int, row_bytes: int) -> int:
    """Rows of a block: as many as fit, at most 256, in multiples of 16 (a tile of bfloat16), or all there are."""
    fit = max(16, min(256, VMEM_BYTES // max(row_bytes, 1)) // 16 * 16)
    return min(rows, fit)


def result(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """What a kernel is to return."""
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
