"""Goal: weights come whole or in part, from one file or many, in the type they have; what is damaged is named.

Method: safetensors files written by that package, beside what `Weights` reads; each kind of damage.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pyengine.checkpoint import ModelError, Weights, resolve
from tests.model.checkpoints import upper_half, write_bits, write_tiny

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny")


def shard(folder: Path, parts: int = 3) -> Path:
    """Cuts model.safetensors into `parts` files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places: dict[str, str] = {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        names = sorted(tensors)[part::parts]
        save_file({name: tensors[name] for name in names}, folder / file)
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def opened(folder: Path) -> Weights:
    return Weights(resolve(str(folder), folder.parent / "cache"))


def test_whole_and_in_part(tiny: Path) -> None:
    expected = load_file(tiny / "model.safetensors")
    for weights in (opened(tiny), opened(shard(tiny))):
        for name, values in expected.items():
            assert weights.shape(name) == values.shape
            assert weights.dtype(name) == "float32"
            np.testing.assert_array_equal(weights.get(name), values)
        np.testing.assert_array_equal(weights.get(QUERY, rows=range(16, 48)), expected[QUERY][16:48])
        np.testing.assert_array_equal(weights.get(QUERY, columns=range(12)), expected[QUERY][:, :12])
        np.testing.assert_array_equal(weights.get(QUERY, range(3, 5), range(7, 48)), expected[QUERY][3:5, 7:])
        assert "rope_factors.weight" not in weights
        weights.get(QUERY)[0, 0] = 5.0  # a framework may want to write: to memory of its own
        assert opened(tiny).get(QUERY)[0, 0] == expected[QUERY][0, 0]
        with pytest.raises(ValueError, match="not a part of 96"):
            weights.get(QUERY, rows=range(90, 97))
        with pytest.raises(ValueError, match="not a part of 48"):
            weights.get(QUERY, columns=range(0, 48, 2))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_byte_types(tiny: Path, dtype: str) -> None:
    """Bit for bit; bfloat16 has numpy's own type or none, the bits are the same."""
    bits = {}
    tensors = load_file(tiny / "model.safetensors")
    for name, values in tensors.items():
        bits[name] = upper_half(values) if dtype == "bfloat16" else values.astype(np.float16).view(np.uint16)
    write_bits(tiny / "model.safetensors", bits, {"float16": "F16", "bfloat16": "BF16"}[dtype])
    weights = opened(tiny)
    for name, expected in bits.items():
        assert weights.dtype(name) == dtype
        np.testing.assert_array_equal(weights.get(name).view(np.uint16), expected)


def test_a_header_that_leaves_the_data_unaligned(tiny: Path) -> None:
    expected = load_file(tiny / "model.safetensors")
    for pad in range(4):
        write_bits(tiny / "model.safetensors", expected, "F32", pad)
        weights = opened(tiny)
        assert weights.get(QUERY).flags.aligned
        np.testing.assert_array_equal(weights.get(QUERY), expected[QUERY])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [QUERY, "model.norm.weight", "model.embed_tokens.weight"])
def test_what_is_not_finite_is_named(tiny: Path, value: float, name: str) -> None:
    """Wherever it is: in the last element too."""
    tensors = load_file(tiny / "model.safetensors")
    for place in (0, tensors[name].size - 1):
        damaged = tensors[name].copy()
        damaged.flat[place] = value
        save_file(tensors | {name: damaged}, tiny / "model.safetensors")
        weights = opened(tiny)
        with pytest.raises(ModelError, match=rf"{name}' has values that are NaN or infinite"):
            weights.get(name)
        weights.get("lm_head.weight")


def test_what_is_mapped_is_shared_and_needs_no_framework(tiny: Path) -> None:
    """The arrays lie in the mapped file, and no array outlives its mapping."""
    program = (
        "import gc, sys; from pathlib import Path; from pyengine.checkpoint import Weights, resolve\n"
        "weights = Weights(resolve(sys.argv[1], Path(sys.argv[2])))\n"
        f"values = weights.get({QUERY!r})\n"
        "del weights; gc.collect()\n"
        "address = values.__array_interface__['data'][0]\n"
        "places = [line.split() for line in Path('/proc/self/maps').read_text().splitlines()]\n"
        "bounds = [(place[0].split('-'), place[-1]) for place in places]\n"
        "(file,) = [path for (low, high), path in bounds if int(low, 16) <= address < int(high, 16)]\n"
        "assert file.endswith('model.safetensors'), file\n"
        "assert not {'torch', 'transformers', 'jax'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tiny), str(tiny.parent / "cache")], check=True)


def test_other_files_in_the_folder_do_not_matter(tiny: Path) -> None:
    """Mistral's repositories have the same weights once more, by other names."""
    save_file({"layers.0.attention.wq.weight": np.zeros(3, np.float32)}, tiny / "consolidated.safetensors")
    opened(tiny)
    opened(shard(tiny))


def drop_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def truncate_shard(folder: Path) -> None:
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def swap_shards(folder: Path) -> None:
    one, two = (folder / f"model-0000{part}-of-00003.safetensors" for part in (1, 2))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


def point_outside(folder: Path) -> None:
    change_index(folder, {QUERY: "../other.safetensors"})


def change_index(folder: Path, places: dict[str, Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    index["weight_map"] |= places
    path.write_text(json.dumps(index))


def empty_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_shard, r"index\.json names 'model-00002-of-00003\.safetensors', which is not there.*get that file"),
        (truncate_shard, r"model-00002-of-00003\.safetensors: not a whole safetensors file \(\d+ bytes, at least \d+"),
        (swap_shards, r"tensor '.*', which .*index\.json says is here, is missing"),
        (point_outside, r"'\.\./other\.safetensors' is not the name of a file in this folder"),
        (empty_index, "'weight_map' is not a map"),
    ],
)
def test_damaged_shards_are_refused(tiny: Path, damage: Any, message: str) -> None:
    damage(shard(tiny))
    with pytest.raises(ModelError, match=message):
        opened(tiny)


def test_every_truncation_is_refused(tiny: Path) -> None:
    path = tiny / "model.safetensors"
    content = path.read_bytes()
    for length in [0, 1, 7, 8, 9, 100, 1000, *np.random.default_rng(0).integers(0, len(content), 20).tolist()]:
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match="not a whole safetensors file"):
            opened(tiny)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"a": {"dtype": "F32", "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}',
        b"\xff\xfe",
    ],
)
def test_a_header_that_is_wrong_is_refused(tiny: Path, header: bytes) -> None:
    (tiny / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        opened(tiny)


def test_what_does_not_fit_the_configuration_is_named(tiny: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    path = tiny / "model.safetensors"
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}, path)
    opened(tiny)  # says nothing new: older exports have it
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": np.ones(96, np.float32)}, path)
    with pytest.raises(ModelError, match=r"'model.layers.0.self_attn.q_proj.bias' is not part of a llama model"):
        opened(tiny)
    save_file(tensors | {QUERY: tensors[QUERY].astype(np.int8)}, path)
    with pytest.raises(ModelError, match=r"'model.layers.1.self_attn.q_proj.weight' is of type I8; supported: F32"):
        opened(tiny)
    save_file(tensors | {QUERY: tensors[QUERY].T.copy()}, path)
    with pytest.raises(ModelError, match=r"has shape \[48, 96\], but config.json asks for \[96, 48\]"):
        opened(tiny)
