"""GGUF files become Hugging Face folders: configuration, weights in float32, tokenizer."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.checkpoint.architectures import ARCHITECTURES
from pyengine.checkpoint.errors import ModelError
from pyengine.checkpoint.gguf_fields import Fields
from pyengine.checkpoint.gguf_tokenizer import convert_tokenizer

F32 = npt.NDArray[np.float32]

CONVERTER_VERSION = 3  # part of the cache key: raise it when `convert_gguf` writes something else for the same file

GGUF_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_factors",
}
GGUF_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(path: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors (fp32) and the tokenizer of a GGUF file into `folder`."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, OSError, struct.error, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: the GGUF file is truncated or damaged ({error}); get it again") from error
    fields = Fields(reader, path)
    given = fields["general.architecture"]
    classes = {known.gguf: name for name, known in ARCHITECTURES.items() if known.gguf is not None}
    if given not in classes:
        raise ModelError(f"{path}: architecture {given!r} is not supported; supported: {', '.join(classes)}")
    architecture = ARCHITECTURES[classes[given]]
    config = _config_json(fields, {tensor.name for tensor in reader.tensors})
    config |= {"architectures": [classes[given]], "model_type": architecture.name}
    convert_tokenizer(fields, folder)
    _convert_weights(reader, config, architecture.gguf_pairs, folder, path)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _config_json(fields: Fields, tensors: set[str]) -> dict[str, Any]:
    prefix = f"{fields['general.architecture']}."

    heads = fields[prefix + "attention.head_count"]
    hidden = fields[prefix + "embedding_length"]
    head_dim = fields.get(prefix + "attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.get(prefix + name, head_dim) != head_dim:
            raise ModelError(f"{fields.path}: {name} is not the heads' {head_dim}, which is not supported")
    eos = [fields[name] for name in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if name in fields]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.get(prefix + "rope.freq_base", 10000.0)}
    scaling = fields.get(prefix + "rope.scaling.type", "none")
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": fields.get(prefix + "rope.scaling.factor", 1.0)}
    elif scaling != "none":
        raise ModelError(f"{fields.path}: rope scaling {scaling!r} is not supported; supported: none, linear")
    if fields.get(prefix + "attention.sliding_window", 0):
        raise ModelError(f"{fields.path}: a sliding window is not supported in GGUF files; use the Hugging Face folder")
    if "rope_freqs.weight" in tensors:
        rope["rope_type"] = "factors"
    return {
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields[prefix + "feed_forward_length"],
        "num_hidden_layers": fields[prefix + "block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get(prefix + "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields[prefix + "context_length"],
        "rms_norm_eps": fields[prefix + "attention.layer_norm_rms_epsilon"],
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos or None,
        "torch_dtype": "float32",
    }


def _convert_weights(reader: Any, config: dict[str, Any], pairs: bool, folder: Path, path: Path) -> None:
    """Tensor by tensor: all together, in float32, may be more than the memory.

    pairs: rows of queries and keys lie pair by pair, as llama.cpp turns neighbours.
    """
    import gguf

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        start, end = end, end + 4 * math.prod(shape)
        header[_name(tensor.name)] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers lie on multiples of 8
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in reader.tensors:
            name = _name(tensor.name)
            try:
                values = gguf.dequantize(tensor.data, tensor.tensor_type).astype("<f4", copy=False)
            except (NotImplementedError, ValueError) as error:
                raise ModelError(
                    f"{path}: cannot dequantize {tensor.name!r} ({error}); use another quantization"
                ) from error
            if pairs and name.endswith(("q_proj.weight", "k_proj.weight")):
                kind = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
                values = _half_rotation(values, config[kind])
            assert list(values.shape) == header[name]["shape"], name
            file.write(np.ascontiguousarray(values).data)


def _name(theirs: str) -> str:
    """A tensor's Hugging Face name; what has none keeps its own, and is refused as too much."""
    stem, _, leaf = theirs.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{layer}.{GGUF_LAYER_TENSORS.get(part, part)}.{leaf}"
    return f"{GGUF_TENSORS.get(stem, stem)}.{leaf}"


def _half_rotation(weight: F32, heads: int) -> F32:
    """Rows [head, pair, 2] of a GGUF projection to [head, 2, pair]: dimension i turns with i + head_dim / 2."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
