"""Every table and figure of the paper that a scheduler and a cache can be asked for, from the code that serves.

    python -m bench.paper                  # JSON lines; docs/paper.md and docs/paper/*.png are written anew
    python -m bench.paper --only split     # one of them, lines only
    python -m bench.paper --quick          # the first requests of each trace, lines only, nothing compared

Each value stands beside the paper's, with their ratio (ours / paper) and a verdict: reproduced (within 10 %), near
(25 %) or differs. What differs is said first in docs/paper.md. Without the traces a generated one stands for each of
them: all runs as well, and nothing is compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench.common import line, note
from bench.paper import caches
from bench.paper.figures import FIGURES, needed
from bench.paper.runs import carry_out
from bench.paper.tables import document
from bench.paper.traces import QUICK, Traces

ROOT = Path(__file__).parents[2]
HEAD = """# The paper's tables, from the code that serves

Written by `make paper`; not to be edited. Conductor, policies, batcher, pools and eviction policies are those that
serve; compute, links and clocks are modelled (`scheduler/sim`). Costs: LLaMA3-70B on eight A800, the prefill fit of
the paper's own figures; decode twice, as calibrated to the gaps of its cluster runs and as single requests imply it.
Traces: those that its authors published, raw arrivals (on a grid of 3 s); the tool&agent trace was not, and is a
RECONSTRUCTION from what is known of it, of which the first half hour is run. One set of parameters for all figures,
none tuned for one: they stand in `bench/paper/cases.py`, with what our conductor has that the paper's has not.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces", help="folder (%(default)s)")
    parser.add_argument("--only", action="append", help="one of the figures; may be given again")
    parser.add_argument("--quick", action="store_true", help=f"the first {QUICK} requests of each trace only")
    parser.add_argument("--processes", type=int, help="runs at once; by default one per core")
    parser.add_argument("--keep", type=Path, help="folder for outcomes: what was interrupted goes on from there")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where paper.md goes (%(default)s)")
    arguments = parser.parse_args()
    known = {figure.name: figure for figure in (make() for make in FIGURES)}
    for name in arguments.only or ():
        if name not in (*known, "caches"):
            print(f"paper: there is no figure {name!r}: known are {', '.join((*known, 'caches'))}", file=sys.stderr)
            return 2
    if arguments.processes is not None and arguments.processes < 1:
        print(f"paper: --processes must be 1 or more, not {arguments.processes}", file=sys.stderr)
        return 2
    traces = Traces.found(arguments.traces, arguments.quick)
    compares = traces.folder is not None and not arguments.quick
    writes = compares and not arguments.only
    if traces.folder is None:
        note(
            f"{arguments.traces} has no traces (--traces FOLDER): a generated one stands for each, nothing is compared"
        )
    elif arguments.quick:
        note(f"the first {QUICK} requests of each trace: nothing is compared")

    began = time.monotonic()
    figures = [figure for figure in known.values() if not arguments.only or figure.name in arguments.only]
    cases = needed(figures)
    outcomes = {}
    for case, outcome in carry_out(cases, traces, arguments.processes, arguments.keep):
        outcomes[case] = outcome
        note(f"{len(outcomes)} of {len(cases)} runs, {time.monotonic() - began:.0f} s: {case.trace.name}")
    pictures = arguments.docs / "paper" if writes else None
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
    tables = [figure.make(outcomes, pictures) for figure in figures]
    if not arguments.only or "caches" in arguments.only:
        tables += caches.tables(traces)
    for table in tables:
        if not compares:
            table.forget_paper()
        table.print()
    spent = sum(outcome.seconds for outcome in outcomes.values())
    line("paper", "time", time.monotonic() - began, "s", runs=len(cases), of_processors=spent)
    if writes:
        (arguments.docs / "paper.md").write_text(document(tables, HEAD))
    return 0


if __name__ == "__main__":
    sys.exit(main())
