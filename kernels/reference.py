"""What the kernels compute, in numpy: short and obviously right, in the precision of its inputs (tests use float64).

Shapes: T tokens of one sequence, H query heads, K KV heads, D head_dim. Weights: [out, in] by Hugging Face name.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]
Ids = npt.NDArray[np.integer]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / RMS(x) * weight over the last axis. Source: Zhang and Sennrich, 2019."""
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight)


def rope(x: Array, positions: Ids, inverse_frequencies: Array) -> Array:
    """Turns dimensions i, i + D / 2 by position * inverse_frequencies[i]. x: [T, heads, D]. Source: Su et al., 2021."""
    angle = (positions[:, None] * inverse_frequencies)[:, None, :].astype(x.dtype)
    first, second = np.split(x, 2, axis=-1)
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def swiglu(gate: Array, up: Array) -> Array:
    """SiLU(gate) * up. Source: Shazeer, 2020."""
    return gate / (1.0 + np.exp(-gate)) * up


def paged_attention(query: Array, key_pages: Array, value_pages: Array, pages: Ids, start: int) -> Array:
    """Causal attention of T tokens from position `start` over the KV of positions 0..start + T - 1 in pages.

    query: [T, H, D]; key_pages, value_pages: [K, pages, block_tokens, D]; pages: the sequence's, in order. Query head h
    reads KV head h // (H / K). Returns [T, H, D].
    """
    tokens, heads, head_dim = query.shape
    kv_heads, _, block_tokens, _ = key_pages.shape
    out = np.empty_like(query)
    for token in range(tokens):
        positions = np.arange(start + token + 1)
        page, offset = pages[positions // block_tokens], positions % block_tokens
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = key_pages[kv_head, page, offset] @ query[token, head] / np.sqrt(head_dim)
            weights = np.exp(scores - scores.max())
            out[token, head] = weights / weights.sum() @ value_pages[kv_head, page, offset]
    return out


def llama_forward(
    tokens: Ids,
    start: int,
    pages: Ids,
    cache: Array,
    weights: Mapping[str, Array],
    inverse_frequencies: Array,
    norm_eps: float,
) -> Array:
    """Logits [T, vocab] of T tokens from position `start`; writes their KV into `cache`.

    cache: [layers, 2, K, pages, block_tokens, D]; pages: the sequence's, in order.
    """
    layers, _, kv_heads, _, block_tokens, head_dim = cache.shape
    positions = start + np.arange(len(tokens))
    page, offset = pages[positions // block_tokens], positions % block_tokens
    hidden = weights["model.embed_tokens.weight"][tokens]

    def split(x: Array) -> Array:
        return x.reshape(len(tokens), -1, head_dim)

    for layer in range(layers):
        own = {name: weights[f"model.layers.{layer}.{name}.weight"] for name in LAYER_WEIGHTS}
        x = rms_norm(hidden, own["input_layernorm"], norm_eps)
        query = rope(split(x @ own["self_attn.q_proj"].T), positions, inverse_frequencies)
        key = rope(split(x @ own["self_attn.k_proj"].T), positions, inverse_frequencies)
        value = split(x @ own["self_attn.v_proj"].T)
        for head in range(kv_heads):
            cache[layer, 0, head, page, offset] = key[:, head]
            cache[layer, 1, head, page, offset] = value[:, head]
        attended = paged_attention(query, cache[layer, 0], cache[layer, 1], pages, start)
        hidden = hidden + attended.reshape(len(tokens), -1) @ own["self_attn.o_proj"].T
        x = rms_norm(hidden, own["post_attention_layernorm"], norm_eps)
        x = swiglu(x @ own["mlp.gate_proj"].T, x @ own["mlp.up_proj"].T)
        hidden = hidden + x @ own["mlp.down_proj"].T
    hidden = rms_norm(hidden, weights["model.norm.weight"], norm_eps)
    head_weight = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return np.asarray(hidden @ head_weight.T)


LAYER_WEIGHTS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
