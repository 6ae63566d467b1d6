"""Who runs beside whom, and the size report under every run of the whole suite.

Several processes (`--numprocesses`) share the suite file by file. The files that compute a real model keep all cores
busy on their own, those with real processes mostly wait: so the first are one piece of work, begun first by one
process, while the others go through the rest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.kernels.table import table
from tests.tidy.report_sizes import report

if TYPE_CHECKING:
    from xdist.scheduler.loadfile import LoadFileScheduling

#: They compute with SmolLM2. The first of them has the oracle's answers computed, the others find them on the disk.
REAL_MODEL = ("tests/model/test_real_model.py", "tests/system/test_oracle.py")

# OpenMP's threads spin while they wait for each other. Beside other processes that burns the time slices of the very
# threads that are waited for; asleep they cost a wake-up. Read by every process when it loads torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# XLA compiles a second for every shape; what one process has compiled all others find, those that tests start too.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: file_of(item.nodeid) not in REAL_MODEL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler.loadfile import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = file_of(nodeid)
            return "real model" if file in REAL_MODEL else file

    # As collected: by default the files with the fewest tests come last, which are ours that take longest.
    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """A command that runs in this process sets up its log: it ends with its test."""
    root = logging.getLogger()
    level, known = root.level, set(root.handlers)
    yield
    root.setLevel(level)
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        if handler not in known:
            root.removeHandler(handler)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if conformance := table(terminalreporter.stats):
        terminalreporter.section("conformance of the kernels")
        terminalreporter.write_line(conformance)
    if config.args == config.getini("testpaths"):
        terminalreporter.section("size report")
        terminalreporter.write_line(report())
