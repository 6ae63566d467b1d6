"""A `pyengine serve` of its own, for benchmarks and system tests.

with Server("--both", "2", model="fake", backend="fake") as server:
    ...  # HTTP at server.base
    server.kill("both-0", signal.SIGKILL)
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

#: Seconds a server may take until it is healthy: a first start converts the model.
START_TIMEOUT = 120.0
#: Seconds a server may take until it is gone. It promises 5, or 9 with an SSD, on a machine that is not busy.
STOP_TIMEOUT = 30.0
#: Seconds between two looks at something that announces itself nowhere else.
POLL = 0.02

_TITLE = "pyengine: "
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


class ServerError(RuntimeError):
    """The server did not start, ended by itself or did not stop; the text has the tail of its log."""


class Server:
    """Context manager around one server process with all its parts.

    flags: command-line flags of `pyengine serve`, without --model, --backend, --host, --port and --state-dir.
    model, backend: as these flags. state_dir: None leaves the default (with the converted models).
    environment: variables to set beside the inherited ones.
    start_timeout: seconds until healthy with all workers the flags ask for. key: an API key of scope "all", for a
    server that asks for one.
    """

    def __init__(
        self,
        *flags: str,
        model: str = "smollm2",
        backend: str = "torch",
        state_dir: Path | str | None = None,
        environment: Mapping[str, str] | None = None,
        start_timeout: float = START_TIMEOUT,
        key: str = "",
    ) -> None:
        self.flags = flags
        self.port = free_port()
        cert = flags[flags.index("--tls-cert") + 1] if "--tls-cert" in flags else ""
        self.base = f"{'https' if cert else 'http'}://127.0.0.1:{self.port}"
        self._trusted = ssl.create_default_context(cafile=cert) if cert else None
        self._key = key
        self._start_timeout = start_timeout
        self._environment = {**os.environ, **(environment or {})}
        # Through child.py it dies with this process, also when that is killed and can stop nothing.
        tied = ("-m", "pyengine.child", "--parent", str(os.getpid()), "--name", "serve", "pyengine.cli", "serve")
        self._command = [sys.executable, *tied, "--model", model, "--backend", backend]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), *flags]
        if state_dir is not None:
            self._command += ["--state-dir", str(state_dir)]
        self._folder: Path | None = None
        self._log = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._parts: dict[str, int] = {}

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> Server:
        """Starts it and waits until it is healthy. Raises ServerError."""
        assert self._process is None, "a server is started once"
        self._folder = Path(tempfile.mkdtemp(prefix="served-"))
        with (self._folder / "log").open("wb") as log:
            # A session of its own: the terminal's Ctrl-C reaches the benchmark only, which then stops the server.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self.wait_workers(expected_workers(self.flags), self._start_timeout)
        except BaseException:
            self.destroy()
            raise
        return self

    def wait_workers(self, count: int, timeout: float = START_TIMEOUT) -> None:
        """Waits until /health is 200 and names at least `count` workers. Raises ServerError."""

        def enough() -> bool:
            status, body = self.get_json("/health")
            return status == 200 and len(body["workers"]) >= count

        self.wait_until(enough, timeout, f"healthy with {count} workers")

    def wait_until(self, condition: Callable[[], bool], timeout: float, what: str) -> None:
        """Polls while the server lives. A refused or broken connection is not yet. Raises ServerError."""
        limit = time.monotonic() + timeout
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if condition():
                    return
            self._assert_alive(what)
            if time.monotonic() > limit:
                raise ServerError(f"the server was not {what} within {timeout:g} s; its log ends:\n{self.tail()}")
            time.sleep(POLL)

    def stop(self, timeout: float = STOP_TIMEOUT, number: signal.Signals = signal.SIGINT) -> int:
        """Ctrl-C, or another signal; returns the exit status when the server and all its parts are gone (or were).

        Raises ServerError, after killing what is left, if that takes longer than `timeout` seconds.
        """
        if self._process is None:
            return 0
        parts = self._parts = self.children()
        limit = time.monotonic() + timeout
        try:
            self._process.send_signal(number)
            status = self._process.wait(timeout)
            while alive := [name for name, pid in parts.items() if is_alive(pid)]:
                if time.monotonic() > limit:
                    raise ServerError(f"{alive} outlived the server; its log ends:\n{self.tail()}")
                time.sleep(POLL)
        except subprocess.TimeoutExpired as error:
            left = f"still running: {sorted(self.children())}; its log ends:\n{self.tail()}"
            raise ServerError(f"the server did not stop within {timeout:g} s; {left}") from error
        finally:
            self.destroy()
        return status

    def destroy(self) -> None:
        """Kills everything and removes the log file (its text stays in `log`). Idempotent."""
        if self._process is None or self._folder is None:
            return
        # Parts whose launcher is gone are found no more, so those seen last count as well.
        parts = {*self._parts.values(), *self.children().values()}
        self._process.kill()
        self._process.wait()
        for pid in parts:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._log = self.log
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._process = None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
        else:
            print(self.tail(200))  # of use to whoever reads about the failure
            self.destroy()

    # -- what it says ----------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Of the launcher."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def log(self) -> str:
        """All it has printed."""
        if self._folder is None:
            return self._log
        return (self._folder / "log").read_text(errors="replace")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.splitlines()[-lines:])

    def get(self, path: str, timeout: float = 5.0) -> tuple[int, bytes]:
        """Status and body. Raises OSError if nobody answers."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        request = urllib.request.Request(self.base + path, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout, context=self._trusted) as response:
                return int(response.status), response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def get_json(self, path: str) -> tuple[int, Any]:
        status, body = self.get(path)
        return status, json.loads(body)

    def metrics(self) -> dict[str, float]:
        """All samples of /metrics: name with labels, as printed -> value."""
        status, body = self.get("/metrics")
        if status != 200:
            raise ServerError(f"/metrics answered {status}: {body.decode(errors='replace')}")
        samples = {}
        for line in body.decode().splitlines():
            if line and not line.startswith("#"):
                sample, _, value = line.rpartition(" ")
                samples[sample] = float(value)
        return samples

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of this name that carry these labels (0 if there is none)."""
        return select(self.metrics(), name, **labels)

    # -- its processes ---------------------------------------------------------------------------------------------

    def children(self) -> dict[str, int]:
        """Name of each part -> process id."""
        if self._process is None:
            return {}
        return {name: pid for pid, name in titles(self._process.pid).items()}

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal to a part; returns the process id it had. Raises KeyError, listing the parts."""
        parts = self.children()
        if name not in parts:
            raise KeyError(f"no part {name}; there are: {', '.join(sorted(parts))}")
        os.kill(parts[name], number)
        return parts[name]

    def wait_replaced(self, name: str, pid: int, timeout: float = 30.0) -> int:
        """Waits until the launcher has started a part again; returns its new process id. Raises ServerError."""
        self.wait_until(lambda: self.children().get(name, pid) != pid, timeout, f"restarting {name}")
        return self.children()[name]

    def _assert_alive(self, what: str) -> None:
        assert self._process is not None, "the server is not running"
        if (status := self._process.poll()) is not None:
            raise ServerError(
                f"the server ended with status {status} before it was {what}; its log ends:\n{self.tail()}"
            )


def free_port() -> int:
    """A TCP port of the loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def expected_workers(flags: tuple[str, ...]) -> int:
    """How many workers `pyengine serve` starts with these flags; 1 if a file says so."""
    if "--config" in flags:
        return 1
    counts = [int(flags[i + 1]) for i, flag in enumerate(flags) if flag in ("--prefill", "--decode", "--both")]
    return sum(counts) or 2


def select(samples: Mapping[str, float], name: str, **labels: str) -> float:
    """Sum over the samples of this name that carry these labels."""
    total = 0.0
    for sample, value in samples.items():
        family, _, rest = sample.partition("{")
        if family == name and labels.items() <= dict(_LABEL.findall(rest)).items():
            total += value
    return total


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def titles(root: int) -> dict[int, str]:
    """Living descendants of a process that are parts of pyengine: process id -> name."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            title = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
        except OSError:
            continue  # it ended between the listing and the look
        if state not in "ZX":
            parents[int(folder.name)] = int(parent)
            if title.startswith(_TITLE):
                names[int(folder.name)] = title.removeprefix(_TITLE)

    def below(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == root:
                return True
        return False

    return {pid: name for pid, name in names.items() if below(pid)}
