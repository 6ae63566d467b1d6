"""Goal: with --log-json a collector can read every line of every process, and find a request in them.
Method: a real cluster that says all it can, a request with a name, a death; each line is parsed.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx2

from pyengine import logs
from tests.system.conftest import body, fake_server, prompt, until

KEYS = {"timestamp", "level", "process", "target", "message"}


def test_every_line_of_every_process_is_one_object(state_dir: Path) -> None:
    talkative = {"PYENGINE_LOG_LEVEL": "debug"}
    with fake_server(state_dir, "--nodes", "2", "--log-json", environment=talkative) as server:
        asked = body(prompt(60), 5)
        answer = httpx2.post(f"{server.base}/v1/completions", json=asked, headers={"X-Request-Id": "find-me"})
        assert answer.status_code == 200, answer.text
        before = server.children()["decode-0"]
        server.kill("decode-0")
        until(lambda: server.children().get("decode-0", before) != before, "the dead worker is started again")
        until(lambda: '"process": "decode-0"' in server.log, "it has said something")
        server.stop()
    lines: list[dict[str, Any]] = [json.loads(line) for line in server.log.splitlines()]
    for line in lines:
        assert set(line) >= KEYS, line
        assert line["level"] in ("debug", "info", "warn", "error"), line
        assert line["timestamp"].endswith("Z") and len(line["timestamp"]) == 27, line
    assert {line["process"] for line in lines} >= {
        *("serve", "gateway-0", "conductor", "prefill-0", "decode-0", "transferd")
    }
    assert {line["node"] for line in lines if line["process"] == "transferd"} == {"node-0", "node-1"}
    (found,) = [line for line in lines if line.get("request") == "find-me"]
    assert found["process"] == "gateway-0" and "completion=5" in found["message"]


def test_whatever_is_said_is_one_line(capsys: Any) -> None:
    """Line breaks, halves of surrogate pairs, tracebacks."""
    kept = logging.root.handlers, logging.root.level
    try:
        logs.begin("p", "info", as_json=True)
        assert logs.is_json()
        try:
            raise ValueError("a\nb")
        except ValueError:
            logging.getLogger("x").exception("bad: %s", "\ud800\n\u2028", extra={"request": "r"})
        (line,) = capsys.readouterr().err.splitlines()
        told = json.loads(line)
        assert (told["message"], told["request"], told["level"]) == ("bad: \ud800\n\u2028", "r", "error")
        assert "ValueError: a\nb" in told["exception"]
    finally:
        logs.begin("p", "info")
        logging.root.handlers, logging.root.level = kept
