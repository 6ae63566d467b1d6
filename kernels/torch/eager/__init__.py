"""Every contract in plain PyTorch: what runs on CPUs, and wherever nothing better can."""

from pyengine.kernels.torch.eager.attention import decode_attention, prefill_attention
from pyengine.kernels.torch.eager.rows import rms_norm, rope_write, swiglu
from pyengine.kernels.torch.eager.sampling import sample
from pyengine.kernels.torch.eager.shaping import logprobs, shape_logits
from pyengine.kernels.torch.eager.strips import gather, scatter

__all__ = [
    "decode_attention",
    "gather",
    "logprobs",
    "prefill_attention",
    "rms_norm",
    "rope_write",
    "sample",
    "scatter",
    "shape_logits",
    "swiglu",
]
