"""How far a simulation is from what was measured: the same trace, the same code, two summaries side by side."""

from __future__ import annotations

import msgspec

from .summary import Summary
from .table import Cell, table

#: What is compared, from a summary: in the order of the table.
_TIMES = ("ttft", "tbt", "tbt_mean", "second_gap")
_POINTS = ("mean", "p50", "p90", "p99")
_SHARES = ("goodput", "effective", "hit")


class Gap(msgspec.Struct, frozen=True):
    """One figure. relative: (simulated - live) / live, None: one of them is missing or nothing was measured."""

    name: str
    live: float | None
    simulated: float | None
    relative: float | None


def gaps(live: Summary, simulated: Summary) -> list[Gap]:
    found = []
    for name in _TIMES:
        one, other = getattr(live, name), getattr(simulated, name)
        found += [_gap(f"{name} {point}", getattr(one, point), getattr(other, point)) for point in _POINTS]
    return found + [_gap(name, getattr(live, name), getattr(simulated, name)) for name in _SHARES]


def gap_table(found: list[Gap]) -> str:
    rows: list[tuple[Cell, ...]] = [
        (gap.name, gap.live, gap.simulated, "-" if gap.relative is None else f"{100 * gap.relative:+.1f}%")
        for gap in found
    ]
    return table(("seconds, shares, requests/s", "live", "simulated", "difference"), rows)


def _gap(name: str, live: float | None, simulated: float | None) -> Gap:
    known = live is not None and simulated is not None and live != 0
    return Gap(name, live, simulated, (simulated - live) / live if known else None)  # type: ignore[operator]
