"""What is said, by every backend, when a worker's pages do not fit into memory."""

from __future__ import annotations

GIB = 2**30


def too_many_pages(pages: int, needed: int, where: str, free: int | None = None) -> MemoryError:
    """To be raised. needed: bytes of all pages. where: the device's name. free: bytes that it has, if it says so."""
    has = "" if free is None else f", and {free / GIB:.1f} GiB are free"
    return MemoryError(
        f"{pages} KV pages need {needed} bytes ({needed / GIB:.1f} GiB) on {where}{has}; ask for fewer pages (--pages,"
        " or --kv-bytes)"
    )
