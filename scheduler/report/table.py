"""Tables for a terminal: plain text in aligned columns, the same bytes for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

Cell = str | int | float | None


def table(headers: Sequence[str], rows: Sequence[Sequence[Cell]], left: int = 1) -> str:
    """The first `left` columns are words and stand left, the others are numbers and stand right."""
    lines = [list(headers), *([cell(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(text.ljust(width) if i < left else text.rjust(width) for i, (text, width) in enumerate(row)).rstrip()
        for row in (list(zip(line, widths, strict=True)) for line in lines)
    )


def cell(value: Cell) -> str:
    """Three significant digits for a float; "-" where there is no value."""
    match value:
        case None:
            return "-"
        case str():
            return value
        case int():
            return f"{value:,}"
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{digits}f}" if 0 <= digits <= 6 else f"{value:,.0f}" if digits < 0 else f"{value:.2e}"


def percent(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{100 * value:.1f}%"


def seconds(value: float | None) -> str:
    """With a unit that suits it."""
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) >= 100:
        return f"{value:.0f} s"
    return f"{cell(value)} s" if abs(value) >= 1 or value == 0 else f"{cell(1000 * value)} ms"
