"""Attention over paged KV with PyTorch's scaled_dot_product_attention: pages are gathered, then attended to.

Grouped queries: query head h reads KV head h // (heads / kv_heads).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def decode_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """One new token for each of several sequences.

    query: [sequences, heads, head_dim]; keys, values: [kv_heads, sequences, length, head_dim], strided or not; mask:
    added to the scores, [sequences, 1, 1, length] with -inf where a sequence has no token, or None. Returns
    [sequences, heads, head_dim]. The query heads of one KV head are its rows, so that no key is copied for them.
    """
    sequences, heads, head_dim = query.shape
    grouped = query.view(sequences, keys.shape[0], heads // keys.shape[0], head_dim)
    out = F.scaled_dot_product_attention(grouped, keys.transpose(0, 1), values.transpose(0, 1), attn_mask=mask)
    return out.reshape(sequences, heads, head_dim)


def prefill_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """A run of new tokens of one sequence, which see the tokens before them and each other causally.

    query: [tokens, heads, head_dim], the last `tokens` of the `length` positions; keys, values:
    [kv_heads, length, head_dim]; mask: `causal_mask(tokens, length)`, or None when tokens = length. Returns
    [tokens, heads, head_dim].
    """
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != keys.shape[0],
    )
    return out.squeeze(0).transpose(0, 1)


def causal_mask(tokens: int, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[tokens, length]: 0 where token i, at position length - tokens + i, may look, else -inf."""
    mask = torch.full((tokens, length), float("-inf"), dtype=dtype, device=device)
    return mask.triu_(length - tokens + 1)


def padding_mask(lengths: list[int], length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[sequences, 1, 1, length]: 0 at a sequence's first `lengths[i]` positions, else -inf."""
    positions = torch.arange(length, device=device)
    beyond = positions >= torch.tensor(lengths, device=device).unsqueeze(1)
    mask = torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill_(beyond, float("-inf"))
    return mask[:, None, None, :]
