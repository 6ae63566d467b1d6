"""The architectures that are served: what config.json leaves to the name of a class, once for every framework.

A row here, and a file and a row in `MODELS` of each framework, add one: docs/backends.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pyengine.checkpoint.errors import ModelError

Json = dict[str, Any]


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """One family of models.

    name: as `ModelConfig.architecture` and each framework's `MODELS` spell it, Hugging Face's `model_type` too.
    gguf: the same in GGUF files, None where they have none. gguf_pairs: GGUF files hold the rows of its queries and
    keys pair by pair. qkv_bias: queries, keys and values have a bias. head_norms: queries and keys are normed by head.
    refused: fields of config.json that, set, mean what is not supported. window: the sliding window of all layers.
    """

    name: str
    gguf: str | None = None
    gguf_pairs: bool = False
    qkv_bias: bool = False
    head_norms: bool = False
    refused: tuple[str, ...] = ()
    window: Callable[[Json], int | None] = lambda config: None


def _mistral_window(config: Json) -> int | None:
    return _positive(config.get("sliding_window", 4096))  # where nothing is said, transformers has 4096


def _qwen_window(config: Json) -> int | None:
    """Layers from `max_window_layers` on have it; `layer_types`, newer, says it layer by layer."""
    if not config.get("use_sliding_window"):
        return None
    layers = int(config["num_hidden_layers"])
    first = int(config.get("max_window_layers", 28))
    kinds = config.get("layer_types") or [
        "full_attention" if layer < first else "sliding_attention" for layer in range(layers)
    ]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise ModelError(
            "config.json: a sliding window in some layers only is not supported; supported: in all layers or in none "
            "('use_sliding_window': false turns it off, for prompts within the window it changes nothing)"
        )
    return _positive(config.get("sliding_window", 4096))


def _positive(window: Any) -> int | None:
    if window is None:
        return None
    if int(window) < 1:
        raise ModelError(f"config.json: 'sliding_window' must be positive or null, not {window}")
    return int(window)


#: By the class that config.json names.
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(
        name="llama", gguf="llama", gguf_pairs=True, refused=("attention_bias", "mlp_bias")
    ),
    "MistralForCausalLM": Architecture(name="mistral", window=_mistral_window),
    "Qwen2ForCausalLM": Architecture(name="qwen2", gguf="qwen2", qkv_bias=True, window=_qwen_window),
    "Qwen3ForCausalLM": Architecture(
        name="qwen3", gguf="qwen3", head_norms=True, refused=("attention_bias",), window=_qwen_window
    ),
}


def architecture_of(config: Json) -> Architecture:
    """The architecture that config.json names. Raises ModelError with those that are known."""
    named = config.get("architectures") or []
    for name in named:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not named:
        for architecture in ARCHITECTURES.values():
            if architecture.name == config.get("model_type"):
                return architecture
    given = named[0] if named else config.get("model_type")
    raise ModelError(f"architecture {given!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
