"""Goal: kernels stand what no random case has: scores beyond fp16, broken sequences, gaps between rows, nonsense.

Method: as in test_conformance, on cases made by hand; every tuning of the attentions once.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from pyengine.kernels.inputs import Draws, Sequences
from tests.kernels.calls import IMPLEMENTATIONS, JAX, TORCH, Call, Sparse, computes, oracle, rounded
from tests.kernels.cases import CASES, DTYPES, attention_call, make, random_of
from tests.kernels.conftest import Compute
from tests.kernels.test_conformance import error_of

torch = pytest.importorskip("torch", reason="needs the torch extra")

BOTH = ("prefill_attention", "decode_attention")
CASE: dict[str, Any] = {
    "dtype": "float32",
    "heads": (4, 2),
    "head_dim": 64,
    "page_tokens": 16,
    "window": None,
    "in_order": False,
}
TUNINGS = {"prefill_attention": 6, "decode_attention": 4}
BATCHES = {"prefill_attention": "prefixes", "decode_attention": "long and short"}


def call_of(contract: str, **changes: Any) -> Call:
    return attention_call(contract, {**CASE, "batch": BATCHES[contract], **changes})


@pytest.mark.parametrize(
    ("contract", "dtype", "implementation"),
    [each for each in product(BOTH, DTYPES, IMPLEMENTATIONS) if computes(each[2], each[0], each[1])],
)
def test_huge_scores(contract: str, dtype: str, implementation: str, compute: Compute) -> None:
    """Signs times 64: scores reach 65,536, more than fp16 holds; they are exact, and equal or far apart."""
    call = call_of(contract, dtype=dtype, head_dim=256)
    random = random_of({"contract": contract, "dtype": dtype})
    patterns = random.choice([-64.0, 64.0], (5, 256))
    kv, query = call.arguments["kv"].copy(), call.arguments["query"]
    there = ~np.isnan(kv[0, ..., 0])
    kv[0][there] = patterns[random.integers(5, size=there.sum())]
    call = call.changed(kv=kv, query=patterns[random.integers(5, size=query.shape[:2])])
    assert error_of(compute(call, implementation), oracle(call), dtype) <= 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("contract", BOTH)
def test_a_broken_sequence_breaks_no_other(
    contract: str, window: int | None, implementation: str, compute: Compute
) -> None:
    """All KV of the first or last sequence is NaN: its rows may be anything, the others are the same, bit by bit."""
    call = call_of(contract, window=window)
    sequences: Sequences = call.arguments["sequences"]
    expected = compute(call, implementation)["result"]
    for broken in (0, len(sequences) - 1):
        kv = call.arguments["kv"].copy()
        kv[:, :, sequences.tables[broken, : -(-sequences.lengths[broken] // 16)]] = np.nan
        answer = compute(call.changed(kv=kv), implementation)["result"]
        others = np.delete(np.arange(len(expected)), np.arange(*sequences.rows[broken : broken + 2]))
        np.testing.assert_array_equal(answer[others], expected[others])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_equal_logits_are_kept_by_id(top_p: float, implementation: str, compute: Compute) -> None:
    rows = 4
    draws = Draws(
        temperature=np.ones(rows),
        min_p=np.zeros(rows),
        top_k=np.full(rows, rows, np.int32),
        top_p=np.full(rows, top_p),
        uniform=(np.arange(rows) + 0.5) / rows,
    )
    logits = np.full((rows, 5000), -0.0)
    logits[:, ::2] = 0.0
    answer = compute(Call("sample", "float32", {"logits": logits, "draws": draws}), implementation)
    assert answer["result"].tolist() == list(range(rows))


@pytest.mark.parametrize("implementation", TORCH)
@pytest.mark.parametrize("contract", CASES)
def test_gaps_between_rows_are_minded_or_refused(contract: str, implementation: str, compute: Compute) -> None:
    first = {name: values[-1] for name, values in CASES[contract][0].items()}
    changes = {"tokens": 3, "width": 100, "blocks": 3, "layers": slice(1, 3), "rows": 7, "kind": "plain", "vocab": 1000}
    case = {name: changes.get(name, value) for name, value in first.items()}
    if not computes(implementation, contract, str(case.get("dtype"))):
        case["dtype"] = "bfloat16"
    call = replace(make(contract, case), strided=True)
    try:
        answer = compute(call, implementation)
    except ValueError as refusal:
        if "must be dense" not in str(refusal):
            raise
        return
    expected = oracle(call)
    assert error_of(answer, expected, call.dtype) <= (0 if contract in ("gather", "scatter", "sample") else 1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("contract", BOTH)
def test_pages_that_do_not_exist_are_refused(contract: str, implementation: str, compute: Compute) -> None:
    call = call_of(contract)
    sequences: Sequences = call.arguments["sequences"]
    for page in (-1, call.arguments["kv"].shape[2]):
        tables = sequences.tables.copy()
        tables[0, 0] = page
        with pytest.raises(ValueError, match="are named, there are 0"):
            compute(call.changed(sequences=replace(sequences, tables=tables)), implementation)
    with pytest.raises(ValueError, match="the table has 3"):
        compute(call.changed(sequences=replace(sequences, tables=sequences.tables[:, :3])), implementation)


@pytest.mark.parametrize(
    ("contract", "implementation"),
    [
        (name, each)
        for name in ("gather", "scatter")
        for each in IMPLEMENTATIONS
        if (name, each in JAX) != ("gather", True)
    ],
)
def test_strips_of_another_range_are_refused(contract: str, implementation: str, compute: Compute) -> None:
    case = {name: values[-1] for name, values in CASES[contract][0].items()} | {"layers": slice(1, 3)}
    with pytest.raises(ValueError, match="strips are"):
        compute(make(contract, case).changed(heads=slice(0, 3)), implementation)


@pytest.mark.parametrize(("contract", "tuning"), [(name, tuning) for name in BOTH for tuning in range(TUNINGS[name])])
def test_every_tuning_computes_the_same(contract: str, tuning: int, compute: Compute) -> None:
    from pyengine.kernels.torch.triton import decode, prefill

    configs = {"prefill_attention": prefill.CONFIGS, "decode_attention": decode.CONFIGS}[contract]
    assert len(configs) == TUNINGS[contract], "there are more now"
    call = replace(call_of(contract, heads=(9, 3), head_dim=80, dtype="bfloat16", window=50), tuning=tuning)
    assert error_of(compute(call, "triton"), oracle(call), call.dtype) <= 1


@pytest.mark.parametrize("implementation", [*TORCH, "jnp"])  # Pallas' interpreter copies all pages, several times
@pytest.mark.parametrize("contract", BOTH)
def test_offsets_beyond_32_bits(contract: str, implementation: str, compute: Compute) -> None:
    """The sequence is in the last page and in one at the front of more than 2^31 elements, 4 GB that nobody touches."""
    dtype = "float16" if computes(implementation, contract, "float16") else "bfloat16"
    random = random_of({"contract": contract})
    total = 2**31 // (2 * 256 * 256) + 3
    values = rounded(random.standard_normal((2, 1, 2, 256, 256)), dtype)
    few = Sequences.of([1], [300], [np.array([0, 1])])
    many = replace(few, tables=np.array([[total - 1, 1]], np.int32))
    query = rounded(random.standard_normal((1, 1, 256)), dtype)
    call = Call(contract, dtype, {"query": query, "kv": values, "sequences": few, "window": None})
    spread = call.changed(kv=Sparse(total, many.tables[0], values), sequences=many)
    assert error_of(compute(spread, implementation), oracle(call), dtype) <= 1


@pytest.mark.parametrize(
    ("levels", "dtype", "head_dim", "reason"),
    [
        (("scalar", "avx2"), "bfloat16", 128, None),
        (("scalar",), "float32", 128, "no AVX2, AVX-512 or NEON"),
        (("scalar", "neon"), "float16", 128, "float16"),
        (("scalar", "avx2"), "float32", 512, "head_dim 512"),
    ],
)
def test_a_cpu_has_ours_or_a_warning_that_says_why_not(
    levels: tuple[str, ...],
    dtype: str,
    head_dim: int,
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyengine.kernels.torch import choice, eager, native

    monkeypatch.setattr(choice, "LINEAR_LEVELS", levels)
    with caplog.at_level(logging.INFO):
        chosen = choice.choose(torch.device("cpu"), getattr(torch, dtype), head_dim)
    assert chosen is (eager if reason else native)
    working = choice.working_type(torch.device("cpu"), getattr(torch, dtype), head_dim)
    assert working is (getattr(torch, dtype) if reason else torch.float32)
    (record,) = caplog.records
    assert record.levelname == ("WARNING" if reason else "INFO") and (reason or f"native ({levels[-1]})") in caplog.text


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "reason"),
    [
        ((9, 0), "bfloat16", 128, None),
        ((7, 5), "float16", 128, "compute capability 7.5"),
        ((9, 0), "float64", 128, "float64"),
        ((9, 0), "bfloat16", 512, "head_dim 512"),
    ],
)
def test_a_gpu_has_triton_or_a_warning_that_says_why_not(
    capability: tuple[int, int],
    dtype: str,
    head_dim: int,
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyengine.kernels.torch import eager, triton
    from pyengine.kernels.torch.choice import choose

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    with caplog.at_level(logging.INFO):
        chosen = choose(torch.device("cuda"), getattr(torch, dtype), head_dim)
    assert chosen is (eager if reason else triton)
    (record,) = caplog.records
    assert (record.levelname, reason or "Triton") == ("WARNING" if reason else "INFO", reason or "Triton")
    assert (reason or "Triton") in record.getMessage() and "a GPU" in record.getMessage()
