"""Goal: parameters that no choice can follow are refused with a sentence that names them, and the others travel whole.

Method: each bound from both sides, in the constructor and in a frame; random parameters through the codec.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.scheduler.messages import Codec, Tokens
from pyengine.scheduler.types import (
    GRAMMARS,
    MOST_BIASES,
    MOST_LOGPROBS,
    FinishReason,
    Grammar,
    Logprobs,
    SamplingParams,
)

NAN = math.nan
GOOD: list[dict[str, Any]] = [
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"repetition_penalty": 0.01},
    {"repetition_penalty": 100.0},
    {"logit_bias": ((0, -100.0), (2**31 - 1, 100.0))},
    {"logit_bias": tuple((token, 1.0) for token in range(MOST_BIASES))},
    {"min_tokens": 128, "max_tokens": 128},
    {"logprobs": 0},
    {"logprobs": MOST_LOGPROBS},
    *({"grammar": Grammar(kind, "")} for kind in GRAMMARS),
]
BAD: list[tuple[dict[str, Any], str]] = [
    *(({"min_p": value}, "min_p") for value in (-0.1, 1.1, NAN)),
    *(({"presence_penalty": value}, "presence_penalty") for value in (-2.1, 2.1, NAN)),
    *(({"frequency_penalty": value}, "frequency_penalty") for value in (-2.1, 2.1, NAN)),
    *(({"repetition_penalty": value}, "repetition_penalty") for value in (0.0, -1.0, 100.1, math.inf, NAN)),
    *(({"logit_bias": ((token, 1.0),)}, "logit_bias") for token in (-1, 2**31)),
    *(({"logit_bias": ((1, value),)}, "logit_bias") for value in (-100.1, 100.1, -math.inf, NAN)),
    ({"logit_bias": ((1, 1.0), (1, 2.0))}, "each id once"),
    ({"logit_bias": tuple((token, 1.0) for token in range(MOST_BIASES + 1))}, "at most"),
    *(({"min_tokens": value}, "min_tokens") for value in (-1, 129)),
    *(({"logprobs": value}, "logprobs") for value in (-1, MOST_LOGPROBS + 1)),
]


@pytest.mark.parametrize("params", GOOD)
def test_bounds_are_allowed(params: dict[str, Any]) -> None:
    made = SamplingParams(**params)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=SamplingParams) == made


@pytest.mark.parametrize(("params", "says"), BAD)
def test_what_is_beyond_them_is_refused_by_name(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SamplingParams(**params)
    with pytest.raises(msgspec.ValidationError, match=says):
        msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)


def test_a_grammar_is_of_a_known_kind() -> None:
    with pytest.raises(ValueError, match="json_object"):
        Grammar("xml", "")


def test_what_follows_from_the_last_token_is_known() -> None:
    """Penalties and grammars; not what is the same whatever was chosen."""
    for params in (
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 0.9},
        {"grammar": Grammar("regex", "a*")},
    ):
        assert SamplingParams(**params).follows_itself, params
    steady = SamplingParams(logit_bias=((1, 1.0),), min_tokens=3, logprobs=2, min_p=0.1, top_k=3)
    assert not steady.follows_itself


logprobs = st.builds(
    Logprobs,
    st.floats(-100, 0),
    st.integers(1, 10**6),
    st.lists(st.tuples(st.integers(0, 10**6), st.floats(-100, 0)), max_size=4).map(tuple),
)


@given(st.lists(st.tuples(st.integers(0, 10**6), logprobs), max_size=5), st.booleans())
def test_tokens_travel_with_what_is_told_of_them(told: list[tuple[int, Logprobs]], asked: bool) -> None:
    message = Tokens(
        request=1,
        attempt=2,
        first=3,
        tokens=tuple(token for token, _ in told),
        finish=FinishReason.STOP,
        logprobs=tuple(one for _, one in told) if asked else None,
    )
    codec = Codec(Tokens)
    assert codec.decode(codec.encode([message])) == [message]
