"""Sampling without a sort: the last kept logit is found by bisection, the draw is one look through sums of blocks.

Kept is always a number of first tokens by rank: all above some logit, and of those that equal it the first by id. All
is float32; sums are made in two stages, of blocks and over them, so that they are right to 1e-6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from pyengine.kernels.inputs import Draws

BLOCK = 256
LOWEST = -(2**31)  # below the order of every float

State = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def sample(logits: jax.Array, draws: Draws) -> jax.Array:
    if 0 in logits.shape:
        return jnp.zeros(logits.shape[0], jnp.int32)
    largest = logits.max(axis=-1)
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jnp.asarray(draws.temperature > 0.0)
    tokens = _if_any(drawn, lambda: jnp.where(drawn, _draw(logits, largest, draws), tokens), tokens)
    return jnp.where(jnp.isfinite(largest), tokens, -1)


def _draw(logits: jax.Array, largest: jax.Array, draws: Draws) -> jax.Array:
    temperature = jnp.where(draws.temperature > 0.0, draws.temperature, 1.0)
    weights = jnp.exp((logits - largest[:, None]) / temperature[:, None])
    filtered = (draws.temperature > 0.0) & ((draws.top_k > 0) | (draws.min_p > 0.0) | (draws.top_p < 1.0))
    weights = _if_any(jnp.asarray(filtered), lambda: _kept(logits, weights, draws), weights)
    return _first_above(weights, jnp.asarray(draws.uniform))


def _kept(logits: jax.Array, weights: jax.Array, draws: Draws) -> jax.Array:
    """The weights, 0 for tokens that may not be drawn."""
    top_k, top_p = jnp.asarray(draws.top_k), jnp.asarray(draws.top_p)
    eligible = weights >= draws.min_p[:, None]
    weights = jnp.where(eligible, weights, 0.0)
    order = jnp.where(eligible, _order(logits), LOWEST)

    limited = (top_k > 0) & (top_k < eligible.sum(axis=-1))
    ones, wanted = jnp.ones_like(weights), top_k.astype(jnp.float32)  # exact up to 2^24, more than any vocabulary has
    first_k = functools.partial(_first_ranks, order, ones, wanted, limited)
    weights = _if_any(limited, lambda: jnp.where(first_k(), weights, 0.0), weights)

    limited = top_p < 1.0
    order, mass = jnp.where(weights > 0.0, order, LOWEST), top_p * sum_of_blocks(weights)
    first_p = functools.partial(_first_ranks, order, weights, mass, limited)
    return _if_any(limited, lambda: jnp.where(first_p(), weights, 0.0), weights)


def _first_ranks(order: jax.Array, measure: jax.Array, wanted: jax.Array, limited: jax.Array) -> jax.Array:
    """The fewest first tokens by rank that measure at least `wanted` together, at least one; bool [S, vocab].

    order: int32 [S, vocab], LOWEST for what is never among them; measure: float32, alike for tokens of one order;
    limited: which rows are asked for, all else is kept. A bisection over orders: it ends when one token or only equal
    ones are between what is enough and what is not, which 32 looks always reach.
    """

    def look(least: jax.Array) -> tuple[jax.Array, jax.Array]:
        above = order >= least[:, None]
        return sum_of_blocks(jnp.where(above, measure, 0.0)), above.sum(axis=-1)

    def undecided(state: State) -> jax.Array:
        low, high, _, low_count, high_count = state
        return limited & (low + 1 < high) & (low_count - high_count > 1)

    def halve(state: State) -> State:
        low, high, high_measure, low_count, high_count = state
        active = undecided(state)
        middle = low // 2 + high // 2 + (low & high & 1)
        measured, count = look(middle)
        enough = measured >= wanted
        up, down = active & enough, active & ~enough
        return (
            jnp.where(up, middle, low),
            jnp.where(down, middle, high),
            jnp.where(down, measured, high_measure),
            jnp.where(up, count, low_count),
            jnp.where(down, count, high_count),
        )

    rows, vocab = order.shape
    low, high = jnp.full(rows, LOWEST, jnp.int32), order.max(axis=-1) + 1
    start = (low, high, jnp.zeros(rows), jnp.full(rows, vocab, jnp.int32), jnp.zeros(rows, jnp.int32))
    low, high, high_measure, low_count, high_count = jax.lax.while_loop(
        lambda state: undecided(state).any(), halve, start
    )
    above = order >= high[:, None]
    equal = (order >= low[:, None]) & ~above
    one = jnp.where(equal, measure, 0.0).max(axis=-1)
    equals = jnp.maximum(jnp.ceil((wanted - high_measure) / jnp.where(one > 0.0, one, 1.0)), 1.0)
    cut = limited & (equals < low_count - high_count)  # the first of equal ones by id
    equal = _if_any(cut, lambda: equal & (~cut[:, None] | (jnp.cumsum(equal, axis=-1) <= equals[:, None])), equal)
    return above | equal | ~limited[:, None]


def _if_any(rows: jax.Array, then: Callable[[], jax.Array], otherwise: jax.Array) -> jax.Array:
    """Costs nothing in a step where no row asks for it."""
    result: jax.Array = jax.lax.cond(rows.any(), then, lambda: otherwise)
    return result


def _order(logits: jax.Array) -> jax.Array:
    """int32 that compare as the floats do, 0.0 and -0.0 alike."""
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0.0, 0.0, logits), jnp.int32)
    return jnp.bitwise_xor(bits, (bits >> 31) & 0x7FFFFFFF)


def sum_of_blocks(values: jax.Array) -> jax.Array:
    """[S, vocab] -> [S], in two stages."""
    return _blocks(values).sum(axis=-1).sum(axis=-1)


def _blocks(values: jax.Array) -> jax.Array:
    """[S, vocab] -> [S, blocks, BLOCK], zeros behind the last."""
    rows, vocab = values.shape
    return jnp.pad(values, ((0, 0), (0, -vocab % BLOCK))).reshape(rows, -1, BLOCK)


def _first_above(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The first token up to which the weights exceed uniform * their sum: int32 [S]. Never one of weight 0."""
    blocks = _blocks(weights)
    sums = blocks.sum(axis=-1)
    up_to = jnp.cumsum(sums, axis=-1)
    target = uniform * up_to[:, -1]
    block = _first(up_to > target[:, None], sums > 0.0)
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    before = jnp.where(block > 0, jnp.take_along_axis(up_to, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    return block * BLOCK + _first(jnp.cumsum(within, axis=-1) > (target - before)[:, None], within > 0.0)


def _first(reached: jax.Array, there: jax.Array) -> jax.Array:
    """The first of those there that has reached it, else, as sums are rounded, the last that is there."""
    found = reached & there
    last = there.shape[-1] - 1 - jnp.argmax(there[:, ::-1], axis=-1)
    return jnp.where(found.any(axis=-1), jnp.argmax(found, axis=-1), last).astype(jnp.int32)
