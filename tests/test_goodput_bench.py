"""Goal: the goodput bench gives everybody the same chances and forgets nothing. Method: its contenders and its cache,
with one short run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import goodput_runs
from bench.goodput_contenders import CONTENDERS
from bench.goodput_runs import GENERATED, Cache, Case
from pyengine.scheduler.policies import find_admission, find_policy

CASE = Case(GENERATED, 0, 0, 20, 1, False, 2.0, (1, 1), "least-harm", "patient")


@pytest.mark.parametrize("count", [1, 4, 6])
def test_all_try_as_many_settings_and_all_of_them_exist(count: int) -> None:
    for contender in CONTENDERS:
        settings = contender.settings(count, 7)
        assert len(set(settings)) == len(settings) == count
        assert settings == contender.settings(6, 7)[:count], "a larger budget tries the same and more"
        for setting in settings:
            find_policy(setting.policy)
            find_admission(setting.admission)


def test_what_was_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache.jsonl"
    first = Cache(path).run([CASE, CASE], 1)[CASE]
    assert 0.0 <= first.effective <= 1.0
    assert first == goodput_runs.run(CASE), "the same case, the same result"

    def never(case: Case) -> None:
        raise AssertionError(f"{case} is known")

    monkeypatch.setattr(goodput_runs, "run", never)
    assert Cache(path).run([CASE], 1) == {CASE: first}
    with pytest.raises(AssertionError, match="is known"):
        Cache(path).run([replace(CASE, speed=3.0)], 1)
