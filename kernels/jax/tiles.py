"""Query rows cut into tiles, each of one sequence: attention goes through the keys of a sequence for a tile at a time.

Rows of a step lie one sequence behind the other; a tile of a fixed number of rows would have some of two. So rows are
laid out anew, and what belongs to nobody is left out. All of it is traced, of fixed shapes, and small.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from pyengine.kernels.inputs import Sequences


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """n tiles of M rows, for queries of T rows; the first `count` have work.

    rows: int32 [n, M], rows of the query, anything within it where there is none; positions: int32 [n, M] of their
    tokens, -1 where there is none; begins, ends: int32 [n], the keys that any of its rows sees; owners: int32 [n], its
    sequence; tables: int32 [S, N], the pages of each, anything at what is not needed; places: int32 [T], in which row
    of the tiles a row of the query is, -1 in none; count: int32.
    """

    rows: jax.Array
    positions: jax.Array
    begins: jax.Array
    ends: jax.Array
    owners: jax.Array
    tables: jax.Array
    places: jax.Array
    count: jax.Array

    def take(self, query: jax.Array, kv_heads: int) -> jax.Array:
        """[T, H, D] -> [n, K, M * (H / K), D]: the query heads of one KV head are rows one behind the other."""
        count, size = self.rows.shape
        taken = query[self.rows].reshape(count, size, kv_heads, -1, query.shape[-1])
        return taken.swapaxes(1, 2).reshape(count, kv_heads, -1, query.shape[-1])

    def give(self, tiles: jax.Array, heads: int) -> jax.Array:
        """What `take` did, back; zeros in rows that are in no tile."""
        count, kv_heads, _, head_dim = tiles.shape
        rows = tiles.reshape(count, kv_heads, -1, heads // kv_heads, head_dim).swapaxes(1, 2)
        rows = rows.reshape(-1, heads, head_dim)[self.places]
        return jnp.where(self.places[:, None, None] >= 0, rows, jnp.zeros((), rows.dtype))


def decode_tiles(sequences: Sequences, rows: int, window: int | None) -> Tiles:
    """A tile for each sequence, of its only new token."""
    return _cut(sequences, rows, 1, len(sequences), window)


def prefill_tiles(sequences: Sequences, rows: int, size: int, window: int | None) -> Tiles:
    """As many tiles of `size` rows as any sequences with that number of rows could need."""
    return _cut(sequences, rows, size, rows // size + min(len(sequences), rows), window)


def _cut(sequences: Sequences, rows: int, size: int, tiles: int, window: int | None) -> Tiles:
    starts, lengths = jnp.asarray(sequences.rows), jnp.asarray(sequences.lengths)
    counts = jnp.diff(starts)
    there = lengths > 0
    needed = jnp.where(there, -(-counts // size), 0)
    ends = jnp.cumsum(needed)  # tiles of the sequences up to and with each
    tile = jnp.arange(tiles)
    owner = jnp.minimum(_owner(ends, tile), max(len(sequences) - 1, 0))
    within = (tile - (ends - needed)[owner])[:, None] * size + jnp.arange(size)  # which of its new tokens
    used = (tile < ends[-1])[:, None] & (within < counts[owner][:, None])
    positions = jnp.where(used, (lengths - counts)[owner][:, None] + within, -1)
    first, last = positions[:, 0], positions.max(axis=1)
    row = jnp.arange(rows)
    theirs = jnp.minimum(_owner(starts[1:], row), max(len(sequences) - 1, 0))
    places = (ends - needed)[theirs] * size + row - starts[theirs]
    return Tiles(
        rows=jnp.where(used, starts[owner][:, None] + within, 0),
        positions=positions,
        begins=jnp.zeros_like(first) if window is None else jnp.maximum(0, first + 1 - window),
        ends=last + 1,
        owners=owner,
        tables=jnp.asarray(sequences.tables),
        places=jnp.where((row < starts[-1]) & there[theirs], places, -1),
        count=ends[-1],
    )


def _owner(ends: jax.Array, items: jax.Array) -> jax.Array:
    """Whose each item is, if the owners' items end at `ends`: int32 like items, len(ends) behind the last."""
    return (ends[None, :] <= items[:, None]).sum(axis=1, dtype=jnp.int32)
