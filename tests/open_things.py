"""What this process has open: for tests that nothing of theirs stays."""

from __future__ import annotations

import contextlib
import gc
import os


def open_things() -> set[str]:
    """Open files, by number and by what they are, and threads; garbage is gone first.

    Compare as `open_things() - before == set()`: what other tests had open may go meanwhile.
    """
    gc.collect()
    there = {f"thread {thread}" for thread in os.listdir("/proc/self/task")}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of this very listing
            there.add(f"{descriptor} {os.readlink(f'/proc/self/fd/{descriptor}')}")
    return there
