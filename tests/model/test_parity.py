"""Goal: our models compute what transformers' and the numpy reference compute.

Method: tiny random checkpoints of every architecture in all supported shapes (grouped and single KV heads, tied and
untied head, each kind of rotary scaling, windows shorter than the prompt), written by hand and by transformers; logits
of every position compared, in prefill and decode. The kernels by themselves: tests/kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pyengine.backend import Slice
from pyengine.checkpoint import ModelError, Weights, inverse_frequencies, resolve, rotary_tables
from pyengine.kernels import reference
from pyengine.scheduler.types import BLOCK_TOKENS, SamplingParams
from tests.model.checkpoints import LLAMA3_ROPE, MISTRAL, QWEN2, QWEN3, SHAPES, TINY, YARN_ROPE, tiny_config, write_tiny
from tests.model.gguf_files import write_gguf

F32 = np.ndarray[Any, np.dtype[np.float32]]

torch = pytest.importorskip("torch", reason="needs the torch extra")

LENGTH = 150
#: Largest difference of a logit; logits are up to some units.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.4}


def our_logits(folder: Path, cache: Path, tokens: list[int], chunk: int, dtype: str = "auto") -> F32:
    """Logits of each chunk's last position, by chunked prefill over scattered pages."""
    from pyengine.backends.torch import TorchBackend

    backend = TorchBackend(resolve(str(folder), cache), threads=1, dtype=dtype)
    backend.allocate(32)
    pages = np.random.default_rng(0).permutation(32).astype(np.int32)
    rows = []
    for start in range(0, len(tokens), chunk):
        piece = np.array(tokens[start : start + chunk], dtype=np.uint32)
        rows.append(backend.logits([Slice(piece, start, pages, SamplingParams(temperature=0.0))])[0].numpy())
    return np.stack(rows)


def their_logits(folder: Path, tokens: list[int], dtype: Any, **options: Any) -> F32:
    """Logits of every position, by transformers in one pass."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    with torch.inference_mode():
        logits: F32 = model(torch.tensor([tokens])).logits[0].float().numpy()
    assert np.abs(logits).max() > 0.5, "the test's own model must say something"
    return logits


def assert_parity(folder: Path, cache: Path) -> None:
    """Prefill in chunks of several lengths, and decode, against transformers in float32."""
    tokens = np.random.default_rng(1).integers(0, 256, LENGTH).tolist()
    expected = their_logits(folder, tokens, torch.float32)
    for chunk in (1, 10, LENGTH):
        ours = our_logits(folder, cache, tokens, chunk)
        ends = np.minimum(np.arange(chunk, LENGTH + chunk, chunk), LENGTH) - 1
        np.testing.assert_allclose(ours, expected[ends], atol=TOLERANCE["float32"], rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(shape: str, tmp_path: Path) -> None:
    assert_parity(write_tiny(tmp_path / "model", **SHAPES[shape]), tmp_path)


@pytest.mark.parametrize("changes", [{}, MISTRAL, QWEN2, QWEN3], ids=["llama", "mistral", "qwen2", "qwen3"])
def test_what_transformers_saves_is_read(changes: dict[str, Any], tmp_path: Path) -> None:
    """Its own config.json, with its own defaults, and its own shards."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = TINY | changes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    assert_parity(tmp_path / "model", tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{}, QWEN2 | {"hidden_size": 96}, QWEN2 | {"head_dim": 8, "tie_word_embeddings": True}, QWEN3 | {"head_dim": 128}],
    ids=["llama", "qwen2", "qwen2 tied", "qwen3"],
)
def test_a_gguf_is_read_as_transformers_does(changes: dict[str, Any], tmp_path: Path) -> None:
    """It takes the length of a head from hidden_size for Qwen2, and to be 128 for Qwen3."""
    path = write_gguf(tmp_path / "tiny.gguf", write_tiny(tmp_path / "model", **changes))
    tokens = np.random.default_rng(1).integers(0, 256, LENGTH).tolist()
    expected = their_logits(tmp_path, tokens, torch.float32, gguf_file=path.name)
    ours = our_logits(path, tmp_path, tokens, 50)
    np.testing.assert_allclose(ours, expected[49::50], atol=TOLERANCE["float32"], rtol=0)


