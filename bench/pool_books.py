"""The books over blocks, with no memory behind them: how many lookups a second, how many bytes a block.

Runs `rust/transfer/examples/bookkeeping.rs` (the pool that serves, over the null tier) and says what it has found. 10
million keys; a lookup finds and pins a prefix of 64 blocks, a release lets go of it. `find` asks only whether a block
is there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from pathlib import Path

from bench.common import line, note

ROOT = Path(__file__).parents[1]
KEYS, QUICK_KEYS = 10_000_000, 1_000_000
#: What the pool uses, and what most others are like.
POLICIES = ("cost", "lru")


def rows(arguments: argparse.Namespace) -> None:
    """The lines of `bench.pool`. arguments: `quick`, `only`."""
    if arguments.only not in "books":
        return
    if shutil.which("cargo") is None:
        note("books: no cargo, which builds what is measured")
        return
    keys = QUICK_KEYS if arguments.quick else KEYS
    command = ["cargo", "run", "--quiet", "--release", "-p", "pyengine-transfer", "--example", "bookkeeping", "--"]
    run = subprocess.run([*command, str(keys), *POLICIES], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    for text in run.stdout.splitlines():
        found = json.loads(text)
        case = f"books {keys // 1_000_000}M {found['case']}"
        line("pool", case, found["value"], found["unit"], against=found.get("against"), ratio=found.get("ratio"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the keys")
    rows(argparse.Namespace(quick=parser.parse_args().quick, only=""))
