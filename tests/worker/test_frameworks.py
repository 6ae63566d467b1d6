"""Goal: KV that one framework has computed is KV for the other: the same tokens whoever prefills and whoever decodes.

Method: twenty prompts, greedy, in float32, against transformers, through real daemons: every pair of torch and jax, in
one arena and over tcp. Where the two highest logits are closer than rounding, one of the two must be chosen, and the
answer goes on behind the oracle's (`oracle.Comparison`, which says how many these were). From the counters: every block
of every prompt crossed, and the decode worker computed its own tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from pyengine.backend import Backend
from pyengine.backends import load_backend
from pyengine.scheduler.types import SamplingParams
from tests import crossing, oracle
from tests.model.checkpoints import SHAPES, write_tiny
from tests.worker.harness import Cluster, Request

pytest.importorskip("torch", reason="the torch extra is not installed")
pytest.importorskip("transformers", reason="the oracle is not installed")
pytest.importorskip("flax", reason="the jax extra is not installed")

BLOCK = 16
PAGES = 256
MAX_TOKENS, MAX_SEQUENCES = 32, 4
FRAMEWORKS = ("torch", "jax")


class Reused:
    """A backend that outlives its worker, with its pages: a cluster closes what it is given; to compile takes long."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def allocate(self, pages: int) -> None:
        assert pages == PAGES

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return crossing.write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cases(model: Path) -> list[oracle.Case]:
    return crossing.cases(model)


@pytest.fixture(scope="module")
def backend(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Backend]]:
    """By framework and part: a worker of either part has a backend of its own."""
    made: dict[tuple[str, str], Backend] = {}
    cache = tmp_path_factory.mktemp("cache")

    def of(framework: str, part: str) -> Backend:
        if (framework, part) not in made:
            backend = load_backend(framework, str(model), cache=cache, threads=1, dtype="float32")
            made[framework, part] = backend
            backend.allocate(PAGES)
            # Here, as nobody waits: to compile takes longer than an event may.
            backend.warm_up(MAX_TOKENS, MAX_SEQUENCES)
        return Reused(made[framework, part])  # type: ignore[return-value]

    yield of
    for each in made.values():
        each.close()


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9,
        top_k=(0, 40)[seed % 2],
        top_p=(1.0, 0.9)[seed // 2 % 2],
        seed=seed,
        max_tokens=20,
        ignore_eos=True,
    )


@pytest.mark.parametrize(
    ("shape", "dtype"), [("grouped", "float32"), ("mistral window", "bfloat16"), ("qwen3", "auto")]
)
def test_namespaces_are_equal(shape: str, dtype: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", **SHAPES[shape])
    torch, jax = (load_backend(name, str(folder), cache=tmp_path, threads=1, dtype=dtype) for name in FRAMEWORKS)
    assert torch.namespace.difference(jax.namespace) is None
    assert torch.namespace.digest() == jax.namespace.digest()
    assert (torch.vocab_size, torch.max_positions, torch.eos_token_ids) == (
        jax.vocab_size,
        jax.max_positions,
        jax.eos_token_ids,
    )


@pytest.mark.parametrize("nodes", ["one arena", "tcp"])
@pytest.mark.parametrize("decode", FRAMEWORKS)
@pytest.mark.parametrize("prefill", FRAMEWORKS)
def test_the_same_tokens_whoever_computes(
    cases: list[oracle.Case], backend: Callable[[str, str], Backend], prefill: str, decode: str, nodes: str
) -> None:
    with Cluster("tcp") as cluster:
        there = backend(decode, "decode")
        names = {"one arena": ("n", "n"), "tcp": ("p", "d")}[nodes]
        for name in sorted(set(names)):
            cluster.add_node(name, 512, there)
        add = partial(cluster.add_worker, pages=PAGES, max_tokens=MAX_TOKENS, max_sequences=MAX_SEQUENCES)
        add("prefill", names[0], backend(prefill, "prefill"))
        worker = add("decode", names[1], there)
        comparisons = [oracle.Comparison(case) for case in cases]
        requests: list[Request] = []
        while open_ones := [(c, wanted) for c in comparisons if (wanted := c.wanted()) is not None]:
            asked = [cluster.submit(ids, "prefill", "decode", sampling=greedy(count)) for _, (ids, count) in open_ones]
            cluster.run(*asked)
            requests += asked
            for (comparison, _), request in zip(open_ones, asked, strict=True):
                assert request.failed is None
                comparison.feed(request.ids)
        oracle.assert_few_ties(comparisons)
        cluster.settle()
        assert worker.counters["prefill"] == 0
        assert worker.counters["recomputed"] == 0
        assert worker.counters["decode"] == sum(len(request.ids) - 1 for request in requests)
        # One prompt after the other shares nothing, so each brought all its blocks, the partial one too.
        blocks = sum(-(-len(case.ids) // BLOCK) for case in cases)
        transport = "arena" if nodes == "one arena" else "tcp"
        crossed = cluster.counter(names[1], "pyengine_transfer_blocks_total", transport=transport, direction="in")
        assert crossed >= blocks if len(requests) > len(cases) else crossed == blocks


def test_the_same_draws_whoever_computes(cases: list[oracle.Case], backend: Callable[[str, str], Backend]) -> None:
    """Sampling with seeds: random numbers are the host's, and they go through tokens in the order of ids."""
    answers: dict[tuple[str, str], list[list[int]]] = {}
    for prefill, decode in product(FRAMEWORKS, FRAMEWORKS):
        with Cluster("tcp") as cluster:
            there = backend(decode, "decode")
            cluster.add_node("n", 512, there)
            add = partial(cluster.add_worker, pages=PAGES, max_tokens=MAX_TOKENS, max_sequences=MAX_SEQUENCES)
            add("prefill", "n", backend(prefill, "prefill"))
            add("decode", "n", there)
            requests = [
                cluster.submit(case.ids, "prefill", "decode", sampling=sampled(number))
                for number, case in enumerate(cases)
            ]
            cluster.run(*requests)
            answers[prefill, decode] = [request.ids for request in requests]
    expected = answers["torch", "torch"]
    assert len({tuple(ids) for ids in expected}) == len(expected), "they are drawn"
    assert all(each == expected for each in answers.values())
