"""What the tests of commands share: the null backend as a plugin, a small trace, and a way to call `conductor`."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pyengine.scheduler import cli
from pyengine.scheduler.cluster import View
from pyengine.scheduler.policies import Ask, Choice


@dataclass(frozen=True)
class Called:
    status: int
    out: str
    err: str


Conductor = Callable[..., Called]


def install(folder: Path, name: str, where: str, group: str = "pyengine.cluster_backends") -> None:
    """A distribution with one entry point, as pip would leave it."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {where}\n")


class Failing:
    """A policy of another package with a fault."""

    replicates = False

    def __call__(self, view: View, ask: Ask, rng: random.Random) -> Choice:
        raise ZeroDivisionError("no choice")


@pytest.fixture
def conductor(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Conductor:
    """`conductor ARGUMENTS` in this process, with the backends null and broken and the policy failing installed."""
    packages = tmp_path / "packages"
    packages.mkdir()
    install(packages, "null", "tests.backends.null:NullBackend")
    install(packages, "broken", "tests.backends.null:Broken")
    install(packages, "failing", "tests.commands.conftest:Failing", "pyengine.policies")
    monkeypatch.syspath_prepend(str(packages))
    importlib.invalidate_caches()

    def call(*arguments: object) -> Called:
        found = cli.app([str(argument) for argument in arguments], exit_on_error=False, result_action="return_value")
        shown = capsys.readouterr()
        return Called(int(found), shown.out, shown.err)

    return call


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """30 requests, one a second; each continues the one three before it."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 1000 * i,
            "input_length": 512 * (i // 3 + 1) + 100,
            "output_length": 10 + i,
            "hash_ids": [1000 * (i % 3) + block for block in range(i // 3 + 1)] + [10**6 + i],
        }
        for i in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
