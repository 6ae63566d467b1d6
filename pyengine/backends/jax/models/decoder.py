"""What the architectures here have in common: embedding, a scan over layers, norm and head. A layer is each one's own.

Everything runs on each device of a mesh with that device's part of the weights (`shard_map`), so the numbers of heads
below are those of one device; what devices must tell each other is said where they do. T rows of a call, H query heads,
K KV heads, D head_dim, P pages of B tokens, S sequences; cache: [layers, 2, K, P, B, D].
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from pyengine.backends.jax.mesh import BOTH, total
from pyengine.backends.jax.shards import Shards, Whole
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.jax.contract import Attend, Kernels

Carry = tuple[jax.Array, jax.Array, jax.Array]


class Batch(NamedTuple):
    """One call of the model, padded: rows behind the last one have slot -1, sequences behind the last one length 0.

    tokens, positions, slots: int32 [T]; after: int32 [T], the row's token is what this slice of the step before chose,
    -1: it is in `tokens`; outputs: int32 [S], the row of each sequence whose logits are wanted; places: int32 [S], the
    number of its slice in the step, one that does not exist where no token is wanted.
    """

    tokens: jax.Array
    after: jax.Array
    positions: jax.Array
    slots: jax.Array
    sequences: Sequences
    outputs: jax.Array
    places: jax.Array


class Step(NamedTuple):
    """What is the same for all layers: angles of the rows [T, D / 2], where they are written, attention."""

    cosines: jax.Array
    sines: jax.Array
    slots: jax.Array
    attend: Attend


class Layer(Protocol):
    """Its parameters are those of all layers, one above the other. Called, it has one's, but `Whole` ones whole."""

    def __call__(
        self, x: jax.Array, residual: jax.Array, cache: jax.Array, layer: jax.Array, step: Step
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x: what is to be added to the stream `residual`, both [T, hidden]. Returns these two and the cache."""
        ...


class Decoder(nnx.Module):
    """Weights and forward pass. Holds no KV: the page tensor is an argument, and a result."""

    def __init__(self, shards: Shards, kernels: Kernels, layers: Layer) -> None:
        self.config = shards.config
        self.kernels = kernels
        self.embedding = shards.embedding()
        self.layers = layers
        self.norm = shards.norm()
        self.head = shards.head()
        self.cosines, self.sines = shards.angles()

    def __call__(
        self, batch: Batch, before: jax.Array, cache: jax.Array, *, decoding: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Computes one call. Returns float32 logits [S, vocab], and the cache with the call's KV.

        before: int32 [slices], what the step before chose. decoding: there is one row for each sequence.
        """
        config, kernels = self.config, self.kernels
        attention = kernels.decode_attention if decoding else kernels.prefill_attention
        step = Step(
            cosines=self.cosines[batch.positions],
            sines=self.sines[batch.positions],
            slots=batch.slots,
            attend=attention(batch.sequences, len(batch.tokens), config.window),
        )
        parts: Any = nnx.split(self.layers, Whole, ...)
        graph, whole, weights = parts

        def compute(carry: Carry, layer: tuple[jax.Array, nnx.State[Any, Any]]) -> tuple[Carry, None]:
            # The scan carries the whole cache, which XLA then writes in place; as its input it would be copied.
            index, own = layer
            return nnx.merge(graph, whole, own)(*carry, index, step), None

        x = self._embed(jnp.where(batch.after < 0, batch.tokens, before[batch.after]))
        start = (x, jnp.zeros_like(x), cache)
        (x, residual, cache), _ = jax.lax.scan(compute, start, (jnp.arange(config.layers), weights))
        x, _ = kernels.rms_norm(x[batch.outputs], self.norm[...], config.norm_eps, residual[batch.outputs])
        logits = self.head(x, 0, wide=True)
        logits = jax.lax.all_gather(logits, BOTH, axis=1, tiled=True)  # every device draws, from all tokens
        return logits[:, : config.vocab_size], cache

    def _embed(self, tokens: jax.Array) -> jax.Array:
        """[T, hidden]: each device knows some tokens and has zeros for all others."""
        table = self.embedding[...]
        own = tokens - jax.lax.axis_index(BOTH) * len(table)
        known = (own >= 0) & (own < len(table))
        return total(jnp.where(known[:, None], table[jnp.where(known, own, 0)], 0))
