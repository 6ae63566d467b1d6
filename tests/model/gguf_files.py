"""Tiny checkpoints as GGUF files, written with llama.cpp's own package: its names of fields and tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from pyengine.checkpoint.config import parse_config

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def write_gguf(path: Path, source: Path, *, change: Callable[[gguf.GGUFWriter], None] | None = None) -> Path:
    """The checkpoint folder `source` as a GGUF file: fp16 matrices, all else fp32; `change` is called before writing.

    Llama's queries and keys lie pair by pair, as llama.cpp's converter puts them. The tokens are single bytes and "ab".
    """
    config = parse_config(json.loads((source / "config.json").read_text()))
    architecture = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[
        config.architecture
    ]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + ["<s>", "</s>", "<tool>", "ab"] + [f"unused{index}" for index in range(config.vocab_size - 260)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 4] + [1] * (config.vocab_size - 259))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(architecture, config.layers)
    for name, values in load_file(source / "model.safetensors").items():
        if config.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.heads if "q_proj" in name else config.kv_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        dtype = np.float32 if values.ndim == 1 else np.float16
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        writer.add_tensor(theirs, np.ascontiguousarray(values.astype(dtype)))
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
