"""Goal: every implementation of a kernel keeps its contract: that of the numpy reference under the same name.

Method: a list of implementations times a list of cases (every two values of two axes together in one), compared with
the reference in float64. Then what no random case says: huge scores, sequences that are broken, gaps between rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pyengine.kernels import reference
from pyengine.kernels.inputs import Draws
from tests.kernels.calls import IMPLEMENTATIONS, Answer, Call, computes, oracle
from tests.kernels.cases import cases, make
from tests.kernels.conftest import Compute
from tests.kernels.pairs import few
from tests.kernels.table import PROPERTY

#: How far a result may be from the reference in float64, relative to 1 + its size: four roundings of the type, and for
#: float32 a few more, as sums over hundreds of terms are made in it. They say what the contracts promise: never looser.
TOLERANCES = {"float32": 2.0**-18, "bfloat16": 4 * 2.0**-8, "float16": 4 * 2.0**-11}
#: Bits are moved, and tokens drawn, not computed.
EXACT = ("gather", "scatter", "sample")

Record = Callable[[str, object], None]

CASES = list(cases())
#: JAX compiles a program for almost every case of these, in half a second, for Pallas' interpreter in a whole one: they
#: have each value so many times, and every two together only with PYENGINE_TEST_ALL_KERNEL_CASES=1.
COMPILED = ("prefill_attention", "decode_attention", "rope_write")
TIMES = {"jnp": 2, "pallas": 1}


def parameters() -> Iterator[Any]:
    """Case by case: what the oracle says of one is remembered for all implementations."""
    left_out = {
        (index, implementation)
        for implementation, times in TIMES.items()
        for contract in COMPILED
        for index in set(theirs(contract)) - {theirs(contract)[place] for place in few(cases_of(contract), times)}
    }
    for index, (name, _, _) in enumerate(CASES):
        for implementation in IMPLEMENTATIONS:
            if (index, implementation) not in left_out:
                yield pytest.param(index, implementation, id=f"{name}-{implementation}")


def theirs(contract: str) -> list[int]:
    return [index for index, (_, name, _) in enumerate(CASES) if name == contract]


def cases_of(contract: str) -> list[dict[str, Any]]:
    return [CASES[index][2] for index in theirs(contract)]


@functools.lru_cache(maxsize=4)
def known(index: int) -> tuple[Call, Answer]:
    _, contract, case = CASES[index]
    call = make(contract, case)
    return call, oracle(call)


def error_of(answer: Answer, expected: Answer, dtype: str) -> float:
    """The largest error as a share of the tolerance; infinite where one is NaN and the other not."""
    assert answer.keys() == expected.keys()
    worst = 0.0
    for name, values in expected.items():
        assert answer[name].shape == values.shape, name
        with np.errstate(invalid="ignore"):
            errors = np.abs(answer[name] - values) / (1 + np.abs(values)) / TOLERANCES[dtype]
        errors[(values == answer[name]) | (np.isnan(values) & np.isnan(answer[name]))] = 0.0
        worst = max(worst, float(np.nan_to_num(errors, nan=np.inf).max(initial=0.0)))
    return worst


def allowed_tokens(logits: np.ndarray[Any, Any], draws: Draws) -> list[set[int]]:
    """What each row may draw, if masses are rounded by 1e-5."""
    answers = []
    for top_p in (-1e-5, 0.0, 1e-5):
        for uniform in (-1e-5, 0.0, 1e-5):
            moved = Draws(
                draws.temperature,
                draws.min_p,
                draws.top_k,
                np.where(draws.top_p < 1.0, np.clip(draws.top_p + top_p, 1e-9, 1.0), 1.0),
                np.clip(draws.uniform + uniform, 0.0, 1.0 - 2.0**-53),
            )
            answers.append(reference.sample(logits, moved))
    return [set(row) for row in np.stack(answers).T.tolist()]


@pytest.mark.parametrize(("index", "implementation"), list(parameters()))
def test_contract(index: int, implementation: str, compute: Compute, record_property: Record) -> None:
    call, expected = known(index)
    if not computes(implementation, call.contract, call.dtype):
        with pytest.raises(ValueError, match="float32 and bfloat16"):
            compute(call, implementation)
        return
    try:
        answer = compute(call, implementation)
    except Exception:
        record_property(PROPERTY, (implementation, call.contract, np.inf))
        raise
    if call.contract == "sample":
        allowed = allowed_tokens(call.arguments["logits"], call.arguments["draws"])
        error = max(
            (float(token not in row) for token, row in zip(answer["result"].tolist(), allowed, strict=True)), default=0
        )
    elif call.contract in EXACT:
        error = float(any((answer[name] != values).any() for name, values in expected.items()))
    else:
        error = error_of(answer, expected, call.dtype)
    record_property(PROPERTY, (implementation, call.contract, error))
    assert error <= (0.0 if call.contract in EXACT else 1.0)
