"""What a figure is: the runs it needs, and what it makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.paper.cases import Case
from bench.paper.runs import Outcome
from bench.paper.tables import Table

Outcomes = Mapping[Case, Outcome]


@dataclass(frozen=True)
class Figure:
    """cases: to be run. make: the table, of all outcomes; draws into the folder, unless that is None."""

    name: str
    cases: tuple[Case, ...]
    make: Callable[[Outcomes, Path | None], Table]
