"""Goal: a worker whose backend overlaps plans and submits a step while one runs, and says what it would say without.

Method: cases of test_worker.py and test_faults.py with a fake backend that computes on a thread; beside them one that
writes down in which order it is called, and ones that fail while a step is under way behind the one that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pyengine.backend import Deferred, Pending, Readable, Slice, Written
from pyengine.backends.fake import FakeBackend, fake_tokens
from pyengine.scheduler.types import FinishReason, SamplingParams
from tests.worker import test_faults, test_llm, test_worker
from tests.worker.harness import Cluster
from tests.worker.test_worker import backend, one_node, prompt


@pytest.fixture
def overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fake backend that is made overlaps."""
    defaults = FakeBackend.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "overlaps", 1)
    assert backend().overlaps


CASES: dict[str, Callable[[], None]] = {
    "apart, one block": partial(test_worker.test_apart_equals_oracle, "tcp", 16),
    "apart, chunks": partial(test_worker.test_apart_equals_oracle, "tcp", 300),
    "apart, one arena": partial(test_worker.test_apart_equals_oracle, "arena", 65),
    "many at once": test_worker.test_many_at_once_through_small_pools,
    "each for the other": test_worker.test_nodes_that_prefill_for_each_other_do_not_deadlock,
    "second turn": partial(test_worker.test_second_turn_reuses_what_was_decoded, one_node),
    "rot": test_worker.test_flipped_bytes_in_the_arena_are_recomputed,
    "aborts": partial(test_worker.test_random_aborts_leave_nothing, None),
    "preemption": test_worker.test_preemption_recomputes_and_says_so,
    "the space is full": partial(test_worker.test_an_answer_that_fills_the_kv_space_ends_with_length, True),
    "seeds": test_worker.test_seeded_sampling_does_not_depend_on_batch_or_worker,
    "a retry": test_worker.test_retry_continues_numbering_and_seed,
    "a burst": test_worker.test_a_burst_with_one_prefix_computes_it_once,
    "KV is lost": partial(test_faults.test_much_lost_kv_goes_back_for_a_new_plan, 64, None),
    "a model that never works": test_faults.test_a_model_that_always_fails_ends_the_worker,
    "a daemon's death": partial(test_faults.test_a_daemon_killed_mid_transfer, 1),
    **{
        f"a model that {how}": partial(test_faults.test_a_request_that_the_model_fails_on_falls_alone, how)
        for how in ("raises", "too few", "none", "too large")
    },
}


@pytest.mark.parametrize("case", CASES)
def test_what_holds_without_holds_with_it(overlaps: None, case: str) -> None:
    CASES[case]()


def test_logits_that_are_no_numbers_fail_their_request_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With torch as on a GPU: the next step is queued behind the one whose logits are no numbers."""
    pytest.importorskip("torch", reason="needs the torch extra")
    from pyengine.backends.torch import TorchBackend

    monkeypatch.setattr(TorchBackend, "overlaps", property(lambda _: True, lambda *_: None), raising=False)
    test_llm.test_logits_that_are_no_numbers_fail_their_request_alone(tmp_path)


class Recorded(FakeBackend):
    """Writes down when a step is submitted and when it is waited for."""

    def __init__(self) -> None:
        super().__init__(overlaps=1)
        self.calls: list[tuple[str, int]] = []
        self.sizes: list[int] = []

    def submit(self, slices: list[Slice], written: Written | None = None, readable: Readable | None = None) -> Pending:
        number = len(self.sizes)
        self.sizes.append(len(slices))
        self.calls.append(("submit", number))
        pending = super().submit(slices, written, readable)

        def tokens() -> list[int]:
            self.calls.append(("tokens", number))
            return pending.tokens()

        return Deferred(tokens)


def test_a_step_is_submitted_before_the_one_before_is_waited_for() -> None:
    """And none behind the last: the end by length is foreseen."""
    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        recorded = Recorded()
        worker = cluster.add_worker("both", "a", recorded)
        request = cluster.submit(prompt(20), "both", "both")
        cluster.run(request)
        assert request.ids == fake_tokens(prompt(20), 8)
        submitted = [("submit", 0)]
        for number in range(1, 8):
            submitted += [("submit", number), ("tokens", number - 1)]
        assert recorded.calls == [*submitted, ("tokens", 7)]
        assert recorded.sizes == [1] * 8
        assert not worker.computing
        assert worker.counters["steps"] == 8
        cluster.settle()


def test_an_end_that_is_not_foreseen_costs_one_row_and_no_more() -> None:
    """What the row too many has written is neither told nor cached, and its page is free when the step is over."""
    answer = fake_tokens(prompt(20), 20)
    last = next(index for index in range(4, 20) if answer[index] not in answer[:index])
    sampling = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(answer[last],))
    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        recorded = Recorded()
        worker = cluster.add_worker("both", "a", recorded)
        request = cluster.submit(prompt(20), "both", "both", sampling=sampling)
        cluster.run(request)
        assert request.ids == answer[: last + 1]
        assert request.finish is FinishReason.STOP
        assert worker.computing
        assert worker.batcher.pool.referenced > 0
        cluster.settle()
        assert recorded.sizes == [1] * (last + 2)
        assert worker.counters["decode"] == last, "a row too many is not counted"
        blocks = (20 + last) // 16
        assert worker.batcher.pool.cached == cluster.counter("a", "pyengine_pool_blocks", state="cached") == blocks


class FailsOnce(FakeBackend):
    """Fails in one step, the nth."""

    def __init__(self, at: int) -> None:
        super().__init__(overlaps=1)
        self.left = at

    def execute(self, slices: list[Slice]) -> list[int]:
        self.left -= 1
        if not self.left:
            self._chosen = [0] * len(slices)  # what a device would hold: nothing that can be told from tokens
            raise ArithmeticError("once")
        return super().execute(slices)


@pytest.mark.parametrize("at", range(1, 10))
def test_what_was_submitted_behind_a_step_that_failed_is_computed_again(at: int) -> None:
    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        cluster.add_worker("both", "a", FailsOnce(at))
        requests = [cluster.submit(prompt(20 + i, i), "both", "both") for i in range(3)]
        cluster.run(*requests)
        assert [request.ids for request in requests] == [fake_tokens(prompt(20 + i, i), 8) for i in range(3)]
        cluster.settle()


class Refuses(FakeBackend):
    """Cannot submit its nth step."""

    def __init__(self, at: int) -> None:
        super().__init__(overlaps=1)
        self.left = at

    def submit(self, slices: list[Slice], written: Written | None = None, readable: Readable | None = None) -> Pending:
        self.left -= 1
        if not self.left:
            raise MemoryError("no room for the step's inputs")
        return super().submit(slices, written, readable)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_step_that_cannot_be_submitted_is_computed_one_by_one(at: int) -> None:
    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        cluster.add_worker("both", "a", Refuses(at))
        requests = [cluster.submit(prompt(20 + i, i), "both", "both") for i in range(3)]
        cluster.run(*requests)
        assert [request.ids for request in requests] == [fake_tokens(prompt(20 + i, i), 8) for i in range(3)]
        cluster.settle()


def test_a_worker_that_closes_waits_for_the_device() -> None:
    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        recorded = Recorded()
        worker = cluster.add_worker("both", "a", recorded)
        cluster.submit(prompt(20), "both", "both")
        cluster.until(lambda: worker.computing)
        worker.close()
        assert recorded.calls[-1] == ("tokens", len(recorded.sizes) - 1)
