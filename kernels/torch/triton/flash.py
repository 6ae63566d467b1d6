"""The inner loop of both attentions: a tile of query rows over a run of keys in pages, with a running softmax.

Source: Dao, FlashAttention-2, 2023. Scores are in units of log2, so that exp2 does, and nothing of [rows, keys] is ever
in memory. Rows of one tile are the query heads of one KV head, so each key is loaded once for all of them.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def attend_keys(
    accumulated,  # float32 [rows, PADDED_DIM]: weighted sum of values, not yet divided
    total,  # float32 [rows]: sum of weights
    largest,  # float32 [rows]: the score that weights are relative to; -inf before the first key
    query,  # [rows, PADDED_DIM]
    keys,
    values,  # pointers to the KV head's first page
    table,  # pointer to the sequence's pages
    position,  # int32 [rows]: the last key that each row sees
    begin,
    end,  # keys begin..end, begin counted from as tiles are cut
    page_stride,
    token_stride,
    scale,  # of scores, LOG2_E included
    window,
    MASKED: tl.constexpr,  # some row sees some key of the run not, or the last tile is cut
    WINDOWED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    dims = tl.arange(0, PADDED_DIM)
    for first in range(begin, end, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        here = key < end
        page = tl.load(table + key // PAGE_TOKENS, mask=here, other=0).to(tl.int64)
        offset = page * page_stride + (key % PAGE_TOKENS) * token_stride
        if MASKED:
            # What lies behind the tokens may be NaN, and 0 * NaN is NaN: it is not loaded.
            loaded = here[:, None] & (dims[None, :] < HEAD_DIM)
            k = tl.load(keys + offset[:, None] + dims[None, :], mask=loaded, other=0.0)
        elif PADDED_DIM != HEAD_DIM:
            k = tl.load(keys + offset[:, None] + dims[None, :], mask=dims[None, :] < HEAD_DIM, other=0.0)
        else:
            k = tl.load(keys + offset[:, None] + dims[None, :])
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION) * scale
        if MASKED:
            seen = (key[None, :] <= position[:, None]) & here[None, :]
            if WINDOWED:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet: -inf - -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        largest = higher
        if MASKED:
            v = tl.load(values + offset[:, None] + dims[None, :], mask=loaded, other=0.0)
        elif PADDED_DIM != HEAD_DIM:
            v = tl.load(values + offset[:, None] + dims[None, :], mask=dims[None, :] < HEAD_DIM, other=0.0)
        else:
            v = tl.load(values + offset[:, None] + dims[None, :])
        accumulated = tl.dot(weights.to(v.dtype), v, accumulated * shrink[:, None], input_precision=PRECISION)
    return accumulated, total, largest
