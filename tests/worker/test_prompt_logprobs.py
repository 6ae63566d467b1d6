"""Goal: whoever asks what the model thinks of a prompt is told of each of its tokens once and rightly, always.

Method: real workers and pools (harness.py) over a tiny checkpoint, against transformers' logits; over the fake backend,
against the same prompt asked in other ways: alone, in a crowd, preempted, handed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine.backends import load_backend
from pyengine.scheduler.types import Logprobs, Role, SamplingParams
from pyengine.worker import prompts
from tests.model.checkpoints import write_tiny
from tests.worker.harness import Cluster, Request

LENGTH = 150


def asks(most: int | None = 3, tokens: int = 4) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, prompt_logprobs=most)


def prompt(seed: int, length: int = LENGTH) -> list[int]:
    return np.random.default_rng(seed).integers(0, 250, length).tolist()  # type: ignore[no-any-return]


@pytest.fixture
def apart() -> Iterator[Cluster]:
    """A prefill and a decode worker on two nodes."""
    with Cluster() as cluster:
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            backend = load_backend("fake", "fake", cache=Path("unused"))
            cluster.add_node(f"node-{name}", 400, backend)
            cluster.add_worker(name, f"node-{name}", backend, role=role)
        yield cluster


def alone(pages: int = 256, **more: Any) -> Cluster:
    cluster = Cluster()
    backend = load_backend("fake", "fake", cache=Path("unused"))
    cluster.add_node("n", 400, backend)
    cluster.add_worker("w", "n", backend, pages=pages, **more)
    return cluster


def whole(request: Request, length: int = LENGTH) -> list[Logprobs]:
    assert request.failed is None
    assert sorted(request.prompt_told) == list(range(1, length)), "each token but the first"
    return [request.prompt_told[at] for at in range(1, length)]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_it_is_what_transformers_thinks(backend: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    pytest.importorskip(backend, reason=f"needs the {backend} extra")
    from transformers import AutoModelForCausalLM

    folder = write_tiny(tmp_path / "tiny")
    ids = prompt(1)
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(torch.tensor([ids])).logits[0]
    expected = torch.log_softmax(logits.double(), -1).numpy()
    loaded = load_backend(backend, str(folder), cache=tmp_path, threads=1)
    with Cluster() as cluster:
        cluster.add_node("n", 100, loaded)
        cluster.add_worker("w", "n", loaded, pages=64, max_tokens=50)
        request = cluster.submit(ids, "w", "w", sampling=asks(5))
        cluster.run(request)
        for at, one in enumerate(whole(request), 1):
            row = expected[at - 1]
            assert one.chosen == pytest.approx(row[ids[at]], abs=1e-4)
            assert one.rank == 1 + int((row > row[ids[at]]).sum()) or np.isclose(np.sort(row), row[ids[at]]).sum() > 1
            assert [value for _, value in one.top] == pytest.approx(np.sort(row)[::-1][:5], abs=1e-4)
            assert all(value == pytest.approx(row[token], abs=1e-4) for token, value in one.top)
        cluster.settle()


def test_who_decodes_elsewhere_is_told_the_same_and_answers_the_same(apart: Cluster) -> None:
    request = apart.submit(prompt(2), "p", "d", sampling=asks())
    silent = apart.submit(prompt(2), "p", "d", sampling=asks(None), number=1)
    apart.run(request, silent)
    assert request.ids == silent.ids and silent.prompt_told == {}
    with alone() as cluster:
        other = cluster.submit(prompt(2), "w", "w", sampling=asks())
        cluster.run(other)
        assert whole(other) == whole(request) and other.ids == request.ids
    assert all(len(one.top) == 3 for one in whole(request))
    apart.settle()


@pytest.mark.parametrize("max_tokens", [1, 7, 64, 1000])
def test_chunks_and_crowds_change_nothing(max_tokens: int) -> None:
    with alone() as cluster:
        first = cluster.submit(prompt(3), "w", "w", sampling=asks())
        cluster.run(first)
    with alone(max_tokens=max_tokens) as cluster:
        crowd = [cluster.submit(prompt(seed, 40), "w", "w", sampling=asks(seed % 2 or None)) for seed in range(4, 8)]
        second = cluster.submit(prompt(3), "w", "w", sampling=asks())
        sequence = next(iter(cluster.workers["w"].batcher.sequences.values()))
        assert sequence.most >= prompts.AT_ONCE
        cluster.run(second, *crowd)
        assert whole(second) == whole(first) and second.ids == first.ids
        assert [bool(one.prompt_told) for one in crowd] == [False, True, False, True]
        cluster.settle()


def test_whoever_is_preempted_is_told_once() -> None:
    """Pages for one and a half: while two answers grow, one must give its pages up and compute its prompt anew."""
    with alone() as cluster:
        expected = [cluster.submit(prompt(seed, 60), "w", "w", sampling=asks(2, 40)) for seed in (8, 9)]
        cluster.run(*expected)
    with alone(pages=10) as cluster:
        pair = [cluster.submit(prompt(seed, 60), "w", "w", sampling=asks(2, 40)) for seed in (8, 9)]
        cluster.run(*pair)
        assert cluster.workers["w"].counters["preempted"] > 0
        for one, other in zip(pair, expected, strict=True):
            assert whole(one, 60) == whole(other, 60) and one.ids == other.ids
        cluster.settle()


def test_an_abort_in_between_leaves_nothing(apart: Cluster) -> None:
    request = apart.submit(prompt(10), "p", "d", sampling=asks())
    apart.until(lambda: bool(request.prompt_told))
    assert len(request.prompt_told) <= prompts.AT_ONCE
    apart.abort(request)
    apart.settle()
    assert not apart.workers["p"]._telling


@pytest.mark.parametrize("length", [1, 2])
def test_short_prompts(length: int) -> None:
    with alone() as cluster:
        request = cluster.submit(prompt(11, length), "w", "w", sampling=asks(0))
        cluster.run(request)
        assert [one.top for one in whole(request, length)] == [()] * (length - 1)


def test_wishes_that_cannot_be_are_refused() -> None:
    for count in (-1, 21):
        with pytest.raises(ValueError, match="prompt_logprobs must be between 0 and 20"):
            asks(count)
