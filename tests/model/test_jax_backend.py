"""Goal: the JAX backend computes what transformers does, with a known number of programs, pages that stay in place, and
heads over several devices; what all backends must do stands in test_backend_conformance.py.

Method: tiny checkpoints of every architecture against transformers and torch; XLA's own count of what it compiled and
the addresses of its buffers under random traffic; meshes of four host devices in a child process, as JAX counts the
devices once.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pyengine._native import LINEAR_LEVELS
from pyengine.backend import Shaping, Slice, WorkerBroken
from pyengine.backends import lacking, load_backend
from pyengine.checkpoint import ModelError
from pyengine.kernels import reference
from pyengine.kernels.inputs import Sequences, Shapes
from pyengine.scheduler.types import BLOCK_TOKENS, SamplingParams
from tests.model import checkpoints
from tests.model.checkpoints import LLAMA3_ROPE, MISTRAL, QWEN2, QWEN3, QWEN_WINDOW, write_tiny
from tests.model.test_shaped_choices import random_shaping

if reason := lacking("jax"):
    pytest.skip(reason, allow_module_level=True)

import jax

from pyengine.backends.jax import JaxBackend, shaping
from pyengine.backends.jax.buckets import TOGETHER, Buckets

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=3)
#: Largest difference of a logit in float32, as for torch (test_parity.py).
TOLERANCE = 1e-4
LENGTH = 150
#: One of each architecture, with what is special to it; windows are shorter than the prompt.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "mistral": MISTRAL | {"sliding_window": 37},
    "qwen2": QWEN2 | {"head_dim": 8, "num_key_value_heads": 3},
    "qwen3": QWEN3 | QWEN_WINDOW,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def load(folder: Path, cache: Path, pages: int = 32) -> JaxBackend:
    backend = JaxBackend.load(str(folder), cache=cache)
    backend.allocate(pages)
    return backend


def slice_of(tokens: Any, start: int, pages: Any, sampling: SamplingParams | None = GREEDY) -> Slice:
    return Slice(np.asarray(tokens, np.uint32), start, np.asarray(pages, np.int32), sampling)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers_and_torch(shape: str, tmp_path: Path) -> None:
    """A prompt in chunks, the last of its tokens one by one, over scattered pages; torch is asked the same."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    transformers = pytest.importorskip("transformers", reason="needs the bench extra")
    from pyengine.backends.torch import TorchBackend

    folder = write_tiny(tmp_path / "model", **SHAPES[shape])
    tokens = np.random.default_rng(1).integers(0, 256, LENGTH)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens.tolist()])).logits[0].numpy()
    assert np.abs(expected).max() > 0.5, "the test's own model must say something"
    twin = TorchBackend.load(str(folder), cache=tmp_path, threads=1)
    twin.allocate(32)
    backend = load(folder, tmp_path)
    assert backend.namespace == twin.namespace
    pages = np.random.default_rng(0).permutation(32)
    for start, end in ((0, 50), (50, 100), (100, 144), *((at, at + 1) for at in range(144, LENGTH))):
        slices = [slice_of(tokens[start:end], start, pages)]
        ours = backend.logits(slices)[0]
        np.testing.assert_allclose(ours, expected[end - 1], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(ours, twin.logits(slices)[0].numpy(), atol=TOLERANCE, rtol=0)


def test_a_step_that_takes_the_pages_with_it_ends_the_worker(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong before it is computed is that step's alone. What fails on the device leaves no pages, and what
    comes after says so as well.
    """
    if LINEAR_LEVELS[-1] == "scalar":
        pytest.skip("needs kernels of ours, which refuse what does not fit: this processor has not the instructions")
    tokens = np.arange(20)
    good, bad = slice_of(tokens, 0, [0, 1]), slice_of(tokens, 0, [3, 400])
    for overlaps in (False, True):
        backend = load(tiny, tmp_path)
        backend.overlaps = overlaps  # made to queue its steps, as on a device
        expected = backend.execute([good])
        with pytest.raises(ValueError, match="400"):
            backend.execute([bad])
        assert backend.execute([good]) == expected
        with monkeypatch.context() as patch:
            patch.setattr(Sequences, "check_pages", lambda *_, **__: None)
            for _ in range(2):
                with pytest.raises(WorkerBroken, match="all KV pages are lost"):
                    backend.submit([bad]).tokens()
        with pytest.raises(WorkerBroken, match="all KV pages are lost"):
            backend.submit([good]).tokens()
        strips = np.zeros((1, backend.namespace.kv.strips, backend.namespace.kv.strip_bytes), np.uint8)
        with pytest.raises(WorkerBroken, match="all KV pages are lost"):
            backend.write_pages([0], strips)


@pytest.mark.parametrize("shape", sorted(checkpoints.SHAPES))
def test_prompts_of_every_shape(shape: str, tmp_path: Path) -> None:
    """The whole table that torch is compared over: one prompt, longer than the windows."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    transformers = pytest.importorskip("transformers", reason="needs the bench extra")
    folder = write_tiny(tmp_path / "model", **checkpoints.SHAPES[shape])
    tokens = np.random.default_rng(1).integers(0, 256, 64)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens.tolist()])).logits[0, -1].numpy()
    backend = load(folder, tmp_path)
    (logits,) = np.asarray(backend.logits([slice_of(tokens, 0, np.arange(4))]))
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)
    backend.close()


