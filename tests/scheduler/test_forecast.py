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
    forecast.heartbeat("d", 0, 0.1)
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
    forecast.heartbeat("d", 0, 0.1)
    assert forecast.batch("d", 11.0, 11.0).sequences == 0
    assert forecast.batch("d", 11.0 + HEARTBEAT_EVERY, 11.0).context == 1000.0
    # It runs, and steps have become slower: the first of them since 11.5 s.
    forecast.heartbeat("d", 1, 0.2)
    assert forecast.batch("d", 13.5, 13.5).context == pytest.approx(1020.0)
    assert forecast.leaves("d", 13.5, 13.5)[0].tolist() == pytest.approx([13.5 + 80 * 0.2])
    # Who was once counted runs, whatever the next heartbeat counts: it has just not ended yet for its gateway.
    forecast.heartbeat("d", 0, 0.2)
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
    forecast.heartbeat("d", 0, 0.1)
    forecast.add(("g", 1), entry(lengths, joins=0.0, most=4000, length=10.0), 0.0)
    assert forecast.leaves("d", 0.0, 0.0)[0].tolist() == pytest.approx([1.0])
    assert forecast.leaves("d", 5.0, 5.0)[0].tolist() == pytest.approx([100.0], rel=0.2)


def test_who_runs_without_a_plan_counts() -> None:
    """A conductor that has just started knows what heartbeats say only."""
    lengths = LengthPredictor()
    forecast = Forecast(lengths)
    forecast.add(("g", 1), entry(lengths, joins=0.0), 0.0)
    forecast.heartbeat("d", 4, 0.1)
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
    """One request of the list. since: up to when its tokens have been counted."""

    entry: Entry
    joins: float
    done: float
    length: float
    since: float
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
        self.heard: dict[str, int] = {}
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
        self.list[key] = Model(made, made.joins, 0.0, made.length, self.now)

    def _forget(self, key: tuple[str, int]) -> None:
        self.list.pop(key, None)

    @rule(number=st.integers(0, 12))
    def end(self, number: int) -> None:
        self.forecast.end(("g", number))
        self._forget(("g", number))

    @rule(worker=st.sampled_from(WORKERS), running=st.integers(0, 6), gap=st.floats(0.01, 0.5))
    def heartbeat(self, worker: str, running: int, gap: float) -> None:
        self.forecast.heartbeat(worker, running, gap)
        self.told[worker] = gap
        if any(model.entry.decode == worker for model in self.list.values()):
            self.heard[worker] = running

    @rule(seconds=st.floats(0.01, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(length=st.integers(1, 200))
    def learn(self, length: int) -> None:
        self.lengths.learn("", 1000, 200, length, True, 1.0)

    def _settle(self) -> None:
        for model in self.list.values():
            since = max(model.joins, model.since)
            model.done += max(self.now - since, 0.0) / self.gaps[model.entry.decode]
            model.since = self.now
        for worker, running in self.heard.items():
            mine = [model for model in self.list.values() if model.entry.decode == worker]
            if not mine:
                continue
            mine.sort(key=lambda model: (not model.seen, model.joins))
            self.gaps[worker] = self.told[worker]
            self.strangers[worker] = max(running - len(mine), 0)
            there = sum(model.joins <= self.now for model in mine)
            for model in mine[running:there]:
                if not model.seen:
                    model.joins, model.done = self.now + HEARTBEAT_EVERY, 0.0
            for model in mine[there:running]:
                model.joins = self.now
            for model in mine[:running]:
                model.seen = True
        self.heard.clear()
        for model in self.list.values():
            model.done = min(model.done, model.entry.most)
            if model.done + 1.0 > model.length:
                model.length = self.lengths.expected_one(model.entry.table, model.entry.most, model.done)

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
        sequences, context = self.forecast.batches(WORKERS, at, self.now)
        leaves, _ = self.forecast.leaves(worker, at, self.now)
        self._settle()
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
            row = WORKERS.index(worker)
            assert sequences[row] == batch.sequences
            assert context[row] == pytest.approx(batch.context)
            assert leaves.tolist() == pytest.approx(sorted(self._leaves(model) for model in there))

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "forecast"):
            self.forecast.check()
            assert len(self.forecast) == len(self.list)


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 50), st.integers(1, 200)), max_size=30), st.floats(0, 60))
def test_all_workers_at_once_are_as_one_by_one(requests: list[tuple[float, int]], at: float) -> None:
    lengths = LengthPredictor()
    forecast = Forecast(lengths)
    names = tuple(f"d{number}" for number in range(5))
    for number, (joins, most) in enumerate(requests):
        forecast.add(("g", number), entry(lengths, names[number % 4], joins, most), 0.0)
    sequences, context = forecast.batches(names, at, 0.0)
    for row, name in enumerate(names):
        batch = forecast.batch(name, at, 0.0)
        assert (sequences[row], context[row]) == (batch.sequences, pytest.approx(batch.context))
