"""Whether a model's weights fit into memory, asked before they are read.

Linux grants any memory and ends the process that uses it: nobody would learn why.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

from pyengine.checkpoint.config import ModelConfig
from pyengine.checkpoint.errors import ModelError
from pyengine.scheduler.types import DTYPE_BYTES

GIB = 2**30
#: Of each version of control groups: its name in /proc/self/cgroup, its folder, the files with limit and use, and the
#: line of memory.stat that counts what the kernel can drop.
_GROUPS = (
    ("", "sys/fs/cgroup", "memory.max", "memory.current", "file"),
    ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
)


def check_room(name: str, config: ModelConfig, dtype: str, free: int, ranks: int = 1, beside: int = 0) -> None:
    """Raises ModelError unless the weights, in `dtype`, fit into `free` bytes.

    ranks: how many processes hold them, each its part. beside: bytes of what is held twice, or in a wider type.
    """
    numbers = sum(math.prod(shape) for shape in config.shapes().values())
    needed = (numbers * DTYPE_BYTES[dtype] + beside) // ranks
    if needed > free:
        half = "--dtype bfloat16, which needs half of it, " if DTYPE_BYTES[dtype] > 2 else ""
        raise ModelError(
            f"the weights of {name!r} in {dtype} need {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free: use "
            f"{half}a smaller model, or more memory"
        )


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still get: the machine's, or fewer where a container has a limit.

    root: for tests.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([available, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> list[int]:
    """What each limit above this process leaves."""
    left = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name, folder, limit, use, cache in _GROUPS:
            if name not in names.split(","):
                continue
            group = root / folder / path.lstrip("/")
            while group.is_relative_to(root / folder):
                # A group without a limit says "max", or has no such file; a container sees its own as the root.
                with contextlib.suppress(OSError, ValueError):
                    dropped = dict(entry.split() for entry in (group / "memory.stat").read_text().splitlines())
                    used = int((group / use).read_text()) - int(dropped.get(cache, 0))
                    left.append(max(0, int((group / limit).read_text()) - used))
                group = group.parent
    return left
