"""A table of the report: what the paper has, what we have, and what is to be thought of the difference."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from bench.common import line, tidy

#: Relative differences up to which a value counts as reproduced, and as near.
REPRODUCED, NEAR = 0.10, 0.25


@dataclass(frozen=True)
class Row:
    """One value. paper: None where the paper has none (ours is given for what it is)."""

    case: str
    ours: float
    paper: float | None
    unit: str

    @property
    def ratio(self) -> float | None:
        """Ours as a multiple of the paper's."""
        return self.ours / self.paper if self.paper else None

    @property
    def verdict(self) -> str:
        """ "reproduced" within 10 %, "near" within 25 %, else "differs"; "-" with nothing to compare."""
        ratio = self.ratio
        if ratio is None:
            return "-"
        if not math.isfinite(ratio) or ratio <= 0:
            return "differs"
        off = max(ratio, 1 / ratio) - 1
        return "reproduced" if off <= REPRODUCED else "near" if off <= NEAR else "differs"


@dataclass
class Table:
    """One table or figure of the paper. says: how it was made. remarks: what the reader must know to judge it."""

    name: str
    title: str
    says: str
    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    plot: str | None = None

    def add(self, case: str, ours: float, paper: float | None, unit: str) -> None:
        self.rows.append(Row(case, ours, paper, unit))

    def forget_paper(self) -> None:
        """Ours are of another trace than the paper's."""
        self.rows = [replace(row, paper=None) for row in self.rows]

    def differing(self) -> list[Row]:
        return [row for row in self.rows if row.verdict == "differs"]

    def print(self) -> None:
        """As JSON lines."""
        for row in self.rows:
            compared: dict[str, str | float] = {} if row.paper is None else {"paper": row.paper, "verdict": row.verdict}
            against = None if row.paper is None else "paper"
            line("paper", f"{self.name} {row.case}", row.ours, row.unit, against=against, ratio=row.ratio, **compared)

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", self.says, ""]
        lines += ["| | paper | ours | ours / paper | |", "|---|---|---|---|---|"]
        for row in self.rows:
            cells = [row.case, show(row.paper, row.unit), show(row.ours, row.unit), show(row.ratio, ""), row.verdict]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        if self.plot:
            lines += [f"![{self.title}](paper/{self.plot})", ""]
        return "\n".join([*lines, *(f"{remark}\n" for remark in self.remarks)])


def show(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    short = tidy(value)
    text = "none" if short is None else f"{short:g}"
    return f"{text} {unit}".rstrip() if unit != "%" else f"{text} %"


def document(tables: Iterable[Table], head: str) -> str:
    """The whole report; what does not match is said first."""
    tables = list(tables)
    counts: dict[str, int] = {}
    for table in tables:
        for row in table.rows:
            counts[row.verdict] = counts.get(row.verdict, 0) + 1
    lines = [head, "## What does not match", ""]
    for table in tables:
        worst = table.differing()
        if worst:
            cases = ", ".join(f"{row.case} ({show(row.ratio, '')})" for row in worst)
            lines.append(f"* **{table.title}**: {cases}. {' '.join(table.remarks)}".rstrip())
    compared = sum(count for verdict, count in counts.items() if verdict != "-")
    lines += [
        "",
        f"Of {compared} values {counts.get('reproduced', 0)} are reproduced (within {REPRODUCED:.0%}),"
        f" {counts.get('near', 0)} are near (within {NEAR:.0%}), {counts.get('differs', 0)} differ.",
        "",
    ]
    return "\n".join([*lines, *(table.markdown() for table in tables)])
