"""The cases of each contract: shapes, types and awkward batches, and random numbers in them.

Pages are full of NaN wherever no sequence has a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pyengine.kernels.inputs import Draws, Sequences, Shapes, Shaping, words
from tests.kernels.calls import BITS, Call, rounded
from tests.kernels.pairs import cover

DTYPES = ("float32", "bfloat16", "float16")
#: (query heads, KV heads): 1, 2, 3, 4, 5, 8 and 16 for each.
HEADS = ((3, 3), (4, 2), (9, 3), (8, 2), (5, 1), (16, 2), (16, 1))
HEAD_DIMS = (64, 80, 96, 128, 256)
PAGE_TOKENS = (16, 32, 64, 128, 256)
WINDOWS = (None, 1, 33, 100)

#: (tokens before, new tokens) of each sequence, and rows behind them that belong to nobody.
PREFILLS: dict[str, tuple[list[tuple[int, int]], int]] = {
    "nobody": ([], 0),
    "one token": ([(0, 1)], 0),
    "a prompt": ([(0, 37)], 0),
    "odd prompts": ([(0, 1), (0, 15), (0, 17), (0, 33)], 0),
    "prefixes": ([(130, 19), (16, 16), (1, 5), (0, 7), (47, 1)], 0),
    "a chunk": ([(201, 40)], 0),
    "edges of tiles": ([(before, 2) for before in range(60, 66)], 0),
    "some not there": ([(0, 0), (20, 0), (5, 9), (-2, 2)], 3),
}
#: Lengths, the new token included.
DECODES: dict[str, list[int]] = {
    "nobody": [],
    "one token": [1],
    "one": [17],
    "alike": [48, 48, 48],
    "odd lengths": [300, 1, 33, 15, 16, 17],
    "long": [1030],
    "edges of tiles": [31, 32, 33, 63, 64, 65, 128, 129],
    "long and short": [1030, 3, 0, 600],
    "some not there": [0, 40, 0, 5, 290],
}


def random_of(case: dict[str, Any]) -> np.random.Generator:
    return np.random.default_rng(list(repr(sorted(case.items(), key=lambda item: item[0])).encode()))


def normal(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    return rounded(random.standard_normal(shape), dtype)


def filled_pages(
    random: np.random.Generator, case: dict[str, Any], counts: list[int], lengths: list[int]
) -> tuple[np.ndarray[Any, Any], Sequences]:
    """(kv, sequences): their tokens in pages, in order or not, NaN elsewhere."""
    kv_heads, head_dim, page_tokens = case["heads"][1], case["head_dim"], case["page_tokens"]
    needed = [-(-length // page_tokens) for length in lengths]
    pages = sum(needed) + 2
    free = np.arange(1, pages) if case["in_order"] else random.permutation(pages)
    tables = np.split(free, np.cumsum(needed))[:-1]
    kv = np.full((2, kv_heads, pages, page_tokens, head_dim), np.nan)
    for table, length in zip(tables, lengths, strict=True):
        positions = np.arange(length)
        kv[:, :, table[positions // page_tokens], positions % page_tokens] = normal(
            random, (2, kv_heads, length, head_dim), case["dtype"]
        )
    sequences = Sequences.of(counts, lengths, list(tables))
    sequences.tables[np.arange(sequences.tables.shape[1]) >= np.array(needed, int).reshape(-1, 1)] = 2**30  # unused
    return kv, sequences


def attention_call(contract: str, case: dict[str, Any]) -> Call:
    random = random_of(case)
    if contract == "prefill_attention":
        batch, more = PREFILLS[case["batch"]]
        counts, lengths = [count for _, count in batch], [before + count for before, count in batch]
    else:
        lengths, more = DECODES[case["batch"]], 0
        counts = [1] * len(lengths)
    kv, sequences = filled_pages(random, case, counts, lengths)
    query = normal(random, (sum(counts) + more, case["heads"][0], case["head_dim"]), case["dtype"])
    arguments = {"query": query, "kv": kv, "sequences": sequences, "window": case["window"]}
    return Call(contract, case["dtype"], arguments)


def rms_norm_call(contract: str, case: dict[str, Any]) -> Call:
    random, dtype = random_of(case), case["dtype"]
    shape = (case["tokens"], case["width"])
    arguments = {"x": normal(random, shape, dtype), "weight": normal(random, shape[1:], dtype), "eps": 1e-5}
    if case["residual"]:
        arguments["residual"] = normal(random, shape, dtype)
    return Call(contract, dtype, arguments)


def rope_write_call(contract: str, case: dict[str, Any]) -> Call:
    random, dtype = random_of(case), case["dtype"]
    tokens, (heads, kv_heads), head_dim = case["tokens"], case["heads"], case["head_dim"]
    slots = random.permutation(4 * case["page_tokens"])[:tokens].astype(np.int64)
    if case["unwritten"]:
        slots[::3] = -1
    angles = random.integers(0, 100_000, (tokens, 1)) * 10_000.0 ** -np.linspace(0, 1, head_dim // 2)
    arguments: dict[str, Any] = {
        "qkv": normal(random, (tokens, heads + 2 * kv_heads, head_dim), dtype),
        "kv": normal(random, (2, kv_heads, 4, case["page_tokens"], head_dim), dtype),
        "cosines": rounded(np.cos(angles), "float32"),
        "sines": rounded(np.sin(angles), "float32"),
        "slots": slots,
    }
    if case["norms"]:
        arguments["norms"] = (normal(random, (head_dim,), dtype), normal(random, (head_dim,), dtype), 1e-6)
    return Call(contract, dtype, arguments)


def swiglu_call(contract: str, case: dict[str, Any]) -> Call:
    values = normal(random_of(case), (case["tokens"], 2 * case["width"]), case["dtype"])
    return Call(contract, case["dtype"], {"gate_up": values * 4})


def strips_call(contract: str, case: dict[str, Any]) -> Call:
    random = random_of(case)
    bits: Any = BITS[case["dtype"]]
    layers, heads, blocks = 3, case["heads"][1], case["blocks"]
    limits = np.iinfo(bits)

    def any_bits(*shape: int) -> np.ndarray[Any, Any]:
        return random.integers(limits.min, limits.max, shape, bits, endpoint=True)

    part = np.empty((layers, heads))[case["layers"], case["part"]].shape
    arguments = {
        "cache": any_bits(layers, 2, heads, 7, case["page_tokens"], case["head_dim"]),
        "pages": random.permutation(7)[:blocks].astype(np.int64),
        "strips": any_bits(blocks, part[0], 2, part[1], case["page_tokens"], case["head_dim"]),
        "layers": case["layers"],
        "heads": case["part"],
    }
    return Call(contract, case["dtype"], arguments)


def sample_call(contract: str, case: dict[str, Any]) -> Call:
    random = random_of(case)
    rows, vocab = case["rows"], case["vocab"]
    logits = normal(random, (rows, vocab), "float32") * 4
    if case["kind"] == "ties":
        logits = np.round(logits)
    elif case["kind"] == "forbidden":
        logits[random.random(logits.shape) < 0.9] = -np.inf
        logits[:, random.integers(vocab)] = 1.0
    elif case["kind"] == "huge":
        logits *= 1e30
    elif case["kind"] == "broken":
        logits[::2, random.integers(vocab)] = np.nan
        logits[1::3, random.integers(vocab)] = np.inf
        logits[2::4] = -np.inf
    logits = rounded(logits, "float32")
    uniform = random.random(rows)
    uniform[::3] = random.choice([0.0, 1.0 - 2.0**-53], len(uniform[::3]))
    draws = Draws(
        temperature=random.choice([0.0, 0.3, 1.0, 4.0], rows, p=[0.1, 0.3, 0.3, 0.3]),
        min_p=random.choice([0.0, 0.05, 1.0], rows, p=[0.5, 0.4, 0.1])
        if "min_p" in case["filters"]
        else np.zeros(rows),
        top_k=(random.choice([0, 1, 3, 50, 10**6], rows) if "top_k" in case["filters"] else np.zeros(rows)).astype(
            np.int32
        ),
        top_p=random.choice([0.01, 0.5, 0.9, 1.0], rows) if "top_p" in case["filters"] else np.ones(rows),
        uniform=uniform,
    )
    return Call(contract, "float32", {"logits": logits, "draws": draws})


def shape_logits_call(contract: str, case: dict[str, Any]) -> Call:
    random, vocab = random_of(case), case["vocab"]
    shapings = [shaping(random, vocab, case["by"]) for _ in range(case["rows"])]
    logits = normal(random, (case["rows"], vocab), "float32") * 4
    logits[:, :: max(vocab // 7, 2)] = 0.0
    return Call(contract, "float32", {"logits": rounded(logits, "float32"), "shapes": Shapes.of(shapings, vocab)})


def shaping(random: np.random.Generator, vocab: int, by: tuple[str, ...]) -> Shaping:
    """One row's, which asks for what `by` names, or for nothing."""

    def some(name: str) -> np.ndarray[Any, np.dtype[np.int32]]:
        most = vocab if name in by and random.random() < 0.8 else 0
        return random.permutation(vocab)[: random.integers(most + 1)].astype(np.int32)

    ids, seen, mask = some("add"), some("seen"), None
    add = random.normal(size=len(ids)).astype(np.float32) * 3
    add[random.random(len(add)) < 0.2] = -np.inf
    if "mask" in by and random.random() < 0.8:
        mask = random.integers(0, 2**32, words(vocab), np.uint32)
        if random.random() < 0.2:
            mask[:] = 0
    return Shaping(ids, add, seen, float(random.choice([0.5, 1.0, 1.3])), mask)


