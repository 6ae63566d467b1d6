"""Every table and figure of the paper that a scheduler and a cache can be asked for, from the code that serves.

    python -m bench.paper                  # JSON lines; docs/paper.md and docs/paper/*.png are written anew
    python -m bench.paper --only split     # one of them, lines only

Each value stands beside the paper's, with their ratio (ours / paper) and a verdict: reproduced (within 10 %), near
(25 %) or differs. What differs is said first in docs/paper.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench.common import line, note
from bench.paper import caches
from bench.paper.figures import FIGURES, needed
from bench.paper.runs import Traces, carry_out
from bench.paper.tables import document

ROOT = Path(__file__).parents[2]
HEAD = """# The paper's tables, from the code that serves

Written by `make paper`; not to be edited. Conductor, policies, batcher, pools and eviction policies are those that
serve; compute, links and clocks are modelled (`scheduler/sim`). Costs: LLaMA3-70B on eight A800, the prefill fit of
the paper's own figures; decode twice, as calibrated to the gaps of its cluster runs and as single requests imply it.
Traces: those that its authors published, raw arrivals (on a grid of 3 s); the tool&agent trace was not, and is a
RECONSTRUCTION from what is known of it. One set of parameters for all figures, none tuned for one.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces", help="folder (%(default)s)")
    parser.add_argument("--only", action="append", help="one of the figures; may be given again")
    parser.add_argument("--processes", type=int, help="runs at once; by default one per core")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where paper.md goes (%(default)s)")
    arguments = parser.parse_args()
    traces = Traces(arguments.traces)
    if missing := traces.missing():
        print(f"paper: {missing[0]} is not there: say with --traces where the traces are", file=sys.stderr)
        return 2
    figures = [make() for make in FIGURES]
    known = [figure.name for figure in figures] + ["caches"]
    for name in arguments.only or ():
        if name not in known:
            print(f"paper: there is no figure {name!r}: known are {', '.join(known)}", file=sys.stderr)
            return 2
    figures = [figure for figure in figures if not arguments.only or figure.name in arguments.only]
    pictures = arguments.docs / "paper"
    pictures.mkdir(parents=True, exist_ok=True)

    import matplotlib

    matplotlib.use("Agg")
    began = time.monotonic()
    cases = needed(figures)
    outcomes = {}
    for case, outcome in carry_out(cases, arguments.traces, arguments.processes):
        outcomes[case] = outcome
        note(f"{len(outcomes)} of {len(cases)} runs, {time.monotonic() - began:.0f} s: {case.trace.name}")
    tables = [figure.make(outcomes, pictures) for figure in figures]
    if not arguments.only or "caches" in arguments.only:
        tables += caches.tables(arguments.traces)
    for table in tables:
        table.print()
    line("paper", "time", time.monotonic() - began, "s", runs=len(cases))
    if not arguments.only:
        (arguments.docs / "paper.md").write_text(document(tables, HEAD))
    return 0


if __name__ == "__main__":
    sys.exit(main())
