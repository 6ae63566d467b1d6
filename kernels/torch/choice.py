"""Which implementation computes what, decided once at start-up from what the device can do, and said in the log."""

from __future__ import annotations

import logging

import torch
from pyengine._native import LINEAR_LEVELS
from pyengine.kernels.torch import eager
from pyengine.kernels.torch.contract import Kernels

# mypy: disable-error-code="import-untyped"

logger = logging.getLogger(__name__)


def choose(device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernels:
    """The kernels for one model on one device, whose weights and pages are of this type.

    Where something slower has to do that is a warning: a GPU without Triton, a CPU without ours.
    """
    if device.type == "cpu":
        reason = _not_native(dtype, head_dim)
        if reason is not None:
            logger.warning("kernels on cpu: eager PyTorch, slower than ours, which cannot run: %s", reason)
            return eager
        from pyengine.kernels.torch import native

        logger.info("kernels on cpu: native (%s), %s", LINEAR_LEVELS[-1], dtype)
        return native
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    reason = _no_triton(device, dtype, head_dim)
    if reason is not None:
        logger.warning("kernels on %s: eager PyTorch, slower than Triton, which cannot run: %s", name, reason)
        return eager
    from pyengine.kernels.torch import triton

    logger.info("kernels on %s: Triton, %s", name, dtype)
    return triton


def working_type(device: torch.device, dtype: torch.dtype, head_dim: int) -> torch.dtype:
    """In which type activations pass between kernels, where weights and pages are of `dtype`.

    CPUs compute in float32 in any case, where ours can: to round activations would cost accuracy and time.
    """
    return torch.float32 if device.type == "cpu" and _not_native(dtype, head_dim) is None else dtype


def keeps(device: torch.device, dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether matrices that are stored as bfloat16 stay so though the model is computed in float32.

    Our products widen each number to float32 before it is used: the results are the same to the last bit, and half as
    much memory is read.
    """
    native = device.type == "cpu" and LINEAR_LEVELS[-1] != "scalar"
    return native and dtype is torch.float32 and stored is torch.bfloat16


def _not_native(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why our kernels cannot compute this model on this CPU, or None."""
    if LINEAR_LEVELS[-1] == "scalar":
        return "this CPU has no AVX2, AVX-512 or NEON"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"they do not compute in {dtype}"
    if head_dim > 256 or head_dim % 2:
        return f"head_dim {head_dim} is above 256 or odd"
    return None


def _no_triton(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why Triton cannot compute this model here, or None."""
    if device.type != "cuda":
        return f"it is not written for {device.type} devices"
    try:
        import triton  # noqa: F401 - only to see whether it is there
    except ImportError as error:
        return f"it is not installed ({error})"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"compute capability {major}.{minor} has no bf16, 8.0 has"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it does not compute in {dtype}"
    if head_dim > 256 or head_dim % 16:
        return f"head_dim {head_dim} is above 256 or no multiple of 16"
    return None
