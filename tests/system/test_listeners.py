"""Goal: nothing listens beyond this machine's loopback but who asks everybody for a secret.
Method: each listener that there is, told to listen everywhere: without a secret it refuses to start, with one it tells
nothing to who does not know it. And all sockets of a whole cluster are looked up in the kernel's tables.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pyengine import Pool, TransferEngine
from pyengine._native import GiveUpError
from pyengine.scheduler import links
from tests.system.conftest import PATIENCE, fake_server

EVERYWHERE = "0.0.0.0:0"


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text(secrets.token_hex(32))
    file.chmod(0o600)
    return file


DAEMON = ("--node", "n", "--dram-bytes", "1MiB", "--log", "off")


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("pyengine._transferd", (*DAEMON, "--listen", EVERYWHERE)),
        ("pyengine._transferd", (*DAEMON, "--socket", "SOCKET", "--http", EVERYWHERE)),
        (
            "pyengine.cli",
            ("gateway", "--host", "0.0.0.0", "--port", "0", "--conductor", "ipc://x", "--secret-file", "S"),
        ),
    ],
    ids=["data", "metrics", "gateway"],
)
def test_without_a_secret_it_does_not_start(
    module: str, arguments: tuple[str, ...], tmp_path: Path, secret: Path
) -> None:
    named = {"SOCKET": str(tmp_path / "s"), "S": str(secret)}
    ended = run(module, *(named.get(argument, argument) for argument in arguments))
    assert ended.returncode == 2, ended.stderr
    assert "127.0.0.1" in ended.stderr or "keys add" in ended.stderr, "it says what to do"


def test_engines_and_links_want_a_secret_too() -> None:
    import zmq

    with pytest.raises(GiveUpError, match="secret"):
        TransferEngine(EVERYWHERE, node="n")
    with pytest.raises(GiveUpError, match="secret"):
        Pool.open("16MiB", listen=EVERYWHERE)
    context: zmq.Context[Any] = zmq.Context()
    with context.socket(zmq.ROUTER) as router, pytest.raises(links.LinkError):
        links.bind(router, "tcp://0.0.0.0:*", None)
    context.term()


@contextmanager
def daemon(*arguments: str) -> Iterator[dict[str, Any]]:
    """Its ready line."""
    ready, told = os.pipe()
    tied = ("-m", "pyengine.child", "--parent", str(os.getpid()), "--name", "d", "pyengine._transferd")
    command = [sys.executable, *tied, *DAEMON, *arguments, "--drain-seconds", "0", "--ready-fd", str(told)]
    process = subprocess.Popen(command, pass_fds=(told,))
    os.close(told)
    try:
        with os.fdopen(ready) as line:
            yield json.loads(line.readline())
    finally:
        process.terminate()
        process.wait(PATIENCE)


def test_a_daemon_s_metrics_are_for_who_has_the_key(tmp_path: Path, secret: Path) -> None:
    key = run("pyengine._transferd", "watch-key", "--secret-file", str(secret)).stdout.strip()
    assert len(bytes.fromhex(key)) == 32 and key not in secret.read_text()
    where = ("--socket", str(tmp_path / "s"), "--secret-file", str(secret))
    with daemon(*where, "--http", EVERYWHERE) as facts:
        base = f"http://127.0.0.1:{facts['http'].rpartition(':')[2]}"
        for path in ("/metrics", "/health/deep", "/nothing", "/"):
            for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": key}, {"X-Key": key}):
                refused = httpx2.get(base + path, headers=headers)
                assert (refused.status_code, refused.headers["WWW-Authenticate"]) == (401, "Bearer"), path
                assert "watch-key" in refused.text
        # Probes have no key, and learn no name.
        for path in ("/health/live", "/health/ready"):
            assert httpx2.get(base + path).json() == {"ok": True}
        shown = {"Authorization": f"Bearer {key}"}
        assert "pyengine_" in httpx2.get(f"{base}/metrics", headers=shown).text
        assert httpx2.get(f"{base}/health/ready", headers=shown).json()["node"] == "n"
    # On loopback nobody is asked.
    with daemon(*where, "--http", "127.0.0.1:0") as facts:
        assert httpx2.get(f"http://{facts['http']}/metrics").status_code == 200


def listening(pid: int) -> set[tuple[str, int]]:
    """(address in the kernel's hex, port) of a process's TCP sockets that listen."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
        except FileNotFoundError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found


def test_a_cluster_listens_on_loopback_only(state_dir: Path) -> None:
    with fake_server(state_dir, "--nodes", "2", "--transport", "tcp") as server:
        found = {name: listening(pid) for name, pid in server.children().items()}
    assert sum(map(len, found.values())) >= 3, "the gateway and two daemons"
    for name, sockets in found.items():
        for address, port in sockets:
            assert address == "0100007F", f"{name} listens at {address} (port {port})"
