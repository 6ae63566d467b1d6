"""Prints the size report under every run of the whole suite."""

from __future__ import annotations

import pytest

from tests.tidy.report_sizes import report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.args == config.getini("testpaths"):
        terminalreporter.section("size report")
        terminalreporter.write_line(report())
