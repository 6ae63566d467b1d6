"""Goal: the machines of docs/deployment.md serve as the page says. Method: its files and commands, started on three
addresses of the loopback; only paths, sizes, ports, model and backend are replaced.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest

from bench.server import free_port
from tests.certificate import make_certificate
from tests.waiting import until

from .pages import ROOT, Snippet, parse
from .shell import commands

PAGE = parse("docs/deployment.md", (ROOT / "docs/deployment.md").read_text())
FRONT, PREFILL, DECODE = "10.0.0.1", "10.0.0.2", "10.0.0.3"
PROGRAMS = {"conductor": "pyengine.scheduler.cli", "transferd": "pyengine._transferd", "pyengine": "pyengine.cli"}
#: Seconds. Generous: what takes longer never comes.
PATIENCE = 60.0


class Machines:
    """The page's three machines: folders below one, addresses of the loopback, ports that are free."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports: dict[str, int] = {}
        for host in (FRONT, PREFILL, DECODE):
            for place in ("etc", "run", "lib"):
                (folder / host / place).mkdir(parents=True, mode=0o700)

    def here(self, text: str, host: str) -> str:
        """Text of a file or a command of that machine, as it is for this one."""
        text = re.sub(r"((?:\d:|port = ))(\d{4})\b", lambda found: f"{found[1]}{self.port(found[2])}", text)
        text = re.sub(r"\b10\.0\.0\.(\d)\b", r"127.0.0.\1", text)
        for there, place in (("/etc/pyengine", "etc"), ("/run/pyengine", "run"), ("/var/lib/pyengine", "lib")):
            text = text.replace(there, str(self.folder / host / place))
        text = re.sub(r'"\d+GiB"', '"64MiB"', text)
        text = re.sub(r'^model = ".*"$', 'model = "fake"', text, flags=re.MULTILINE)
        return text.replace('backend = "torch"', 'backend = "fake"')

    def port(self, there: str) -> int:
        return self.ports.setdefault(there, free_port())

    def run(self, line: str, host: str) -> str:
        """A command that ends: what it says."""
        ran = subprocess.run(self._call(line, host), capture_output=True, text=True, timeout=PATIENCE, check=True)
        return ran.stdout

    @contextmanager
    def running(self, line: str, host: str) -> Iterator[None]:
        """A command that serves, from when it is ready."""
        program, *rest = self._call(line, host)
        reading, writing = os.pipe()
        log = self.folder / f"{line.split()[0]}-{line.split()[1]}-{host}.log"
        call = [sys.executable, "-m", "pyengine.child", "--parent", str(os.getpid()), "--name", "part", *rest[1:]]
        with log.open("wb") as out, os.fdopen(reading) as ready:
            started = subprocess.Popen(
                [*call, "--ready-fd", str(writing)], pass_fds=(writing,), stdout=out, stderr=subprocess.STDOUT
            )
            os.close(writing)
            try:
                assert ready.readline(), f"{program} {line}: {log.read_text()}"
                yield
            finally:
                started.terminate()
                started.wait(PATIENCE)

    def _call(self, line: str, host: str) -> list[str]:
        program, *arguments = shlex.split(self.here(line, host))
        return [sys.executable, "-m", PROGRAMS[program], *arguments]


def command(starts: str) -> str:
    [line] = {line for snippet in PAGE for line in commands(snippet) if line.startswith(starts)}
    return line


def files() -> Iterator[tuple[str, str, Snippet]]:
    """(name, machine, block) of each file that the page gives."""
    for snippet in PAGE:
        named = re.match(r"# (\S+\.toml), on (\S+)", snippet.text)
        if named:
            yield named[1], named[2], snippet


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    made = Machines(tmp_path)
    for name, host, snippet in files():
        (tmp_path / host / "etc" / name).write_text(made.here(snippet.text, host))
    for host in (FRONT, PREFILL, DECODE):
        secret = tmp_path / host / "etc" / "secret"
        secret.write_text("5c" * 32)
        secret.chmod(0o600)
    make_certificate(tmp_path / FRONT / "etc")
    return made


def test_three_machines_serve(machines: Machines) -> None:
    assert len(list(files())) == 5
    with ExitStack() as stack:
        for host in (PREFILL, DECODE):
            stack.enter_context(machines.running(command("transferd"), host))
        for host in (PREFILL, DECODE):
            stack.enter_context(machines.running(command("pyengine worker"), host))
        key = machines.run(command("pyengine keys add"), FRONT).split()[0]
        stack.enter_context(machines.running(command("pyengine gateway"), FRONT))
        # Last, though it stands first on the page: everybody else dials until it is there.
        stack.enter_context(machines.running(command("conductor serve"), FRONT))

        trusted = ssl.create_default_context(cafile=str(machines.folder / FRONT / "etc" / "cert.pem"))
        client = stack.enter_context(
            httpx2.Client(
                base_url=f"https://127.0.0.1:{machines.port('8443')}",
                verify=trusted,
                headers={"Authorization": f"Bearer {key}"},
                timeout=PATIENCE,
            )
        )
        until(lambda: client.get("/readyz").status_code == 200, "both workers are known", PATIENCE)
        asked = {"model": "fake", "prompt": "x" * 64, "max_tokens": 4}
        answer = client.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert client.post("/v1/completions", json=asked, headers={"Authorization": "Bearer x"}).status_code == 401
        health = client.get("/health?deep=1").json()
        assert json.dumps(health).count("prefill-0") and json.dumps(health).count("decode-0")
        for line in looks():
            assert machines.run(line.replace(" d.toml", " /etc/pyengine/transferd.toml"), PREFILL), line


def looks() -> list[str]:
    """What docs/operations.md and docs/transferd.md ask a running daemon, but for what names a block of its."""
    pages = ("docs/operations.md", "docs/transferd.md")
    shown = [snippet for page in pages for snippet in parse(page, (ROOT / page).read_text())]
    lines = [line for snippet in shown for line in commands(snippet) if re.search(r"^transferd [a-z]+ --config", line)]
    found = [line for line in lines if not re.search(r" [0-9a-f]{32}|--namespace", line)]
    assert {line.split()[1] for line in found} >= {"status", "keys", "verify", "quotas", "drain"}
    return found
