"""Goal: decode through graphs is decode, to the last bit, whatever the batch; what cannot be captured is said.

Method: on a CPU, with the twin of the recorder (graph_twin.py), which leaves garbage wherever a graph would not find
what the host has not written for this very step. Random batches of sequences of random lengths over scattered pages
are decoded with graphs and without: logits and all pages are compared bit by bit. Then the same with Triton's kernels,
interpreted, whose plan is what a GPU would capture. That the launches themselves are captured only a GPU can show.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pyengine.backend import Slice
from pyengine.scheduler.types import BLOCK_TOKENS, SamplingParams
from tests.kernels.interpreter import interpret
from tests.model.checkpoints import write_tiny

torch = pytest.importorskip("torch", reason="needs the torch extra")

from pyengine.backends.torch import TorchBackend  # noqa: E402 (needs torch)
from pyengine.backends.torch.graphs import sizes_up_to  # noqa: E402
from pyengine.checkpoint import resolve  # noqa: E402
from pyengine.kernels.torch import eager  # noqa: E402
from pyengine.kernels.torch import threads as kernel_threads  # noqa: E402
from tests.model.graph_twin import GraphTwin, with_graphs  # noqa: E402

GREEDY = SamplingParams(temperature=0.0)
PAGES, SEQUENCES = 64, 11
Load = Callable[..., TorchBackend]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """load(**changes of the checkpoint): with pages of random numbers, the same ones in each."""
    before = torch.get_num_threads()

    def load_one(**changes: Any) -> TorchBackend:
        folder = tmp_path / "model"
        if not folder.exists():
            write_tiny(folder, **changes)
        return loaded(folder)

    yield load_one
    kernel_threads.use(None)
    torch.set_num_threads(before)


def loaded(folder: Path) -> TorchBackend:
    backend = TorchBackend(resolve(str(folder), folder.parent), threads=1)
    backend.allocate(PAGES)
    spec = backend.namespace.kv
    values = np.random.default_rng(0).standard_normal((PAGES, spec.strips, spec.strip_bytes // 4)).astype(np.float32)
    backend.write_pages(list(range(PAGES)), values.view(np.uint8))
    return backend


def pages_of(backend: TorchBackend) -> np.ndarray[Any, np.dtype[np.uint8]]:
    spec = backend.namespace.kv
    out = np.empty((PAGES, spec.strips, spec.strip_bytes), np.uint8)
    backend.read_pages(list(range(PAGES)), out)
    return out


def batch_of(random: np.random.Generator, count: int, longest: int = 150) -> list[Slice]:
    """Single tokens of `count` sequences, of which some want no logits, each on pages of its own."""
    lengths = [int(length) for length in random.integers(1, longest + 1, count)]
    while sum(-(-length // BLOCK_TOKENS) for length in lengths) > PAGES:
        lengths = [max(1, length // 2) for length in lengths]
    free = iter(random.permutation(PAGES))
    slices = []
    for length in lengths:
        pages = np.array([next(free) for _ in range(-(-length // BLOCK_TOKENS))], np.int32)
        sampling = GREEDY if random.random() < 0.8 else None
        slices.append(Slice(random.integers(0, 256, 1).astype(np.uint32), length - 1, pages, sampling))
    return slices


@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": 37, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}]
)
def test_random_batches_are_the_same_to_the_bit(changes: dict[str, Any], load: Load) -> None:
    plain, graphed = load(**changes), load(**changes)
    twin = with_graphs(graphed, SEQUENCES)
    assert twin.recordings == len(sizes_up_to(SEQUENCES)) == 5
    random = np.random.default_rng(1)
    for step in range(60):
        slices = batch_of(random, int(random.integers(1, SEQUENCES + 1)))
        expected, found = plain.logits(slices), graphed.logits(slices)
        np.testing.assert_array_equal(found.numpy(), expected.numpy())
        assert twin.replays == step + 1
    assert np.array_equal(pages_of(graphed), pages_of(plain))


def test_steps_go_on_from_tokens_of_the_one_before(load: Load) -> None:
    """Begun before the tokens they continue are known, in changing order and number: some sequences leave."""
    plain, graphed = load(), load()
    plain.overlaps = graphed.overlaps = True
    twin = with_graphs(graphed, SEQUENCES)
    first = batch_of(np.random.default_rng(2), 9, 30)
    spare = iter(range(PAGES))
    first = [
        msgspec.structs.replace(slice_, pages=np.array([next(spare) for _ in range(4)], np.int32), sampling=GREEDY)
        for slice_ in first
    ]
    answers = []
    for backend in (plain, graphed):
        steps, slices = [backend.submit(first)], first
        for step in range(8):
            order = np.random.default_rng(step).permutation(len(slices))[: 9 - step // 2]
            slices = [
                msgspec.structs.replace(slices[row], start=slices[row].start + 1, after=int(row)) for row in order
            ]
            steps.append(backend.submit(slices))
            if len(steps) > 2:
                answers.append(steps[-3].tokens())
        answers += [steps[-2].tokens(), steps[-1].tokens()]
    assert answers[:9] == answers[9:]
    assert twin.replays == 9
    assert np.array_equal(pages_of(graphed), pages_of(plain))


def test_prompts_and_larger_batches_are_computed_call_by_call(load: Load) -> None:
    plain, graphed = load(), load()
    twin = with_graphs(graphed, 4)
    random = np.random.default_rng(3)
    for slices in (
        batch_of(random, 5),
        [Slice(np.arange(20, dtype=np.uint32), 0, np.array([0, 1], np.int32), GREEDY)],
        [
            *batch_of(random, 1, 16),
            Slice(np.arange(2, dtype=np.uint32), 30, np.array([60, 61], np.int32), GREEDY),
        ],
    ):
        assert graphed.execute(slices) == plain.execute(slices)
    assert twin.replays == 0
    assert graphed.execute([]) == []


def test_pages_that_do_not_exist_are_refused(load: Load) -> None:
    """Nothing of the step is computed, and the next one is right."""
    plain, graphed = load(), load()
    twin = with_graphs(graphed, 4)
    with pytest.raises(ValueError, match="pages"):
        graphed.execute([Slice(np.array([1], np.uint32), 20, np.array([3, PAGES + 2], np.int32), GREEDY)])
    assert twin.replays == 0
    slices = batch_of(np.random.default_rng(4), 3)
    assert graphed.execute(slices) == plain.execute(slices)
    assert np.array_equal(pages_of(graphed), pages_of(plain))


def test_what_cannot_be_captured_is_said_and_computed_all_the_same(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    """Eager PyTorch looks at slots while it writes KV: a capture of it fails."""
    plain, graphed = load(), load()

    class Looking:
        def __getattr__(self, name: str) -> Any:
            return getattr(eager, name)

        def decode_tables(self, tables: Any, kv: Any, window: Any = None) -> Any:
            return lambda query, kv: query

    graphed.recorder = GraphTwin()
    graphed._model.kernels = Looking()
    graphed.warm_up(16, 4)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "capturing failed" in record.message and "not permitted when stream is capturing" in record.message
    assert graphed._graphs is None
    slices = batch_of(np.random.default_rng(5), 3)
    np.testing.assert_allclose(graphed.logits(slices).numpy(), plain.logits(slices).numpy(), atol=1e-4)

    caplog.clear()
    graphed._model.kernels = plain._model.kernels
    graphed.warm_up(16, 4)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "cannot be captured" in record.message


def test_a_cpu_says_that_it_has_none(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pyengine.backends.torch.backend")
    backend = load()
    backend.warm_up(16, 4)
    assert backend._graphs is None
    assert [record.message for record in caplog.records] == ["decode without CUDA graphs: a CPU has none"]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 8, 9, 64, 255, 256, 257, 1000, 4096])
def test_there_are_few_sizes(most: int) -> None:
    sizes = sizes_up_to(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most and sizes[0] == 1
    assert len(sizes) <= 35 + 16 * max(0, math.ceil(math.log2(most / 256)))
    for batch in range(1, most + 1):
        size = next(size for size in sizes if size >= batch)
        assert size - batch < max(8, batch / 16), f"{batch} sequences are padded to {size}"


def test_the_plan_of_triton_is_one_that_can_be_captured(tmp_path: Path) -> None:
    """In Triton's interpreter: a process of its own."""
    write_tiny(tmp_path / "model", num_hidden_layers=1, max_position_embeddings=64)
    with ProcessPoolExecutor(1, get_context("spawn"), interpret) as child:
        replays, different = child.submit(decode_with_triton, tmp_path / "model").result()
    assert replays == 2
    assert different == []


def decode_with_triton(folder: Path) -> tuple[int, list[int]]:
    """(replays, steps whose logits differ by a bit from those without graphs).

    With so few positions decode is in one part, however wide its tables are: into how many follows from that.
    """
    from pyengine.kernels.torch import triton

    plain, graphed = loaded(folder), loaded(folder)
    plain._model.kernels = graphed._model.kernels = triton
    twin = with_graphs(graphed, 3)
    random = np.random.default_rng(6)
    batches = [batch_of(random, count, 60) for count in (3, 2)]
    with torch.inference_mode():
        pairs = [(plain.logits(slices), graphed.logits(slices)) for slices in batches]
    return twin.replays, [step for step, (one, other) in enumerate(pairs) if not torch.equal(one, other)]
