"""Goal: what a daemon answers at once is in the step that is planned next, and a daemon that does not answer costs no
more than one short wait.

Method: a pool whose answer comes a look too late, with all the time it needs, and one that never answers; no time is
measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyengine import _native, kv_mover
from pyengine.backends.fake import fake_tokens
from pyengine.kv_mover import Pool
from pyengine.scheduler.types import SamplingParams
from tests.worker.harness import PATIENCE, Cluster, Request
from tests.worker.test_faults import Twin
from tests.worker.test_worker import backend, prompt

#: Long enough to have blocks in the pool, and short enough for one step.
ASKED = prompt(33, 7)


class Slow(Twin):
    """Its answer to a lookup comes after somebody has looked for it in vain."""

    looks = 1

    def lookup(self, tag: _native.Tag, keys: bytes) -> None:
        self.looks = 0
        self.real.lookup(tag, keys)

    def events(self) -> list[_native.PoolEvent]:
        self.looks += 1
        return [] if self.looks == 1 else self.real.events()


class Deaf(Twin):
    """Answers the first lookup only."""

    asked = 0

    def lookup(self, tag: _native.Tag, keys: bytes) -> None:
        self.asked += 1
        if self.asked == 1:
            self.real.lookup(tag, keys)


class Waits:
    """Stands for the mover's poll object. count: of waits begun."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.count = 0

    def poll(self, milliseconds: float) -> Any:
        self.count += 1
        return self.real.poll(milliseconds)


def _busy(cluster: Cluster, wrap: Callable[[_native.PoolClient], Pool]) -> Request:
    """A worker that decodes, and so plans a step whatever else there is."""
    cluster.add_node("a", 64, backend())
    cluster.add_worker("both", "a", backend(), wrap=wrap)
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    request = cluster.submit(prompt(20), "both", "both", sampling=sampling)
    cluster.until(lambda: bool(request.ids))
    return request


def test_what_is_answered_at_once_is_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_mover, "ANSWER", PATIENCE)
    with Cluster() as cluster:
        first = _busy(cluster, Slow)
        second, before = cluster.submit(ASKED, "both", "both"), len(first.ids)
        cluster.step()
        assert second.ids == fake_tokens(ASKED, 8)[:1]
        assert len(first.ids) == before + 1, "in one step with what decodes"
        cluster.run(first, second)
        cluster.settle()


def test_who_does_not_answer_is_waited_for_once() -> None:
    with Cluster() as cluster:
        first = _busy(cluster, Deaf)
        mover = cluster.workers["both"].mover
        waits = mover._answers = Waits(mover._answers)  # type: ignore[assignment]
        second, before = cluster.submit(ASKED, "both", "both"), len(first.ids)
        cluster.step()
        begun = waits.count
        assert begun
        cluster.step()
        assert waits.count == begun
        assert len(first.ids) == before + 2 and not second.ids, "what decodes goes on"
        cluster.abort(second)
        cluster.run(first)
        cluster.settle()
