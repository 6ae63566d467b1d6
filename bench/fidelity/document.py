"""docs/fidelity.md: what differs first, then each cluster at each load, and what the figures rest on."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.fidelity.clusters import Setting
from bench.fidelity.costs import EVERY
from bench.fidelity.machine import GIVES_WAY
from bench.fidelity.runs import Found, Turn
from pyengine.scheduler.report.document import objectives
from pyengine.scheduler.report.table import cell

HEAD = """# Live against simulated

Written by `make fidelity`; not to be edited. The same generated trace goes to a cluster that `pyengine serve` has
started, over HTTP as `conductor replay` sends it, and through the simulator: same conductor, policy, batcher, pools,
heartbeats and costs. Each turn has a trace and a cluster of its own; a difference is (simulated - live) / live,
the median over the turns. TBT is the mean of the longest tenth of a request's gaps.
"""

PREFERRED = """Others used the machine meanwhile, so the live clusters and their client came before all else on it
(`--preferred`: niceness -20).
"""

BESIDE = f"""## What the figures rest on

* **The fake backend's steps** take what a cost model says, and the simulator has the same.
* **Computed steps.** The simulator is told how long they take by the workers that compute: their own fits (the same
  five coefficients that the conductor decides by, times what steps took on average by what was predicted), and what
  their loops spend beside the model, told every {EVERY:g} s while the load in question ran, and averaged. So what is
  compared is all but the speed of a matrix product: who computes what, when, with whom, and what that does to whoever
  waits. Where goodput peaks is sought with costs from a trace of its own.
* **Cores that are shared.** Each worker has a core; gateway, conductor, daemons and client have none of their own where
  there are no others. They are little, and a worker's step would let each of them wait for milliseconds: so workers
  give way to them (niceness {GIVES_WAY}). What they take of a core makes steps longer, and is in their costs.

## What the simulator does not model

* **HTTP, tokenization, detokenization and Python's loops.** What they cost one request alone is in four constants
  (above, with each cluster), measured on it while it was idle, once, and the same for all its turns and loads. What
  they cost more under load, as processes wait for a processor and one loop for the requests before it, is not: live
  tails are longer than simulated ones.
* **The granularity of sleep.** A worker of the fake backend keeps its steps' times to about 0.2 ms where it gets a
  processor at once; where it is woken late, the step is late. The tables of the machine say by how much a process was.
* **First contacts.** The first transfer between two nodes opens a session, the first request to a worker a connection.
  The seconds at the start of each load do not count, and do most of this.
* **When copies run.** A worker copies KV between its pool and its pages in its loop, between two steps. What that takes
  is in the overhead of the mean step; simulated, it is spread over all steps, live it is in some gaps and not in
  others.
* **Costs as they vary.** A simulated step takes what the cost model says; a computed one varies with the processor's
  caches, and with what else runs beside it. TBT is the mean of the longest tenth of a request's gaps, two or three of
  them here, so whatever varies makes it longer: with steps 10 % longer or shorter by chance, by about as much.
* **Messages that wait for a processor.** A token is late by what its gateway, or the client, waits for a core, and
  its gap is longer by that. Where two workers fill two cores ("own" near "of" in the table of the machine), that is
  some milliseconds often, and tens now and then ("late p99", "late max"): the machine sets the tail of gaps.
* **Chance.** Live messages overtake each other; a request that is routed differently meets another queue. Near the peak
  that moves tails of a few hundred requests by more than all of the above: the range over the turns shows it.

## What comparing has found

Each of these was a difference between live and simulated first, and is mended in what serves:

* A worker looks at messages and at what its pool answers between two steps only: a prompt that came while it computed
  waited for that step's end and, if there was something else to compute, for one step more: for an answer that takes
  0.2 ms. It waits for it now before it plans. Simulated, that makes the first token of short prompts 9 to 17 % sooner
  at workers that prefill and decode, and up to 3 % at those that prefill only.
* A batch of one took 37 ms on SmolLM2, a batch of two 25: a single row went through weights that are not packed. It
  goes through the packed ones now (22 ms).
* The first use of every 512 KV pages stopped a CPU worker for 0.85 s: numpy asks for huge pages, and a KV page lies in
  180 of them. It lies in small ones now.
