"""Which devices hold which heads.

A mesh has two axes: "kv", along which the KV heads are cut, and "copy", along which they are repeated where there are
more devices than KV heads. Queries, columns of the MLP and the vocabulary are cut along both. With 4 devices:

    8 KV heads: kv 4, copy 1: two KV heads each.        2 KV heads: kv 2, copy 2: each head on two devices.

Device number kv * copies + copy has the query heads that read its KV heads, as these stand one beside the other.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pyengine.checkpoint import ModelConfig, ModelError

KV = "kv"
COPY = "copy"
BOTH = (KV, COPY)


def make_mesh(config: ModelConfig, tp: int) -> Mesh:
    """The first `tp` devices. Raises ModelError where they cannot share the model evenly, or are too few."""
    config.check_ranks(tp)
    if config.intermediate_size % tp:  # XLA cuts into equal parts only
        raise ModelError(
            f"{tp} devices cannot share {config.intermediate_size} columns of the MLP evenly: choose a smaller --tp"
        )
    devices = jax.devices()
    if tp > len(devices):
        raise ModelError(
            f"tensor parallelism {tp} needs as many devices, JAX has {len(devices)} ({devices[0].platform})"
        )
    kv = min(tp, config.kv_heads)
    return Mesh(np.array(devices[:tp]).reshape(kv, tp // kv), BOTH)


def total(x: jax.Array) -> jax.Array:
    """The sum of all devices' x, on each of them."""
    summed: jax.Array = jax.lax.psum(x, BOTH)  # type: ignore[no-untyped-call]
    return summed


def cut(mesh: Mesh, *axes: str | tuple[str, ...] | None) -> NamedSharding:
    """For an array whose dimension i is cut along axes[i] of the mesh; None: not at all."""
    return NamedSharding(mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]
