"""Every contract in plain jax.numpy: what runs on CPUs and GPUs, and wherever Pallas cannot."""

from pyengine.kernels.jax.jnp.attention import decode_attention, prefill_attention
from pyengine.kernels.jax.jnp.linear import multiply
from pyengine.kernels.jax.jnp.rows import rms_norm, rope_write, swiglu
from pyengine.kernels.jax.jnp.sampling import sample
from pyengine.kernels.jax.jnp.shaping import logprobs, shape_logits
from pyengine.kernels.jax.jnp.strips import gather, scatter

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
