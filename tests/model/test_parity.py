"""Goal: our Llama computes what transformers' Llama and the numpy reference compute.

Method: tiny random checkpoints in all supported shapes (grouped and single KV heads, tied and untied head, each kind of
rotary scaling), logits of every position compared. The kernels by themselves: tests/kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pyengine.backend import Slice
from pyengine.checkpoint import inverse_frequencies, resolve
from pyengine.kernels import reference
from pyengine.scheduler.types import BLOCK_TOKENS, SamplingParams
from tests.model.checkpoints import LLAMA3_ROPE, tiny_config, write_tiny

torch = pytest.importorskip("torch", reason="needs the torch extra")

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "every head its own kv": {"num_key_value_heads": 6},
    "one kv head": {"num_key_value_heads": 1},
    "wide head": {"head_dim": 32},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "old spelling": {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": None},
}
LENGTH = 150


def our_logits(folder: Path, cache: Path, tokens: list[int], chunk: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits of each chunk's last position, by chunked prefill over scattered pages."""
    from pyengine.backends.torch import TorchBackend

    backend = TorchBackend.load(str(folder), cache=cache, threads=1)
    backend.allocate(32)
    pages = np.random.default_rng(0).permutation(32).astype(np.int32)
    rows = []
    for start in range(0, len(tokens), chunk):
        piece = np.array(tokens[start : start + chunk], dtype=np.uint32)
        rows.append(backend.logits([Slice(piece, start, pages, SamplingParams(temperature=0.0))])[0].numpy())
    return np.stack(rows)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(shape: str, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    folder = write_tiny(tmp_path / "model", **SHAPES[shape])
    tokens = np.random.default_rng(1).integers(0, 256, LENGTH).tolist()
    llama = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = llama(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(expected).max() > 0.5, "the test's own model must say something"
    for chunk in (1, 10, LENGTH):
        ours = our_logits(folder, tmp_path, tokens, chunk)
        ends = np.minimum(np.arange(chunk, LENGTH + chunk, chunk), LENGTH) - 1
        np.testing.assert_allclose(ours, expected[ends], atol=1e-4, rtol=0)


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
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)


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


def test_frequencies_equal_transformers() -> None:
    """The rotary frequencies are the same floats: at position 8000 one unit in the last place would show."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    for theta in (10000.0, 100000.0, 500000.0):
        config = tiny_config(rope_parameters={"rope_type": "default", "rope_theta": theta}, head_dim=64)
        theirs = LlamaRotaryEmbedding(
            LlamaConfig(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": theta})
        ).inv_freq.numpy()
        np.testing.assert_allclose(inverse_frequencies(config), theirs, rtol=2e-7)
