"""Goal: policies are found by name, set by name, added by other packages, and a faulty one hurts one request only.

Method: real distributions on the path (a module and its metadata), and the conductor with a scripted world.
"""

from __future__ import annotations

import dataclasses
import importlib
import random
import re
import sys
from pathlib import Path

import pytest

from pyengine.scheduler.cluster import View
from pyengine.scheduler.policies import (
    POLICIES,
    Ask,
    Choice,
    PolicyFailed,
    UnknownName,
    decide,
    find_admission,
    find_maker,
    find_policy,
    knobs,
    known_policies,
)
from pyengine.scheduler.policies.kvcache_centric import KvCacheCentric
from pyengine.scheduler.types import Role

from .test_policies import bare
from .world import World, chain, worker

#: A policy of another package, whole: this file and one entry point.
THIRD_PARTY = '''
"""Always the last by name."""
from dataclasses import dataclass

import numpy as np

from pyengine.scheduler.policies import Choice


@dataclass(frozen=True)
class Last:
    offset: int = 0
    replicates = False

    def __call__(self, view, ask, rng):
        prefill = int(np.flatnonzero(view.prefills)[-1 - self.offset])
        return Choice(prefill, prefill if view.both[prefill] else int(np.flatnonzero(view.decodes)[-1]))


class Raising:
    replicates = False

    def __call__(self, view, ask, rng):
        return 1 // 0


class Stray:
    replicates = False

    def __call__(self, view, ask, rng):
        return Choice(0, 0)


class Unsaid:
    def __call__(self, view, ask, rng):
        return Choice(1, 0)


class Odd:
    replicates = True

    def __call__(self, view, ask, rng):
        return Choice(1, 0, terms={"good": [1, 2], "short": [1], "words": ["a", "b"]})


class Undecided:
    replicates = True

    def __call__(self, view, ask, rng):
        return Choice(1, 0, fetch=None)


def unmakeable():
    raise OSError("no licence")
'''


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution installed into tmp_path: one module, and the metadata that an installer would write."""
    (tmp_path / "other_policies.py").write_text(THIRD_PARTY)
    (tmp_path / "half_made.py").write_text("raise RuntimeError('half made')")
    metadata = tmp_path / "other_policies-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-policies\nVersion: 1.0\n")
    entries = {
        "last": "other_policies:Last",
        "raising": "other_policies:Raising",
        "stray": "other_policies:Stray",
        "unsaid": "other_policies:Unsaid",
        "odd": "other_policies:Odd",
        "undecided": "other_policies:Undecided",
        "number": "builtins:int",
        "unmakeable": "other_policies:unmakeable",
        "half-made": "half_made:Policy",
        "absent": "other_policies:Absent",
    }
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[pyengine.policies]", *lines]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "other_policies", raising=False)
    importlib.invalidate_caches()
    return tmp_path


def both(count: int, **settings: object) -> World:
    return World(*(worker(f"w{i}", Role.BOTH, f"n{i}") for i in range(count)), **settings)  # type: ignore[arg-type]


def test_another_package_adds_a_policy_with_one_file_and_one_entry_point(other_package: Path) -> None:
    assert "last" in known_policies()
    assert both(3, policy="last").plan(chain(1)).prefill.worker == "w2"
    assert both(3, policy="last:offset=1").plan(chain(1)).prefill.worker == "w1"


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_small_plain_data_and_listed(name: str) -> None:
    maker = find_maker(name)
    assert name in known_policies()
    assert isinstance(maker, type)
    assert dataclasses.is_dataclass(maker)
    assert find_policy(name) == find_policy(name)
    assert maker.__dataclass_params__.frozen  # type: ignore[attr-defined]
    # All that may be set by hand can be set by name, and says so in its own words.
    assert set(knobs(maker)) == {field.name for field in dataclasses.fields(maker)}
    assert all(knob in (maker.__doc__ or "") or knob == "fetch" for knob in knobs(maker))


def test_settings_stand_in_the_name() -> None:
    assert find_policy("kvcache-centric:threshold=2.5") == KvCacheCentric(2.5)
    assert find_policy("kvcache-centric: threshold = 3 , replicates=false") == KvCacheCentric(3.0, False)
    assert find_policy("sglang:ratio=0.5,imbalance=64,fetch=True") != find_policy("sglang")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("roundrobin", r"no policy 'roundrobin': known are random.*did you mean 'round-robin'"),
        ("sglang:ration=0.5", r"no setting of 'sglang' named 'ration': known are ratio, imbalance.*mean 'ratio'"),
        ("sglang:ratio=much", "'ratio' of 'sglang' must be a number, not 'much'"),
        ("sglang:ratio=nan", "'ratio' of 'sglang' must be a number, not 'nan'"),
        ("sglang:fetch=2", "'fetch' of 'sglang' must be true or false, not '2'"),
        ("sglang:ratio", "'ratio' in 'sglang:ratio' is no setting: write sglang:knob=value"),
        ("sglang:", "is no setting"),
        ("sglang:ratio=1,ratio=2", "'ratio' is set twice"),
        ("cache-aware:ratio=1", "'cache-aware' has no settings"),
        ("dynamo:temperature=-1", "'dynamo': temperature must be at least 0"),
        ("least-harm:doubt=0", "'least-harm': doubt must be above 0"),
    ],
)
def test_a_wrong_name_or_setting_says_what_there_is(text: str, says: str) -> None:
    with pytest.raises(UnknownName, match=says):
        find_policy(text)


def test_a_wrong_admission_suggests_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'at-arrival'"):
        find_admission("arrival")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("half-made", r"'half-made' \(half_made:Policy of other-policies\) cannot be loaded: RuntimeError: half made"),
        ("absent", r"'absent' .*cannot be loaded: AttributeError"),
        ("unmakeable", "'unmakeable' cannot be made: OSError: no licence"),
        ("unsaid", "'unsaid' cannot be made: AttributeError: .*replicates"),
        ("number", "'number' makes no policy: it can be called"),
        ("last:offset=one", "'offset' of 'last' must be a whole number, not 'one'"),
        ("lasst", "did you mean 'last'"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_named(other_package: Path, text: str, says: str) -> None:
    with pytest.raises(UnknownName, match=says):
        find_policy(text)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("raising", "the policy 'raising' failed: ZeroDivisionError"),
        ("stray", "the policy 'stray' chose|the policy 'stray' gave"),
        ("undecided", "the policy 'undecided' answered fetch=None, which is neither"),
    ],
)
def test_a_policy_that_fails_costs_one_request_and_is_counted(other_package: Path, policy: str, says: str) -> None:
    world = World(
        worker("a-decode", Role.DECODE, "n0"), worker("b-prefill", Role.PREFILL, "n1"), policy=policy
    )  # fmt: skip
    for _ in range(2):
        refusal = world.refusal(chain(1))
        assert (refusal.kind, refusal.retry_after) == ("policy", None)
        assert re.match(says, refusal.reason)
    assert world.conductor.counters()['pyengine_conductor_rejections_total{reason="policy"}'] == 2
    world.conductor.router.policy = find_policy("kvcache-centric")
    assert world.plan(chain(1)).prefill.worker == "b-prefill"


def test_terms_that_are_no_columns_are_not_told(other_package: Path) -> None:
    """A conductor that explains must not end by what a plugin calls a term."""
    world = World(worker("a-decode", Role.DECODE, "n0"), worker("b-prefill", Role.PREFILL, "n1"), policy="odd")
    world.plan(chain(1))
    found = world.conductor.router.decisions.find(None)
    assert found is not None
    assert [each.terms for each in found.candidates] == [{"good": 1.0}, {"good": 2.0}]


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (Choice(1, 1), "gave 'd0' both parts"),
        (Choice(0, 0), "gave 'p' both parts"),
        (Choice(1, 2), "chose 'd0' and 'd1', which are no pair"),
        (Choice(0, 3), "chose row 0 or 3 of 3"),
        (Choice(-1, 1), "chose row -1 or 1 of 3"),
        (None, "answered None instead of a Choice"),
    ],
)
def test_no_plan_is_made_of_a_choice_that_is_none(choice: Choice, says: str) -> None:
    view, ask = bare()

    class Fixed:
        replicates = False

        def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
            return choice

    with pytest.raises(PolicyFailed, match=says):
        decide("fixed", Fixed(), view, ask, random.Random(0))
    assert decide("least-harm", find_policy("least-harm"), view, ask, random.Random(0)).prefill == 0
