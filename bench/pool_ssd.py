"""The SSD tier beside fio and beside a bare loop: rows of `bench/pool.py`.

All write and read files on one file system, past the page cache, with 16 requests under way, in turns whose order
changes; the median turn counts. What they write lies there already and is overwritten, as it is on a disk that has been
full once. Every 64 MiB there is a sync (the tier's segments end there), and one at the end. The tier verifies what it
reads, the others do not.

fio:   with io_uring or libaio, whichever the machine has; left out, with a line that says so, where it is not installed
limit: 16 threads with pwrite and pread over one file (rust/transfer/examples/ssd.rs)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.common import line, median, note

ROOT = Path(__file__).parents[1]
KIB, MIB, PAGE = 1 << 10, 1 << 20, 4096
DEPTH = 16
#: Bytes of a turn and of all files of a contender. The tier's limit is a quarter more: it always empties a segment.
TURN, QUICK_TURN, ALL = 256 * MIB, 128 * MIB, 1024 * MIB
LIMIT = ALL // 4 * 5
#: Where the tier syncs: the bytes of its segments (`segment_bytes` in pool/disk/mod.rs, for this limit).
SEGMENT = 64 * MIB
#: Blocks of the restart, and a tenth of them for `--quick`.
BLOCKS, QUICK_BLOCKS = 100_000, 10_000

#: One turn: seconds.
Turn = Callable[[], float]


class Tier:
    """The example's process, which has a tier on a directory."""

    def __init__(self, stack: ExitStack, program: Path, folder: Path, limit: int, block: int) -> None:
        command = [str(program), str(folder), str(limit), str(block)]
        pipe = subprocess.PIPE
        self._process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        stack.callback(self._process.terminate)

    def turn(self, *words: object) -> dict[str, Any]:
        """What it says of a turn."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the tier's process has ended in the turn {words}")
        result: dict[str, Any] = json.loads(answer)
        return result

    def seconds(self, *words: object) -> float:
        return float(self.turn(*words)["seconds"])

    def end(self) -> None:
        """As a crash does."""
        self._process.kill()
        self._process.wait()


def rows(arguments: Namespace) -> None:
    """Prints them: those of `arguments.only`, with few and short turns if `arguments.quick`."""
    sizes = {"64KiB": 64 * KIB, "1MiB": MIB}
    kinds = ("write", "read", "randread")
    cases = {f"ssd {kind} {name}": (kind, block) for name, block in sizes.items() for kind in kinds}
    wanted = {case: of for case, of in cases.items() if arguments.only in case}
    restarts = [kind for kind in ("clean", "crash") if arguments.only in f"restart {kind}"]
    if not wanted and not restarts:
        return
    program = build()
    with ExitStack() as stack:
        base = os.environ.get("CARGO_TARGET_DIR", str(ROOT / "target"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pyengine-bench-", dir=base)))
        turns, size = (3, QUICK_TURN) if arguments.quick else (9, TURN)
        for name, block in sizes.items():
            ours = {case: kind for case, (kind, bytes_) in wanted.items() if bytes_ == block}
            if ours:
                with ExitStack() as inner:
                    speeds(inner, program, folder / name, ours, block, turns, size)
                shutil.rmtree(folder / name)
        if restarts:
            blocks = QUICK_BLOCKS if arguments.quick else BLOCKS
            restart(program, folder / "restart", restarts, blocks, 1 if arguments.quick else 3)


def build() -> Path:
    """Where the example is."""
    command = ["cargo", "build", "--quiet", "--release", "--package", "pyengine-transfer", "--example", "ssd"]
    subprocess.run(command, cwd=ROOT, check=True)
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release/examples/ssd"


def fio(folder: Path, kind: str, block: int, size: int) -> Turn | None:
    """A turn of fio's; `None` if it cannot be run."""
    if shutil.which("fio") is None:
        return None
    engines = subprocess.run(["fio", "--enghelp"], capture_output=True, text=True, check=False).stdout.split()
    if not (engine := next((name for name in ("io_uring", "libaio") if name in engines), None)):
        return None
    command = ["fio", "--name=turn", f"--filename={folder}/fio", f"--ioengine={engine}", "--direct=1", f"--bs={block}"]
    command += [f"--iodepth={DEPTH}", f"--size={ALL}", "--output-format=json"]

    def run(*more: str) -> dict[str, Any]:
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"fio: {done.stderr.strip()}")
        job: dict[str, Any] = json.loads(done.stdout)["jobs"][0]
        return job

    at = 0

    def once() -> float:
        nonlocal at
        at = (at + size) % ALL
        turn = [f"--rw={kind}", f"--io_size={size}", "--randrepeat=0"]
        if kind != "randread":
            turn += [f"--offset={at}", f"--size={ALL - at}"]
        if kind == "write":
            turn += [f"--fsync={SEGMENT // block}", "--end_fsync=1"]
        job = run(*turn)["write" if kind == "write" else "read"]
        return float(job["runtime"]) / 1e3 * size / float(job["io_bytes"])

    # So that it is there, and none of it is allocated in the measured time.
    if not (folder / "fio").exists():
        run("--rw=write", "--end_fsync=1")
    return once


