"""Runs the conformance suite of the transports and prints its table: expectations x transports.

Run as `python tests/tidy/conformance_table.py`; it fails if an expectation does. Works with cargo-nextest and without.
"""

import re
import shutil
import subprocess
import sys

# cargo-nextest: "PASS [   0.031s] ( 1/51) pyengine-transfer::conformance sim::paths_tell".
NEXTEST = re.compile(r"^ *(?P<verdict>[A-Z]+) +\[.*\] .*::conformance (?P<name>\w+::\w+)$")
# cargo: "test sim::paths_tell ... ok".
CARGO = re.compile(r"^test (?P<name>\w+::\w+) \.\.\. (?P<verdict>\w+)$")


def command() -> list[str]:
    """The command that runs the suite."""
    nextest = shutil.which("cargo-nextest") is not None
    run = ["cargo", "nextest", "run", "--no-fail-fast"] if nextest else ["cargo", "test", "--no-fail-fast"]
    return [*run, "--color=never", "--package", "pyengine-transfer", "--test", "conformance"]


def results(output: str) -> dict[tuple[str, str], str]:
    """Verdicts by transport and expectation; what failed once has failed."""
    verdicts: dict[tuple[str, str], str] = {}
    for line in output.splitlines():
        if match := NEXTEST.match(line) or CARGO.match(line):
            transport, expectation = match["name"].split("::")
            # A slow one has not ended; its end is told by another line.
            passed = match["verdict"] in ("PASS", "LEAK", "SLOW", "ok")
            known = verdicts.get((transport, expectation), "ok")
            verdicts[transport, expectation] = known if passed else "FAILED"
    return verdicts


def table(verdicts: dict[tuple[str, str], str]) -> str:
    """As Markdown."""
    transports = sorted({transport for transport, _ in verdicts})
    rows = [["expectation", *transports], ["---"] * (1 + len(transports))]
    for expectation in sorted({expectation for _, expectation in verdicts}):
        cells = [verdicts.get((transport, expectation), "-") for transport in transports]
        rows.append([expectation.replace("_", " "), *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    """Prints the table, and all output if something failed."""
    done = subprocess.run(command(), capture_output=True, text=True, check=False)
    verdicts = results(done.stderr + "\n" + done.stdout)
    print(table(verdicts))
    if done.returncode or not verdicts:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    return done.returncode or int(not verdicts)


if __name__ == "__main__":
    sys.exit(main())
