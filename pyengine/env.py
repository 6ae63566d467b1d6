"""The environment: the only file that reads it. Everything else is told by flags and files (see config.py)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

LOG_LEVELS = ("debug", "info", "warning", "error")


class Environment(msgspec.Struct, frozen=True):
    """What the process was started with.

    state_dir: secret, converted checkpoints; kept between runs (PYENGINE_STATE_DIR, else $XDG_STATE_HOME/pyengine, else
    ~/.local/state/pyengine). runtime_dir: parent of sockets, gone after a run ($XDG_RUNTIME_DIR, else the temporary
    folder). log_level: PYENGINE_LOG_LEVEL, one of LOG_LEVELS.
    """

    state_dir: Path
    runtime_dir: Path
    log_level: str


def read() -> Environment:
    """Reads the environment now. Raises ValueError for a log level that does not exist."""
    state = os.environ.get("PYENGINE_STATE_DIR")
    xdg_state = os.environ.get("XDG_STATE_HOME")
    state_dir = Path(state) if state else Path(xdg_state or "~/.local/state") / "pyengine"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    # A login session's runtime folder may be named and not exist (su, containers): the temporary folder always does.
    runtime_dir = Path(runtime) if runtime and os.access(runtime, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    log_level = os.environ.get("PYENGINE_LOG_LEVEL", "info").lower()
    if log_level not in LOG_LEVELS:
        raise ValueError(f"PYENGINE_LOG_LEVEL is {log_level!r}; set it to one of {', '.join(LOG_LEVELS)}")
    return Environment(state_dir.expanduser().absolute(), runtime_dir, log_level)


def limit_xla_threads(threads: int) -> None:
    """How many threads XLA computes with on a CPU: NPROC, read when its client is made, at the first use of JAX.

    XLA has no other way: its own choice is one for each core that the process may run on.
    """
    os.environ["NPROC"] = str(threads)


def xla_threads() -> int:
    """With how many threads XLA computes on a CPU."""
    limit = os.environ.get("NPROC", "")
    return int(limit) if limit.isdecimal() and int(limit) else len(os.sched_getaffinity(0))
