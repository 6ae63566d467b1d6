"""Every contract in Triton, written for GPUs of the H100's class. No GPU has run it yet; the tests interpret it.

Shaping is PyTorch's: some entries of each row, for which a kernel has nothing to fuse.
"""

from pyengine.kernels.torch.eager.shaping import logprobs, shape_logits
from pyengine.kernels.torch.triton.decode import decode_attention, decode_tables
from pyengine.kernels.torch.triton.prefill import prefill_attention
from pyengine.kernels.torch.triton.rows import rms_norm, rope_write, swiglu
from pyengine.kernels.torch.triton.sampling import sample
from pyengine.kernels.torch.triton.strips import gather, scatter

__all__ = [
    "decode_attention",
    "decode_tables",
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
