"""Tiny random checkpoints of every architecture, as Hugging Face folders, made by hand: no framework is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pyengine.checkpoint import ModelConfig
from pyengine.checkpoint.config import parse_config

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 2**-16,  # exact in the fp32 of a GGUF file
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 8.0,  # so that some of a tiny head's dimensions are on the ramp
    "original_max_position_embeddings": 64,
}
MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
QWEN3: dict[str, Any] = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
QWEN_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 23, "max_window_layers": 0}

#: What every framework must compute as transformers does: changes of TINY by name. Prompts are longer than the windows.
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "every head its own kv": {"num_key_value_heads": 6},
    "one kv head": {"num_key_value_heads": 1},
    "wide head": {"head_dim": 32},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "old spelling": {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": None},
    "mistral": MISTRAL | {"sliding_window": None},
    "mistral window": MISTRAL | {"sliding_window": 37, "tie_word_embeddings": True},
    "qwen2": QWEN2,
    "qwen2 tied": QWEN2 | {"tie_word_embeddings": True, "head_dim": 8, "num_key_value_heads": 3},
    "qwen2 window": QWEN2 | QWEN_WINDOW,
    "qwen2 yarn": QWEN2 | {"rope_parameters": YARN_ROPE},
    "qwen3": QWEN3,
    "qwen3 tied": QWEN3 | {"tie_word_embeddings": True, "head_dim": 32},
    "qwen3 window": QWEN3 | QWEN_WINDOW | {"sliding_window": 16},
    "qwen3 yarn": QWEN3 | {"rope_parameters": YARN_ROPE},
}


def tiny_config(**changes: Any) -> ModelConfig:
    """The parsed configuration of `write_tiny(..., **changes)`."""
    return parse_config(TINY | changes)


def write_tiny(
    folder: Path, *, seed: int = 0, without: str | None = None, bfloat16: bool = False, **changes: Any
) -> Path:
    """Writes a checkpoint with random weights, in float32 or bfloat16.

    `changes` go into config.json, the tensor `without` is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tiny_config(**changes).shapes().items():
        norm = name.endswith("norm.weight")
        scale = 1.5 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.1 if norm else 0.5
        values = generator.standard_normal(shape) * scale + norm
        if name != without:
            tensors[name] = values.astype(np.float32)
    if bfloat16:
        write_bits(folder / "model.safetensors", {name: upper_half(values) for name, values in tensors.items()}, "BF16")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def upper_half(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The bits of bfloat16, cut off: numpy has none."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def write_bits(path: Path, bits: dict[str, np.ndarray[Any, Any]], dtype: str, pad: int = 0) -> None:
    """A safetensors file by hand, of any type. pad: spaces behind the header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in bits.items():
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    text = json.dumps(header).encode() + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(values.tobytes() for values in bits.values()))
