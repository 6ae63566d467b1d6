"""One request as HTML: where its time went, and why it went where it went. Pure; all foreign text is escaped."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from pyengine.dashboard.drawing import when
from pyengine.dashboard.figures import UNKNOWN, count, percent, seconds
from pyengine.gateway.recent import Choice, Record
from pyengine.gateway.timing import FIRST_TOKEN_PARTS
from pyengine.scheduler.explanation import Candidate, Explanation

WIDTH = 800
ROW = 34

MEANING = {
    "tokenize": "chat template and tokenizer, at the gateway",
    "schedule": "until the conductor's plan came",
    "queue": "others came first, at the prefill worker",
    "load": "the prefix, from DRAM, SSD or a peer into pages",
    "prefill": "the rest of the prompt was computed",
    "return": "from the worker to the gateway",
    "handoff": "from the first token to the second: KV went to the decode worker",
    "decode": "all further tokens",
}


class Span(NamedTuple):
    """A part of a choice's time, in seconds from its arrival."""

    name: str
    begin: float
    end: float


def spans(choice: Choice) -> Iterator[Span]:
    """What it went through, one behind the other. Nothing before its first token."""
    at = 0.0
    for name in FIRST_TOKEN_PARTS:
        if name in choice.parts:
            yield Span(name, at, at + choice.parts[name])
            at += choice.parts[name]
    if "handoff" in choice.parts:
        apart = choice.prefill != choice.decode
        end = at + choice.parts["handoff"]
        yield Span("handoff" if apart else "decode", at, end)
        at = end
    if choice.parts and choice.total > at:
        yield Span("decode", at, choice.total)


def facts(record: Record) -> str:
    """The list at the top of the page."""
    tiers = ", ".join(
        f"{count(tokens)} from {tier.replace('_', ' ')}" for tier, tokens in record.tiers.items() if tokens
    )
    rows = [
        ("model", escape(record.model)),
        ("tenant", escape(record.tenant or UNKNOWN)),
        ("came at", when(record.when)),
        ("end", escape(record.end or "under way")),
        ("prompt", f"{count(record.prompt)} tokens"),
        ("reused", f"{percent(record.cached, record.prompt)}{f': {escape(tiers)}' if tiers else ''}"),
        ("answers", f"{len(record.choices)} of {count(record.completion)} tokens in all"),
        ("retries", count(record.retries)),
    ]
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in rows)


def timeline(choice: Choice) -> str:
    """A picture, and the same as a table."""
    parts = list(spans(choice))
    if not parts:
        lost = "".join(_lost(at, why) for at, why in choice.lost)
        return f'<p class="nothing">There is no first token yet, after {seconds(choice.total)}.</p><ul>{lost}</ul>'
    whole = max(choice.total, parts[-1].end, 1e-9)
    bars = "".join(
        f'<rect class="{span.name}" x="{span.begin / whole * WIDTH:.2f}" y="4" height="{ROW - 8}" '
        f'width="{max((span.end - span.begin) / whole * WIDTH, 1.0):.2f}">'
        f"<title>{span.name}: {seconds(span.end - span.begin)}</title></rect>"
        for span in parts
    )
    first = choice.parts["ttft"] / whole * WIDTH
    mark = f'<line class="mark" x1="{first:.2f}" x2="{first:.2f}" y1="0" y2="{ROW}"/>'
    marks = "".join(
        f'<line class="lost" x1="{at / whole * WIDTH:.2f}" x2="{at / whole * WIDTH:.2f}" y1="0" y2="{ROW}"/>'
        for at, _ in choice.lost
    )
    rows = "".join(
        f'<tr><th scope="row"><span class="swatch {span.name}"></span>{span.name}</th>'
        f'<td class="number" data-title="took">{seconds(span.end - span.begin)}</td>'
        f'<td class="number" data-title="of all">{percent(span.end - span.begin, whole)}</td>'
        f'<td data-title="is">{escape(MEANING[span.name])}</td></tr>'
        for span in parts
    )
    handoff = ", ".join(f"{name} {seconds(value)}" for name, value in choice.handoff.items())
    notes = f"<p><small>The hand-off, as the decode worker tells it: {escape(handoff)}.</small></p>" if handoff else ""
    lost = "".join(_lost(at, why) for at, why in choice.lost)
    held = choice.parts.get("held", 0.0)
    waited = f" (held for {seconds(held)}, as the second was promised soon behind it)" if held > 0.0 else ""
    return (
        f"<p>{_went(choice)}; first token after <b>{seconds(choice.parts['ttft'])}</b>{waited}"
        f"{_verdict(choice.ttft_kept)}, "
        f"TBT {seconds(choice.tbt)}{_verdict(choice.tbt_kept)}, in all {seconds(choice.total)}.</p>"
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {ROW}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(", ".join(f"{span.name} {seconds(span.end - span.begin)}" for span in parts))}">'
        f"{bars}{mark}{marks}</svg>"
        f'<table class="parts"><thead><tr><th scope="col">part</th><th scope="col" class="number">took</th>'
        f'<th scope="col" class="number">of all</th><th scope="col">is</th></tr></thead><tbody>{rows}</tbody></table>'
        f"{notes}{f'<ul>{lost}</ul>' if lost else ''}"
    )