@pytest.mark.parametrize("shape", ["mistral window", "qwen2", "qwen3 window"])
def test_a_mixed_step_equals_transformers(shape: str, tmp_path: Path) -> None:
    """Decodes of several lengths and two prompts, one behind a prefix, in one step."""
    from pyengine.backends.torch import TorchBackend

    folder = write_tiny(tmp_path / "model", **SHAPES[shape])
    tokens = np.random.default_rng(3).integers(0, 256, LENGTH).astype(np.uint32)
    expected = their_logits(folder, tokens.tolist(), torch.float32)
    backend = TorchBackend(resolve(str(folder), tmp_path), threads=1)
    backend.allocate(64)
    pages = np.random.default_rng(4).permutation(64).astype(np.int32)
    starts, ends = (9, 0, 60, 149, 30), (10, 45, 61, 150, 90)
    tables = np.split(pages, [1, 4, 9, 19])
    whole = SamplingParams(temperature=0.0)
    prefixes = [Slice(tokens[:start], 0, table, None) for start, table in zip(starts, tables, strict=True) if start > 0]
    backend.execute(prefixes)
    last = [
        Slice(tokens[start:end], start, table, whole) for start, end, table in zip(starts, ends, tables, strict=True)
    ]
    ours = backend.logits(last).numpy()
    np.testing.assert_allclose(ours, expected[np.array(ends) - 1], atol=TOLERANCE["float32"], rtol=0)


def test_a_weight_that_is_not_finite_is_named_at_load(tmp_path: Path) -> None:
    from pyengine.backends.torch import TorchBackend

    folder = write_tiny(tmp_path / "model", **QWEN3)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.self_attn.k_norm.weight"][3] = np.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"'model.layers.2.self_attn.k_norm.weight' has values that are NaN or infin"):
        TorchBackend.load(str(folder), cache=tmp_path)


def test_an_architecture_that_torch_lacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row in the table of architectures is not yet a model."""
    from pyengine.backends.torch import TorchBackend, models

    monkeypatch.delitem(models.MODELS, "qwen3")
    folder = write_tiny(tmp_path / "model", **QWEN3)
    with pytest.raises(ModelError, match="torch backend has no 'qwen3' model; it has: llama, mistral, qwen2"):
        TorchBackend.load(str(folder), cache=tmp_path)


@pytest.mark.parametrize("shape", ["grouped", "mistral window", "qwen2", "qwen3"])
def test_bfloat16(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in bfloat16, computed in float32: as exact as any. In bfloat16, as on a GPU: as near as transformers."""
    folder = write_tiny(tmp_path / "model", bfloat16=True, **SHAPES[shape])
    tokens = np.random.default_rng(1).integers(0, 256, LENGTH).tolist()
    exact = their_logits(folder, tokens, torch.float32)
    np.testing.assert_allclose(our_logits(folder, tmp_path, tokens, LENGTH)[0], exact[-1], atol=TOLERANCE["float32"])
    from pyengine.backends.torch import model
    from pyengine.kernels.torch import eager, linear

    theirs = np.abs(their_logits(folder, tokens, torch.bfloat16) - exact)
    for chunk, as_on_a_gpu in ((10, False), (1, True), (10, True)):
        if as_on_a_gpu:  # activations are rounded as well
            monkeypatch.setattr(linear, "PRODUCTS", (linear.Plain,))
            monkeypatch.setattr(model, "choose", lambda *_: eager)
            monkeypatch.setattr(model, "working_type", lambda _, dtype, *__: dtype)
        ours = np.abs(our_logits(folder, tmp_path, tokens, chunk, "bfloat16") - exact[chunk - 1 :: chunk])
        print(f"error of a logit, ours / transformers: mean {ours.mean():.4f} / {theirs.mean():.4f}, "
              f"largest {ours.max():.4f} / {theirs.max():.4f}, of {np.abs(exact).max():.2f}")  # fmt: skip
        assert ours.max() < TOLERANCE["bfloat16"]
        assert ours.mean() < 1.1 * theirs.mean()  # it rounds the angles too


