"""Goal: every backend shapes the choices of a step as the slices say, row by row, and tells what the model thought.

Method: the list of backends of test_backend_conformance; each one's own logits, shaped by a naive rule in plain Python,
say which tokens may be chosen, and a naive softmax of them what is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from pyengine.backend import NOTHING_LEFT, Backend, Shaping, Slice
from pyengine.backends.fake import FakeBackend, chain, hashed, kv_rows, logits_of
from pyengine.conversion import Converted
from pyengine.kernels.inputs import words
from pyengine.sampling import draws
from pyengine.scheduler.types import MOST_LOGPROBS, Logprobs, SamplingParams
from tests.kernels.test_conformance import allowed_tokens
from tests.model.test_backend_conformance import GREEDY, make, pages_for, prompt, slice_of, spread, tiny

__all__ = ["make", "spread", "tiny"]

LENGTHS = (1, 17, 40, 5)
DRAWS = [
    GREEDY,
    SamplingParams(temperature=2.0, min_p=0.3, seed=4),
    SamplingParams(temperature=0.9, min_p=0.02, top_k=50, top_p=0.95, seed=3),
]
Array = np.ndarray[Any, np.dtype[np.float32]]


def own_logits(backend: Any, slice_: Slice) -> Array:
    """What the model makes of a whole prompt: float32 [vocab]."""
    if isinstance(backend, FakeBackend):
        spec = backend.namespace.kv
        kv = kv_rows(chain(0, slice_.tokens.tolist()), spec.strips, spec.groups[0].head_dim // 2)
        return logits_of(hashed(kv, slice_.sampling or GREEDY, len(kv)), backend.vocab_size)
    if isinstance(backend, Converted):
        backend = backend._backend
    return np.asarray(backend.logits([slice_])[0])


def naive(logits: Array, shaping: Shaping) -> Array:
    """The rule, id by id, in the order of the promise."""
    out = []
    seen, factor = set(shaping.seen.tolist()), np.float32(shaping.repetition)
    added = dict(zip(shaping.ids.tolist(), shaping.add, strict=True))
    for token, logit in enumerate(logits):
        if token in seen:
            logit = logit / factor if logit > 0 else logit * factor
        logit = logit + added.get(token, np.float32(0))
        if shaping.mask is not None and not int(shaping.mask[token // 32]) >> token % 32 & 1:
            logit = -np.inf
        out.append(logit)
    return np.array(out, np.float32)


def naive_logprobs(logits: Array, token: int, count: int) -> Logprobs:
    total = math.log(sum(math.exp(float(logit)) for logit in logits))
    ranked = sorted(range(len(logits)), key=lambda id: (-logits[id], id))
    top = tuple((id, float(logits[id]) - total) for id in ranked[:count])
    return Logprobs(float(logits[token]) - total, ranked.index(token) + 1, top)


def random_shaping(random: np.random.Generator, vocab: int) -> Shaping:
    def some(most: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return random.permutation(vocab)[: random.integers(most + 1)].astype(np.int32)

    ids, mask = some(vocab), None
    add = (random.normal(size=len(ids)) * 2).astype(np.float32)
    add[random.random(len(add)) < 0.1] = -np.inf
    if random.random() < 0.5:
        mask = random.integers(0, 2**32, words(vocab), np.uint32)
    logprobs = (None, 0, 1, 5, MOST_LOGPROBS)[random.integers(5)]
    return Shaping(ids, add, some(vocab), float(random.choice([0.7, 1.0, 1.5])), mask, logprobs)


def batch(shapings: list[Shaping | None], sampling: SamplingParams = GREEDY) -> list[Slice]:
    slices = []
    for number, (length, shaping) in enumerate(zip(LENGTHS, shapings, strict=True)):
        slice_ = slice_of(prompt(length, number), 0, pages_for(length, 8 * number), sampling)
        slices.append(msgspec.structs.replace(slice_, shaping=shaping))
    return slices


def same(told: Logprobs | None, expected: Logprobs) -> bool:
    assert told is not None
    return (
        told.rank == expected.rank
        and [id for id, _ in told.top] == [id for id, _ in expected.top]
        and np.allclose(
            [told.chosen, *(p for _, p in told.top)], [expected.chosen, *(p for _, p in expected.top)], atol=1e-4
        )
    )


@pytest.mark.parametrize("sampling", DRAWS)
def test_rows_are_shaped_as_they_say(make: Callable[[], Backend], sampling: SamplingParams) -> None:
    backend = make()
    if isinstance(backend, FakeBackend) and sampling is not GREEDY:
        pytest.skip("the fake draws by its hash, which the seed is part of")
    for seed in range(8):
        random = np.random.default_rng([seed, int(sampling.temperature * 10)])
        shapings = [random_shaping(random, backend.vocab_size) if random.random() < 0.8 else None for _ in LENGTHS]
        slices = batch(shapings, sampling)
        own = [own_logits(backend, slice_) for slice_ in slices]
        pending = backend.submit(slices)
        tokens, told = pending.tokens(), pending.logprobs()
        shaped = np.stack([naive(row, shaping or Shaping()) for row, shaping in zip(own, shapings, strict=True)])
        allowed = allowed_tokens(shaped, draws([sampling] * len(slices), list(LENGTHS)))
        assert all(token in may for token, may in zip(tokens, allowed, strict=True)), (tokens, allowed)
        for row, shaping in enumerate(shapings):
            if shaping is not None and shaping.logprobs is not None:
                assert same(told[row], naive_logprobs(own[row], tokens[row], shaping.logprobs))
            else:
                assert not told or told[row] is None


def test_a_row_with_nothing_left_harms_no_other(make: Callable[[], Backend]) -> None:
    """By a mask, and by what is added; the next step goes on from those that have chosen."""
    backend = make()
    vocab = backend.vocab_size
    expected = backend.execute(batch([None] * 4))
    masked = Shaping(mask=np.zeros(words(vocab), np.uint32), logprobs=2)
    added = Shaping(ids=np.arange(vocab, dtype=np.int32), add=np.full(vocab, -np.inf, np.float32))
    slices = batch([None, masked, added, None])
    pending = backend.submit(slices)
    chosen = [slice_of([0], length, slice_.pages.tolist()) for length, slice_ in zip(LENGTHS, slices, strict=True)]
    tokens = None
    if backend.overlaps:
        later = backend.submit([msgspec.structs.replace(s, after=row) for row, s in enumerate(chosen)])
        tokens, following = pending.tokens(), later.tokens()
        alone = [slice_of([expected[row]], LENGTHS[row], slices[row].pages.tolist()) for row in (0, 3)]
        assert [following[0], following[3]] == backend.execute(alone)
    tokens = tokens or pending.tokens()
    assert tokens == [expected[0], NOTHING_LEFT, NOTHING_LEFT, expected[3]]
    assert backend.execute(batch([None] * 4)) == expected


def test_what_is_told_does_not_depend_on_the_batch(make: Callable[[], Backend]) -> None:
    """To the last bit where logits do not: alone, and beside others that ask for more or for nothing."""
    backend = make()
    asks = Shaping(logprobs=3)
    together = backend.submit(batch([Shaping(logprobs=20), asks, None, asks]))
    together.tokens()
    for number in (1, 3):
        alone = backend.submit([batch([asks] * 4)[number]])
        alone.tokens()
        (one,), other = alone.logprobs(), together.logprobs()[number]
        if backend.namespace.weights == "fake" or type(backend).__name__ == "TorchBackend":
            assert one == other
        else:
            assert other is not None and same(one, other)


def test_a_step_goes_on_from_a_shaped_choice(make: Callable[[], Backend]) -> None:
    backend = make()
    tokens, pages = prompt(20), pages_for(40)
    (plain,) = backend.execute([slice_of(tokens, 0, pages)])
    other = (plain + 1) % backend.vocab_size
    forced = Shaping(ids=np.array([other], np.int32), add=np.array([100.0], np.float32))
    first = msgspec.structs.replace(slice_of(tokens, 0, pages), shaping=forced)
    assert backend.execute([first]) == [other]
    (expected,) = backend.execute([slice_of([other], 20, pages)])
    pending = backend.submit([first])
    later = backend.submit([msgspec.structs.replace(slice_of([0], 20, pages), after=0)])
    assert (pending.tokens(), later.tokens()) == ([other], [expected])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Shaping(ids=np.array([-1], np.int32), add=np.zeros(1, np.float32)), "the vocabulary has"),
        (Shaping(seen=np.array([10**6], np.int32), repetition=2.0), "the vocabulary has"),
        (Shaping(mask=np.zeros(1, np.uint32)), "has another shape"),
    ],
)
def test_what_no_vocabulary_has_is_refused(make: Callable[[], Backend], wrong: Shaping, says: str) -> None:
    backend = make()
    expected = backend.execute(batch([None] * 4))
    with pytest.raises(ValueError, match=says):
        backend.submit(batch([None, wrong, None, replace(wrong, logprobs=1)])).tokens()
    assert backend.execute(batch([None] * 4)) == expected
