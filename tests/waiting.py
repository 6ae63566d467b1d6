"""Waits for what no event tells."""

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], what: str, patience: float) -> None:
    """Polls what another process counts or knows; there is no event to wait for. patience: seconds, then it fails."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)
