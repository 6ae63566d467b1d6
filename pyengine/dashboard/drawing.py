"""A view as HTML: what stands in each section of the page. Pure; all that comes from elsewhere is escaped."""

from __future__ import annotations

import math
import time
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from html import escape

from pyengine.dashboard.figures import UNKNOWN, ago, count, percent, seconds, size
from pyengine.dashboard.view import Curve, Node, Transfer, View, Worker
from pyengine.gateway.recent import Record

#: Of a curve, in its own units.
WIDTH, HEIGHT = 120, 28

TIER_NAMES = {
    "device": "worker's pages",
    "dram": "node's DRAM",
    "ssd": "node's SSD",
    "peer_dram": "another node's DRAM",
    "peer_ssd": "another node's SSD",
    "computed": "computed",
}


def sections(view: View, now: float) -> dict[str, str]:
    """The inside of each section by the id of its element. now: seconds since 1970."""
    return {
        "state": state(view),
        "head": head(view),
        "workers": workers(view),
        "nodes": nodes(view),
        "tiers": tiers(view),
        "transfers": transfers(view),
        "hot": hot(view),
        "promises": promises(view),
        "refusals": refusals(view),
        "requests": requests(view, now),
    }


def state(view: View) -> str:
    kind, text = ("bad", view.trouble) if view.trouble else ("good", "serving")
    names = ", ".join(view.models) or "no model"
    return f'<strong>{escape(names)}</strong> <span class="chip {kind}" role="status">{escape(text)}</span>'


def head(view: View) -> str:
    return "".join(_tile(curve) for curve in view.curves)


def workers(view: View) -> str:
    def row(worker: Worker) -> list[str]:
        if not worker.up:
            how = '<span class="chip bad">away</span>'
        elif worker.stalled > 10.0:
            how = f'<span class="chip bad">stands still for {seconds(worker.stalled)}</span>'
        else:
            how = '<span class="chip good">up</span>'
        return [
            escape(worker.name),
            how,
            escape(worker.role or UNKNOWN),
            escape(worker.node or UNKNOWN),
            escape(f"{worker.backend} {worker.dtype}".strip() or UNKNOWN),
            count(worker.running),
            count(worker.waiting),
            _bar(worker.pages, f"{100.0 * worker.pages:.1f} %"),
            f"{count(worker.rate)}/s",
        ]

    titles = ("worker", "state", "role", "node", "computes with", "running", "waiting", "pages used", "tokens")
    return _table(titles, map(row, view.workers), "No worker has dialled in yet.", numbers=(5, 6, 8))


def nodes(view: View) -> str:
    def row(node: Node) -> list[str]:
        slots = sum(node.dram.values())
        used = slots - node.dram.get("free", 0)
        states = ", ".join(f"{count(n)} {name}" for name, n in sorted(node.dram.items()) if n and name != "free")
        disk = UNKNOWN
        if node.ssd_limit:
            disk = _bar(node.ssd_used / node.ssd_limit, f"{size(node.ssd_used)} of {size(node.ssd_limit)}")
        trouble = ("", "SSD only reads", "SSD failed")[min(node.ssd_trouble, 2)]
        chip = f'<span class="chip bad">{escape(trouble or "away")}</span>' if trouble or not node.up else ""
        return [
            escape(node.name),
            chip or '<span class="chip good">up</span>',
            _bar(used / slots if slots else 0.0, f"{count(used)} of {count(slots)} blocks"),
            escape(states or "empty"),
            disk,
            count(node.known_blocks),
            count(node.grants_waiting),
            f"{size(node.received)}/s",
            f"{size(node.sent)}/s",
        ]

    titles = ("node", "state", "DRAM", "of these", "SSD", "blocks indexed", "grants waiting", "receives", "sends")
    return _table(titles, map(row, view.nodes), "No node's daemon has reported yet.", numbers=(5, 6, 7, 8))


def tiers(view: View) -> str:
    whole = sum(view.tiers.values())
    if not whole:
        return _nothing("Where the tokens of prompts were found will be here, once there was a prompt.")
    parts = "".join(
        f'<span class="part {name}" style="flex-grow:{tokens}" title="{escape(TIER_NAMES[name])}"></span>'
        for name, tokens in view.tiers.items()
        if tokens
    )
    legend = "".join(
        f'<li><span class="swatch {name}"></span>{escape(TIER_NAMES[name])} <b>{count(tokens)}</b> '
        f"<small>{percent(tokens, whole)}</small></li>"
        for name, tokens in view.tiers.items()
    )
    return f'<div class="stack" aria-hidden="true">{parts}</div><ul class="legend">{legend}</ul>'


def transfers(view: View) -> str:
    def row(transfer: Transfer) -> list[str]:
        return [
            escape(transfer.node),
            escape(transfer.transport),
            escape(transfer.direction),
            count(transfer.blocks),
            size(transfer.bytes),
            f"{size(transfer.rate)}/s",
        ]

    titles = ("node", "transport", "direction", "blocks", "bytes", "just now")
    return _table(titles, map(row, view.transfers), "No block has been handed over yet.", numbers=(3, 4, 5))


