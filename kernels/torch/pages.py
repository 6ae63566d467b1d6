"""The page tensor, and canonical strips as a tensor.

Page tensor: [layers, 2 (k, v), kv_heads, pages, block_tokens, head_dim]. The heads stand before the pages, so that
gathering a sequence's pages gives attention its [kv_heads, tokens, head_dim] without a second copy.
Canonical strips (design, KV layout): per block [layer][k|v][kv_head][token][head_dim], dense. `gather` and `scatter` go
between the two.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

import torch
from pyengine.kernels.memory import too_many_pages

Strips = npt.NDArray[np.uint8]


def allocate(
    layers: int, kv_heads: int, pages: int, block_tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A zeroed page tensor. Raises MemoryError saying how much was needed."""
    shape = (layers, 2, kv_heads, pages, block_tokens, head_dim)
    needed = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    try:
        if device.type == "cpu":
            return torch.from_numpy(_zeroed(needed)).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError, OSError, OverflowError) as error:
        raise too_many_pages(pages, needed, str(device)) from error


def _zeroed(size: int) -> npt.NDArray[np.uint8]:
    """Memory that the kernel hands out page by page, when it is used: a worker starts 1.5 s sooner per 2 GiB.

    Small pages. One KV page lies in as many places as there are layers and heads; of huge ones, which numpy asks for,
    the first use of a KV page zeroed 180 at once: a worker of SmolLM2 stood still for 0.85 s whenever its requests
    reached another 512 pages. A decode step is as fast with either.
    """
    memory = mmap.mmap(-1, size)
    # A system without huge pages knows no such advice, and needs none.
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def as_blocks(cache: torch.Tensor, strips: Strips) -> torch.Tensor:
    """Strips of whole blocks, uint8 [blocks, strips, strip_bytes], as a tensor [blocks, layers, 2, kv_heads,
    block_tokens, head_dim] over the same memory. Raises ValueError if they are not those of this page tensor.
    """
    layers, two, kv_heads, _, block_tokens, head_dim = cache.shape
    expected = (layers * two * kv_heads, block_tokens * head_dim * cache.element_size())
    if strips.dtype != np.uint8 or strips.shape[1:] != expected or not strips.flags.c_contiguous:
        raise ValueError(f"strips must be contiguous uint8 [blocks, {expected[0]}, {expected[1]}], not {strips.shape}")
    if not strips.flags.writeable:
        raise ValueError("strips must be writable: torch has no read-only tensors")
    flat = torch.from_numpy(strips.reshape(-1)).view(cache.dtype)
    return flat.view(strips.shape[0], layers, two, kv_heads, block_tokens, head_dim)
