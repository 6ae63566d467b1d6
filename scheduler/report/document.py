"""A report for machines (JSON) and for people (text). What a number rests on is always beside it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ..sim.report import Report
from ..types import Slo
from .summary import Spread, Summary
from .table import cell, percent, seconds, table

#: Of the JSON's layout; a change that a reader would stumble over raises it.
FORMAT = 1


def document(report: Report, summary: Summary, slo: Slo) -> dict[str, Any]:
    """Everything of a run, for `json.dumps`: NaN and infinities are null."""
    records = {field.name: getattr(report.records, field.name) for field in dataclasses.fields(report.records)}
    return {
        "format": FORMAT,
        "complete": report.complete,
        "provenance": plain(report.provenance),
        "slo": plain(slo),
        "summary": plain(summary),
        "totals": plain(report.totals),
        "notes": list(report.notes),
        "digest": report.digest,
        "series": {name: {"seconds": plain(x), "values": plain(y)} for name, (x, y) in report.series.items()},
        "workers": report.workers,
        "records": {name: plain(column) for name, column in records.items()},
    }


def dumps(value: object) -> str:
    return json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def plain(value: Any) -> Any:
    """The same in dicts, lists, strings and finite numbers."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return [plain(item) for item in value.tolist()]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(getattr(value, "value", value))


def text(report: Report, summary: Summary, slo: Slo) -> str:
    """A run on one screen."""
    s = summary
    parts = []
    if not report.complete:
        parts.append(f"PARTIAL: stopped early, judged by the {s.requests:,} requests that had come to an end.")
    parts += [provenance(report.provenance), _outcomes(s, slo), _times(s)]
    parts.append(_cache(s))
    parts += [f"note: {note}" for note in report.notes]
    parts.append(f"digest: {report.digest}")
    return "\n\n".join(part for part in parts if part)


def provenance(facts: Mapping[str, object]) -> str:
    """One fact a line. What is nested stands in the JSON as a whole; here, a cluster by its workers, else what fits."""
    if not facts:
        return ""
    shown = {"cluster": _workers, "cost models": _models}
    lines = {name: shown.get(name, _short)(plain(value)) for name, value in facts.items()}
    # How it was scheduled is said by names of its own: policy, admission, seed.
    lines.pop("run", None)
    width = max(len(name) for name in lines)
    return "\n".join(f"{name.ljust(width)}  {line}" for name, line in lines.items())


def _models(found: Any) -> str:
    """By name, and what each is of."""
    if not isinstance(found, dict):
        return _short(found)
    about = {name: model.get("about", "") if isinstance(model, dict) else model for name, model in found.items()}
    return "; ".join(f"{name} ({what})" for name, what in about.items())


def _workers(found: Any) -> str:
    """The shape of a cluster: "8 prefill + 8 decode of llama3-70b-a800"."""
    if not isinstance(found, dict) or "workers" not in found:
        return _short(found)
    groups = [f"{worker['count']} {worker['role']}" for worker in found["workers"]]
    kinds = dict.fromkeys(str(worker["model"]).rpartition("/")[2] for worker in found["workers"])
    return f"{' + '.join(groups)} of {', '.join(kinds)}"


def _short(value: Any, limit: int = 160) -> str:
    match value:
        case dict():
            shown = "; ".join(f"{name}: {_short(item, limit)}" for name, item in value.items())
        case list():
            shown = ", ".join(_short(item, limit) for item in value) or "-"
        case float():
            shown = f"{value:g}"
        case None:
            shown = "-"
        case _:
            shown = str(value)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def objectives(slo: Slo) -> str:
    named = [f"{name} {seconds(value)}" for name, value in _limits(slo) if value is not None]
    return ", ".join(named) or "none"


def _limits(slo: Slo) -> tuple[tuple[str, float | None], ...]:
    return (("TTFT", slo.ttft), ("TBT", slo.tbt), ("deadline", slo.deadline))


def _outcomes(s: Summary, slo: Slo) -> str:
    rows: list[tuple[str, str | int | float]] = [
        ("requests", s.requests),
        ("done", s.done),
        ("rejected", s.rejected),
        ("dropped late", s.dropped),
        ("not over", s.unfinished),
        ("prefilled in vain", s.wasted),
        ("offered", f"{cell(s.offered)} /s"),
        ("effective", percent(s.effective)),
        ("goodput", f"{cell(s.goodput)} /s"),
        ("within TTFT", percent(s.met_ttft)),
        ("within TBT", percent(s.met_tbt)),
    ]
    return table(("requests", f"objectives: {objectives(slo)}"), rows)


def _times(s: Summary) -> str:
    named = (("TTFT", s.ttft), ("TBT, longest 10%", s.tbt), ("TBT, mean", s.tbt_mean), ("second gap", s.second_gap))
    return table(
        ("seconds", "count", "mean", "p10", "p50", "p90", "p99", "max"), [(name, *_row(value)) for name, value in named]
    )


def _row(value: Spread) -> tuple[int | float | None, ...]:
    return (value.count, value.mean, value.p10, value.p50, value.p90, value.p99, value.max)


def _cache(s: Summary) -> str:
    rows = [("in all", percent(s.hit)), *((tier, percent(share)) for tier, share in s.hits.items())]
    facts = [
        f"prefill {seconds(s.prefill_seconds)} of a worker for each request",
        f"{cell(s.output_rate)} tokens/s answered",
    ]
    if s.ttft_error is not None and s.ttft_bias is not None:
        sign = "+" if s.ttft_bias >= 0 else ""
        facts.append(f"TTFT foretold within {percent(s.ttft_error)} (bias {sign}{percent(s.ttft_bias)})")
    return table(("prompt tokens reused", "share"), rows) + "\n\n" + "; ".join(facts)
