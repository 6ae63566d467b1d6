"""Goal: `pyengine bench` measures by the definitions it names, asks what it was told to, and says what failed.
Method: figures of written times against arithmetic by hand; a server of the API in a thread, through the command.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.cli import app
from pyengine.commands.figures import measure, text
from pyengine.commands.load import Wish, made_up, scaled
from pyengine.config import ConfigError
from pyengine.scheduler.backends.replies import Reply
from pyengine.scheduler.sim.report import DONE, DROPPED
from pyengine.scheduler.sim.trace import Request, Trace
from pyengine.scheduler.types import Slo

from .server import Api, serving

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*words: str) -> tuple[int, str, str]:
        status = app(["bench", *words], exit_on_error=False, result_action="return_value")
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def reply(due: float, tokens: list[float], ended: float, outcome: int = DONE, error: str | None = None) -> Reply:
    request = Request(due, 10, max(len(tokens), 1), ())
    return Reply(request, due, 0.0, sent=due, tokens=tokens, ended=ended, outcome=outcome, error=error, cached=5)


def test_figures_are_what_aiperf_calls_so() -> None:
    replies = [
        # Two tokens in one chunk: three gaps between tokens, of which one is 0, and two between chunks.
        reply(1.0, [2.0, 2.5, 2.5, 4.0], 4.0),
        reply(2.0, [5.0], 5.0),
        reply(3.0, [3.5], 11.0, DROPPED, "it broke"),
    ]
    found = measure(replies, Slo(ttft=1.5))
    assert (found.requests, found.done, found.failed, found.unfinished) == (3, 2, 1, 0)
    assert found.duration == 10.0
    assert found.request_throughput == pytest.approx(0.2) and found.output_throughput == pytest.approx(0.5)
    spreads = found.spreads
    assert (spreads["ttft"].min, spreads["ttft"].max, spreads["ttft"].p50) == (1.0, 3.0, 2.0)
    assert spreads["ttst"].avg == 0.5
    # (request latency - TTFT) / (tokens - 1); an answer of one token has none.
    assert spreads["itl"].count == 1 and spreads["itl"].avg == pytest.approx(2.0 / 3)
    assert (spreads["icl"].count, spreads["icl"].min, spreads["icl"].max) == (2, 0.5, 1.5)
    assert spreads["tbt"].avg == 1.5
    assert (spreads["latency"].min, spreads["latency"].max) == (3.0, 3.0)
    # Of three that are over one is good: what failed is not.
    assert found.good == 1 and found.good_share == pytest.approx(1 / 3)
    assert found.goodput == pytest.approx(0.1)
    assert found.cached == 0.5 and found.errors == {"it broke": 1}
    shown = text(found, Slo(ttft=1.5))
    assert "1 failed" in shown and "TTFT <= 1.5 s" in shown and "failed: 1 x it broke" in shown


@pytest.mark.parametrize(
    ("slo", "good"), [(Slo(), None), (Slo(tbt=1.4), 1), (Slo(tbt=1.5), 2), (Slo(deadline=2.9), 0), (Slo(1.0, 1.5), 1)]
)
def test_good_is_what_meets_all_objectives(slo: Slo, good: int | None) -> None:
    found = measure([reply(1.0, [2.0, 2.5, 4.0], 4.0), reply(2.0, [5.0], 5.0)], slo)
    assert found.good == good and (found.goodput is None) == (good is None)


def test_nothing_measured_is_no_error() -> None:
    found = measure([reply(0.0, [], float("nan"), DROPPED, "no")], Slo(ttft=1.0))
    assert (found.done, found.failed, found.goodput, found.spreads) == (0, 1, 0.0, {})
    assert "0 done, 1 failed" in text(found, Slo(ttft=1.0))


@given(st.floats(0.01, 1.0), st.integers(1, 400), st.integers(1, 400), st.integers(0, 400))
def test_scaling_keeps_what_is_shared(factor: float, one: int, other: int, common: int) -> None:
    """Blocks of two prompts are equal where they were equal before, all of a prompt differ, and none is missing."""
    common = min(common, one, other)

    def request(count: int, mark: str) -> Request:
        keys = tuple(f"{'both' if index < common else mark}{index}".encode() for index in range(count))
        return Request(0.0, 16 * count + 3, 9, keys)

    rows = [request(one, "one"), request(other, "other")]
    trace = scaled(Trace("t", 16, lambda: rows), factor)
    first, second = list(trace)
    for row, before in ((first, rows[0]), (second, rows[1])):
        assert row.prompt_tokens == max(1, int(before.prompt_tokens * factor))
        assert len(row.blocks) == len(set(row.blocks)) == row.prompt_tokens // 16
        assert 1 <= row.output_tokens <= before.output_tokens
    equal = [a == b for a, b in zip(first.blocks, second.blocks, strict=False)]
    assert equal == sorted(equal, reverse=True)
    assert sum(equal) == sum(int(index / factor) < common for index in range(len(equal)))


def test_made_up_requests_come_as_was_asked() -> None:
    wish = Wish(10.0, 400, "poisson", (40, 80), (3, 5), 0.5, 7)
    rows = list(made_up(wish, 16))
    assert rows == list(made_up(wish, 16)) != list(made_up(Wish(10.0, 400, "poisson", (40, 80), (3, 5), 0.5, 8), 16))
    assert len({row.blocks[0] for row in rows}) == 1 and len({row.blocks[1] for row in rows}) == 400
    assert {row.output_tokens for row in rows} == {3, 4, 5} and {row.prompt_tokens for row in rows} == set(
        range(40, 81)
    )
    # 400 gaps of mean 0.1 s: their mean is within five of its deviations, and they vary as much as they are long.
    gaps = [b.arrival - a.arrival for a, b in itertools.pairwise(rows)]
    mean = sum(gaps) / len(gaps)
    assert 0.075 < mean < 0.125 and 0.05 < (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 < 0.15
    even = list(made_up(Wish(10.0, 3, "constant", (1, 1), (1, 1), 0.0, 0), 16))
    assert [row.arrival for row in even] == pytest.approx([0.0, 0.1, 0.2])


def test_the_command_asks_and_tells(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYENGINE_API_KEY", "pye-secret")
    picture = tmp_path / "a.png"
    with serving(Api(answers=[["a", "b", "c"]])) as api:
        words = (api.url, "--rate", "200", "--requests", "6", "--prompt-tokens", "20-40", "--output-tokens", "3")
        status, out, _ = call(*words, "--json", "--slo-ttft", "30", "--plot", str(picture))
    found = json.loads(out)
    assert status == 0 and found["complete"] and (found["done"], found["failed"]) == (6, 0)
    assert found["output_tokens"] == 18 and found["spreads"]["ttft"]["count"] == 6
    assert found["good_share"] == 1.0 and found["goodput"] == pytest.approx(found["request_throughput"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    paths, headers, bodies = zip(*api.asked, strict=True)
    assert set(paths) == {"/v1/completions"} and {each["authorization"] for each in headers} == {"Bearer pye-secret"}
    assert all(20 <= len(body["prompt"]) <= 40 and body["max_tokens"] == 3 for body in bodies)
    assert "pye-secret" not in out


def test_what_fails_is_counted_by_its_reason(call: Call) -> None:
    with serving(Api(answers=[503, ["a"]])) as api:
        status, out, _ = call(api.url, "--rate", "200", "--requests", "3")
    assert status == 1 and "2 done, 1 failed" in out and "failed: 1 x http 503: told to say 503" in out


def test_no_more_are_under_way_than_was_asked(call: Call, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2 + each]} for each in range(5)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving(Api(answers=[["a", "b"]])) as api:
        status, out, _ = call(api.url, "--trace", str(trace), "--scale", "0.1", "--requests", "4", "--concurrency", "1")
    assert status == 0 and "lengths times 0.1" in out and "4 done" in out
    assert "waited for one of 1 connections: as was asked" in out
    assert [len(body["prompt"]) for _, _, body in api.asked] == [60] * 4
    # 512 of 600 tokens were shared, so 51 of 60 are now, in whole blocks 48.
    heads = {tuple(body["prompt"][:48]) for _, _, body in api.asked}
    assert len(heads) == 1 and len({tuple(body["prompt"]) for _, _, body in api.asked}) == 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("http://127.0.0.1:1",), "pyengine serve"),
        (("ftp://x",), "no URL of a gateway"),
        (("--rate", "0"), "--rate must be a number above 0"),
        (("--scale", "2", "--trace", __file__), "neither JSON"),
        (("--prompt-tokens", "9-3"), "a range like 64-192"),
        (("--plot", "a.txt"), ".png, .svg or .pdf"),
        (("--trace", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("--shared-prefix", "2"), "a share from 0 to 1"),
    ],
)
def test_impossible_wishes(call: Call, words: tuple[str, ...], says: str) -> None:
    status, out, err = call(*words)
    assert (status, out) == (2, "") and says in err and err.startswith("pyengine bench: error: ")


def test_a_gateway_that_asks_for_a_key(call: Call) -> None:
    class Closed(Api):
        def _whole(self, writer: object, status: int, body: object) -> None:
            super()._whole(writer, 401, body)  # type: ignore[arg-type]

    with serving(Closed()) as api:
        status, _, err = call(api.url)
    assert status == 2 and "set PYENGINE_API_KEY" in err


def test_a_key_that_would_be_a_header_of_its_own(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYENGINE_API_KEY", "a\r\nX-Evil: 1")
    status, _, err = call("http://127.0.0.1:1")
    assert status == 2 and "look at PYENGINE_API_KEY" in err and "Evil" not in err


def test_scale_is_a_share() -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        scaled(Trace("t", 16, list), 0)
