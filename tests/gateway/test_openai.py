"""Goal: requests are read as the API defines them, and what is wrong is named.
Method: pure functions; bytes in, data out.
"""

from __future__ import annotations

import contextlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.chat.conversation import conversation
from pyengine.gateway import openai
from pyengine.gateway.answers import Answer, Piece, Told, Usage
from pyengine.gateway.errors import ApiError
from pyengine.gateway.metrics import Histogram, Metrics
from pyengine.gateway.openai import ChatRequest

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> ChatRequest:
    return openai.parse_chat(json.dumps({"messages": MESSAGES, **fields}).encode())[0]


def test_defaults_are_the_api_s() -> None:
    sampling = openai.sampling(chat(), prompt_tokens=10, max_positions=100, room=80)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (1.0, 1.0, 0, ())
    assert sampling.max_tokens == 70
    assert sampling.seed is not None
    completion, _ = openai.parse_completion(b'{"prompt": "hi"}')
    assert openai.sampling(completion, 10, 100, 80).max_tokens == openai.COMPLETION_TOKENS


def test_every_field_arrives() -> None:
    choice = {"temperature": 0, "top_p": 0.5, "top_k": 7, "seed": -3}
    end = {"max_completion_tokens": 5, "max_tokens": 9, "stop": "a", "stop_token_ids": [1], "ignore_eos": True}
    request = chat(**choice, **end)
    sampling = openai.sampling(request, 1, 100, 100)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.0, 0.5, 7)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (("a",), (1,), True)
    assert sampling.seed == 2**63 - 3


def test_more_tokens_than_positions_is_cut() -> None:
    assert openai.sampling(chat(max_tokens=10**9), 90, 100, 1000).max_tokens == 10


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request, _ = openai.parse_chat(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())
    assert conversation(request.messages) == [{"role": "user", "content": "ab"}]


def test_neutral_values_of_unsupported_fields_pass() -> None:
    chat(best_of=1, suffix="", functions=[], tools=[], response_format={"type": "text"}, modalities=["text"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"min_p": 1.1}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"01": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(2000)}}, "logit_bias"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "ü" * 129}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"stop": ["a"] * 99}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**70]}, "stop_token_ids"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"stream_options": {"include_usage": 3}}, "stream_options"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


@pytest.mark.parametrize("field", ["unknown", "tools", "prompt", "messages"])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_nesting_is_refused_in_the_api_s_way(field: str, opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"
    deep = opening * 100_000 + b"1" + closing * 100_000
    body = b'{"messages": [{"role": "user", "content": "x"}], "prompt": "x", "%s": %s}' % (field.encode(), deep)
    for parse in (openai.parse_chat, openai.parse_completion):
        with pytest.raises(ApiError) as caught:
            parse(body)
        assert caught.value.status == 400


@pytest.mark.parametrize("one_by_one", [False, True])
def test_too_many_token_ids_are_refused_before_they_are_looked_at(
    one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai, "MAX_PROMPT_IDS", 10)
    prompt = [[1] * 6, [1] * 5] if one_by_one else [1] * 11
    with pytest.raises(ApiError, match="at most 10") as caught:
        openai.parse_completion(json.dumps({"prompt": prompt}).encode())
    assert caught.value.param == "prompt"


@given(st.binary(max_size=200))
def test_no_body_breaks_the_parser(body: bytes) -> None:
    for parse in (openai.parse_chat, openai.parse_completion):
        with contextlib.suppress(ApiError):
            parse(body)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content"]), inner),
        max_leaves=5,
    ),
    st.sampled_from(
        [
            "messages",
            "prompt",
            "stop",
            "seed",
            "max_tokens",
            "temperature",
            "stop_token_ids",
            "n",
            "tools",
            "top_k",
            "cache_salt",
            "timeout",
            "priority",
            "service_tier",
        ]
    ),
)
def test_no_value_breaks_the_parser(value: object, field: str) -> None:
    """Whatever a field holds: it is taken, or refused in the API's way."""
    body = json.dumps({"messages": MESSAGES, "prompt": "x", field: value}).encode()
    for parse in (openai.parse_chat, openai.parse_completion):
        with contextlib.suppress(ApiError):
            request, _ = parse(body)
            sampling = openai.sampling(request, 1, 100, 100)
            # It can be sent to a worker.
            assert msgspec.msgpack.encode(sampling)


def test_stream_and_whole_have_the_api_s_shape() -> None:
    answer = Answer("completion", "m", "7")
    usage = Usage(3, 2, 1)
    whole = json.loads(answer.whole([Piece(0, "ab", [7], "stop")], usage))
    assert whole["choices"] == [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}]
    assert whole["usage"]["total_tokens"] == 5
    assert answer.opening(usage, 1) == b""
    assert answer.closing(usage) == b"data: [DONE]\n\n"
    event = json.loads(answer.delta(Piece(0, "a", [7], None)).removeprefix(b"data: "))
    assert event["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}]
    with_ids = Answer("completion", "m", "7", Told(token_ids=True, prompts=[[1, 2]]))
    assert json.loads(with_ids.whole([Piece(0, "ab", [7], "stop")], usage))["choices"][0]["token_ids"] == [7]
    failure = Answer.failure(ApiError(503, "no worker"))
    assert json.loads(failure.split(b"\n\n")[0].removeprefix(b"data: "))["error"]["message"] == "no worker"


def test_histogram_is_cumulative() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.samples("h", 'm="x"') == {
        'h_bucket{m="x",le="1.0"}': 2,
        'h_bucket{m="x",le="2.0"}': 3,
        'h_bucket{m="x",le="+Inf"}': 4,
        'h_sum{m="x"}': 12.0,
        'h_count{m="x"}': 4,
    }


def test_metrics_name_each_family_once() -> None:
    metrics = Metrics()
    metrics.of('odd"name').finish("stop")
    text = metrics.render({'pyengine_x_total{node="a"}': 2.0, 'pyengine_x_total{node="b"}': 3.5}, {}, {}).decode()
    assert text.count("# TYPE pyengine_x_total counter") == 1
    assert 'pyengine_x_total{node="a"} 2\npyengine_x_total{node="b"} 3.5\n' in text
    assert 'model_name="odd\\"name"' in text
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
