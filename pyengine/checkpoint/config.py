"""What a model's config.json says, as numbers that fit together, and the tensors that follow from them."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from pyengine.checkpoint.architectures import architecture_of
from pyengine.checkpoint.errors import ModelError
from pyengine.checkpoint.rope import RopeScaling, parse_rope


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a model. Lengths in tokens, everything else counts of elements.

    architecture: a name of `architectures.py`. window: each token sees so many with itself, in all layers; None: all.
    qkv_bias: queries, keys and values have a bias. head_norms: each head of queries and keys is normed before it is
    rotated. tied_head: the embedding is the head as well.
    """

    architecture: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    tied_head: bool = False
    window: int | None = None
    qkv_bias: bool = False
    head_norms: bool = False

    def check(self) -> None:
        """Raises ModelError unless the numbers fit together."""
        for name in ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ModelError(f"config: {name} must be positive, not {getattr(self, name)}")
        if self.max_positions < 1:
            raise ModelError(f"config: the model's context length must be positive, not {self.max_positions}")
        if self.heads % self.kv_heads:
            raise ModelError(f"config: {self.heads} attention heads are not a multiple of {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(f"config: rotary embedding needs an even head_dim, not {self.head_dim}")

    def check_ranks(self, ranks: int) -> None:
        """Raises ModelError unless each of so many can be given whole heads, and the KV heads that these read."""
        if self.heads % ranks or (self.kv_heads % ranks and ranks % self.kv_heads):
            raise ModelError(
                f"{ranks} ranks cannot share {self.heads} attention heads and {self.kv_heads} KV heads evenly: choose a"
                f" --tp that divides {self.heads}, and that divides {self.kv_heads} or is a multiple of it"
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model needs by its Hugging Face name, with its shape [out, in]."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
        }
        if not self.tied_head:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        if self.rope_scaling.kind == "factors":
            shapes["rope_factors.weight"] = (self.head_dim // 2,)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "input_layernorm.weight": (self.hidden_size,),
                prefix + "self_attn.q_proj.weight": (query, self.hidden_size),
                prefix + "self_attn.k_proj.weight": (kv, self.hidden_size),
                prefix + "self_attn.v_proj.weight": (kv, self.hidden_size),
                prefix + "self_attn.o_proj.weight": (self.hidden_size, query),
                prefix + "post_attention_layernorm.weight": (self.hidden_size,),
                prefix + "mlp.gate_proj.weight": (self.intermediate_size, self.hidden_size),
                prefix + "mlp.up_proj.weight": (self.intermediate_size, self.hidden_size),
                prefix + "mlp.down_proj.weight": (self.hidden_size, self.intermediate_size),
            }
            if self.qkv_bias:
                shapes |= {
                    prefix + "self_attn.q_proj.bias": (query,),
                    prefix + "self_attn.k_proj.bias": (kv,),
                    prefix + "self_attn.v_proj.bias": (kv,),
                }
            if self.head_norms:
                shapes |= {
                    prefix + "self_attn.q_norm.weight": (self.head_dim,),
                    prefix + "self_attn.k_norm.weight": (self.head_dim,),
                }
        return shapes

    def digest(self) -> str:
        """Names all of the configuration that shapes KV."""
        return hashlib.blake2b(msgspec.json.encode(self, order="sorted"), digest_size=16).hexdigest()


def parse_config(config: dict[str, Any]) -> ModelConfig:
    """Hugging Face's config.json, in its old (rope_theta, rope_scaling) and new (rope_parameters) spelling.

    Raises ModelError; what the numbers mean together is for `ModelConfig.check`.
    """
    architecture = architecture_of(config)
    for key in (*architecture.refused, "quantization_config"):
        if config.get(key):
            raise ModelError(f"config.json sets {key!r}, which is not supported; use a checkpoint without it")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"config.json: hidden_act {config['hidden_act']!r} is not supported; supported: 'silu'")
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    try:
        scaling = parse_rope(rope)
        max_positions = int(config["max_position_embeddings"])
        if scaling.kind == "yarn":  # Qwen's leave the length as it was, and say the factor
            max_positions = max(max_positions, int(scaling.factor * scaling.original_max_positions))
        return ModelConfig(
            architecture=architecture.name,
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=int(config["num_attention_heads"]),
            kv_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]),
            max_positions=max_positions,
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_scaling=scaling,
            tied_head=bool(config.get("tie_word_embeddings", False)),
            window=architecture.window(config),
            qkv_bias=architecture.qkv_bias,
            head_norms=architecture.head_norms,
        )
    except KeyError as error:
        raise ModelError(f"config.json: {error.args[0]!r} is missing") from error
    except ModelError:
        raise
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"config.json: a number is expected ({error})") from error
