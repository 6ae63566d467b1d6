"""Goal: /health?deep=1 never says that all is well while an engine hangs, and says who it is; then well again.

Method: real processes over the fake backend: one that hangs in a step (its heartbeats go on), and one that is stopped
(SIGSTOP: its connections stand). Of times only the outcome counts.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from bench.server import Server
from tests.system.conftest import complete, fake_server, prompt, stream, until


def deep(server: Server, within: float = 1.0) -> tuple[int, dict[str, Any]]:
    response = httpx2.get(f"{server.base}/health?deep=1&within={within}", timeout=60)
    return response.status_code, response.json()


def fails(server: Server, *names: str) -> bool:
    status, body = deep(server)
    return status == 503 and all(any(name in text for text in body["failing"]) for name in names)


@contextlib.contextmanager
def stopped(process: int) -> Iterator[None]:
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def well(server: Server) -> bool:
    return deep(server, 10.0)[0] == 200


def test_who_is_stopped_is_named(state_dir: Path) -> None:
    """A worker, then a daemon: without that nothing can be handed over, and every other process does well."""
    with fake_server(state_dir, "--prefill", "1", "--decode", "1", "--nodes", "2", "--transport", "tcp") as server:
        until(lambda: well(server), "all is well")
        checked = {check["check"] for check in deep(server)[1]["checks"]}
        workers = {f"worker {name}" for name in ("prefill-0", "decode-0")}
        assert workers | {"node node-0", "node node-1", "path prefill-0 -> decode-0"} <= checked
        for path in ("/livez", "/readyz"):
            assert server.get_json(path)[0] == 200
        # Nothing that a probe brings stays.
        until(lambda: server.metric("pyengine_worker_requests") == 0, "all probes are over")
        assert server.metric("pyengine_pool_blocks", state="cached") == 0
        with stopped(server.children()["decode-0"]):
            until(lambda: fails(server, "decode-0"), "who is stopped is named")
            until(lambda: server.get_json("/readyz")[0] == 503, "nobody is sent here any more")
            assert "no worker for decode" in str(server.get_json("/readyz")[1]["failing"])
            assert server.get_json("/livez")[0] == 200
        until(lambda: well(server), "all is well again")
        with stopped(server.children()["transferd-1"]):
            until(lambda: fails(server, "node-1"), "its node is named")
        until(lambda: well(server), "all is well again")
        assert complete(server, prompt(40), 8)["usage"]["completion_tokens"] == 8


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
