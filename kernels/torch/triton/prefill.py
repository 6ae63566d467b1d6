"""Prefill attention: chunks of many sequences in one launch, each over its prefix in pages and itself."""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

import torch
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.torch.contract import Attend
from pyengine.kernels.torch.triton.flash import LOG2_E, attend_keys
from pyengine.kernels.torch.triton.launch import dense, fitting, on_device, precision

CONFIGS = [
    triton.Config({"BLOCK_M": 64, "BLOCK_N": 64}, num_warps=4, num_stages=3),
    triton.Config({"BLOCK_M": 64, "BLOCK_N": 32}, num_warps=4, num_stages=3),
    triton.Config({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=8, num_stages=3),
    triton.Config({"BLOCK_M": 128, "BLOCK_N": 128}, num_warps=8, num_stages=2),
    triton.Config({"BLOCK_M": 32, "BLOCK_N": 64}, num_warps=4, num_stages=2),
    triton.Config({"BLOCK_M": 32, "BLOCK_N": 32}, num_warps=4, num_stages=2),
]


def prefill_attention(sequences: Sequences, kv: torch.Tensor, window: int | None = None) -> Attend:
    sequences.check_pages(*kv.shape[2:4])
    told = on_device(sequences, kv.device)
    longest = int(sequences.counts.max(initial=0))
    owned = int(sequences.rows[-1])

    def attend(query: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        dense(query=query, kv=kv)
        heads, head_dim = query.shape[1:]
        kv_heads, page_tokens = kv.shape[1], kv.shape[3]
        group = heads // kv_heads
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        out[owned:] = 0.0
        if not owned:
            return out

        def grid(config: dict[str, int]) -> tuple[int, int, int]:
            return triton.cdiv(longest * group, config["BLOCK_M"]), kv_heads, len(sequences)

        _prefill[grid](
            query,
            kv[0],
            kv[1],
            out,
            told.rows,
            told.lengths,
            told.tables,
            query.stride(0),
            query.stride(1),
            out.stride(0),
            out.stride(1),
            kv.stride(1),
            kv.stride(2),
            kv.stride(3),
            told.tables.stride(0),
            LOG2_E / head_dim**0.5,
            window or 0,
            GROUP=group,
            WINDOWED=window is not None,
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            PAGE_TOKENS=page_tokens,
            PRECISION=precision(query.dtype),
        )
        return out

    return attend


@triton.autotune(CONFIGS, ["GROUP", "HEAD_DIM", "PAGE_TOKENS"], prune_configs_by={"early_config_prune": fitting})
@triton.jit
def _prefill(
    query,
    keys,
    values,
    out,
    rows,
    lengths,
    tables,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    head_stride,
    page_stride,
    token_stride,
    table_stride,
    scale,
    window,
    GROUP: tl.constexpr,
    WINDOWED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # The last tiles of a sequence see the most keys: they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    first_row = tl.load(rows + sequence)
    count = tl.load(rows + sequence + 1) - first_row
    if tile * BLOCK_M >= count * GROUP:
        return
    before = tl.load(lengths + sequence) - count

    # Row r of the tile is query head r % GROUP of the KV head, of token r // GROUP.
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    there = token < count
    position = before + token
    dims = tl.arange(0, PADDED_DIM)
    stored = there[:, None] & (dims[None, :] < HEAD_DIM)
    head = kv_head * GROUP + row % GROUP
    source = (first_row + token).to(tl.int64) * query_token_stride + head * query_head_stride
    q = tl.load(query + source[:, None] + dims[None, :], mask=stored, other=0.0)

    # Keys begin..seen_begin and seen_end..end are seen by some rows only, those between by all.
    first = before + tile * BLOCK_M // GROUP
    last = before + tl.minimum(count - 1, (tile * BLOCK_M + BLOCK_M - 1) // GROUP)
    end = last + 1
    seen_end = tl.maximum(first + 1, 0) // BLOCK_N * BLOCK_N
    begin = 0
    seen_begin = 0
    if WINDOWED:
        begin = tl.maximum(first + 1 - window, 0) // BLOCK_N * BLOCK_N
        seen_begin = (tl.maximum(last + 1 - window, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        seen_begin = tl.maximum(begin, tl.minimum(seen_begin, seen_end))

    keys += kv_head.to(tl.int64) * head_stride
    values += kv_head.to(tl.int64) * head_stride
    tables += sequence.to(tl.int64) * table_stride
    accumulated = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if WINDOWED:
        accumulated, total, largest = attend_keys(
            accumulated, total, largest, q, keys, values, tables, position, begin, seen_begin,
            page_stride, token_stride, scale, window,
            True, WINDOWED, HEAD_DIM, PADDED_DIM, PAGE_TOKENS, BLOCK_N, PRECISION,
        )  # fmt: skip
    accumulated, total, largest = attend_keys(
        accumulated, total, largest, q, keys, values, tables, position, seen_begin, seen_end,
        page_stride, token_stride, scale, window,
        False, WINDOWED, HEAD_DIM, PADDED_DIM, PAGE_TOKENS, BLOCK_N, PRECISION,
    )  # fmt: skip
    accumulated, total, largest = attend_keys(
        accumulated, total, largest, q, keys, values, tables, position, tl.maximum(seen_begin, seen_end), end,
        page_stride, token_stride, scale, window,
        True, WINDOWED, HEAD_DIM, PADDED_DIM, PAGE_TOKENS, BLOCK_N, PRECISION,
    )  # fmt: skip

    target = (first_row + token).to(tl.int64) * out_token_stride + head * out_head_stride
    result = accumulated / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + target[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=stored)
