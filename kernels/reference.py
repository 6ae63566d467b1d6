"""What the kernels compute, in numpy: short and obviously right, in the precision of its inputs (tests use float64).

The docstrings here are the contracts: an implementation keeps them under the same names (README.md beside this file),
and does not repeat them. Sizes: T tokens of a step, S sequences, H query heads, K KV heads (query head h reads KV head
h // (H / K)), D head_dim, P pages of B tokens. Weights of a model: [out, in] by Hugging Face name.

The page tensor: [layers, 2 (k, v), K, P, B, D]; `kv` is one layer of it. What lies behind a sequence's tokens in its
last page, and in pages that nobody has, may be anything, NaN too, and changes no result.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from pyengine.kernels.inputs import Draws, Sequences, Shapes

Array = npt.NDArray[np.floating]
Ids = npt.NDArray[np.integer]
ALL = slice(None)


def rms_norm(x: Array, weight: Array, eps: float, residual: Array | None = None) -> tuple[Array, Array]:
    """(normed, stream): stream = residual + x (x where there is no residual), normed = stream / RMS(stream) * weight.

    x, residual, both results: [T, width]; weight: [width]. The norm is that of the stream as it is stored. Where there
    is a residual both are used up: its memory may hold the stream, and that of x the norm. Source: Zhang and Sennrich,
    2019.
    """
    stream = x if residual is None else residual + x
    return np.asarray(stream / np.sqrt((stream * stream).mean(axis=-1, keepdims=True) + eps) * weight), stream


def rope(x: Array, cosines: Array, sines: Array) -> Array:
    """Turns dimensions i, i + D / 2. x: [T, heads, D]; cosines, sines: [T, D / 2]. Source: Su et al., 2021."""
    first, second = np.split(x, 2, axis=-1)
    cosine, sine = cosines[:, None, :], sines[:, None, :]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def rope_write(
    qkv: Array,
    kv: Array,
    cosines: Array,
    sines: Array,
    slots: Ids,
    norms: tuple[Array, Array, float] | None = None,
) -> Array:
    """Rotates queries and keys, and writes keys and values into pages. Returns the queries [T, H, D].

    qkv: [T, H + 2K, D], all queries before all keys before all values; kv: [2, K, P, B, D], written; cosines, sines:
    [T, D / 2] in float32 or better, of position * inverse frequency (Llama 3's scaling is in the frequencies); slots:
    int64 [T], page * B + offset, no two alike, or -1: its KV is written nowhere. norms: (query weight [D], key weight
    [D], eps), an RMS norm of each query and key head before it is rotated (Qwen3). qkv is used up: the queries may be
    in its memory.
    """
    kv_heads, page_tokens = kv.shape[1], kv.shape[3]
    heads = qkv.shape[1] - 2 * kv_heads
    queries, keys, values = np.split(qkv, [heads, heads + kv_heads], axis=1)
    if norms is not None:
        queries, keys = rms_norm(queries, norms[0], norms[2])[0], rms_norm(keys, norms[1], norms[2])[0]
    queries, keys = rope(queries, cosines, sines), rope(keys, cosines, sines)
    for token, slot in enumerate(slots):
        if slot >= 0:
            page, offset = divmod(int(slot), page_tokens)
            kv[:, :, page, offset] = keys[token], values[token]
    return queries


def swiglu(gate_up: Array) -> Array:
    """SiLU(gate) * up. gate_up: [T, 2 * width], gate before up, used up; returns [T, width]. Source: Shazeer, 2020."""
    gate, up = np.split(gate_up, 2, axis=-1)
    with np.errstate(over="ignore"):  # exp of a large -gate is infinite, and what is divided by it 0
        return np.asarray(gate / (1.0 + np.exp(-gate)) * up)


def paged_attention(query: Array, kv: Array, sequences: Sequences, window: int | None = None) -> Array:
    """Causal attention of new tokens over the KV in pages, their own included. Scores are scaled by 1 / sqrt(D).

    query: [T, H, D]; kv: [2, K, P, B, D]. The new token at position p sees the positions 0..p, with a window the last
    `window` of them (itself among them). Returns [T, H, D]; zeros in rows that belong to nobody or see nothing.

    Implementations have it twice, `prefill_attention` for any number of new tokens, `decode_attention` for one each,
    and in two stages: `attend = prefill_attention(sequences, kv, window)` once a step, with any layer's kv, then
    `attend(query, kv)` in each layer, which uses the query up: its memory may hold the result.
    """
    _, heads, head_dim = query.shape
    kv_heads, page_tokens = kv.shape[1], kv.shape[3]
    out = np.zeros_like(query)
    for first, count, length, table in zip(
        sequences.rows, sequences.counts, sequences.lengths, sequences.tables, strict=False
    ):
        for token in range(count if length else 0):
            end = length - count + token + 1
            positions = np.arange(0 if window is None else max(0, end - window), end)
            page, offset = table[positions // page_tokens], positions % page_tokens
            for head in range(heads):
                keys, values = kv[:, head // (heads // kv_heads), page, offset]
                scores = keys @ query[first + token, head] / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                out[first + token, head] = weights / weights.sum() @ values
    return out


def gather(cache: Array, pages: Ids, strips: Array, layers: slice = ALL, heads: slice = ALL) -> None:
    """Copies whole pages, of a range of layers and of KV heads, into canonical strips. One launch for all.

    cache: [layers, 2, K, P, B, D]; pages: [N], each at most once; strips: [N, layers of the range, 2, heads of the
    range, B, D], written, bit by bit.
    """
    strips[:] = cache[layers, :, heads][:, :, :, pages].transpose(3, 0, 1, 2, 4, 5)


def scatter(cache: Array, pages: Ids, strips: Array, layers: slice = ALL, heads: slice = ALL) -> None:
    """As `gather`, the other way: strips into pages."""
    cache[layers, :, heads][:, :, :, pages] = strips.transpose(1, 2, 3, 0, 4, 5)


def sample(logits: Array, draws: Draws) -> Ids:
    """The next token of each row: int64 [S]. logits: float32 [S, vocab]. -1 where no token follows, as the row holds a
    NaN or its largest logit is infinite.

    Temperature 0 takes the largest logit, the first of equal ones. Else the weight of a token is
    exp((logit - largest) / temperature), and tokens are ranked by logit, equal ones by id. Kept are those with at least
    min_p times the largest weight; of these the first top_k; of these the fewest first ones that have top_p of the
    weight of all of these. Drawn is the first, in the order of ids, up to which the kept weights exceed uniform * their
    sum.

    By id and not by rank: logits that differ by a rounding error may change ranks from one batch, framework or node to
    another, and whole intervals would change places with them. Implementations may round masses by 1e-5 of the sum.
    """
    tokens = np.full(len(draws), -1, np.int64)
    for row, values in enumerate(logits):
        if not np.isfinite(values.max()):
            continue
        if draws.temperature[row] == 0.0:
            tokens[row] = values.argmax()
            continue
        order = np.argsort(-values, kind="stable")
        ranked = values[order].astype(np.float64)
        weights = np.exp((ranked - ranked[0]) / draws.temperature[row])
        kept = int((weights >= draws.min_p[row]).sum())
        if draws.top_k[row]:
            kept = min(kept, int(draws.top_k[row]))
        if draws.top_p[row] < 1.0:
            masses = np.cumsum(weights[:kept])
            kept = int(np.searchsorted(masses, draws.top_p[row] * masses[-1])) + 1
        by_id = np.argsort(order[:kept])
        masses = np.cumsum(weights[by_id])
        drawn = int(np.searchsorted(masses, draws.uniform[row] * masses[-1], side="right"))
        tokens[row] = order[by_id[min(drawn, kept - 1)]]
    return tokens


def shape_logits(logits: Array, shapes: Shapes) -> None:
    """Shapes rows of logits before a token is chosen from them. logits: float32 [S, vocab], written.

    First seen logits are divided by their factor where they are positive, else multiplied by it (the repetition penalty
    of Keskar et al., 2019), then `add` is added, then those that a mask does not allow become -inf (where a NaN may
    stay). No (row, id) is twice in `seen`, or in `ids`.
    """
    at = shapes.seen_rows, shapes.seen
    logits[at] = np.where(logits[at] > 0.0, logits[at] / shapes.factors, logits[at] * shapes.factors)
    logits[shapes.rows, shapes.ids] += shapes.add
    ids = np.arange(logits.shape[1])
    for row, mask in zip(shapes.masked, shapes.masks, strict=True):
        allowed = mask[ids // 32] >> (ids % 32) & 1
        logits[row, allowed == 0] = -np.inf


def logprobs(logits: Array, tokens: Ids, count: int) -> tuple[Array, Ids, Ids, Array]:
    """(chosen, ranks, ids, values): what rows of logits say of a token each, and of their `count` likeliest ones.

    logits: float32 [S, vocab]; tokens: [S], a negative one counts as 0; count: of vocab at most. chosen: float32 [S],
    natural logarithms of the tokens' probabilities (softmax); ranks: [S], 1 for the likeliest, equal ones by id; ids:
    [S, count], in the order of ranks; values: float32 [S, count], their logarithms.
    """
    largest = logits.max(axis=-1, keepdims=True)
    logs = logits - largest - np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))
    order = np.argsort(-logits, axis=-1, kind="stable")
    column = np.maximum(tokens, 0)[:, None]
    ids = order[:, :count]
    ranks = np.argsort(order, axis=-1)[np.arange(len(order))[:, None], column][:, 0] + 1
    return (
        np.take_along_axis(logs, column, axis=-1)[:, 0],
        ranks,
        ids,
        np.take_along_axis(logs, ids, axis=-1),
    )


def llama_forward(
    tokens: Ids,
    start: int,
    pages: Ids,
    cache: Array,
    weights: Mapping[str, Array],
    inverse_frequencies: Array,
    norm_eps: float,
) -> Array:
    """Logits [T, vocab] of T tokens of one sequence from position `start`; writes their KV into `cache`.

    cache: [layers, 2, K, P, B, D]; pages: the sequence's, in order.
    """
    layers, page_tokens, head_dim = cache.shape[0], *cache.shape[-2:]
    positions = start + np.arange(len(tokens))
    slots = pages[positions // page_tokens] * page_tokens + positions % page_tokens
    angles = positions[:, None] * inverse_frequencies
    sequences = Sequences.of([len(tokens)], [start + len(tokens)], [pages])
    hidden = weights["model.embed_tokens.weight"][tokens]
    for layer in range(layers):
        own = {name: weights[f"model.layers.{layer}.{name}.weight"] for name in LAYER_WEIGHTS}
        x, _ = rms_norm(hidden, own["input_layernorm"], norm_eps)
        qkv = np.concatenate([x @ own[f"self_attn.{part}_proj"].T for part in "qkv"], axis=-1)
        query = rope_write(qkv.reshape(len(tokens), -1, head_dim), cache[layer], np.cos(angles), np.sin(angles), slots)
        attended = paged_attention(query, cache[layer], sequences)
        x = attended.reshape(len(tokens), -1) @ own["self_attn.o_proj"].T
        x, hidden = rms_norm(x, own["post_attention_layernorm"], norm_eps, hidden)
        x = swiglu(np.concatenate([x @ own["mlp.gate_proj"].T, x @ own["mlp.up_proj"].T], axis=-1))
        hidden = hidden + x @ own["mlp.down_proj"].T
    hidden, _ = rms_norm(hidden, weights["model.norm.weight"], norm_eps)
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
