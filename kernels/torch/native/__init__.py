"""Every contract on CPUs with AVX2, AVX-512 or NEON: ours in Rust (`rust/kernels`), but for drawing and shaping.

Nothing is allocated where the contract lets memory be used up: norms, activations and what attention finds are written
over their input. Types are float32 and bfloat16, also float32 with pages of bfloat16; sums are float32. A token's
result does not depend, to the last bit, on those beside it or on how its prompt was cut into chunks.
"""

from pyengine.kernels.torch.eager.sampling import sample
from pyengine.kernels.torch.eager.shaping import logprobs, shape_logits
from pyengine.kernels.torch.native.attention import decode_attention, prefill_attention
from pyengine.kernels.torch.native.rows import rms_norm, rope_write, swiglu
from pyengine.kernels.torch.native.strips import gather, scatter

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
