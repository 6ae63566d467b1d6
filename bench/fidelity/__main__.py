"""Live against simulated: the same trace, the same code, and how far one is from the other.

    python -m bench.fidelity               # JSON lines, and docs/fidelity.md
    python -m bench.fidelity --only fake   # one of the clusters, lines only
    python -m bench.fidelity --quick       # a minute; percentages of so few requests mean nothing

Ctrl-C ends it with a report of the turns that are over, called partial.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from bench.common import end_on_sigterm, line, note
from bench.fidelity.clusters import SETTINGS, quick
from bench.fidelity.document import document
from bench.fidelity.runs import Interrupted, comparisons
from bench.server import ServerError
from pyengine.scheduler.report.document import plain

ROOT = Path(__file__).parents[2]
INTERRUPTED = 130


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[setting.name for setting in SETTINGS], help="one of the clusters")
    parser.add_argument("--turns", type=int, help="traces, each through both (3; 1 if quick)")
    parser.add_argument("--quick", action="store_true", help="few workers, seconds, one turn")
    parser.add_argument(
        "--preferred",
        action="store_true",
        help="the live cluster and its client come before all else that runs here (niceness -20, if permitted); for a "
        "machine that others use meanwhile",
    )
    parser.add_argument("--out", type=Path, help="where the document goes (docs/fidelity.md if all is measured)")
    parser.add_argument("--json", type=Path, help="file for all that was found")
    arguments = parser.parse_args()
    turns = (1 if arguments.quick else 3) if arguments.turns is None else arguments.turns
    if turns < 1:
        parser.error(f"--turns must be at least 1, not {turns}")
    out = arguments.out
    if out is None and not arguments.only and not arguments.quick:
        out = ROOT / "docs" / "fidelity.md"
    for path in filter(None, (out, arguments.json)):
        if not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}")
    end_on_sigterm()
    settings = [setting for setting in SETTINGS if arguments.only in (None, setting.name)]
    if arguments.quick:
        settings = [quick(setting) for setting in settings]
    began, complete = time.monotonic(), False
    with comparisons(settings, arguments.preferred) as compared:
        try:
            for comparison in compared:
                comparison.prepare()
            for seed in range(1, 1 + turns):
                for comparison in compared:
                    comparison.turn(seed)
            complete = True
        except (Interrupted, KeyboardInterrupt):
            note("fidelity: stopped; what is over is reported")
        except (ServerError, RuntimeError, PermissionError) as error:
            print(f"fidelity: {error}", file=sys.stderr)
            return 1
    found = [comparison.found for comparison in compared]
    line("fidelity", "time", time.monotonic() - began, "s", complete=complete)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"complete": complete, "found": plain(found)}, indent=1))
    if out is not None:
        out.write_text(document(settings, found, complete=complete, preferred=arguments.preferred))
    return 0 if complete else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
