"""Attention over paged KV with PyTorch's scaled_dot_product_attention: pages are gathered, then attended to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import torch
import torch.nn.functional as F
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.torch.contract import Attend

#: Sequences whose page counts differ by more than this factor are decoded apart: padding costs gathers.
PADDING_FACTOR = 2

Table = torch.Tensor | slice  # pages: int64 [N], or a run of them, which needs no copy
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Run:
    """New tokens of one sequence: rows first..last of the query.

    keys: from the table's first token on; mask: added to the scores, [rows, keys], or None: causal from the first key.
    """

    first: int
    last: int
    table: Table
    keys: slice
    mask: torch.Tensor | None


@dataclass(frozen=True)
class Group:
    """Sequences of similar length with one new token each.

    rows: their rows of the query; table: of all, each with `pages` of its own; keys: from the table's first token on;
    mask: added to the scores, [sequences, 1, 1, keys], -inf at what is not seen; blank: int64, tokens of the gathered
    pages that hold nothing, maybe NaN. Both None where every key is seen.
    """

    rows: torch.Tensor | slice
    sequences: int
    table: Table
    keys: slice
    mask: torch.Tensor | None
    blank: torch.Tensor | None


def prefill_attention(sequences: Sequences, kv: torch.Tensor, window: int | None = None) -> Attend:
    sequences.check_pages(*kv.shape[2:4])
    runs = []
    for first, count, length, table in zip(
        sequences.rows.tolist(), sequences.counts.tolist(), sequences.lengths.tolist(), sequences.tables, strict=False
    ):
        if count and length:
            runs.append(_run(first, count, length, table, kv, window))

    def attend(query: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        if len(runs) == 1 and (runs[0].first, runs[0].last) == (0, len(query)):
            return _attend_run(query, kv, runs[0])
        out = torch.zeros_like(query)
        for run in runs:
            out[run.first : run.last] = _attend_run(query[run.first : run.last], kv, run)
        return out

    return attend


def _run(first: int, count: int, length: int, table: I32, kv: torch.Tensor, window: int | None) -> Run:
    page_tokens = kv.shape[3]
    start = length - count  # position of the first new token
    seen = 0 if window is None else max(0, start + 1 - window)  # first position that any of them sees
    begin = seen // page_tokens
    keys = length - seen
    mask = None
    if start or (window is not None and window < length):
        mask = torch.full((count, keys), float("-inf"), dtype=kv.dtype, device=kv.device)
        mask.triu_(start - seen + 1)
        if window is not None:
            behind = torch.full_like(mask, float("-inf")).tril_(start - seen - window)
            mask += behind
    pages = _table(table[begin : -(-length // page_tokens)], kv.device)
    return Run(first, first + count, pages, slice(seen - begin * page_tokens, length - begin * page_tokens), mask)


def _attend_run(query: torch.Tensor, kv: torch.Tensor, run: Run) -> torch.Tensor:
    keys, values = _gather(kv, run.table).flatten(2, 3)[:, :, run.keys]
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        attn_mask=run.mask,
        is_causal=run.mask is None,
        enable_gqa=query.shape[1] != kv.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def decode_attention(sequences: Sequences, kv: torch.Tensor, window: int | None = None) -> Attend:
    sequences.check_pages(*kv.shape[2:4])
    assert (sequences.counts <= 1).all(), "decode is one new token at most for each sequence"
    groups = _groups(sequences, kv, window)

    def attend(query: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        if len(groups) == 1 and isinstance(groups[0].rows, slice) and groups[0].sequences == len(query):
            return _attend_group(query, kv, groups[0])
        out = torch.zeros_like(query)
        for group in groups:
            out[group.rows] = _attend_group(query[group.rows], kv, group)
        return out

    return attend


def _groups(sequences: Sequences, kv: torch.Tensor, window: int | None) -> list[Group]:
    """Cuts the sequences, sorted by the keys they see, where pages exceed PADDING_FACTOR times the group's first."""
    page_tokens = kv.shape[3]
    there = np.flatnonzero((sequences.counts == 1) & (sequences.lengths > 0))
    ends = sequences.lengths[there]  # keys begin..end are seen; from here on counted from the first page that has any
    begins = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
    first_pages = begins // page_tokens
    ends, begins = ends - first_pages * page_tokens, begins - first_pages * page_tokens
    counts = -(-ends // page_tokens)
    order = np.argsort(ends, kind="stable")
    groups = []
    while len(order):
        size = int(np.searchsorted(counts[order], counts[order[0]] * PADDING_FACTOR, side="right"))
        members, order = order[:size], order[size:]
        columns = first_pages[members, None] + np.arange(counts[members[-1]])
        last = first_pages[members] + counts[members]
        columns = np.where(columns < last[:, None], columns, first_pages[members, None])  # padding: each one's own page
        tables = np.take_along_axis(sequences.tables[there[members]], columns, axis=1)
        rows = sequences.rows[there[members]]
        groups.append(_group(rows, tables, begins[members], ends[members], kv))
    return groups


def _group(rows: I32, tables: I32, begins: I32, ends: I32, kv: torch.Tensor) -> Group:
    """tables: [sequences, pages]; of each sequence's tokens in them, begins..ends are seen."""
    page_tokens = kv.shape[3]
    taken = _table(rows, kv.device)
    if (ends == ends[0]).all() and (begins == begins[0]).all():
        seen = slice(int(begins[0]), int(ends[0]))
        return Group(taken, len(rows), _table(tables.reshape(-1), kv.device), seen, None, None)
    positions = np.arange(tables.shape[1] * page_tokens)
    # What is padded with a full page of the sequence itself is harmless; its only page has an end that is not.
    filled = np.where(ends > page_tokens, -(-ends // page_tokens) * page_tokens, len(positions))
    blank = np.flatnonzero((positions >= ends[:, None]) & (positions < filled[:, None]))
    keys = positions[: ends.max()]
    hidden = torch.from_numpy((keys >= ends[:, None]) | (keys < begins[:, None])).to(kv.device)
    mask = torch.zeros(hidden.shape, dtype=kv.dtype, device=kv.device).masked_fill_(hidden, float("-inf"))
    return Group(
        taken,
        len(rows),
        _index(tables.reshape(-1), kv.device),  # never a run of pages: what is gathered is blanked
        slice(0, len(keys)),
        mask[:, None, None, :],
        _index(blank, kv.device),
    )


def _attend_group(query: torch.Tensor, kv: torch.Tensor, group: Group) -> torch.Tensor:
    heads, head_dim = query.shape[1:]
    kv_heads = kv.shape[1]
    gathered = _gather(kv, group.table)
    if group.blank is not None:
        gathered.flatten(2, 3).index_fill_(2, group.blank, 0.0)
    gathered = gathered.view(2, kv_heads, group.sequences, -1, head_dim)
    keys, values = gathered[:, :, :, group.keys].transpose(1, 2)
    # The query heads of one KV head are its rows, so that no key is copied for them.
    grouped = query.reshape(group.sequences, kv_heads, heads // kv_heads, head_dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask)
    return out.reshape(group.sequences, heads, head_dim)


def _table(pages: I32, device: torch.device) -> Table:
    """A slice if the pages (or rows) lie one behind the other."""
    if (np.diff(pages) == 1).all():
        return slice(int(pages[0]), int(pages[0]) + len(pages))
    return _index(pages, device)


def _index(values: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)


def _gather(kv: torch.Tensor, table: Table) -> torch.Tensor:
    """[2, K, len(table), B, D]: a copy, or a view of pages that lie one behind the other."""
    return kv[:, :, table] if isinstance(table, slice) else kv.index_select(2, table)
