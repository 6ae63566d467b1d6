"""Which implementation computes what, decided once at start-up from what the device can do, and said in the log."""

from __future__ import annotations

import logging

import jax
from pyengine.kernels.jax import jnp
from pyengine.kernels.jax.contract import Kernels

logger = logging.getLogger(__name__)


def choose(device: jax.Device, dtype: str, head_dim: int) -> Kernels:
    """The kernels for one model on devices of this kind. A TPU that must do without its own is a warning."""
    if device.platform == "tpu":
        logger.warning("kernels on %s: jax.numpy, slower than kernels of its own, which are not chosen yet", device)
    else:
        logger.info("kernels on %s: jax.numpy, %s", device.platform, dtype)
    return jnp
