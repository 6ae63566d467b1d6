"""Goal: /health?deep=1 never says that all is well while an engine hangs, and says who it is; then well again.

Method: real processes over the fake backend: one that hangs in a step (its heartbeats go on), and one that is stopped
(SIGSTOP: its connections stand). Of times only the outcome counts.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bench.server import Server
from tests.system.conftest import complete, fake_server, prompt, stream, until


def deep(server: Server, within: float = 1.0) -> tuple[int, dict[str, Any]]:
    response = httpx2.get(f"{server.base}/health?deep=1&within={within}", timeout=60)
    return response.status_code, response.json()


def fails(server: Server, *names: str) -> bool:
    status, body = deep(server)
    return status == 503 and all(any(name in text for text in body["failing"]) for name in names)


def well(server: Server) -> bool:
    return deep(server, 10.0)[0] == 200


@pytest.mark.parametrize("flags", [("--prefill", "1", "--decode", "2", "--nodes", "2"), ("--both", "2")])
def test_a_cluster_that_does_well(flags: tuple[str, ...], state_dir: Path) -> None:
    with fake_server(state_dir, *flags) as server:
        until(lambda: well(server), "all is well")
        status, body = deep(server)
        checked = {check["check"] for check in body["checks"]}
        workers = server.get_json("/health")[1]["workers"]
        assert status == 200 and {f"worker {name}" for name in workers} <= checked
        assert sum(name.startswith("path ") for name in checked) == 2
        for path in ("/livez", "/readyz"):
            assert server.get_json(path)[0] == 200
        # Nothing that a probe brings stays.
        until(lambda: server.metric("pyengine_worker_requests") == 0, "all probes are over")
        assert server.metric("pyengine_pool_blocks", state="cached") == 0


def test_a_backend_that_hangs_is_named(state_dir: Path, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    with fake_server(state_dir, "--prefill", "1", "--decode", "1", model=f"fake:hold={hold}") as server:
        until(lambda: well(server), "all is well")
        pieces = stream(server, prompt(40), 400)
        next(pieces)
        hold.touch()
        # Plain /health knows of heartbeats only; they go on.
        until(lambda: fails(server, "worker decode-0: its loop has stood still"), "the loop that hangs is named")
        assert server.get_json("/health")[0] == 200
        until(lambda: fails(server, "path prefill-0 -> decode-0: no first token of prefill-0"), "its path is named")
        hold.unlink()
        assert len(list(pieces)) > 0
        until(lambda: well(server), "all is well again")


def test_a_worker_that_is_stopped_is_named(state_dir: Path) -> None:
    with fake_server(state_dir, "--prefill", "1", "--decode", "1") as server:
        until(lambda: well(server), "all is well")
        stopped = server.children()["decode-0"]
        os.kill(stopped, signal.SIGSTOP)
        try:
            until(lambda: fails(server, "decode-0"), "who is stopped is named")
            until(lambda: server.get_json("/readyz")[0] == 503, "nobody is sent here any more")
            assert "no worker for decode" in str(server.get_json("/readyz")[1]["failing"])
            assert server.get_json("/livez")[0] == 200
        finally:
            os.kill(stopped, signal.SIGCONT)
        until(lambda: well(server), "all is well again")
        assert complete(server, prompt(40), 8)["usage"]["completion_tokens"] == 8


def test_a_daemon_that_is_stopped_is_named(state_dir: Path) -> None:
    """Between two nodes nothing can be handed over any more: every process but the daemon does well."""
    with fake_server(state_dir, "--prefill", "1", "--decode", "1", "--nodes", "2", "--transport", "tcp") as server:
        until(lambda: well(server), "all is well")
        stopped = server.children()["transferd-1"]
        os.kill(stopped, signal.SIGSTOP)
        try:
            until(lambda: fails(server, "node-1"), "its node is named")
        finally:
            os.kill(stopped, signal.SIGCONT)
        until(lambda: well(server), "all is well again")
