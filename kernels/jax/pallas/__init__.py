"""Every contract for TPUs, in Pallas. Sampling and shaping are jax.numpy's: see README.md."""

from pyengine.kernels.jax.jnp.linear import multiply
from pyengine.kernels.jax.jnp.sampling import sample
from pyengine.kernels.jax.jnp.shaping import logprobs, shape_logits
from pyengine.kernels.jax.pallas.attention import decode_attention, prefill_attention
from pyengine.kernels.jax.pallas.rows import rms_norm, swiglu
from pyengine.kernels.jax.pallas.strips import gather, scatter
from pyengine.kernels.jax.pallas.write import rope_write

__all__ = [
    "decode_attention",
    "gather",
    "logprobs",
    "multiply",
    "prefill_attention",
    "rms_norm",
    "rope_write",
    "sample",
    "scatter",
    "shape_logits",
    "swiglu",
]
