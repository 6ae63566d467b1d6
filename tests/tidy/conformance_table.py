"""Prints the conformance suite's table, transports x expectations, from a run of the Rust tests.

`python tests/tidy/conformance_table.py COMMAND...` runs cargo-nextest or `cargo test`, passes on what it prints, and
puts the table of that very run behind it; without a command it runs the suite alone. Fails if the command does, or if
the suite was not in it. What did not run is not said to have passed: rdma needs devices, which `make test-rdma` has.
"""

import re
import subprocess
import sys
from collections.abc import Iterable

# cargo-nextest: "PASS [   0.031s] ( 1/51) pyengine-transfer::conformance sim::paths_tell"; SKIP has no time.
NEXTEST = re.compile(r"^ *(?P<verdict>[A-Z][A-Z ]*?) +\[.*\] .*::conformance (?P<name>\w+::\w+)$")
# cargo: "Running tests/conformance.rs (...)", then "test sim::paths_tell ... ok".
PROGRAM = re.compile(r"^ +(Running|Doc-tests) (?P<program>\S*)")
CARGO = re.compile(r"^test (?P<name>\w+::\w+) \.\.\. (?P<verdict>\w+)")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")

PASSED, FAILED, SKIPPED = "ok", "FAILED", "not run"
#: A slow one has not ended; its end is told by another line.
VERDICTS = {"PASS": PASSED, "LEAK": PASSED, "ok": PASSED, "SLOW": "", "SKIP": SKIPPED, "ignored": SKIPPED}
SUITE = ("--package", "pyengine-transfer", "--test", "conformance")


def nextest() -> bool:
    """True if cargo-nextest is there."""
    return not subprocess.run(["cargo", "nextest", "--version"], capture_output=True, check=False).returncode


def results(lines: Iterable[str]) -> dict[tuple[str, str], str]:
    """Verdicts by transport and expectation; what failed once has failed."""
    verdicts: dict[tuple[str, str], str] = {}
    in_suite = False
    for coloured in lines:
        line = COLOURS.sub("", coloured.rstrip("\n"))
        if program := PROGRAM.match(line):
            in_suite = program["program"].endswith("conformance.rs")
        match = NEXTEST.match(line) or (CARGO.match(line) if in_suite else None)
        if match is None:
            continue
        transport, expectation = match["name"].split("::")
        verdict = VERDICTS.get(match["verdict"], FAILED)
        if verdict and verdicts.get((transport, expectation)) != FAILED:
            verdicts[transport, expectation] = verdict
    return verdicts


def table(verdicts: dict[tuple[str, str], str]) -> str:
    """As Markdown."""
    transports = sorted({transport for transport, _ in verdicts})
    rows = [["expectation", *transports], ["---"] * (1 + len(transports))]
    for expectation in sorted({expectation for _, expectation in verdicts}):
        cells = [verdicts.get((transport, expectation), SKIPPED) for transport in transports]
        cells = [
            "in the VM" if (transport, cell) == ("rdma", SKIPPED) else cell
            for transport, cell in zip(transports, cells, strict=True)
        ]
        rows.append([expectation.replace("_", " "), *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(1 + len(transports))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in padded)


def main(command: list[str]) -> int:
    """Runs the command, prints what it prints, then the table."""
    if not command:
        command = ["cargo", *(["nextest", "run"] if nextest() else ["test"]), "--no-fail-fast", *SUITE]
    if command[1:2] == ["nextest"]:
        command = [*command, "--status-level=skip"]  # Else it says nothing of what it leaves out.
    lines: list[str] = []
    # One pipe, as cargo says on stderr whose results follow on stdout.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        for line in running.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    verdicts = results(lines)
    if not verdicts:
        print(f"the conformance suite was not in this run: {' '.join(command)}", file=sys.stderr)
        return running.returncode or 1
    print(f"\nConformance of the transports, in this run (in the VM: by make test-rdma):\n\n{table(verdicts)}\n")
    return running.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
