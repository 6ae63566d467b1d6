"""The conformance table of the kernels, implementations x contracts, from the reports of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, cast

import pytest

#: What a test records: its implementation, its contract and its largest error, as a share of what is allowed.
PROPERTY = "kernel"


def table(stats: dict[str, list[Any]]) -> str | None:
    """As Markdown, or None if no kernel was tested. stats: reports by outcome, as the terminal reporter has them."""
    outcomes: defaultdict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
    for report in _tests(stats):
        for name, value in report.user_properties:
            if name == PROPERTY:
                implementation, contract, error = cast(tuple[str, str, float], value)
                outcomes[implementation, contract].append((report.outcome, error))
    if not outcomes:
        return None
    implementations = list(dict.fromkeys(implementation for implementation, _ in outcomes))
    rows = [["contract", *implementations], ["---"] * (1 + len(implementations))]
    rows += [
        [contract, *(_cell(outcomes[implementation, contract]) for implementation in implementations)]
        for contract in sorted({contract for _, contract in outcomes})
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    )


def _tests(stats: dict[str, list[Any]]) -> Iterable[pytest.TestReport]:
    for outcome in ("passed", "failed", "skipped"):
        yield from (report for report in stats.get(outcome, []) if isinstance(report, pytest.TestReport))


def _cell(outcomes: list[tuple[str, float]]) -> str:
    if not outcomes:
        return "not run"
    failed = sum(outcome == "failed" for outcome, _ in outcomes)
    if failed:
        return f"FAILED {failed} of {len(outcomes)}"
    worst = max(error for _, error in outcomes)
    return f"{len(outcomes)} ok, {worst:.0%} of the tolerance"
