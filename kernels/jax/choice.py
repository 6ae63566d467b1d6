"""Which implementation computes what, decided once at start-up from what the device can do, and said in the log."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from pyengine.kernels.jax import jnp as plain
from pyengine.kernels.jax.contract import Kernels

logger = logging.getLogger(__name__)


def choose(device: jax.Device, dtype: DTypeLike, head_dim: int) -> Kernels:
    """The kernels for one model on devices of one kind. A TPU that must do without Pallas is a warning: it is slow."""
    name = jnp.dtype(dtype).name
    if device.platform != "tpu":
        logger.info("kernels on %s: jax.numpy, as Pallas' are for TPUs, %s", device.device_kind, name)
        return plain
    if (reason := _no_pallas(name, head_dim)) is not None:
        logger.warning("kernels on %s: jax.numpy, slower than Pallas, which cannot: %s", device.device_kind, reason)
        return plain
    from pyengine.kernels.jax import pallas

    logger.info("kernels on %s: Pallas, sampling in jax.numpy, %s", device.device_kind, name)
    return pallas


def _no_pallas(dtype: str, head_dim: int) -> str | None:
    """Why Pallas cannot compute this model on a TPU, or None."""
    if dtype not in ("float32", "bfloat16"):
        return f"TPUs do not compute in {dtype}"
    if head_dim > 256 or head_dim % 16:
        return f"head_dim {head_dim} is above 256 or no multiple of 16"
    return None
