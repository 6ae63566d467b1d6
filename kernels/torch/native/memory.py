"""Tensors as addresses. Addresses carry no shapes: whoever passes them on has checked these."""

from __future__ import annotations

import functools

import torch
from pyengine._native import CpuKernels, LinearThreads
from pyengine.kernels.torch import threads

TYPES = (torch.float32, torch.bfloat16)
#: The widest head that `rust/kernels` has room for.
WIDEST_HEAD = 256


def kernels() -> CpuKernels:
    """On the threads wanted now, with the best instructions."""
    return _kernels(threads.pool())


@functools.cache
def _kernels(pool: LinearThreads) -> CpuKernels:
    return CpuKernels(pool)


def is_half(tensor: torch.Tensor) -> bool:
    """Whether it is bfloat16; raises ValueError where it is not float32 either, or not dense, or not on the CPU."""
    dtype = tensor.dtype
    if dtype not in TYPES or not tensor.is_cpu:
        raise ValueError(f"native kernels compute in float32 and bfloat16 on the CPU, not {dtype} on {tensor.device}")
    if not is_dense(tensor):
        raise ValueError("tensors must be dense in their last axis")
    return dtype is torch.bfloat16


def is_dense(tensor: torch.Tensor) -> bool:
    """In its last axis, if that can be said of it."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 or not tensor.numel()


def page_tensor(kv: torch.Tensor) -> tuple[int, list[int], list[int]]:
    """One layer's pages: its address, ways and counts, as `CpuKernels` takes them."""
    _, heads, pages, page_tokens, head_dim = kv.shape
    if head_dim > WIDEST_HEAD or head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd or above {WIDEST_HEAD}")
    return kv.data_ptr(), list(kv.stride()[:4]), [heads, pages, page_tokens, head_dim]
