"""What all commands do alike: complaints in one sentence, outputs tried before the work, progress for who watches.

Exit status: 0 done, 1 done and the answer is no, 2 impossible as asked, 130 stopped by Ctrl-C (the report is partial).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyengine.config import ConfigError

from ..backends import BackendError
from ..links import LinkError
from ..policies import UnknownName
from ..report.plots import NoPlots
from ..sim.compute import ModelError
from ..sim.specfile import SpecError
from ..sim.trace import TraceError

IMPOSSIBLE = 2
INTERRUPTED = 130
#: Seconds between two looks at the progress: a person reads no faster; where each is a line of a log, fewer will do.
SHOW_EVERY, LINE_EVERY = 0.2, 10.0


class InputError(ValueError):
    """Something on the command line; one sentence that says what to do."""


#: What users can do something about. All else is a bug and shows its traceback.
WISHES = (InputError, BackendError, TraceError, SpecError, ModelError, UnknownName, NoPlots, LinkError, ConfigError)


def guarded(command: str, run: Callable[[], int]) -> int:
    """Runs a command; an impossible wish becomes one sentence on stderr and status 2."""
    try:
        return run()
    except WISHES as error:
        print(f"conductor {command}: error: {error}", file=sys.stderr)
        return IMPOSSIBLE
    except KeyboardInterrupt:
        # Before there was anything to report.
        print(f"conductor {command}: stopped", file=sys.stderr)
        return INTERRUPTED


def try_output(*paths: Path | None) -> None:
    """Raises InputError if one of these cannot be written: said now, and not after minutes of work."""
    for path in filter(None, paths):
        there = path.exists()
        try:
            with path.open("ab"):
                pass
            if not there:
                path.unlink()
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None


def write_text(path: Path | None, text: str) -> None:
    if path is not None:
        try:
            path.write_text(text)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def told(text: str) -> Iterator[None]:
    """Prints a report; within, files are written. Where nobody reads any more (`| head`), or nothing fits, they are all
    the same: InputError is raised behind them.
    """
    failure: OSError | None = None
    try:
        print(text, flush=True)
    except OSError as error:
        failure = error
        # What is left of it would be complained of once more when Python ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    yield
    if failure is not None:
        raise InputError(f"cannot write the report to stdout: {failure.strerror}")


class Watch:
    """Progress on stderr: overwritten on a terminal, a line now and then elsewhere if it was asked for."""

    def __init__(self, what: str, wanted: bool | None = None) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = self._terminal if wanted is None else wanted
        self._what = what
        self._begun = self._last = time.monotonic()
        self._width = 0

    def __call__(self, done: int, total: int | None, seconds: float | None = None) -> None:
        """total: None: not known. seconds: of the trace gone by."""
        now = time.monotonic()
        if not self._shown or now - self._last < (SHOW_EVERY if self._terminal else LINE_EVERY):
            return
        self._last = now
        self._say(self._line(done, total, seconds, now - self._begun))

    def close(self) -> None:
        """Leaves the terminal's line empty for what comes next."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0

    def _line(self, done: int, total: int | None, seconds: float | None, elapsed: float) -> str:
        of = "" if total is None else f" of {total:,}"
        parts = [f"{done:,}{of} {self._what}"]
        if seconds is not None:
            parts.append(f"{seconds:,.0f} s of the trace")
        parts.append(f"{elapsed:.0f} s")
        if total and done:
            parts.append(f"about {max(elapsed / done * (total - done), 0):.0f} s to go")
        return ", ".join(parts)

    def _say(self, line: str) -> None:
        if self._terminal:
            sys.stderr.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()
