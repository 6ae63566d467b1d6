"""Pictures of reports. matplotlib is not among what the package needs: who asks for a picture installs it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..sim.report import F64, Report
from ..types import Slo
from .summary import effective

#: Marks of curves that lie over each other, in the order of the legend.
MARKS = "os^Dv<>ph*"
#: Columns of a curve over time: wide enough for a trace of an hour, a minute each.
BINS = 60


class NoPlots(ValueError):
    """matplotlib is missing."""


def need_plots() -> None:
    """Raises NoPlots. To be called before minutes of work, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NoPlots("--plot needs matplotlib: pip install matplotlib, or leave --plot out (--json has all curves)")


def plot_run(report: Report, slo: Slo, path: Path) -> None:
    """How TTFT and TBT are spread, the goodput over time, and the load of both roles."""
    records = report.records
    figure, ((first, second), (third, fourth)) = _figure(2, 2)
    for axes, name, values, limit in (
        (first, "TTFT, s", records.ttft, slo.ttft),
        (second, "TBT (longest 10%), s", records.tbt, slo.tbt),
    ):
        known = np.sort(values[np.isfinite(values)])
        if len(known):
            axes.plot(known, np.arange(1, len(known) + 1) / len(known))
        if limit is not None:
            axes.axvline(limit, color="0.6", linestyle="--")
        axes.set(xlabel=name, ylabel="share of requests", ylim=(0, 1.02))
    if len(records.arrival):
        third.set(xlabel="seconds", ylabel="requests/s")
        good = effective(records, slo)
        edges = np.linspace(records.arrival.min(), max(records.arrival.max(), records.arrival.min() + 1e-9), BINS + 1)
        middle, width = (edges[1:] + edges[:-1]) / 2, edges[1] - edges[0]
        for label, chosen in (("offered", np.ones_like(good)), ("effective", good)):
            third.plot(middle, np.histogram(records.arrival[chosen], edges)[0] / width, label=label)
        third.set_ylim(bottom=0)
        third.legend()
    for name in ("prefill load", "decode load"):
        if name in report.series:
            fourth.plot(*report.series[name], label=name)
    load = bool(fourth.lines)
    if not load and "running" in report.series:
        # Nobody has told a client of loads.
        fourth.step(*report.series["running"], where="post", label="running")
    if fourth.lines:
        fourth.legend()
    fourth.set(xlabel="seconds", ylabel="load (1: the objective)" if load else "requests")
    _save(figure, path, _title(report.provenance))


def plot_curves(
    curves: Mapping[str, tuple[F64, F64, F64, F64]], names: tuple[str, str], path: Path, title: str
) -> None:
    """One curve per policy with its interval. curves: by name, (x, y, low, high). names: of both axes."""
    figure, axes = _figure(1, 1)
    for mark, (name, (x, y, low, high)) in zip(MARKS * (len(curves) // len(MARKS) + 1), curves.items(), strict=False):
        axes.errorbar(x, y, np.maximum(np.stack((y - low, high - y)), 0.0), marker=mark, capsize=3, label=name)
    axes.set(xlabel=names[0], ylabel=names[1])
    axes.set_ylim(bottom=0)
    axes.legend()
    _save(figure, path, title)


def plot_lines(
    lines: Mapping[str, Sequence[tuple[float, float]]], names: tuple[str, str], wanted: float, path: Path, title: str
) -> None:
    """What a search has seen: points by line, and the share that was wanted."""
    figure, axes = _figure(1, 1)
    for mark, (name, points) in zip(MARKS * (len(lines) // len(MARKS) + 1), lines.items(), strict=False):
        axes.plot(*np.array(sorted(points)).T, marker=mark, label=name)
    axes.axhline(wanted, color="0.6", linestyle="--")
    axes.set(xlabel=names[0], ylabel=names[1], ylim=(0, 1.02))
    axes.legend()
    _save(figure, path, title)


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    # Not pyplot: no window, no global state, and it draws where there is no display.
    figure_of: Callable[..., Any] = importlib.import_module("matplotlib.figure").Figure
    figure = figure_of(figsize=(5.5 * columns, 3.8 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns)


def _save(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize="small")
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise NoPlots(f"cannot write {path}: {error.strerror or error}") from None


def _title(provenance: Mapping[str, object]) -> str:
    return "\n".join(str(provenance[name]) for name in ("trace", "policy", "fidelity") if name in provenance)
