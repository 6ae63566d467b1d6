"""Products, norms, rotation and attention of our own in Rust (`rust/xla`), for CPUs. The rest is jax.numpy's.

XLA calls them by its typed FFI. In float32 and bfloat16 a token's bits are its own, as in PyTorch (kernels/README.md).
"""

from pyengine.kernels.jax.ffi.attention import decode_attention, prefill_attention
from pyengine.kernels.jax.ffi.calls import use_threads
from pyengine.kernels.jax.ffi.linear import multiply, pack, packed_shape
from pyengine.kernels.jax.ffi.rows import rms_norm, rope_write, swiglu
from pyengine.kernels.jax.jnp import gather, logprobs, sample, scatter, shape_logits

__all__ = [
    "decode_attention",
    "gather",
    "logprobs",
    "multiply",
    "pack",
    "packed_shape",
    "prefill_attention",
    "rms_norm",
    "rope_write",
    "sample",
    "scatter",
    "shape_logits",
    "swiglu",
    "use_threads",
]