def logprobs_call(contract: str, case: dict[str, Any]) -> Call:
    random, (rows, vocab) = random_of(case), (case["rows"], case["vocab"])
    logits = normal(random, (rows, vocab), "float32") * 4
    if case["kind"] == "ties":
        logits = np.minimum(np.round(logits / 4), 0.0)
        logits[logits == 0.0] *= random.choice([1.0, -1.0], int((logits == 0.0).sum()))  # -0 is 0
    elif case["kind"] == "forbidden":
        logits[random.random(logits.shape) < 0.9] = -np.inf
        logits[:, random.integers(vocab)] = 1.0
    elif case["kind"] == "huge":
        logits *= 1e30
    tokens = random.integers(-1, vocab, rows)
    if rows:
        tokens[0] = -1
    count = min(case["count"], vocab)
    return Call(contract, "float32", {"logits": rounded(logits, "float32"), "tokens": tokens, "count": count})


MODEL = {"dtype": DTYPES, "heads": HEADS, "head_dim": HEAD_DIMS, "page_tokens": PAGE_TOKENS}
ATTENTION = {**MODEL, "window": WINDOWS, "in_order": (False, True)}
STRIPS = {
    "dtype": DTYPES,
    "heads": ((1, 1), (3, 3), (8, 8)),
    "head_dim": HEAD_DIMS,
    "page_tokens": PAGE_TOKENS,
    "blocks": (0, 1, 3),
    "layers": (slice(None), slice(1, 2), slice(1, 3), slice(0, 0)),
    "part": (slice(None), slice(0, 1), slice(1, 3)),
}
TOKENS = (0, 1, 3, 19)

