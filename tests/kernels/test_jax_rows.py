"""Goal: in JAX on a CPU, what attention says of a token is the same to the last bit whatever else is in the step.

Method: several sequences at once beside each alone, in other padded shapes; a prompt whole and in chunks; its last
token by decode.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs the jax extra")

import jax.numpy as jnp  # noqa: E402 - not before it is known to be there

from pyengine.kernels.inputs import Sequences  # noqa: E402
from pyengine.kernels.jax.jnp import decode_attention, prefill_attention  # noqa: E402
from pyengine.kernels.jax.padding import bucket, pad_sequences  # noqa: E402

MODELS = ((9, 3, 64), (2, 1, 128))
PAGE_TOKENS, PAGES = 16, 128
LENGTHS = [17, 300, 1, 128, 333]
Array = np.ndarray[Any, np.dtype[np.float32]]


@functools.cache
def world(heads: int, kv_heads: int, head_dim: int) -> tuple[Any, list[Array], list[np.ndarray[Any, Any]]]:
    """(page tensor, queries of every token of each sequence, its pages)."""
    random = np.random.default_rng(7)
    cache = random.standard_normal((1, 2, kv_heads, PAGES, PAGE_TOKENS, head_dim), np.float32)
    queries = [random.standard_normal((length, heads, head_dim), np.float32) for length in LENGTHS]
    ends = np.cumsum([-(-length // PAGE_TOKENS) for length in LENGTHS])
    return jnp.asarray(cache), queries, np.split(random.permutation(PAGES)[: ends[-1]], ends[:-1])


def attend(model: tuple[int, int, int], parts: list[tuple[int, int, int]], rows: int, count: int) -> Array:
    """parts: (sequence, first and end of its new tokens); rows, count: what the step is padded to."""
    cache, queries, pages = world(*model)
    counts = [end - begin for _, begin, end in parts]
    sequences = Sequences.of(counts, [end for _, _, end in parts], [pages[which] for which, _, _ in parts])
    width = bucket(sequences.tables.shape[1])
    padded = pad_sequences(sequences, count, width, PAGES, PAGE_TOKENS)
    query = np.concatenate([queries[which][begin:end] for which, begin, end in parts])
    query = np.pad(query, ((0, rows - len(query)), (0, 0), (0, 0)))
    return np.asarray(_program(max(counts) == 1)(padded, query, cache))[: sum(counts)]


@functools.cache
def _program(decoding: bool) -> Any:
    plan = decode_attention if decoding else prefill_attention
    return jax.jit(lambda sequences, query, cache: plan(sequences, len(query))(query, cache, 0))


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_decode_does_not_see_the_batch(model: tuple[int, int, int]) -> None:
    together = attend(model, [(which, length - 1, length) for which, length in enumerate(LENGTHS)], 16, 16)
    for which, length in enumerate(LENGTHS):
        alone = attend(model, [(which, length - 1, length)], 1, 1)
        np.testing.assert_array_equal(alone[0], together[which])


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_prompts_chunks_and_decode_say_the_same(model: tuple[int, int, int]) -> None:
    together = np.split(
        attend(model, [(which, 0, length) for which, length in enumerate(LENGTHS)], 1024, 8), np.cumsum(LENGTHS)
    )
    for which in (1, 4):
        length = LENGTHS[which]
        np.testing.assert_array_equal(attend(model, [(which, 0, length)], 512, 1), together[which])
        for begin, end in ((0, 100), (100, 200), (200, length)):
            np.testing.assert_array_equal(
                attend(model, [(which, begin, end)], 128 if end < 300 else 256, 2), together[which][begin:end]
            )
        np.testing.assert_array_equal(attend(model, [(which, length - 1, length)], 4, 4)[0], together[which][-1])