def speeds(
    stack: ExitStack, program: Path, folder: Path, cases: dict[str, str], block: int, turns: int, size: int
) -> None:
    """The rows of one size of block."""
    folder.mkdir()
    tier = Tier(stack, program, folder / "tier", LIMIT, block)
    limit = Tier(stack, program, folder / "limit", LIMIT, block)
    for _ in range(2 * ALL // size):
        tier.turn("write", size, DEPTH)
    how = tier.turn("open")["io"]
    limit.turn("bare-read", block, DEPTH)
    for case, kind in cases.items():
        contenders: dict[str, Turn] = {
            "tier": lambda kind=kind: tier.seconds(kind, size, DEPTH),  # type: ignore[misc]
            "limit": lambda kind=kind: limit.seconds(f"bare-{kind}", size, DEPTH),  # type: ignore[misc]
        }
        if theirs := fio(folder, kind, block, size):
            contenders["fio"] = theirs
        else:
            note(f"{case}: fio is not installed, or has neither io_uring nor libaio")
        times = take_turns(contenders, turns)
        rate = size / times["tier"] / 1e9
        for name in sorted(contenders.keys() - {"tier"}):
            ratio = times[name] / times["tier"]
            line("pool", case, rate, "GB/s", against=name, ratio=ratio, theirs=size / times[name] / 1e9, io=how)


def take_turns(contenders: dict[str, Turn], turns: int) -> dict[str, float]:
    """The median turn of each; the order changes, as who comes first finds the disk rested."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(contenders[name]())
    return {name: median(measured) for name, measured in times.items()}


def restart(program: Path, folder: Path, kinds: list[str], blocks: int, turns: int) -> None:
    """How long a tier of so many blocks takes to be ready.

    clean: after a stop. crash: after a kill, the last segments have no footers. crash, no footers: none has one. Beside
    it the time in which all bytes of all segments can be read.
    """
    block = 64 * KIB
    limit = blocks * block // 4 * 5
    times: dict[str, list[float]] = {}
    found: dict[str, int] = {}

    def opened(case: str, end: str) -> None:
        with ExitStack() as stack:
            tier = Tier(stack, program, folder, limit, block)
            result = tier.turn("open")
            times.setdefault(case, []).append(float(result["seconds"]))
            found[case] = int(result["blocks"])
            if end == "write":
                # So that there are segments without footers.
                tier.turn("write", min(SEGMENT, blocks * block // 10), DEPTH)
                end = "kill"
            tier.end() if end == "kill" else tier.turn("close")

    with ExitStack() as stack:
        tier = Tier(stack, program, folder, limit, block)
        tier.turn("write", blocks * block, 64)
        tier.turn("close")
    for _ in range(turns):
        opened("restart clean", "write")
        opened("restart crash", "kill")
        for segment in (folder / "segments").iterdir():
            spoil(segment)
        opened("restart crash, no footers", "close")
        with ExitStack() as stack:
            times.setdefault("scan", []).append(Tier(stack, program, folder, limit, block).seconds("scan", DEPTH))
    scan = median(times.pop("scan"))
    for case, measured in times.items():
        if any(case.startswith(f"restart {kind}") for kind in kinds):
            value, clean = median(measured), case == "restart clean"
            against, ratio = ("1 s", 1 / value) if clean else ("scan", scan / value)
            theirs = 1.0 if clean else scan
            line("pool", f"{case} x64KiB", value, "s", against=against, ratio=ratio, theirs=theirs, blocks=found[case])
    shutil.rmtree(folder)


def spoil(segment: Path) -> None:
    """Overwrites the last page, where a footer ends."""
    with segment.open("r+b") as file:
        file.seek(max(0, segment.stat().st_size - PAGE))
        file.write(bytes(PAGE))
        os.fsync(file.fileno())