#: Per contract: its axes, and what makes a call of one combination.
CASES: dict[str, tuple[dict[str, Any], Callable[[str, dict[str, Any]], Call]]] = {
    "prefill_attention": ({**ATTENTION, "batch": tuple(PREFILLS)}, attention_call),
    "decode_attention": ({**ATTENTION, "batch": tuple(DECODES)}, attention_call),
    "rms_norm": (
        {"dtype": DTYPES, "tokens": TOKENS, "width": (48, 100, 576, 4096), "residual": (False, True)},
        rms_norm_call,
    ),
    "rope_write": ({**MODEL, "tokens": TOKENS, "norms": (False, True), "unwritten": (False, True)}, rope_write_call),
    "swiglu": ({"dtype": DTYPES, "tokens": TOKENS, "width": (1, 33, 1536, 5000)}, swiglu_call),
    "gather": (STRIPS, strips_call),
    "scatter": (STRIPS, strips_call),
    "sample": (
        {
            "rows": (0, 1, 7),
            "vocab": (1, 7, 1000, 5000),
            "kind": ("plain", "ties", "forbidden", "huge", "broken"),
            "filters": ((), ("min_p",), ("top_k",), ("top_p",), ("min_p", "top_k", "top_p")),
        },
        sample_call,
    ),
    "shape_logits": (
        {
            "rows": (0, 1, 5),
            "vocab": (1, 8, 33, 500, 9000),
            "by": (("seen",), ("add",), ("mask",), ("seen", "add"), ("seen", "add", "mask"), ()),
        },
        shape_logits_call,
    ),
    "logprobs": (
        {
            "rows": (0, 1, 5),
            "vocab": (1, 8, 500, 9000),
            "count": (0, 1, 20),
            "kind": ("plain", "ties", "forbidden", "huge"),
        },
        logprobs_call,
    ),
}


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, contract, case) of all."""
    for contract, (axes, _) in CASES.items():
        for case in cover(axes):
            yield f"{contract}-{' '.join(_words(value) for value in case.values())}", contract, case


def make(contract: str, case: dict[str, Any]) -> Call:
    """The call of one case; the same each time."""
    return CASES[contract][1](contract, case)


def _words(value: Any) -> str:
    if isinstance(value, slice):
        return f"{value.start}:{value.stop}"
    if isinstance(value, tuple):
        return "/".join(map(str, value)) or "none"
    return str(value)
