"""Pictures of the tables: small PNG files. matplotlib is loaded when the first is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.paper import targets
from bench.paper.runs import F64, Outcome

Series = Mapping[str, tuple[F64, F64]]


def _figure(rows: int, columns: int, width: float, height: float, share: bool = False) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(rows, columns, figsize=(width, height), squeeze=False, sharex=share, sharey=share)
    return figure, panels


def _finish(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def distributions(outcomes: Mapping[tuple[str, str, str], Outcome], path: Path) -> None:
    """Share of requests by TBT, by (decode model, workload, system); crosses: the paper's."""
    kinds = list(dict.fromkeys(kind for kind, _, _ in outcomes))
    figure, panels = _figure(len(kinds), len(targets.WORKLOADS), 12, 3.5 * len(kinds))
    for row, kind in enumerate(kinds):
        for panel, workload in zip(panels[row], targets.WORKLOADS, strict=True):
            for name in targets.SYSTEMS:
                if (kind, workload, name) not in outcomes:
                    continue
                values = np.sort(outcomes[kind, workload, name].tbt()) * 1000
                (drawn,) = panel.plot(values, np.arange(1, len(values) + 1) / len(values) * 100, label=name)
                panel.plot(targets.TBTS_MS, targets.TBT_SHARE[workload][name], "x", color=drawn.get_color())
            panel.set(title=f"{workload}, {kind} decode", xlim=(0, 600), ylim=(0, 101))
            panel.set(xlabel="TBT ms (x: paper)", ylabel="% of requests")
            panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    _finish(figure, path)


def panels(
    path: Path, xlabel: str, x: Sequence[float], lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
) -> None:
    """One panel for each measure: ours and the paper's."""
    figure, places = _figure(1, len(lines), 4 * len(lines), 3)
    for panel, (name, (ours, theirs)) in zip(places[0], lines.items(), strict=True):
        panel.plot(x, ours, "o-", label="ours")
        panel.plot(x, theirs, "x--", label="paper")
        panel.set(xlabel=xlabel, ylabel=name, ylim=(0, None))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    _finish(figure, path)


def over_time(path: Path, ylabel: str, curves: Series) -> None:
    figure, places = _figure(1, 1, 7, 3)
    for name, (seconds, values) in curves.items():
        places[0][0].plot(seconds, values, label=name, linewidth=1)
    places[0][0].set(xlabel="s", ylabel=ylabel)
    places[0][0].legend(fontsize=8)
    _finish(figure, path)


def loads(runs: Mapping[str, Series], curves: Sequence[str], path: Path) -> None:
    """Load of prefill and of decode over time, one panel for each admission."""
    figure, places = _figure(len(runs), 1, 9, 2 * len(runs), share=True)
    for (panel,), (name, series) in zip(places, runs.items(), strict=True):
        for curve in curves:
            seconds, values = series[curve]
            panel.plot(seconds, values * 100, label=curve, linewidth=0.8)
        panel.axhline(100, color="k", linewidth=0.5)
        panel.set_title(name, fontsize=9)
        panel.set(ylim=(0, 160), ylabel="%")
    places[0][0].legend(fontsize=8)
    places[-1][0].set(xlabel="s")
    _finish(figure, path)