def test_bfloat16_is_near_float32(tiny: Path, tmp_path: Path) -> None:
    """On a CPU too. Tolerance and length as for torch's logits in bfloat16 (test_parity.py)."""
    tokens = np.random.default_rng(1).integers(0, 256, LENGTH)
    logits = []
    for dtype in ("float32", "bfloat16"):
        backend = JaxBackend.load(str(tiny), cache=tmp_path, dtype=dtype)
        backend.allocate(16)
        assert backend.namespace.kv.groups[0].dtype == backend.namespace.compute_dtype == dtype
        logits.append(backend.logits([slice_of(tokens, 0, range(10))])[0])
    difference = np.abs(logits[1] - logits[0]).max()
    assert 0 < difference < 0.4


def traffic(random: np.random.Generator, most_tokens: int, most: int, pages: int) -> list[Slice]:
    """One step: prompts' chunks behind prefixes, and single tokens, each sequence on pages of its own."""
    free = iter(random.permutation(pages).tolist())
    slices, room = [], most_tokens
    for _ in range(random.integers(1, most + 1)):
        count = 1 if random.random() < 0.5 else int(random.integers(1, max(2, room)))
        if count > room:
            break
        room -= count
        start = int(random.integers(0, 40))
        table = [next(free) for _ in range(-(-(start + count) // BLOCK_TOKENS))]
        slice_ = slice_of(random.integers(0, 256, count), start, table, [None, GREEDY, DRAWN][random.integers(3)])
        asked = random_shaping(random, 300) if random.random() < 0.3 else None
        slices.append(msgspec.structs.replace(slice_, shaping=asked))
    return slices


def test_compilations_are_bounded_and_pages_stay_in_place(tiny: Path, tmp_path: Path) -> None:
    """After `warm_up` no traffic compiles anything, and whatever is written to pages is written to the same memory."""
    compiled: list[str] = []

    def heard(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    backend = load(tiny, tmp_path, pages=64)
    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        backend.warm_up(max_tokens=48, max_sequences=4)
        assert backend.compilations == backend.programs_at_most == 3 + 3 + 3 * 4 + 6
        assert len(compiled) <= backend.programs_at_most
        compiled.clear()
        address = backend._pages.unsafe_buffer_pointer()
        random = np.random.default_rng(7)
        spec = backend.namespace.kv
        kinds = set()
        for _ in range(100):
            slices = traffic(random, 48, 4, 64)
            kinds |= {call.shape for call in backend._buckets.calls(slices)}
            backend.execute(slices)
            pages = random.permutation(64)[: random.integers(1, 40)].tolist()
            out = np.zeros((len(pages), spec.strips, spec.strip_bytes), np.uint8)
            backend.read_pages(pages, out)
            backend.write_pages(pages, out)
            assert backend._pages.unsafe_buffer_pointer() == address, "the pages were copied"
        assert kinds == set(backend._buckets.shapes), "the traffic must have every shape"
        assert not compiled
        assert backend.compilations == backend.programs_at_most
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


def test_shaping_is_cut_into_calls_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is seen, then all that is added, each entry once; rows that are not there are not shaped."""
    monkeypatch.setattr(shaping, "ENTRIES", 3)
    random = np.random.default_rng(0)
    for seen, ids, masked in itertools.product((0, 1, 6, 40), (0, 1, 6, 40), (False, True)):
        asked = Shaping(
            ids=random.permutation(64)[:ids].astype(np.int32),
            add=random.normal(size=ids).astype(np.float32),
            seen=random.permutation(64)[:seen].astype(np.int32),
            repetition=1.5,
            mask=random.integers(0, 2**32, 2, np.uint32) if masked else None,
        )
        logits = random.normal(size=(2, 64)).astype(np.float32)
        expected, padded = logits.copy(), np.concatenate([logits, np.zeros((1, 64), np.float32)])
        reference.shape_logits(expected, Shapes.of([asked, asked], 64))
        calls = list(shaping.shape_calls([asked, asked], 2, 64))
        wanted = max(-(-2 * seen // 6), 1) + max(-(-2 * ids // 6), 1) - 1 if seen or ids or masked else 0
        assert len(calls) == wanted
        for call in calls:
            assert {len(call.seen), len(call.ids), len(call.add)} == {6} and len(call.masks) == 2
            padded[2:] = 0.0  # what is shaped there belongs to nobody, and a kernel drops it
            reference.shape_logits(padded, without_row(call, 2))
        assert np.allclose(padded[:2], expected)


def without_row(call: Shapes, row: int) -> Shapes:
    """As kernels read it: what names this row names none."""
    seen, added, masked = call.seen_rows != row, call.rows != row, call.masked != row
    return Shapes(
        call.seen_rows[seen],
        call.seen[seen],
        call.factors[seen],
        call.rows[added],
        call.ids[added],
        call.add[added],
        call.masked[masked],
        call.masks[masked],
    )


def test_calls_have_every_token_of_a_step_once() -> None:
    """Also of steps that are larger than any shape: tokens, positions and slots, and who is to be sampled."""
    random = np.random.default_rng(3)
    buckets = Buckets(tokens=64, sequences=16, width=32, pages=256, block_tokens=BLOCK_TOKENS)
    for _ in range(200):
        slices = traffic(random, 300, 16, 256)
        rows, places = [], []
        for call in buckets.calls(slices):
            assert call.shape in buckets.shapes
            assert len(call.tokens) == call.shape.rows and len(call.places) == call.shape.sequences
            used = call.sequences.rows[-1]
            assert (call.slots[used:] == -1).all()
            rows += list(zip(call.tokens[:used], call.positions[:used], call.slots[:used], strict=True))
            places += [place for place in call.places.tolist() if place < buckets.slices]
            for place, output in zip(call.places.tolist(), call.outputs.tolist(), strict=True):
                if place < buckets.slices:
                    last = slices[place]
                    assert call.positions[output] == last.start + len(last.tokens) - 1
        expected = [
            (token, at, slice_.pages[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS)
            for slice_ in slices
            for at, token in enumerate(slice_.tokens.tolist(), slice_.start)
        ]
        assert sorted(rows) == sorted(expected)
        assert sorted(places) == [index for index, slice_ in enumerate(slices) if slice_.sampling is not None]


def test_more_sequences_than_any_shape_has(tiny: Path, tmp_path: Path) -> None:
    """A step larger than what was announced is computed in parts, with the same tokens."""
    backend = load(tiny, tmp_path, pages=64)
    backend.warm_up(max_tokens=48, max_sequences=4)
    prompts = [np.random.default_rng(seed).integers(0, 256, 5 + 3 * seed) for seed in range(2 * TOGETHER)]
    slices = [slice_of(tokens, 0, range(4 * row, 4 * row + 4)) for row, tokens in enumerate(prompts)]
    together = backend.execute(slices)
    assert together == [backend.execute([slice_])[0] for slice_ in slices]


@pytest.mark.parametrize("name", ["step", "scatter"])
def test_ctrl_c_loses_no_pages(name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when a program has taken the pages and has not given them back."""
    backend = load(tiny, tmp_path)
    prompt = slice_of(np.arange(20), 0, np.arange(2))
    (expected,) = backend.execute([prompt])
    strips = np.empty((2, backend.namespace.kv.strips, backend.namespace.kv.strip_bytes), np.uint8)
    backend.read_pages([0, 1], strips)
    real = getattr(backend._programs, name)

    def interrupted(*arguments: Any) -> Any:
        given = real(*arguments)
        signal.raise_signal(signal.SIGINT)
        return given

    monkeypatch.setattr(backend._programs, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        backend.execute([prompt]) if name == "step" else backend.write_pages([2, 3], strips)
    monkeypatch.undo()
    assert backend.execute([prompt]) == [expected]
    backend.close()


def test_logits_that_are_not_finite_are_an_error(tiny: Path, tmp_path: Path) -> None:
    """For those alone that are asked for a token; KV of NaN stands for whatever made them."""
    backend = load(tiny, tmp_path)
    spec = backend.namespace.kv
    backend.execute([slice_of(range(16), 0, [3], None)])
    backend.write_pages([3], np.full((1, spec.strips, spec.strip_bytes), 0xFF, np.uint8))
    step = slice_of([1], 16, [3, 4])
    with pytest.raises(ArithmeticError, match="not finite"):
        backend.execute([step])
    assert backend.execute([slice_of([1], 16, [3, 4], None)]) == [-1]
    assert backend.execute([slice_of([1, 2], 0, [5])])[0] >= 0


@pytest.mark.parametrize(
    ("tp", "changes", "reason"),
    [
        (4, {}, "4 ranks cannot share 6 attention heads"),
        (3, {}, "3 ranks cannot share 6 attention heads and 2 KV heads"),
        (2, {}, "needs as many devices, JAX has 1"),
    ],
)
def test_tensor_parallelism_that_cannot_be_is_refused(
    tp: int, changes: dict[str, Any], reason: str, tiny: Path, tmp_path: Path
) -> None:
    assert len(jax.devices()) == 1, "this process has one device, which decides the last case"
    with pytest.raises(ModelError, match=reason):
        load_backend("jax", str(tiny), cache=tmp_path, tp=tp)


def child(code: str, *arguments: object) -> str:
    """Runs code in a process of its own, where JAX has not been used. Returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, timeout=200, check=False, cwd=Path(__file__).parents[2], env=dict(os.environ),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


MESHES = """
import sys
import jax, numpy as np
from pathlib import Path
from pyengine.backends import load_backend
from tests.model.test_jax_backend import slice_of
folder, cache = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 4)
tokens = np.random.default_rng(0).integers(0, 256, 18)
pages, others = [3, 1], [0, 5]
logits, strips = {}, {}
for tp in (1, 4):
    backend = load_backend("jax", folder, cache=Path(cache), tp=tp)
    backend.allocate(8)
    spec, shards = backend.namespace.kv, backend._pages.addressable_shards
    assert len(shards) == tp and {shard.data.shape[2] for shard in shards} == {max(1, spec.groups[0].kv_heads // tp)}
    addresses = [shard.data.unsafe_buffer_pointer() for shard in shards]
    backend.execute([slice_of(tokens[:16], 0, pages)])
    logits[tp] = backend.logits([slice_of(tokens[16:], 16, pages)])[0]
    strips[tp] = np.zeros((2, spec.strips, spec.strip_bytes), np.uint8)
    backend.read_pages(pages, strips[tp])
    np.testing.assert_allclose(logits[tp], logits[1], atol=1e-4, rtol=0)
    # What one device has computed goes on on four.
    backend.write_pages(others, strips[1])
    back = np.zeros_like(strips[1])
    backend.read_pages(others, back)
    assert np.array_equal(back, strips[1])
    again = backend.logits([slice_of(tokens[16:], 16, others)])[0]
    np.testing.assert_allclose(again, logits[1], atol=1e-4, rtol=0)
    assert [shard.data.unsafe_buffer_pointer() for shard in backend._pages.addressable_shards] == addresses
print("meshes agree")
"""


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_heads_over_four_devices(kv_heads: int, tmp_path: Path) -> None:
    """The same logits and KV as on one; with 2 KV heads on 4 devices each is held twice and written once."""
    folder = write_tiny(
        tmp_path / "model", num_attention_heads=8, num_key_value_heads=kv_heads, vocab_size=301, num_hidden_layers=2
    )
    assert child(MESHES, folder, tmp_path) == "meshes agree\n"


THREADS = """
import os, sys
from pathlib import Path
from pyengine.backends import load_backend
backend = load_backend("jax", sys.argv[1], cache=Path(sys.argv[2]), threads=3)
backend.allocate(4)
tasks = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
print(tasks.count("tf_XLAEigen"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_are_as_many_as_told(tiny: Path, tmp_path: Path) -> None:
    assert int(child(THREADS, tiny, tmp_path)) == 3
