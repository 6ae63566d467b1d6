"""Goal: an explained decision shows every candidate, every term and the choice. Method: made-up decisions."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from pyengine.scheduler.explanation import Candidate, Explanation
from pyengine.scheduler.report.explained import explained


def candidate(worker: str, role: str, **fields: object) -> Candidate:
    base: dict[str, object] = {
        "worker": worker, "node": f"node of {worker}", "role": role, "prefills": role != "decode",
        "decodes": role != "prefill", "inlines": False, "masked": "", "device": 1, "dram": 2, "ssd": 0, "coming": 0,
        "coming_seconds": 0.0, "load": 0.0, "transfer": 0.125, "queue": 0.25, "compute": 0.5, "ttft": 0.875,
        "tbt": 0.0625, "handoff": 0.03125, "running": 7, "free_pages": 11, "measured": True, "correction": 1.0,
        "terms": {},
    }  # fmt: skip
    return Candidate(**{**base, **fields})  # type: ignore[arg-type]


def explanation(*candidates: Candidate, **fields: object) -> Explanation:
    base: dict[str, object] = {
        "gateway": "g", "request": 5, "attempt": 0, "at": 1.5, "policy": "kvcache-centric", "prompt_tokens": 1000,
        "blocks": 62, "best": 3, "prefill": "p0", "decode": "d0", "fetch": True, "predicted_ttft": 0.875,
        "predicted_tbt": 0.0625, "why": "for a reason", "candidates": candidates,
    }  # fmt: skip
    return Explanation(**{**base, **fields})  # type: ignore[arg-type]


def test_everything_of_a_decision_is_shown() -> None:
    shown = explained(
        explanation(
            candidate("p0", "prefill", terms={"score": 4.25}),
            candidate("p1", "prefill", prefills=False, masked="it is full", terms={"score": 17.5}),
            candidate("d0", "decode", terms={"score": 0.0}),
            candidate("d1", "decode", inlines=True, measured=False, terms={"score": 99.0}),
        )
    )
    for wanted in (
        "request 5, attempt 0", "1,000 tokens", "62 blocks", "policy kvcache-centric", "* p0", "  p1", "it is full",
        "* d0", "inline only", "guessed", "0.125", "0.250", "0.500", "0.875", "0.0625", "0.0312", "4.25", "17.5",
        "99.0",
        "chosen: p0 prefills, d0 decodes, and fetches there what it lacks (for a reason)",
        "foretold: TTFT 875 ms, TBT 62.5 ms",
    ):  # fmt: skip
        assert wanted in shown, (wanted, shown)
    # d0 takes no prompts and is not among those who could.
    prefill = shown[shown.index("to prefill") : shown.index("to decode")]
    assert "d0" not in prefill and "d1" in prefill


def test_a_refusal_says_why_and_marks_nobody() -> None:
    shown = explained(explanation(candidate("p0", "prefill"), prefill="", decode="", refused="every queue is full"))
    assert shown.endswith("refused: every queue is full") and "* " not in shown
    assert explained(explanation(prefill="", decode="", refused="no worker")).endswith("refused: no worker")


def test_one_worker_may_do_all() -> None:
    shown = explained(explanation(candidate("b", "both"), prefill="b", decode="b", fetch=False, why=""))
    assert "chosen: b does all; foretold" in shown


numbers = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 1e12))


@given(st.lists(st.tuples(st.sampled_from(["prefill", "decode", "both"]), numbers, st.integers(0, 10**9)), max_size=8))
def test_any_numbers_make_aligned_tables(rows: list[tuple[str, float, int]]) -> None:
    made = [
        candidate(f"w{i}", role, ttft=number, coming=count, coming_seconds=number, terms={f"t{i % 2}": number})
        for i, (role, number, count) in enumerate(rows)
    ]  # fmt: skip
    shown = explained(explanation(*made))
    for i in range(len(rows)):
        assert re.search(rf"^  w{i}\b", shown, re.MULTILINE)
    assert "nan" not in shown