def why(explanation: Explanation | None) -> str:
    """The candidates of a decision with every term."""
    if explanation is None:
        text = "The conductor remembers its latest 64 decisions: this one is not among them, or the conductor is away."
        return f'<p class="nothing">{text}</p>'
    if explanation.refused:
        text = f"Refused: {explanation.refused}"
    elif explanation.prefill == explanation.decode:
        text = f"{explanation.prefill} does both, of {len(explanation.candidates)} workers"
    else:
        text = f"{explanation.prefill} prefills, {explanation.decode} decodes, of {len(explanation.candidates)} workers"
    predicted = (
        f"policy <b>{escape(explanation.policy or UNKNOWN)}</b>; {count(explanation.prompt_tokens)} prompt tokens in "
        f"{count(explanation.blocks)} blocks, of which somebody holds {count(explanation.best)}; predicted TTFT "
        f"{_predicted(explanation.predicted_ttft)}, TBT {_predicted(explanation.predicted_tbt)}"
    )
    terms = sorted({name for candidate in explanation.candidates for name in candidate.terms})
    heads = "".join(f'<th scope="col"{kind}>{title}</th>' for title, kind, _ in _columns(terms))
    rows = "".join(_row(candidate, explanation, terms) for candidate in explanation.candidates)
    words = f"<p>{escape(explanation.why)}</p>" if explanation.why else ""
    fetches = "<p>The prefill node fetches what it lacks from others.</p>" if explanation.fetch else ""
    return (
        f"<p><b>{escape(text)}</b>; {predicted}.</p>{words}{fetches}"
        '<div class="wide" role="region" tabindex="0" aria-label="candidates"><table class="candidates">'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _columns(terms: list[str]) -> list[tuple[str, str, str]]:
    """Title, attribute, and what it means."""
    number = ' class="number"'
    return [
        ("worker", "", ""),
        ("node", "", ""),
        ("role", "", ""),
        *((title, number, "") for title in ("TTFT", "queue", "load", "transfer", "compute", "hand-off", "TBT")),
        *((title, number, "") for title in ("in pages", "in DRAM", "on SSD", "coming", "running", "free pages")),
        *((escape(name), number, "") for name in terms),
        ("not because", "", ""),
    ]


def _row(candidate: Candidate, explanation: Explanation, terms: list[str]) -> str:
    chosen = [
        part
        for part, name in (("prefill", explanation.prefill), ("decode", explanation.decode))
        if name == candidate.worker
    ]
    mark = f' <span class="chip good">{" + ".join(chosen)}</span>' if chosen else ""
    times = (
        candidate.ttft,
        candidate.queue,
        candidate.load,
        candidate.transfer,
        candidate.compute,
        candidate.handoff,
        candidate.tbt,
    )
    counts = (
        candidate.device,
        candidate.dram,
        candidate.ssd,
        candidate.coming,
        candidate.running,
        candidate.free_pages,
    )
    own = (candidate.terms.get(name) for name in terms)
    cells = [
        *(f'<td class="number">{seconds(value)}</td>' for value in times),
        *(f'<td class="number">{count(value)}</td>' for value in counts),
        *(f'<td class="number">{UNKNOWN if value is None else f"{value:.4g}"}</td>' for value in own),
    ]
    guessed = "" if candidate.measured else " <small>costs guessed</small>"
    return (
        f'<tr{" class=chosen" if chosen else ""}><th scope="row">{escape(candidate.worker)}{mark}{guessed}</th>'
        f"<td>{escape(candidate.node)}</td><td>{escape(candidate.role)}</td>{''.join(cells)}"
        f"<td>{escape(candidate.masked) or UNKNOWN}</td></tr>"
    )


def _predicted(value: float) -> str:
    return UNKNOWN if value < 0.0 else seconds(value)


def _went(choice: Choice) -> str:
    if choice.prefill == choice.decode:
        return f"<b>{escape(choice.prefill or UNKNOWN)}</b>"
    return f"prefill at <b>{escape(choice.prefill)}</b>, decode at <b>{escape(choice.decode)}</b>"


def _verdict(kept: bool | None) -> str:
    if kept is None:
        return ""
    return ' <span class="chip good">kept</span>' if kept else ' <span class="chip bad">missed</span>'


def _lost(at: float, reason: str) -> str:
    return f'<li><span class="chip bad">lost</span> after {seconds(at)}: {escape(reason)}</li>'
