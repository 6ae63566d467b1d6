"""Tiny random Llama checkpoints, as Hugging Face folders, made by hand so that no framework is needed."""

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


def tiny_config(**changes: Any) -> ModelConfig:
    """The parsed configuration of `write_tiny(..., **changes)`."""
    return parse_config(TINY | changes)


def write_tiny(folder: Path, *, seed: int = 0, without: str | None = None, **changes: Any) -> Path:
    """Writes a checkpoint with random weights; `changes` go into config.json, the tensor `without` is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tiny_config(**changes).shapes().items():
        scale = 0.1 if len(shape) == 1 else 1.5 / np.sqrt(shape[-1])
        values = generator.standard_normal(shape) * scale + (len(shape) == 1)
        if name != without:
            tensors[name] = values.astype(np.float32)
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