* A client that asks for token ids had two at once, a gap too late, wherever a token ends in the middle of a character.
* A full garbage collection looked for 0.5 s through what a worker had imported.
"""

#: Beside those that are judged.
_MORE = ("tbt_mean p50", "tbt_mean p90", "second_gap p50", "second_gap p90", "hit")


def document(settings: Sequence[Setting], found: Sequence[Found], *, complete: bool, preferred: bool = False) -> str:
    parts = [HEAD]
    if preferred:
        parts.append(PREFERRED)
    if not complete:
        parts.append("**PARTIAL**: it was stopped; what follows is of the turns that were over.\n")
    parts.append(_differs(settings, found))
    parts += [_setting(setting, one) for setting, one in zip(settings, found, strict=True)]
    return "\n".join([*parts, BESIDE])


def median(turns: Sequence[Turn], name: str) -> float | None:
    """Of the differences that there are."""
    values = _relative(turns, name)
    return statistics.median(values) if values else None


def _differs(settings: Sequence[Setting], found: Sequence[Found]) -> str:
    lines, judged = [], 0
    for setting, one in zip(settings, found, strict=True):
        for load, turns in _loads(one).items():
            for name, limit in setting.limits.items():
                judged += 1
                difference = median(turns, name)
                if difference is None:
                    lines.append(f"* {setting.name}, {load}: {name} was not measured")
                elif abs(difference) > limit:
                    lines.append(f"* {setting.name}, {load}: {name} by {_percent(difference)} (limit {limit:.0%})")
    if not judged:
        return "No turn was over.\n"
    if not lines:
        return f"**Nothing differs** by more than its limit: {judged} figures are within.\n"
    return f"**What differs** by more than its limit, of {judged} figures:\n\n" + "\n".join(lines) + "\n"


def _setting(setting: Setting, found: Found) -> str:
    parts = [f"## {setting.about[0].upper()}{setting.about[1:]}\n"]
    if found.constants is not None:
        measured = "Measured by single requests on the idle cluster, which promised nothing then, for all turns"
        parts.append(f"{measured}: {found.constants.text}.\n")
    if found.curve:
        curve = ", ".join(f"{rate:g}: {cell(goodput)}" for rate, goodput in found.curve)
        parts.append(
            f"Simulated goodput (objectives: {objectives(setting.slo)}) by requests per second: {curve}. "
            f"It peaks at {found.peak:g} requests/s{_at_the_end(found)}.\n"
        )
    parts += [_load(setting, name, turns) for name, turns in _loads(found).items()]
    if found.turns:
        parts.append(_machine(found.turns))
    return "\n".join(parts)


def _load(setting: Setting, name: str, turns: Sequence[Turn]) -> str:
    counts = ", ".join(f"{turn.live.done} of {turn.live.requests}" for turn in turns)
    simulated = ", ".join(f"{turn.simulated.done} of {turn.simulated.requests}" for turn in turns)
    rows = [
        f"### {name[0].upper()}{name[1:]}: {turns[0].rate:.3g} requests/s\n",
        f"Done, turn by turn: {counts} live; {simulated} simulated. Seconds, shares, requests/s:\n",
        "| figure | live | simulated | difference | of the turns | limit | |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for figure in (*setting.limits, *_MORE):
        gaps = [gap for turn in turns for gap in turn.gaps if gap.name == figure]
        live = [gap.live for gap in gaps if gap.live is not None]
        other = [gap.simulated for gap in gaps if gap.simulated is not None]
        each, difference = _relative(turns, figure), median(turns, figure)
        limit = setting.limits.get(figure)
        verdict = "" if limit is None or difference is None else "within" if abs(difference) <= limit else "**differs**"
        shown = [cell(statistics.median(values)) if values else "-" for values in (live, other)]
        spread = f"{_percent(min(each))} to {_percent(max(each))}" if each else "-"
        rows.append(
            f"| {figure.replace('_', ' ')} | {shown[0]} | {shown[1]} | "
            f"{'-' if difference is None else _percent(difference)} | {spread} | "
            f"{'' if limit is None else f'{limit:.0%}'} | {verdict} |"
        )
    return "\n".join(rows) + "\n"


def _at_the_end(found: Found) -> str:
    return " or above: no higher rate was tried" if found.peak == found.curve[-1][0] else ""


def _machine(turns: Sequence[Turn]) -> str:
    rows = [
        "Whether the machine kept up: processors used by the cluster and its client, and by others; by how much a",
        "process that sleeps was woken late; requests that the client sent more than 10 ms late.\n",
        "| turn | own | others | of | late p50 | late p99 | late max | sent late |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for turn in {turn.seed: turn for turn in turns}.values():
        load = turn.load
        late = " | ".join(f"{1e3 * value:.2f} ms" for value in (load.late_p50, load.late_p99, load.late_max))
        rows.append(f"| {turn.seed} | {load.own:.2f} | {load.others:.2f} | {load.cores} | {late} | {turn.late_sent} |")
    notes = sorted({note for turn in turns for note in turn.notes})
    return "\n".join([*rows, "", *(f"* noted: {note}" for note in notes)]) + "\n"


def _loads(found: Found) -> dict[str, list[Turn]]:
    loads: dict[str, list[Turn]] = {}
    for turn in found.turns:
        loads.setdefault(turn.part, []).append(turn)
    return loads


def _relative(turns: Sequence[Turn], name: str) -> list[float]:
    return [gap.relative for turn in turns for gap in turn.gaps if gap.name == name and gap.relative is not None]


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"
