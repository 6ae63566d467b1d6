"""The environment: the only file that reads it. Everything else is told by flags and files (see config.py)."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import msgspec

LOG_LEVELS = ("debug", "info", "warning", "error")
#: Of every variable of ours: PYENGINE_DRAM_BYTES is the setting dram_bytes.
PREFIX = "PYENGINE_"
#: What is no setting of a process: the level of its log, the file of its settings, the key of a client.
OTHERS = ("log_level", "config", "api_key")
#: Variables of the tests, which change nothing here.
TESTS = "test_"
#: What Kubernetes gives to the containers beside a Service called pyengine or pyengine-...: its address, in the form of
#: Docker's old links. An address is no port, so a port that somebody has set is told apart by its value.
_SERVICE = re.compile(
    r"(\w+_)?(service_host|service_port(_\w+)?|port_\d+_(tcp|udp|sctp)(_proto|_port|_addr)?)", re.ASCII
)
_SERVICE_PORT = re.compile(r"(\w+_)?port=(tcp|udp|sctp)://.*", re.ASCII)


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


def settings() -> dict[str, str]:
    """Settings by name (`dram_bytes`) as PYENGINE_... has them, whether there is such a setting or not.

    An empty variable is none: that is how a shell takes one back for one command. Nor is what Kubernetes puts there.
    """
    named = {name.removeprefix(PREFIX).lower(): text for name, text in os.environ.items() if name.startswith(PREFIX)}
    return {
        name: text
        for name, text in named.items()
        if text and name not in OTHERS and not name.startswith(TESTS) and not _is_of_a_service(name, text)
    }


def _is_of_a_service(name: str, text: str) -> bool:
    return bool(_SERVICE.fullmatch(name) or _SERVICE_PORT.fullmatch(f"{name}={text}"))


def variable(name: str) -> str:
    """How the environment calls a setting."""
    return PREFIX + name.upper()


def config_file() -> Path | None:
    """The file of settings where no flag names one (PYENGINE_CONFIG)."""
    text = os.environ.get(variable("config"))
    return Path(text) if text else None


def api_key() -> str | None:
    """The key that a client of a gateway shows (PYENGINE_API_KEY). No flag has it: other users see flags."""
    return os.environ.get(variable("api_key")) or None


def for_children() -> dict[str, str]:
    """The environment without settings: what a launcher was told by it, its children are told by their files."""
    kept = {variable(name) for name in ("state_dir", "log_level")}
    return {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(PREFIX) or name in kept or name.startswith(variable(TESTS))
    }


def limit_xla_threads(threads: int) -> None:
    """How many threads XLA computes with on a CPU: NPROC, read when its client is made, at the first use of JAX.

    XLA has no other way: its own choice is one for each core that the process may run on.
    """
    os.environ["NPROC"] = str(threads)


def xla_threads() -> int:
    """With how many threads XLA computes on a CPU."""
    limit = os.environ.get("NPROC", "")
    return int(limit) if limit.isdecimal() and int(limit) else len(os.sched_getaffinity(0))
