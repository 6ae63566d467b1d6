"""Goal: a summary says what its records say. Method: random records against a loop over requests, and by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.report.document import FORMAT, document, dumps, text
from pyengine.scheduler.report.summary import effective, needed_stretch, spread, summarize
from pyengine.scheduler.report.table import cell, percent, seconds, table
from pyengine.scheduler.types import Slo

from .records import records, report

limits = st.one_of(st.none(), st.floats(0.01, 10))


@given(st.integers(1, 60), st.integers(0, 1000), limits, limits, limits)
@settings(max_examples=60, deadline=None)
def test_shares_and_counts_are_those_of_a_loop(
    count: int, seed: int, ttft: float | None, tbt: float | None, deadline: float | None
) -> None:
    made = records(count, seed)
    slo = Slo(ttft=ttft, tbt=tbt, deadline=deadline)
    good = first = gaps = cached = prompt = 0
    for i in range(count):
        done = made.outcome[i] == 0
        in_ttft = done and (ttft is None or made.ttft[i] <= ttft)
        in_tbt = done and (tbt is None or made.tbt[i] <= tbt)
        in_time = deadline is None or (done and made.finished[i] - made.arrival[i] <= deadline)
        first, gaps, good = first + in_ttft, gaps + in_tbt, good + (in_ttft and in_tbt and in_time)
        if not math.isnan(made.ttft[i]):
            cached, prompt = cached + int(made.cached[i]), prompt + int(made.prompt_tokens[i])
    s = summarize(report(made), slo)
    assert s.requests == count == s.done + s.rejected + s.dropped + s.unfinished
    assert s.effective == pytest.approx(good / count) and int(effective(made, slo).sum()) == good
    assert [s.met_ttft, s.met_tbt] == pytest.approx([first / count, gaps / count])
    assert s.hit == pytest.approx(cached / prompt if prompt else 0)
    assert sum(s.hits.values()) == pytest.approx(s.hit)
    if count > 1:
        mean_gap = (made.arrival[-1] - made.arrival[0]) / (count - 1)
        assert s.offered == pytest.approx(1 / mean_gap)
        assert s.goodput == pytest.approx(s.offered * s.effective)


def test_a_run_stopped_early_is_judged_by_what_had_ended() -> None:
    made = records(4, outcome=np.array([0, 0, 1, 3]), ttft=np.array([1.0, 9.0, np.nan, np.nan]), tbt=np.full(4, 0.1))
    whole, partial = report(made), report(made, complete=False)
    assert summarize(whole, Slo(ttft=2.0)).effective == pytest.approx(1 / 4)
    s = summarize(partial, Slo(ttft=2.0))
    assert s.requests == 3 and s.effective == pytest.approx(1 / 3)
    assert text(partial, s, Slo()).startswith("PARTIAL")
    assert not text(whole, s, Slo()).startswith("PARTIAL")


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.integers(0, 5))
def test_a_spread_is_that_of_the_values_there_are(values: list[float], missing: int) -> None:
    found = spread(np.array(values + [np.nan] * missing))
    assert found.count == len(values) and found.max == max(values)
    assert found.mean == pytest.approx(statistics.fmean(values))
    if len(values) > 1:
        tenths = statistics.quantiles(values, n=100, method="inclusive")
        expected = [tenths[9], tenths[49], tenths[89], tenths[98]]
        assert [found.p10, found.p50, found.p90, found.p99] == pytest.approx(expected)


def test_a_spread_of_nothing_has_no_numbers() -> None:
    assert spread(np.array([np.nan])).p50 is None


@given(st.integers(1, 40), st.integers(0, 1000), st.floats(0.01, 1), st.floats(0.1, 5), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_needed_stretch_is_the_least_that_suffices(
    count: int, seed: int, share: float, ttft: float, both: bool
) -> None:
    """Of both objectives, or of TTFT while TBT is kept."""
    made = records(count, seed)
    slo, kept = (Slo(ttft=ttft, tbt=0.1), Slo()) if both else (Slo(ttft=ttft), Slo(tbt=0.1))
    stretch = needed_stretch(made, slo, share, kept)

    def reached(factor: float) -> float:
        return float(effective(made, Slo(ttft=ttft * factor, tbt=0.1 * factor if both else 0.1)).mean())

    if math.isinf(stretch):
        assert reached(1e9) < share
    else:
        assert reached(stretch * (1 + 1e-9)) >= share - 1e-9
        assert reached(stretch * (1 - 1e-9)) < share


def test_predictions_are_judged_by_what_came() -> None:
    made = records(
        3, outcome=np.array([0, 0, 1]), ttft=np.array([1.0, 2.0, np.nan]), predicted_ttft=np.array([0.5, 3.0, 1.0])
    )
    s = summarize(report(made), Slo())
    assert s.ttft_error == pytest.approx((0.5 + 0.5) / 2) and s.ttft_bias == pytest.approx((0.5 - 0.5) / 2)
    # The same, of which clients saw one first token later than it came, and somebody could not tell.
    late = dataclasses.replace(made, ttft=made.ttft + np.array([7.0, 0.0, 0.0]), held=np.array([7.0, np.nan, np.nan]))
    paced = summarize(report(late), Slo())
    assert (paced.ttft_error, paced.ttft_bias) == pytest.approx((s.ttft_error, s.ttft_bias))
    assert paced.ttft.max == 8.0


def test_the_document_is_json_with_everything() -> None:
    made = records(20)
    whole = report(made)
    found = json.loads(dumps(document(whole, summarize(whole, Slo(ttft=1.0)), Slo(ttft=1.0))))
    assert found["format"] == FORMAT and found["provenance"]["trace"] == "made up" and found["slo"]["ttft"] == 1.0
    assert len(found["records"]["ttft"]) == 20 and found["series"]["prefill load"]["values"] == [0.5, None]
    for shown, value in zip(found["records"]["ttft"], made.ttft, strict=True):
        assert shown == (None if math.isnan(value) else value)


def test_the_text_names_what_the_numbers_rest_on() -> None:
    whole = report(records(50), notes=["seven were odd"])
    shown = text(whole, summarize(whole, Slo(ttft=1.0, tbt=0.1)), Slo(ttft=1.0, tbt=0.1))
    for wanted in ("made up", "TTFT 1.00 s, TBT 100 ms", "goodput", "p99", "peer_dram", "seven were odd", "digest: 00"):
        assert wanted in shown, shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *[(0.0, "0"), (0.012345, "0.0123"), (1234.5, "1,234"), (9.999, "10.00"), (1e-9, "1.00e-09"), (None, "-")],
        *[(math.nan, "-"), (math.inf, "inf"), (12345, "12,345"), ("x", "x"), (-2.5, "-2.50"), (99.96, "100.0")],
    ],
)
def test_a_cell_shows_three_digits(value: float | str | None, shown: str) -> None:
    assert cell(value) == shown


def test_tables_are_aligned_and_units_suit() -> None:
    lines = table(("name", "n"), [("a", 1), ("long name", 12345)]).splitlines()
    assert lines == ["name            n", "---------  ------", "a               1", "long name  12,345"]
    assert (seconds(0.0123), seconds(2.0), seconds(300.0), seconds(None)) == ("12.3 ms", "2.00 s", "300 s", "-")
    assert (percent(0.5), percent(math.nan)) == ("50.0%", "-")
