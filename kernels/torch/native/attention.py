"""Attention over pages as they lie, without a copy of them. Decode is the prefill of one token."""

from __future__ import annotations

import torch
from pyengine._native import AttentionPlan
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.torch.contract import Attend
from pyengine.kernels.torch.native.memory import is_half, kernels, page_tensor


def prefill_attention(sequences: Sequences, kv: torch.Tensor, window: int | None = None) -> Attend:
    kv_heads, pages, page_tokens = kv.shape[1:4]
    sequences.check_pages(pages, page_tokens)
    plan: AttentionPlan | None = None
    planned = 0

    def attend(query: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        nonlocal plan, planned
        rows, heads, head_dim = query.shape
        half, half_pages = is_half(query), is_half(kv)
        if plan is None or planned != heads:
            # The query says how many heads there are: planned with the first layer's.
            plan, planned = _plan(sequences, window, heads // kv_heads, pages, page_tokens), heads
        if heads % kv_heads or kv.shape[1:] != (kv_heads, pages, page_tokens, head_dim) or rows < sequences.rows[-1]:
            raise ValueError(f"the query is {tuple(query.shape)}, kv {tuple(kv.shape)}, planned for {pages} pages")
        where = (query.data_ptr(), query.stride(0), query.stride(1))
        kernels().attend(plan, where, where, rows, page_tensor(kv), half, half_pages)
        return query

    return attend


def decode_attention(sequences: Sequences, kv: torch.Tensor, window: int | None = None) -> Attend:
    assert (sequences.counts <= 1).all(), "decode is one new token at most for each sequence"
    return prefill_attention(sequences, kv, window)


def _plan(sequences: Sequences, window: int | None, group: int, pages: int, page_tokens: int) -> AttentionPlan:
    rows, lengths = sequences.rows.tolist(), sequences.lengths.tolist()
    return AttentionPlan(rows, lengths, sequences.tables.tobytes(), window, group, pages, page_tokens)
