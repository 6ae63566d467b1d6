"""The page tensor, and canonical strips as numpy arrays over it.

Page tensor: [layers, 2 (k, v), kv_heads, pages, block_tokens, head_dim], as in the reference. A TPU tiles the last two
axes (8 x 128 of float32, 16 x 128 of bfloat16): a page of 16 tokens of 128 dimensions is whole tiles, and one piece of
memory for each head, so that a copy of it is one DMA. Heads stand outside, so that a mesh shards an axis that no kernel
looks across. All layers are one array: a scan over layers carries it and writes into it in place.

**bfloat16 on a CPU is kept as its bits, uint16.** XLA computes bfloat16 in float32 there, writes into arrays included:
it would convert all pages to write a token (and quiet the NaNs of strips that are only moved).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from pyengine.kernels.memory import too_many_pages

Strips = npt.NDArray[np.uint8]


def allocate(
    layers: int,
    kv_heads: int,
    pages: int,
    block_tokens: int,
    head_dim: int,
    dtype: DTypeLike,
    device: jax.Device | jax.sharding.Sharding | None = None,
) -> jax.Array:
    """A zeroed page tensor. Raises MemoryError saying how much was needed. device: None is JAX's first."""
    platform = jax.devices()[0].platform if device is None else _platform(device)
    shape = (layers, 2, kv_heads, pages, block_tokens, head_dim)
    needed = int(np.prod(shape, dtype=np.int64)) * jnp.dtype(dtype).itemsize
    try:
        return jnp.zeros(shape, page_dtype(dtype, platform), device=device).block_until_ready()
    except (RuntimeError, MemoryError, OverflowError, ValueError) as error:
        raise too_many_pages(pages, needed, platform) from error


def page_dtype(dtype: DTypeLike, platform: str) -> np.dtype[np.generic]:
    """What pages of a model's type are kept as."""
    bits = platform == "cpu" and jnp.dtype(dtype) == jnp.bfloat16
    return np.dtype(np.uint16) if bits else jnp.dtype(dtype)


def from_pages(values: jax.Array) -> jax.Array:
    """What was read from pages, as numbers."""
    return jax.lax.bitcast_convert_type(values, jnp.bfloat16) if values.dtype == jnp.uint16 else values


def to_pages(values: jax.Array, cache: jax.Array) -> jax.Array:
    """Numbers as the pages have them."""
    return jax.lax.bitcast_convert_type(values, jnp.uint16) if cache.dtype == jnp.uint16 else values


def as_blocks(cache: jax.Array, strips: Strips) -> npt.NDArray[np.generic]:
    """Strips of whole blocks, uint8 [blocks, strips, strip_bytes], as [blocks, layers, 2, kv_heads, block_tokens,
    head_dim] of the page tensor's type over the same memory. Raises ValueError if they are not those of this one.
    """
    layers, two, kv_heads, _, block_tokens, head_dim = cache.shape
    expected = (layers * two * kv_heads, block_tokens * head_dim * cache.dtype.itemsize)
    if strips.dtype != np.uint8 or strips.shape[1:] != expected or not strips.flags.c_contiguous:
        raise ValueError(f"strips must be contiguous uint8 [blocks, {expected[0]}, {expected[1]}], not {strips.shape}")
    return strips.view(cache.dtype).reshape(strips.shape[0], layers, two, kv_heads, block_tokens, head_dim)


def _platform(device: jax.Device | jax.sharding.Sharding) -> str:
    one = device if isinstance(device, jax.Device) else next(iter(device.device_set))
    return str(one.platform)
