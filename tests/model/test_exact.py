"""Goal: on a CPU with our kernels a sequence's logits and KV are the same to the last bit however they come about.

Method: the logits of one prompt's last token, and the KV of all its tokens, as a whole; then in chunks, beside other
sequences, over a prefix that another computed, and with other numbers of threads. Bits are compared, in float32 and in
bfloat16. Then: bfloat16 loses no more than its rounding, and weights stored in it lose nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine import _native
from pyengine.backend import Slice
from pyengine.scheduler.types import SamplingParams
from tests.model.checkpoints import write_tiny

torch = pytest.importorskip("torch", reason="needs the torch extra")

from pyengine.backends.torch import TorchBackend  # noqa: E402 (needs torch)
from pyengine.checkpoint import resolve  # noqa: E402
from pyengine.kernels.torch import threads as kernel_threads  # noqa: E402
from pyengine.kernels.torch.linear import Scratch  # noqa: E402

pytestmark = pytest.mark.skipif(
    _native.LINEAR_LEVELS[-1] == "scalar" or torch.cuda.is_available(), reason="promised on CPUs with our kernels"
)
GREEDY = SamplingParams(temperature=0.0)
#: More than one segment of attention, and no whole number of pages.
LENGTH, PAGE = 333, 16
Array = np.ndarray[Any, Any]
Load = Callable[..., TorchBackend]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    """load(dtype, threads=..., **changes of the checkpoint)."""
    before = torch.get_num_threads()

    def load_one(dtype: str, threads: int = 2, **changes: Any) -> TorchBackend:
        folder = tmp_path / "model"
        if not folder.exists():
            write_tiny(folder, **changes)
        backend = TorchBackend(resolve(str(folder), tmp_path), threads=threads, dtype=dtype)
        backend.allocate(100)
        return backend

    yield load_one
    kernel_threads.use(None)
    torch.set_num_threads(before)


def tokens_of(seed: int, length: int = LENGTH) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 256, length).tolist()
    return tokens


def piece(tokens: list[int], first: int, last: int, page: int) -> Slice:
    """Positions first..last of a sequence whose pages begin at `page`."""
    pages = np.arange(page, page + -(-len(tokens) // PAGE), dtype=np.int32)
    return Slice(np.array(tokens[first:last], np.uint32), first, pages, GREEDY)


def logits(backend: Any, *pieces: Slice) -> Array:
    return np.asarray(backend.logits(list(pieces)))


def kv(backend: Any, page: int) -> Array:
    """The bits of a sequence's whole pages."""
    spec = backend.namespace.kv
    out = np.empty((LENGTH // PAGE, spec.strips, spec.block_bytes // spec.strips), np.uint8)
    backend.read_pages(list(range(page, page + len(out))), out)
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 40])
def test_bits_do_not_depend_on_batch_chunks_or_threads(dtype: str, window: int | None, load: Load) -> None:
    changes = {"sliding_window": window, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    changes = changes if window else {}
    backend = load(dtype, threads=1, **changes)
    tokens = tokens_of(1)
    expected = logits(backend, piece(tokens, 0, LENGTH, 0))
    pages = kv(backend, 0)
    backend = load(dtype, threads=3)
    for chunks in ([0, 100, 101, 300, LENGTH], [0, 16, LENGTH - 1, LENGTH], [0, *range(290, LENGTH + 1)]):
        for first, last in itertools.pairwise(chunks):
            found = logits(backend, piece(tokens, first, last, 30))
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(kv(backend, 30), pages)
    others = [tokens_of(seed) for seed in (2, 3)]
    logits(backend, piece(others[0], 0, 50, 0), piece(others[1], 0, LENGTH - 1, 60))
    beside = logits(
        backend, piece(others[0], 50, 51, 0), piece(tokens, 0, LENGTH, 30), piece(others[1], LENGTH - 1, LENGTH, 60)
    )
    np.testing.assert_array_equal(beside[1:2], expected)
    decoded = logits(backend, piece(others[1], LENGTH - 1, LENGTH, 60), piece(tokens, LENGTH - 1, LENGTH, 30))
    np.testing.assert_array_equal(decoded[1:2], expected)


def test_weights_stored_in_bfloat16_lose_nothing(load: Load, tmp_path: Path) -> None:
    """A float32 model of such a file: its products widen the weights, which half of the memory holds."""
    write_tiny(tmp_path / "model")
    rewrite(tmp_path / "model", lambda tensor: tensor.to(torch.bfloat16))
    tokens = tokens_of(1)
    half = logits(load("float32"), piece(tokens, 0, LENGTH, 0))
    rewrite(tmp_path / "model", lambda tensor: tensor.float())
    np.testing.assert_array_equal(logits(load("float32"), piece(tokens, 0, LENGTH, 0)), half)


def rewrite(folder: Path, change: Callable[[Any], Any], prefix: str = "") -> None:
    """Changes the tensors whose names begin so."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = {name: change(tensor) if name.startswith(prefix) else tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def test_bfloat16_is_near_float32_and_has_a_namespace_of_its_own(load: Load) -> None:
    wide, half = load("float32"), load("bfloat16")
    tokens = tokens_of(1)
    expected, found = (logits(backend, piece(tokens, 0, LENGTH, 0)) for backend in (wide, half))
    # Each weight and each number of KV is off by 2^-9 at most, which three layers of random weights amplify; what is
    # wrongly laid out or rounded twice is off by as much as logits are.
    assert 0 < np.abs(found - expected).mean() < 2.0**-4 * np.abs(expected).mean()
    assert (wide.namespace.compute_dtype, half.namespace.compute_dtype) == ("float32", "bfloat16")
    assert half.namespace.kv.groups[0].dtype == "bfloat16"
    assert half.namespace.kv.block_bytes * 2 == wide.namespace.kv.block_bytes
    assert load("auto").namespace == wide.namespace
    with pytest.raises(ValueError, match="unknown dtype 'float8'; known: auto, float32, bfloat16"):
        load("float8")


def test_products_share_two_pieces_of_memory() -> None:
    scratch = Scratch()
    first, second = scratch.take(5, 7), scratch.take(5, 3)
    assert first.shape == (5, 7) and second.shape == (5, 3) and first.data_ptr() != second.data_ptr()
    places = {scratch.take(rows, 3).data_ptr() for rows in (1, 1, 2, 2, 5, 5)}
    assert places == {first.data_ptr(), second.data_ptr()}
    for rows in range(1, 3 * Scratch.VIEWS):
        scratch.take(rows, 1)
    assert len(scratch._views) <= Scratch.VIEWS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 40])
def test_jax_keeps_the_promise_and_in_float32_has_the_bits_of_pytorch(
    dtype: str, window: int | None, load: Load, tmp_path: Path
) -> None:
    jax = pytest.importorskip("pyengine.backends.jax", reason="needs the jax extra")
    changes = {"sliding_window": window, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    other = load(dtype, **(changes if window else {}))
    backend = jax.JaxBackend(resolve(str(tmp_path / "model"), tmp_path), compiled=tmp_path / "xla", dtype=dtype)
    backend.allocate(100)
    tokens, beside = tokens_of(1), tokens_of(2)
    expected, pages = logits(backend, piece(tokens, 0, LENGTH, 0)), kv(backend, 0)
    for chunks in ([0, 100, 101, 300, LENGTH], [0, 16, LENGTH - 1, LENGTH]):
        for first, last in itertools.pairwise(chunks):
            found = logits(backend, piece(tokens, first, last, 30))
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(kv(backend, 30), pages)
    together = logits(backend, piece(beside, 0, 50, 60), piece(tokens, 0, LENGTH, 30))
    np.testing.assert_array_equal(together[1:], expected)
    decoded = logits(backend, piece(beside, 50, 51, 60), piece(tokens, LENGTH - 1, LENGTH, 30))
    np.testing.assert_array_equal(decoded[1:], expected)
    if dtype == "float32":
        np.testing.assert_array_equal(logits(other, piece(tokens, 0, LENGTH, 0)), expected)
        np.testing.assert_array_equal(kv(other, 0), pages)


@pytest.mark.parametrize("half", [0, 1, 2])
def test_jax_keeps_the_bits_of_a_checkpoint_whose_layers_differ_in_type(half: int, load: Load, tmp_path: Path) -> None:
    """Layer `half` of three is stored in bfloat16, what else there is in float32."""
    jax = pytest.importorskip("pyengine.backends.jax", reason="needs the jax extra")
    write_tiny(tmp_path / "model")
    rewrite(tmp_path / "model", lambda tensor: tensor.to(torch.bfloat16), f"model.layers.{half}.")
    expected = logits(load("float32"), piece(tokens_of(1), 0, LENGTH, 0))
    backend = jax.JaxBackend(resolve(str(tmp_path / "model"), tmp_path), compiled=tmp_path / "xla", dtype="float32")
    backend.allocate(100)
    np.testing.assert_array_equal(logits(backend, piece(tokens_of(1), 0, LENGTH, 0)), expected)
