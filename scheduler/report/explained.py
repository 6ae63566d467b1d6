"""One decision as tables: who could have had the request, what each would have cost, and who got it."""

from __future__ import annotations

from ..explanation import UNSENT, Candidate, Explanation
from .table import Cell, cell, seconds, table


def explained(found: Explanation) -> str:
    """Everything that the decision rests on. `*` marks the choice."""
    which = f"request {found.request}, attempt {found.attempt}"
    if found.attempt == UNSENT:
        which = "a request that nobody has sent"
    facts = [
        f"{which}, at {found.at:,.3f} s on the conductor's clock",
        f"prompt of {found.prompt_tokens:,} tokens, {found.blocks:,} blocks may be reused, {found.best:,} are held by"
        " somebody",
    ]
    if found.policy:
        facts.append(f"policy {found.policy}")
    parts = ["\n".join(facts)]
    prefill = [c for c in found.candidates if c.prefills or c.role != "decode" or c.inlines]
    decode = [c for c in found.candidates if c.decodes or c.role != "prefill"]
    if prefill:
        parts.append("to prefill, blocks and seconds:\n" + _prefill(prefill, found.prefill))
    if decode:
        parts.append("to decode:\n" + _decode(decode, found.decode))
    terms = list(dict.fromkeys(name for candidate in found.candidates for name in candidate.terms))
    if terms:
        chosen = {found.prefill, found.decode}
        rows = [(_mark(c.worker, c.worker in chosen), *(c.terms.get(name) for name in terms)) for c in found.candidates]
        parts.append("the policy's own terms:\n" + table(("worker", *terms), rows))
    return "\n\n".join([*parts, verdict(found)])


def verdict(found: Explanation) -> str:
    """The decision in a sentence."""
    if found.refused:
        return f"refused: {found.refused}"
    fetch = ", and fetches there what it lacks" if found.fetch else ""
    same = found.prefill == found.decode
    where = f"{found.prefill} does all" if same else f"{found.prefill} prefills, {found.decode} decodes"
    because = f" ({found.why})" if found.why else ""
    foretold = f"TTFT {seconds(found.predicted_ttft)}, TBT {seconds(found.predicted_tbt)}"
    return f"chosen: {where}{fetch}{because}; foretold: {foretold}"


def _prefill(candidates: list[Candidate], chosen: str) -> str:
    rows: list[tuple[Cell, ...]] = []
    for c in candidates:
        coming = f"{c.coming} in {cell(c.coming_seconds)}" if c.coming else "-"
        barred = "" if c.prefills or c.inlines else c.masked or "not its role"
        inline = "inline only" if c.inlines and not c.prefills else ""
        rows.append(
            (_mark(c.worker, c.worker == chosen), c.node, c.device, c.dram, c.ssd, coming, c.queue, c.transfer, c.load,
             c.compute, c.ttft, c.correction, "" if c.measured else "guessed", barred or inline)
        )  # fmt: skip
    headers = ("worker", "node", "device", "dram", "ssd", "coming", "queue", "transfer", "load", "compute", "TTFT",
               "corrected by", "costs", "barred")  # fmt: skip
    return _without_empty(headers, rows)


def _decode(candidates: list[Candidate], chosen: str) -> str:
    rows: list[tuple[Cell, ...]] = [
        (_mark(c.worker, c.worker == chosen), c.node, c.running, c.free_pages, c.tbt, c.handoff,
         "" if c.decodes else c.masked or "not its role")
        for c in candidates
    ]  # fmt: skip
    return _without_empty(("worker", "node", "running", "free pages", "TBT", "hand-off", "barred"), rows)


def _mark(worker: str, chosen: bool) -> str:
    return f"* {worker}" if chosen else f"  {worker}"


def _without_empty(headers: tuple[str, ...], rows: list[tuple[Cell, ...]]) -> str:
    """Columns that say nothing of anybody are left out."""
    kept = [i for i in range(len(headers)) if any(row[i] not in ("", "-") for row in rows)]
    return table([headers[i] for i in kept], [[row[i] for i in kept] for row in rows], left=2)
