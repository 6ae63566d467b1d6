"""The log of a process: lines for people, or one JSON object a line for what collects logs.

`LogRecord.request`, given by `extra={"request": ...}`, is the request that a line is about, as in `X-Request-Id`. The
Rust daemon writes the same keys (`rust/transferd/src/json_lines.rs`).
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

_JSON = False


def begin(process: str, level: str, *, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Logs to stderr from now on, or to `stream`; a second call is the last word.

    process: its name, in each line. level: one of env.LOG_LEVELS.
    """
    global _JSON
    _JSON = as_json
    handler = logging.StreamHandler(stream or sys.stderr)
    plain = logging.Formatter(f"{process} %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines(process) if as_json else plain)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def is_json() -> bool:
    """Whether this process logs JSON: then it says nothing in another form either."""
    return _JSON


class JsonLines(logging.Formatter):
    """A record as one JSON object without a line break."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        told = {
            "timestamp": when.replace("+00:00", "Z"),
            "level": {"WARNING": "warn", "CRITICAL": "error"}.get(record.levelname, record.levelname.lower()),
            "process": self._process,
            "target": record.name,
            "message": record.getMessage(),
        }
        if (request := getattr(record, "request", None)) is not None:
            told["request"] = request
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        # ASCII: a client's text is in some lines, and no half of a pair may break one.
        return json.dumps(told)
