"""Goal: the forecast says who decodes where and until when, as plans, heartbeats and lengths tell.
Method: one request by hand; then random histories beside a model that keeps a list and loops over it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pyengine.scheduler import forecast as module
from pyengine.scheduler.forecast import UNKNOWN_GAP, Batch, Entry, Forecast
from pyengine.scheduler.lengths import LengthPredictor
from pyengine.scheduler.messages import HEARTBEAT_EVERY


def entry(lengths: LengthPredictor, decode: str = "d", joins: float = 10.0, most: int = 100, **changes: Any) -> Entry:
    table, length = lengths.first("", 1000, most)
    fields: dict[str, Any] = {
        "prefill": "p",
        "decode": decode,
        "joins": joins,
        "prompt": 1000,
        "most": most,
        "table": table,
        "length": length,
        "tbt": math.inf,
        "prefill_seconds": 2.0,
    }
    return Entry(**(fields | changes))


def test_one_request_from_plan_to_end() -> None:
    lengths = LengthPredictor()
    forecast = Forecast(lengths)
    forecast.heartbeat("d", 0, 0.1, 7.0)
    forecast.add(("g", 1), entry(lengths, tbt=0.2), 8.0)  # a hundred tokens, 0.1 s each, from 10 s on
    assert forecast.batch("d", 9.9, 8.0) == Batch(0, 0.0, math.inf)
    assert forecast.batch("d", 10.0, 8.0) == Batch(1, 1000.0, 0.2)
    assert forecast.batch("d", 15.0, 8.0).context == pytest.approx(1050.0)
    assert forecast.batch("d", 20.1, 8.0) == Batch(0, 0.0, math.inf)
    assert forecast.joins("d", 8.0, 30.0, 8.0).tolist() == [10.0]
    leaves, contexts = forecast.leaves("d", 12.0, 8.0)
    assert leaves.tolist() == pytest.approx([20.0])
    assert contexts.tolist() == pytest.approx([1020.0])
    assert [column.tolist() if isinstance(column, np.ndarray) else column for column in forecast.pending("p", 8.0)] == [
        [2.0],
        [0],
        [""],
    ]
    assert forecast.lasting(12.0, 1.0, 8.0) == (0, 0.0)
    assert forecast.lasting(12.0, 5.0, 8.0) == (1, 1020.0)
    # The prefill is late: at 11 s nobody runs there.
    forecast.heartbeat("d", 0, 0.1, 11.0)
    assert forecast.batch("d", 11.0, 11.0).sequences == 0
    assert forecast.batch("d", 11.0 + HEARTBEAT_EVERY, 11.0).context == 1000.0
    # It runs, and steps have become slower: the first of them since 11.5 s.
    forecast.heartbeat("d", 1, 0.2, 13.5)
    assert forecast.batch("d", 13.5, 13.5).context == pytest.approx(1020.0)
    assert forecast.leaves("d", 13.5, 13.5)[0].tolist() == pytest.approx([13.5 + 80 * 0.2])
    # Who was once counted runs, whatever the next heartbeat counts: it has just not ended yet for its gateway.
    forecast.heartbeat("d", 0, 0.2, 13.5)
    assert forecast.batch("d", 13.6, 13.6).context == pytest.approx(1020.5)
    forecast.end(("g", 1))
    assert forecast.batch("d", 14.0, 14.0).sequences == 0
    assert len(forecast) == 0
    forecast.check()


def test_an_answer_that_goes_on_gets_a_new_length() -> None:
    """Half of the answers have 10 tokens, half 1000: one that has 50 is one of the latter."""
    lengths = LengthPredictor()
    for number in range(400):
        lengths.learn("", 1000, 4000, 10 if number % 2 else 1000, True, 0.0)
    forecast = Forecast(lengths)
    forecast.heartbeat("d", 0, 0.1, 0.0)
    forecast.add(("g", 1), entry(lengths, joins=0.0, most=4000, length=10.0), 0.0)
    assert forecast.leaves("d", 0.0, 0.0)[0].tolist() == pytest.approx([1.0])
    assert forecast.leaves("d", 5.0, 5.0)[0].tolist() == pytest.approx([100.0], rel=0.2)


def test_who_runs_without_a_plan_counts() -> None:
    """A conductor that has just started knows what heartbeats say only."""
    lengths = LengthPredictor()
    forecast = Forecast(lengths)
    forecast.add(("g", 1), entry(lengths, joins=0.0), 0.0)
    forecast.heartbeat("d", 4, 0.1, 0.0)
    batch = forecast.batch("d", 0.1, 0.1)
    assert batch.sequences == 4
    assert batch.context == pytest.approx(4 * 1000.0, rel=0.01)


def test_lower_priorities_that_have_not_joined_do_not_count_for_higher_ones() -> None:
    lengths = LengthPredictor()
    forecast = Forecast(lengths)
    for number, (joins, priority) in enumerate([(0.0, -1), (2.0, -1), (2.0, 0), (2.0, 1)]):
        forecast.add(("g", number), entry(lengths, joins=joins, most=1000, priority=priority), 0.0)
    assert forecast.batch("d", 3.0, 1.0).sequences == 4
    assert forecast.batch("d", 3.0, 1.0, above=0).sequences == 3
    assert forecast.batch("d", 3.0, 1.0, above=1).sequences == 2


def test_entries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 3)
    lengths = LengthPredictor()
    forecast = Forecast(lengths)
    for number in range(5):
        forecast.add(("g", number), entry(lengths), 0.0)
    assert (len(forecast), forecast.unforeseen) == (3, 2)
    forecast.check()


@dataclass
class Model:
    """One request of the list. done: up to when its worker was counted."""

    entry: Entry
    joins: float
    done: float
    length: float
    seen: bool = False


WORKERS = ("d0", "d1", "d2")


class AgainstAList(RuleBasedStateMachine):
    """Everything the forecast answers, from a list; it is brought up to date whenever it is asked."""

    @initialize()
    def begin(self) -> None:
        self.lengths = LengthPredictor()
        self.forecast = Forecast(self.lengths)
        self.list: dict[tuple[str, int], Model] = {}
        self.gaps = dict.fromkeys(WORKERS, UNKNOWN_GAP)
        self.told = dict.fromkeys(WORKERS, UNKNOWN_GAP)
        #: By worker: when its latest heartbeat came, and what it said; tokens of a sequence there since it was counted.
        self.heard: dict[str, tuple[float, int, float, float]] = {}
        self.counted = dict.fromkeys(WORKERS, 100.0)
        self.strangers = dict.fromkeys(WORKERS, 0)
        self.now = 100.0

    @rule(
        number=st.integers(0, 12),
        worker=st.sampled_from(WORKERS),
        ahead=st.floats(0, 4),
        most=st.integers(1, 300),
        prompt=st.integers(1, 5000),
        tbt=st.sampled_from([math.inf, 0.1, 0.3]),
        priority=st.integers(-1, 1),
    )
    def add(self, number: int, worker: str, ahead: float, most: int, prompt: int, tbt: float, priority: int) -> None:
        key = ("g", number)
        made = entry(
            self.lengths, worker, self.now + ahead, most, prompt=prompt, tbt=tbt, priority=priority, tenant=f"t{most}"
        )
        self.forecast.add(key, made, self.now)
        self._forget(key)
        if not any(worker in (model.entry.decode,) for model in self.list.values()):
            # Nobody was there: what was said of it meanwhile counts from now on.
            self.gaps[worker] = self.told[worker]
            self.strangers[worker] = 0
            self.counted[worker] = self.now
            self.heard.pop(worker, None)
        self.list[key] = Model(made, made.joins, 0.0, made.length)

    def _forget(self, key: tuple[str, int]) -> None:
        self.list.pop(key, None)

    @rule(number=st.integers(0, 12))
    def end(self, number: int) -> None:
        self.forecast.end(("g", number))
        self._forget(("g", number))

    @rule(worker=st.sampled_from(WORKERS), running=st.integers(0, 6), gap=st.floats(0.01, 0.5))
    def heartbeat(self, worker: str, running: int, gap: float) -> None:
        self.forecast.heartbeat(worker, running, gap, self.now)
        self.told[worker] = gap
        if any(model.entry.decode == worker for model in self.list.values()):
            at, _, before, tokens = self.heard.get(worker, (self.counted[worker], 0, self.gaps[worker], 0.0))
            self.heard[worker] = (self.now, running, gap, tokens + (self.now - at) / before)

    @rule(seconds=st.floats(0.01, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(length=st.integers(1, 200))
    def learn(self, length: int) -> None:
        self.lengths.learn("", 1000, 200, length, True, 1.0)

    def _settle(self, worker: str) -> None:
        mine = [model for model in self.list.values() if model.entry.decode == worker]
        if worker in self.heard and mine:
            at, running, gap, tokens = self.heard.pop(worker)
            if at > self.counted[worker]:
                self._count(mine, worker, at, tokens / (at - self.counted[worker]))
            mine.sort(key=lambda model: (not model.seen, model.joins))
            self.gaps[worker] = gap
            self.strangers[worker] = max(running - len(mine), 0)
            there = sum(model.joins <= at for model in mine)
            for model in mine[running:there]:
                if not model.seen:
                    model.joins, model.done = at + HEARTBEAT_EVERY, 0.0
            for model in mine[there:running]:
                model.joins = at
            for model in mine[:running]:
                model.seen = True
        self._count(mine, worker, self.now, 1 / self.gaps[worker])
        for model in mine:
            model.done = min(model.done, model.entry.most)
            if model.done + 1.0 > model.length:
                model.length = self.lengths.expected_one(model.entry.table, model.entry.most, model.done)

    def _count(self, models: list[Model], worker: str, until: float, rate: float) -> None:
        for model in models:
            model.done += max(until - max(model.joins, self.counted[worker]), 0.0) * rate
        self.counted[worker] = until

    def _leaves(self, model: Model) -> float:
        left = max(model.length - model.done, 0.0)
        return max(model.joins, self.now) + left * self.gaps[model.entry.decode]

    def _context(self, model: Model, at: float) -> float:
        more = max(at - max(model.joins, self.now), 0.0) / self.gaps[model.entry.decode]
        return model.entry.prompt + model.done + more

    @rule(worker=st.sampled_from(WORKERS), ahead=st.floats(0, 20), above=st.sampled_from([None, -1, 0, 1]))
    def ask(self, worker: str, ahead: float, above: int | None) -> None:
        at = self.now + ahead
        batch = self.forecast.batch(worker, at, self.now, above)
        leaves, _ = self.forecast.leaves(worker, at, self.now)
        self._settle(worker)
        known = any(model.entry.decode == worker for model in self.list.values())
        there = [
            model
            for model in self.list.values()
            if model.entry.decode == worker
            and model.joins <= at < self._leaves(model)
            and (above is None or model.joins <= self.now or model.entry.priority >= above)
        ]
        strangers = self.strangers[worker] if known else 0
        assert batch.sequences == len(there) + strangers
        total = sum(self._context(model, at) for model in there)
        assert batch.context == pytest.approx(total * (1 + strangers / max(len(there), 1)), rel=1e-9, abs=1e-6)
        assert batch.tbt == min((model.entry.tbt for model in there), default=math.inf)
        if above is None:
            assert leaves.tolist() == pytest.approx(sorted(self._leaves(model) for model in there))

    @rule(ahead=st.floats(0, 20), seconds=st.none() | st.floats(0.1, 30))
    def ask_all(self, ahead: float, seconds: float | None) -> None:
        at = self.now + ahead
        sequences, context = self.forecast.lasting(at, seconds, self.now)
        for worker in WORKERS:
            self._settle(worker)
        models = list(self.list.values())
        if models and seconds is None:
            seconds = sum(model.length * self.gaps[model.entry.decode] for model in models) / len(models)
        there = [model for model in models if at - (seconds or 0.0) < model.joins <= at]
        assert sequences == len(there)
        assert context == pytest.approx(sum(self._context(model, at) for model in there), rel=1e-9, abs=1e-6)

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "forecast"):
            self.forecast.check()
            assert len(self.forecast) == len(self.list)


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 50), st.integers(1, 200)), max_size=30), st.lists(st.floats(0, 60), min_size=1))
def test_a_course_is_one_batch_after_the_other(requests: list[tuple[float, int]], times: list[float]) -> None:
    lengths = LengthPredictor()
    forecast = Forecast(lengths)
    for number, (joins, most) in enumerate(requests):
        forecast.add(("g", number), entry(lengths, f"d{number % 2}", joins, most, tbt=0.1 + number), 0.0)
    course = forecast.course("d0", np.array(times), 0.0)
    for number, at in enumerate(times):
        batch = forecast.batch("d0", at, 0.0)
        assert (course.sequences[number], course.tbt[number]) == (batch.sequences, batch.tbt)
        assert course.context[number] == pytest.approx(batch.context)


def test_heartbeats_between_two_questions_all_count() -> None:
    """Ten seconds at 0.1 s a token and ten at 0.2 s are 150 tokens, whoever asks only then."""
    lengths = LengthPredictor()
    forecast = Forecast(lengths)
    forecast.heartbeat("d", 0, 0.1, 0.0)
    forecast.add(("g", 1), entry(lengths, joins=0.0, most=4000, length=1000.0), 0.0)
    for number in range(40):
        forecast.heartbeat("d", 1, 0.1 if number < 20 else 0.2, 0.5 * number)
    assert forecast.batch("d", 20.0, 20.0).context == pytest.approx(1000.0 + 100 + 50)