@pytest.mark.parametrize("shape", ["grouped", "tied", "llama3 rope"])
def test_logits_equal_the_reference(shape: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", **SHAPES[shape])
    config = resolve(str(folder), tmp_path).config
    weights = {
        name: values.astype(np.float64)
        for name, values in load_file(folder / "model.safetensors").items()
        if name in config.shapes()
    }
    tokens = np.random.default_rng(2).integers(0, 256, 40)
    cache = np.zeros((config.layers, 2, config.kv_heads, 3, BLOCK_TOKENS, config.head_dim))
    pages = np.array([2, 0, 1])
    frequencies = inverse_frequencies(config).astype(np.float64)
    expected = np.concatenate(
        [
            reference.llama_forward(tokens[a:b], a, pages, cache, weights, frequencies, config.norm_eps)
            for a, b in ((0, 7), (7, 39), (39, 40))
        ]
    )
    ours = our_logits(folder, tmp_path, tokens.tolist(), 1)
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE["float32"], rtol=0)


def test_pages_to_strips_is_the_canonical_layout() -> None:
    """The page tensor's element (layer, k or v, head, page, token, dim) stands at [layer][k|v][head][token][dim]."""
    from pyengine.kernels.torch import eager, pages

    cache = torch.arange(3 * 2 * 2 * 5 * 4 * 6, dtype=torch.float32).view(3, 2, 2, 5, 4, 6)
    out = np.zeros((2, 3 * 2 * 2, 4 * 6 * 4), dtype=np.uint8)
    eager.gather(cache, torch.tensor([3, 1]), pages.as_blocks(cache, out))
    for block, page in enumerate([3, 1]):
        expected = cache[:, :, :, page].contiguous().numpy()
        np.testing.assert_array_equal(out[block].view(np.float32).reshape(3, 2, 2, 4, 6), expected)
    with pytest.raises(ValueError, match="contiguous"):
        pages.as_blocks(cache, out[:1, :, :-4])


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0])
@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn", "yarn, all said"])
def test_rotary_tables_equal_transformers(rope: str, theta: float) -> None:
    """The rotary frequencies are the same floats: at position 8000 one unit in the last place would show."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kinds: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 4.0},
        "llama3": LLAMA3_ROPE | {"original_max_position_embeddings": 2048},
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048},
        "yarn, all said": YARN_ROPE | {"beta_slow": 2.0, "attention_factor": 0.75},
    }
    parameters = kinds[rope] | {"rope_type": rope.partition(",")[0], "rope_theta": theta}
    config = tiny_config(rope_parameters=parameters, head_dim=64, max_position_embeddings=8192)
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(head_dim=64, max_position_embeddings=8192, rope_parameters=dict(parameters))
    )
    # On a ramp each of them rounds several times.
    tolerance = 2e-7 if rope in ("default", "linear") else 6e-7
    np.testing.assert_allclose(inverse_frequencies(config), theirs.inv_freq.numpy(), rtol=tolerance)
    cosines, sines = rotary_tables(config, NoWeights())
    expected = theirs(torch.zeros(1), torch.arange(config.max_positions)[None])
    # An angle of 8000 is known to a unit in its last place, 2 ** -11.
    np.testing.assert_allclose(cosines, expected[0][0, :, :32].numpy(), atol=2**-10)
    np.testing.assert_allclose(sines, expected[1][0, :, :32].numpy(), atol=2**-10)
    assert config.max_positions == 8192


class NoWeights(Weights):
    """A checkpoint without any tensor."""

    def __init__(self) -> None:
        self._tensors = {}
