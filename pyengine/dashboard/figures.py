"""Numbers as people read them."""

from __future__ import annotations

import math

UNKNOWN = "–"


def count(value: float) -> str:
    return f"{value:,.0f}"


def seconds(value: float) -> str:
    """With three digits, in the unit that fits."""
    if math.isnan(value):
        return UNKNOWN
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1.0:
        return f"{value * 1e3:.3g} ms" if value < 0.9995 else "1 s"
    return f"{value:.2f} s" if value < 100.0 else f"{value:,.0f} s"


def size(value: float) -> str:
    """Bytes, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024.0:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100.0 else f"{value:.1f} {unit}"
        value /= 1024.0
    return f"{value:,.1f} TiB"


def percent(part: float, whole: float) -> str:
    return UNKNOWN if whole <= 0 or math.isnan(part) else f"{100.0 * part / whole:.0f} %"


def ago(value: float) -> str:
    """How long ago, in the grain that is of interest."""
    if value < 90.0:
        return f"{max(value, 0.0):.0f} s ago"
    return f"{value / 60.0:.0f} min ago" if value < 5400.0 else f"{value / 3600.0:.0f} h ago"