def hot(view: View) -> str:
    rows = (
        [
            f"<code>{prefix.key.hex()[:12]}</code>",
            count(prefix.blocks * view.block_tokens),
            f"{prefix.heat:.1f}",
            ago(prefix.ago),
            escape(", ".join(prefix.nodes) or "nobody any more"),
        ]
        for prefix in view.hot
    )
    titles = ("prefix", "tokens", "heat", "last reused", "held by")
    return _table(titles, rows, "A prefix that requests share will be here once it is reused.", numbers=(1, 2))


def promises(view: View) -> str:
    if not view.promised:
        setting = "<code>--slo-ttft</code> and <code>--slo-tbt</code> set objectives"
        return _nothing(f"Nothing was promised to the answers so far: {setting}.")
    share = view.kept / view.promised
    text = f"{count(view.kept)} of {count(view.promised)} answers were within what was promised"
    return f"{_bar(share, f'{100.0 * share:.1f} %', good=True)}<p>{text}.</p>"


def refusals(view: View) -> str:
    rows = ([escape(each.who), escape(each.reason), count(each.count)] for each in view.refusals if each.count)
    return _table(("by", "reason", "requests"), rows, "Nothing was refused, and nothing failed.", numbers=(2,))


def requests(view: View, now: float) -> str:
    def row(record: Record) -> list[str]:
        first = record.choices[0]
        went = " → ".join(dict.fromkeys(name for name in (first.prefill, first.decode) if name)) or UNKNOWN
        link = f"/dashboard/requests/{urllib.parse.quote(record.number, safe='')}"
        return [
            f'<a href="{link}"><code>{escape(_short(record.number))}</code></a>',
            ago(now - record.when),
            _end(record.end),
            f"{count(record.prompt)} <small>{percent(record.cached, record.prompt)} cached</small>",
            count(record.completion),
            seconds(first.parts.get("ttft", math.nan)),
            seconds(first.tbt),
            seconds(max(choice.total for choice in record.choices)),
            escape(went) + (f" <small>{record.retries} retries</small>" if record.retries else ""),
            escape(record.tenant or UNKNOWN),
        ]

    titles = ("request", "came", "end", "prompt", "answer", "TTFT", "TBT", "in all", "went to", "tenant")
    empty = "Requests will be here as they come. Try one below."
    return _table(titles, map(row, view.requests), empty, numbers=(3, 4, 5, 6, 7))


# -- pieces ------------------------------------------------------------------------------------------------------------


def _tile(curve: Curve) -> str:
    if math.isnan(curve.value):
        value, unit = UNKNOWN, ""
    elif curve.unit == "s":
        value, _, unit = seconds(curve.value).partition(" ")
    elif curve.unit == "B/s":
        value, _, unit = f"{size(curve.value)}/s".partition(" ")
    else:
        value, unit = count(curve.value), curve.unit
    return (
        f'<div class="tile"><h3>{escape(curve.name)}</h3><p><b>{value}</b> {escape(unit)}</p>'
        f"{_curve(curve.points)}<small>{escape(curve.hint)}</small></div>"
    )


def _curve(points: Sequence[float]) -> str:
    """A line from the left, whose highest point touches the top."""
    top = max(points, default=0.0) or 1.0
    step = WIDTH / max(len(points) - 1, 1)
    line = " ".join(f"{at * step:.1f},{HEIGHT - 2 - value / top * (HEIGHT - 4):.1f}" for at, value in enumerate(points))
    return (
        f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f'<polyline points="{line}"/></svg>'
    )


def _bar(part: float, text: str, good: bool = False) -> str:
    part = min(max(part, 0.0), 1.0)
    kind = " full" if part > 0.9 and not good else ""
    return f'<span class="bar{kind}"><i style="width:{100.0 * part:.1f}%"></i></span> <small>{escape(text)}</small>'


def _end(end: str) -> str:
    if not end:
        return '<span class="chip">under way</span>'
    good = set(end.split(",")) <= {"stop", "length", "tool_calls"}
    return f'<span class="chip {"good" if good else "bad"}">{escape(end)}</span>'


def _short(number: str) -> str:
    return number if len(number) <= 14 else number[:12] + "…"


def _nothing(text: str) -> str:
    """text: HTML."""
    return f'<p class="nothing">{text}</p>'


def _table(titles: Sequence[str], rows: Iterable[list[str]], empty: str, numbers: Sequence[int] = ()) -> str:
    """rows: HTML of cells. numbers: columns whose cells are numbers. Narrow screens show a row as a card, so each cell
    has its title.
    """
    kinds = [' class="number"' if column in numbers else "" for column in range(len(titles))]
    heads = "".join(f'<th scope="col"{kind}>{escape(title)}</th>' for title, kind in zip(titles, kinds, strict=True))
    cell: Callable[[int, str], str] = lambda column, html: (  # noqa: E731
        f'<td{kinds[column]} data-title="{escape(titles[column])}">{html}</td>'
    )
    body = "".join(f"<tr>{''.join(cell(at, html) for at, html in enumerate(row))}</tr>" for row in rows)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>" if body else _nothing(escape(empty))


def when(moment: float) -> str:
    """Seconds since 1970, as this machine's clock shows them."""
    return time.strftime("%H:%M:%S", time.localtime(moment))
