"""Goal: a model spread over several ranks computes what it computes in one process, and writes the same KV.

Method: who has what by exhaustion over numbers of heads; every architecture with its ranks as threads, whose
collectives are a barrier and a sum; then real processes. What such a replica does with pools:
tests/worker/test_ranks.py.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pyengine.backend import Slice, WorkerBroken
from pyengine.backends import load_backend
from pyengine.checkpoint import ModelConfig, ModelError, resolve
from pyengine.scheduler.types import SamplingParams
from tests.model.checkpoints import MISTRAL, QWEN2, QWEN3, TINY, write_tiny
from tests.model.test_shaped_choices import random_shaping

torch = pytest.importorskip("torch", reason="needs the torch extra")

from pyengine.backends.torch import ParallelTorchBackend, TorchBackend  # noqa: E402
from pyengine.backends.torch.part import Part  # noqa: E402

#: Of a logit, and of a number of KV: sums over a part of the weights each, added up, are rounded elsewhere.
TOLERANCE = 1e-4
PAGES = 16
#: Generous: an event that takes longer never comes.
PATIENCE = 60.0
GREEDY = SamplingParams(temperature=0.0)
#: Eight KV heads, as a model has that several degrees of parallelism share; 301 tokens, which no degree divides.
EIGHT: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16, "vocab_size": 301}


def config(heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=301, hidden_size=64, intermediate_size=97, layers=2, heads=heads, kv_heads=kv_heads, head_dim=8,
        max_positions=64, norm_eps=1e-5, rope_theta=1e4,
    )  # fmt: skip


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_every_row_has_its_rank(kv_heads: int, group: int, ranks: int) -> None:
    """Each query head is at one rank, beside the KV head that it shares; each KV head is written by just one rank."""
    heads = kv_heads * group
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        with pytest.raises(ModelError, match=f"{ranks} ranks cannot share {heads} attention heads and {kv_heads} KV"):
            Part(config(heads, kv_heads), 0, ranks)
        return
    parts = [Part(config(heads, kv_heads), rank, ranks) for rank in range(ranks)]
    written = [
        head
        for part in parts
        if part.heads.stores
        for head in range(part.heads.first, part.heads.first + part.heads.count)
    ]
    assert written == list(range(kv_heads))
    if ranks == 1:
        assert parts[0].rows("model.embed_tokens.weight") is None
        return
    for name, rows in (
        ("model.layers.0.self_attn.q_proj.weight", heads * 8),
        ("model.layers.1.self_attn.q_proj.bias", heads * 8),
        ("model.layers.0.mlp.up_proj.weight", 97),
        ("lm_head.weight", 301),
    ):
        shares = [part.rows(name) for part in parts]
        assert [row for share in shares if share is not None for row in share] == list(range(rows)), name
        assert all(part.columns(name) is None for part in parts)
    for part in parts:
        queries, keys = part.rows("a.q_proj.weight"), part.rows("a.k_proj.weight")
        assert queries is not None and keys is not None and part.columns("a.o_proj.weight") == queries
        assert part.rows("a.o_proj.weight") is None and part.rows("a.input_layernorm.weight") is None
        own = {head // 8 for head in keys}
        assert own == {head // 8 // group for head in queries}, "whose keys its queries are compared with"
        assert own == set(range(part.heads.first, part.heads.first + part.heads.count))


class Together:
    """A twin of the collectives: ranks are threads."""

    def __init__(self, backends: list[TorchBackend]) -> None:
        self._backends = backends
        self._parts: list[Any] = [None] * len(backends)
        self._barrier = threading.Barrier(len(backends))
        for backend in backends:
            backend.group.sum = self._bound(backend, self._sum)  # type: ignore[method-assign, assignment]
            backend.group.logits = self._bound(backend, self._logits)  # type: ignore[method-assign, assignment]

    def _bound(self, backend: TorchBackend, act: Callable[[Part, Any], Any]) -> Callable[[Any], Any]:
        return lambda x: act(backend.group.part, x)

    def _exchange(self, part: Part, x: Any) -> list[Any]:
        self._barrier.wait()
        self._parts[part.rank] = x.clone()
        self._barrier.wait()
        return self._parts

    def _sum(self, part: Part, x: Any) -> Any:
        parts = self._exchange(part, x)
        return torch.add(sum(parts[1:-1], parts[0]), parts[-1], out=x)

    def _logits(self, part: Part, mine: Any) -> Any:
        padded = torch.nn.functional.pad(mine, (0, part.width - mine.shape[1]))
        return part.whole(self._exchange(part, padded))

    def logits(self, slices: list[Slice]) -> Any:
        with ThreadPoolExecutor(len(self._backends)) as pool:
            first, *_ = list(pool.map(lambda backend: backend.logits(slices), self._backends))
            return first


ARCHITECTURES = {
    "llama": (4, {"num_attention_heads": 8, "num_key_value_heads": 4}),
    "llama tied": (2, EIGHT | {"tie_word_embeddings": True, "intermediate_size": 97}),
    "replicated heads": (4, {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "mistral window": (2, MISTRAL | {"sliding_window": 23}),
    "qwen2": (3, QWEN2 | {"num_key_value_heads": 3}),
    "qwen3": (2, QWEN3 | {"tie_word_embeddings": True, "vocab_size": 301}),
}


def steps() -> Iterator[list[Slice]]:
    """Chunks and single tokens of two sequences, alone and together, over scattered pages."""
    tokens = np.random.default_rng(3).integers(0, 256, (2, 70)).astype(np.uint32)
    pages = np.random.default_rng(4).permutation(PAGES).astype(np.int32).reshape(2, -1)
    yield [Slice(tokens[0, :40], 0, pages[0], GREEDY)]
    yield [Slice(tokens[1, :30], 0, pages[1], GREEDY), Slice(tokens[0, 40:41], 40, pages[0], GREEDY)]
    yield [Slice(tokens[0, 41:70], 41, pages[0], None)]
    yield [Slice(tokens[row, at : at + 1], at, pages[row], GREEDY) for row, at in ((0, 69), (1, 30))]


def strips(backend: TorchBackend) -> Any:
    """float32 [pages, layers * 2, heads, ...] of what this backend has."""
    spec, heads = backend.namespace.kv, backend.group.part.heads
    out = np.empty((PAGES, spec.strips // heads.of * heads.count, spec.strip_bytes), np.uint8)
    backend.read_pages(list(range(PAGES)), out)
    return out.view(np.float32).reshape(PAGES, -1, heads.count, spec.strip_bytes // 4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ranks_compute_what_one_does(name: str, tmp_path: Path) -> None:
    ranks, changes = ARCHITECTURES[name]
    checkpoint = resolve(str(write_tiny(tmp_path / "model", **changes)), tmp_path)
    whole = TorchBackend(checkpoint, threads=1)
    parts = [TorchBackend(checkpoint, threads=1, part=Part(checkpoint.config, rank, ranks)) for rank in range(ranks)]
    for backend in (whole, *parts):
        backend.allocate(PAGES)
        assert backend.namespace == whole.namespace, "KV does not depend on who shares a model"
    together = Together(parts)
    for slices in steps():
        expected, found = whole.logits(slices), together.logits(slices)
        assert not len(expected) or float(expected.abs().max()) > 0.5, "the test's own model must say something"
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    kv = strips(whole)
    for part in parts:
        heads = part.group.part.heads
        own = kv[:, :, heads.first : heads.first + heads.count]
        np.testing.assert_allclose(strips(part), own, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("parallel") / "model", **EIGHT)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[ParallelTorchBackend]:
    backend = load_backend("torch", str(folder), cache=folder.parent, threads=2, tp=2)
    assert isinstance(backend, ParallelTorchBackend)
    backend.allocate(PAGES)
    yield backend
    backend.close()
    assert all(not Path(f"/proc/{pid}").exists() for pid in backend.ranks.pids)


def test_processes_compute_what_one_does(pair: ParallelTorchBackend, folder: Path) -> None:
    whole = TorchBackend(resolve(str(folder), folder.parent), threads=1)
    whole.allocate(PAGES)
    assert pair.namespace == whole.namespace
    for slices in steps():
        torch.testing.assert_close(pair.logits(slices), whole.logits(slices), atol=TOLERANCE, rtol=0)
        assert pair.execute(slices) == whole.execute(slices)
        assert shaped(pair, slices) == shaped(whole, slices)
    assert pair.execute([]) == []
    np.testing.assert_allclose(strips(pair), strips(whole)[:, :, :4], atol=TOLERANCE, rtol=0)


def shaped(backend: TorchBackend, slices: list[Slice]) -> tuple[list[int], list[tuple[int, list[int]] | None]]:
    """What is chosen and told (ranks, and ids of the likeliest) where every row is shaped in its own way."""
    random = np.random.default_rng(len(slices))
    asked = [msgspec.structs.replace(slice_, shaping=random_shaping(random, backend.vocab_size)) for slice_ in slices]
    pending = backend.submit(asked)
    tokens = pending.tokens()
    told = pending.logprobs()
    return tokens, [None if one is None else (one.rank, [id for id, _ in one.top]) for one in told]


def test_a_token_does_not_depend_on_its_batch(pair: ParallelTorchBackend) -> None:
    """To the last bit: sums over ranks have one order."""
    tokens = np.random.default_rng(5).integers(0, 256, (PAGES, 1)).astype(np.uint32)
    slices = [Slice(row, 0, np.array([page], np.int32), GREEDY) for page, row in enumerate(tokens)]
    together = pair.logits(slices)
    for row, slice_ in enumerate(slices):
        assert torch.equal(pair.logits([slice_])[0], together[row])


def test_ctrl_c_comes_between_steps(pair: ParallelTorchBackend) -> None:
    """It is raised, and the ranks are still where the leader is."""
    slices = next(steps())
    expected = pair.logits(slices)
    timer = threading.Timer(0.0, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        while True:
            pair.logits(slices)
    timer.join()
    assert torch.equal(pair.logits(slices), expected)


def test_more_ranks_than_kv_heads(tmp_path: Path) -> None:
    checkpoint = resolve(str(write_tiny(tmp_path / "model", num_attention_heads=8, num_key_value_heads=2)), tmp_path)
    whole, spread = TorchBackend(checkpoint, threads=1), ParallelTorchBackend(checkpoint, 4, threads=1)
    whole.allocate(PAGES)
    spread.allocate(PAGES)
    try:
        for slices in steps():
            torch.testing.assert_close(spread.logits(slices), whole.logits(slices), atol=TOLERANCE, rtol=0)
    finally:
        spread.close()


def test_a_dead_rank_is_noticed(folder: Path) -> None:
    """By its end, in the midst of a step: nobody waits for a clock. Method: the rank is stopped before, then killed.
    While its leader is idle: tests/system/test_tensor_parallel.py.
    """
    backend = ParallelTorchBackend(resolve(str(folder), folder.parent), 2, threads=1)
    try:
        backend.allocate(PAGES)
        (pid,) = backend.ranks.pids
        os.kill(pid, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            computing = pool.submit(backend.logits, next(steps()))
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerBroken, match="spread over 2 processes, and rank 1 was killed by SIGKILL"):
                computing.result(PATIENCE)
        with pytest.raises(WorkerBroken, match="rank 1 was killed by SIGKILL"):
            backend.execute(next(steps()))
    finally:
        backend.close()


def test_what_a_rank_cannot_do_is_told(tmp_path: Path) -> None:
    """Damage in another rank's part of the weights, and too many heads for a degree."""
    checkpoint = resolve(str(write_tiny(tmp_path / "model", **EIGHT)), tmp_path)
    with pytest.raises(ModelError, match="3 ranks cannot share 8 attention heads"):
        ParallelTorchBackend(checkpoint, 3)
    place = checkpoint.weights["model.layers.0.mlp.down_proj.weight"]
    with place.path.open("r+b") as file:
        file.seek(place.start + 4 * (TINY["intermediate_size"] - 1))  # the last column
        file.write(np.array([np.nan], np.float32).tobytes())
    with pytest.raises(ModelError, match=r"rank 1: .*down_proj.*NaN"):
        ParallelTorchBackend(checkpoint, 2, threads=1)
