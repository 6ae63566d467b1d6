"""`pyengine doctor`: is this machine fit to serve, and what is to be done. Exit status: 0, 1 if a check fails, 2."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pyengine import env, origins
from pyengine.commands.bundle import LOG_BYTES, write_bundle
from pyengine.commands.checks import Finding, Machine, examine, versions
from pyengine.commands.config import effective
from pyengine.config import ConfigError
from pyengine.scheduler.backends.http import Address, get

MARKS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    *,
    port: int = 8000,
    root: Path = Path("/"),
    json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    bundle: Path | None = None,
    url: str | None = None,
    log: tuple[Path, ...] = (),
) -> int:
    """Checks this machine, and says what to do about each finding.

    Parameters
    ----------
    port
        Where a gateway is to listen.
    root
        Folder that has proc, sys and dev of the machine (of a container's host, say).
    json
        As one JSON list of name, status, found and advice.
    bundle
        File (.tar.gz) for findings, versions, configuration, and what url and log give: without keys, secrets, prompts.
    url
        Gateway whose metrics go into the bundle.
    log
        File whose end goes into the bundle, as serve's output was kept in; may be given several times.
    """

    def run() -> int:
        state = origins.state_dir()
        findings = examine(Machine(state, port, root))
        if json:
            sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(findings), indent=1) + b"\n")
        else:
            show(findings)
        if bundle is not None:
            _pack(bundle, findings, state, url, log)
        elif url is not None or log:
            raise ConfigError("--url and --log are for a bundle: add --bundle FILE")
        return 1 if any(finding.status == "fail" for finding in findings) else 0

    from pyengine.cli import guarded

    return guarded("doctor", run)


def show(findings: list[Finding]) -> None:
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        found = Text(finding.found)
        if finding.advice:
            found.append("\n-> " + finding.advice, style="bold" if finding.status == "fail" else "")
        table.add_row(Text(finding.status, style=MARKS[finding.status]), finding.name, found)
    console.print(table)
    counts = {status: sum(finding.status == status for finding in findings) for status in MARKS}
    console.print("\n" + ", ".join(f"{count} {status}" for status, count in counts.items()))


def _pack(path: Path, findings: list[Finding], state: Path, url: str | None, logs: tuple[Path, ...]) -> None:
    """Raises ConfigError for what cannot be read or written."""
    texts = {str(log): _tail(log) for log in logs}
    metrics = None
    if url is not None:
        try:
            status, body = asyncio.run(get(Address(url, env.api_key()), "/metrics"))
        except OSError as error:
            raise ConfigError(f"no gateway answers at {url}: {error}; leave --url out, or start it") from None
        if status != 200:
            raise ConfigError(f"{url}/metrics answers {status}: set PYENGINE_API_KEY to a key of scope watch or all")
        metrics = body.decode(errors="replace")
    secrets = [env.api_key() or ""]
    with contextlib.suppress(OSError):
        secrets.append((state / "secret").read_text().strip())
    try:
        names = write_bundle(path, findings, effective("serve"), versions(), metrics, texts, secrets)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file") from None
    sys.stderr.write(f"{path} has {', '.join(names)}; look at it before you send it\n")


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
            return file.read(LOG_BYTES).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name a log file (--log)") from None
