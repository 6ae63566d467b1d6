"""Decode attention: one query row for each sequence, whose keys are split over several programs, then combined.

Source: Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023). Into how many parts follows from the width of the tables,
not from the lengths, and each program cuts its sequence itself: a captured launch holds for any lengths.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

import torch
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.torch.contract import Attend, Tables
from pyengine.kernels.torch.triton.flash import LOG2_E, attend_keys
from pyengine.kernels.torch.triton.launch import dense, fitting, multiprocessors, on_device, precision

CONFIGS = [
    triton.Config({"BLOCK_N": 64}, num_warps=4, num_stages=3),
    triton.Config({"BLOCK_N": 32}, num_warps=4, num_stages=4),
    triton.Config({"BLOCK_N": 128}, num_warps=4, num_stages=2),
    triton.Config({"BLOCK_N": 128}, num_warps=8, num_stages=3),
]
#: Keys that one program should have at least: below, combining costs more than it wins.
LEAST_KEYS = 256
#: tl.dot wants 16 rows; with fewer query heads for each KV head the others are empty. Decode waits for memory anyway.
LEAST_ROWS = 16


def decode_attention(sequences: Sequences, kv: torch.Tensor, window: int | None = None) -> Attend:
    sequences.check_pages(*kv.shape[2:4])
    assert (sequences.counts <= 1).all(), "decode is one new token at most for each sequence"
    return _attend(on_device(sequences, kv.device), int(sequences.rows[-1]), kv, window)


def decode_tables(tables: Tables, kv: torch.Tensor, window: int | None = None) -> Attend:
    """See `contract.DecodeTables`."""
    return _attend(tables, len(tables.lengths), kv, window)


def _attend(told: Tables, owned: int, kv: torch.Tensor, window: int | None) -> Attend:
    """owned: rows of the query that belong to a sequence."""
    sequences, width = told.tables.shape
    splits = _splits(sequences, width, kv, window)

    def attend(query: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        dense(query=query, kv=kv)
        heads, head_dim = query.shape[1:]
        kv_heads, page_tokens = kv.shape[1], kv.shape[3]
        group = heads // kv_heads
        padded = triton.next_power_of_2(head_dim)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        out[owned:] = 0.0
        if not owned:
            return out
        parts, weights = out, out  # not used
        if splits > 1:
            parts = torch.empty((owned, heads, splits, head_dim), dtype=torch.float32, device=query.device)
            weights = torch.empty((owned, heads, splits, 2), dtype=torch.float32, device=query.device)
        _decode[(sequences, kv_heads, splits)](
            query,
            kv[0],
            kv[1],
            out,
            parts,
            weights,
            told.rows,
            told.lengths,
            told.tables,
            query.stride(0),
            query.stride(1),
            kv.stride(1),
            kv.stride(2),
            kv.stride(3),
            told.tables.stride(0),
            LOG2_E / head_dim**0.5,
            window or 0,
            SPLITS=splits,
            GROUP=group,
            BLOCK_M=max(LEAST_ROWS, triton.next_power_of_2(group)),
            WINDOWED=window is not None,
            HEAD_DIM=head_dim,
            PADDED_DIM=padded,
            PAGE_TOKENS=page_tokens,
            PRECISION=precision(query.dtype),
        )
        if splits > 1:
            _combine[(owned * heads,)](
                parts,
                weights,
                out,
                SPLITS=splits,
                PADDED_SPLITS=triton.next_power_of_2(splits),
                HEAD_DIM=head_dim,
                PADDED_DIM=padded,
            )
        return out

    return attend


def _splits(sequences: int, width: int, kv: torch.Tensor, window: int | None) -> int:
    """Parts of each sequence: two programs for each multiprocessor, if the sequences may be long enough for that."""
    keys = width * kv.shape[3]
    if window is not None:
        keys = min(keys, window)
    programs = max(1, sequences * kv.shape[1])
    wanted = 2 * multiprocessors(kv.device) // programs
    return max(1, min(wanted, keys // LEAST_KEYS, 128))


@triton.autotune(
    CONFIGS, ["GROUP", "HEAD_DIM", "PAGE_TOKENS", "SPLITS"], prune_configs_by={"early_config_prune": fitting}
)
@triton.jit
def _decode(
    query,
    keys,
    values,
    out,
    parts,  # float32 [T, H, SPLITS, HEAD_DIM]: weighted sums of values
    weights,  # float32 [T, H, SPLITS, 2]: sum of weights, and the score that they are relative to
    rows,
    lengths,
    tables,
    query_token_stride,
    query_head_stride,
    head_stride,
    page_stride,
    token_stride,
    table_stride,
    scale,
    window,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WINDOWED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(rows + sequence)
    if tl.load(rows + sequence + 1) == row:
        return
    length = tl.load(lengths + sequence)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(length - window, 0)
    # Whole tiles for all parts but the last ones, which may be empty.
    span = tl.cdiv(tl.cdiv(length - begin, SPLITS), BLOCK_N) * BLOCK_N
    begin = begin + split * span
    end = tl.minimum(begin + span, length)
    whole = begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N

    member = tl.arange(0, BLOCK_M)
    there = member < GROUP
    head = kv_head * GROUP + member
    dims = tl.arange(0, PADDED_DIM)
    stored = there[:, None] & (dims[None, :] < HEAD_DIM)
    source = row.to(tl.int64) * query_token_stride + head * query_head_stride
    q = tl.load(query + source[:, None] + dims[None, :], mask=stored, other=0.0)
    position = tl.zeros([BLOCK_M], tl.int32) + end

    keys += kv_head.to(tl.int64) * head_stride
    values += kv_head.to(tl.int64) * head_stride
    tables += sequence.to(tl.int64) * table_stride
    accumulated = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    accumulated, total, largest = attend_keys(
        accumulated, total, largest, q, keys, values, tables, position, begin, whole,
        page_stride, token_stride, scale, window,
        False, False, HEAD_DIM, PADDED_DIM, PAGE_TOKENS, BLOCK_N, PRECISION,
    )  # fmt: skip
    accumulated, total, largest = attend_keys(
        accumulated, total, largest, q, keys, values, tables, position, whole, end,
        page_stride, token_stride, scale, window,
        True, False, HEAD_DIM, PADDED_DIM, PAGE_TOKENS, BLOCK_N, PRECISION,
    )  # fmt: skip

    target = row.to(tl.int64) * (tl.num_programs(1) * GROUP) + head  # out is dense
    if SPLITS == 1:
        result = accumulated / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + target[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=stored)
    else:
        part = target * SPLITS + split
        tl.store(parts + part[:, None] * HEAD_DIM + dims[None, :], accumulated, mask=stored)
        tl.store(weights + part * 2, total, mask=there)
        tl.store(weights + part * 2 + 1, largest, mask=there)


@triton.jit
def _combine(
    parts,
    weights,
    out,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, PADDED_SPLITS)
    there = split < SPLITS
    dims = tl.arange(0, PADDED_DIM)
    in_head = dims < HEAD_DIM
    part = row * SPLITS + split
    total = tl.load(weights + part * 2, mask=there, other=0.0)
    largest = tl.load(weights + part * 2 + 1, mask=there, other=float("-inf"))
    highest = tl.max(largest, 0)
    share = tl.exp2(largest - tl.where(highest == float("-inf"), 0.0, highest))
    sums = tl.load(parts + part[:, None] * HEAD_DIM + dims[None, :], mask=there[:, None] & in_head[None, :], other=0.0)
    whole = tl.sum(total * share, 0)
    result = tl.sum(sums * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=in_head)
