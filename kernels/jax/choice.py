"""Which implementation computes what, decided once at start-up from what the device can do, and said in the log."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from pyengine._native import LINEAR_LEVELS
from pyengine.kernels.jax import jnp as plain
from pyengine.kernels.jax.contract import Kernels

logger = logging.getLogger(__name__)


def choose(device: jax.Device, dtype: DTypeLike, head_dim: int, devices: int = 1, threads: int = 0) -> Kernels:
    """The kernels for one model on `devices` devices of one kind. What must do with slower ones is a warning.

    threads: of ours on a CPU; the first choice in a process decides. 0: one for each core.
    """
    name = jnp.dtype(dtype).name
    if device.platform == "cpu":
        if (reason := _not_ours(name, head_dim, devices)) is not None:
            logger.warning("kernels on %s: jax.numpy, slower than ours, which cannot: %s", device.device_kind, reason)
            return plain
        from pyengine.kernels.jax import ffi

        ffi.use_threads(threads)
        logger.info("kernels on %s: ours by XLA's FFI, %s (%s)", device.device_kind, name, LINEAR_LEVELS[-1])
        return ffi
    if device.platform != "tpu":
        logger.info("kernels on %s: jax.numpy, as Pallas' are for TPUs, %s", device.device_kind, name)
        return plain
    if (reason := _no_pallas(name, head_dim)) is not None:
        logger.warning("kernels on %s: jax.numpy, slower than Pallas, which cannot: %s", device.device_kind, reason)
        return plain
    from pyengine.kernels.jax import pallas

    logger.info("kernels on %s: Pallas, sampling in jax.numpy, %s", device.device_kind, name)
    return pallas


def _not_ours(dtype: str, head_dim: int, devices: int) -> str | None:
    """Why ours in Rust cannot compute this model on a CPU, or None."""
    if LINEAR_LEVELS[-1] == "scalar":
        return "this processor has no instructions for them (AVX2, AVX-512, NEON)"
    if dtype not in ("float32", "bfloat16"):
        return f"they do not compute in {dtype}"
    if head_dim > 256 or head_dim % 2:
        return f"head_dim {head_dim} is above 256 or odd"
    if devices > 1:
        return "they have one pool of threads, for one device"
    return None


def _no_pallas(dtype: str, head_dim: int) -> str | None:
    """Why Pallas cannot compute this model on a TPU, or None."""
    if dtype not in ("float32", "bfloat16"):
        return f"TPUs do not compute in {dtype}"
    if head_dim > 256 or head_dim % 16:
        return f"head_dim {head_dim} is above 256 or no multiple of 16"
    return None
