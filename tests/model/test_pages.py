"""Goal: the first use of a KV page costs as little as the next.

Method: the kernel says of the page tensor's mapping whether it may be of huge pages, of which one KV page would touch
as many as there are layers and heads, and how much of it has memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pyengine.backend import Slice
from pyengine.backends.torch import TorchBackend
from pyengine.kernels.torch import ahead, pages
from pyengine.kernels.torch.ahead import Ahead
from tests.model.checkpoints import write_tiny

SMAPS = Path("/proc/self/smaps")


@pytest.mark.skipif(not SMAPS.exists(), reason="the kernel tells nothing of mappings")
def test_pages_of_the_cpu_are_in_small_pages_of_the_system() -> None:
    cache = pages.allocate(2, 3, 512, 16, 64, torch.float32, torch.device("cpu"))
    assert cache.shape == (2, 2, 3, 512, 16, 64) and not cache.any()
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "nh" in _flags(cache.data_ptr()), "the kernel may make huge pages of it"


def test_more_than_there_is_is_said() -> None:
    with pytest.raises(MemoryError, match="ask for fewer pages"):
        pages.allocate(2, 3, 2**45, 16, 64, torch.float32, torch.device("cpu"))


@pytest.mark.skipif(not SMAPS.exists(), reason="the kernel tells nothing of mappings")
def test_pages_have_memory_before_they_are_used_and_no_more_than_that() -> None:
    if not _gives_ahead():
        pytest.skip("this kernel gives no memory ahead (Linux 5.14 does)")
    cache = pages.allocate(2, 3, 512, 16, 64, torch.float32, torch.device("cpu"))
    page = cache.nbytes // 512
    assert _resident(cache) == 0
    getting = Ahead(cache, 100 * page)
    for used, ready in [(0, 100), (49, 100), (50, 151), (60, 151), (300, 401), (351, 452), (511, 512), (3, 512)]:
        getting.used([np.array([7, used, 5], np.int32), np.array([], np.int32)])
        # Nobody's KV is lost by it.
        cache[:, :, :, min(used + 1, 511)] = 1.0 + used
        getting.join()
        assert getting.ready == ready, used
        assert _resident(cache) == ready * page, used
        assert (cache[:, :, :, min(used + 1, 511)] == 1.0 + used).all()
    assert not cache[:, :, :, [0, 150, 200, 451]].any()


def test_pages_smaller_than_the_systems_have_memory_too() -> None:
    cache = pages.allocate(2, 1, 3, 4, 8, torch.float32, torch.device("cpu"))
    getting = Ahead(cache, 1)
    for page in range(3):
        getting.used([np.array([page], np.int32)])
        getting.join()
    assert getting.ready == 3 and not cache.any()


def test_a_backend_on_a_cpu_has_it_done(tmp_path: Path) -> None:
    """From the start, and further when pages are computed in or copied to."""
    if not (SMAPS.exists() and _gives_ahead()):
        pytest.skip("this kernel gives no memory ahead (Linux 5.14 does), or tells nothing of it")
    backend = TorchBackend.load(str(write_tiny(tmp_path)), cache=tmp_path, threads=1)
    backend.allocate(512)
    assert backend._ahead is not None
    backend._ahead = Ahead(backend._pages, 64 * backend.namespace.kv.block_bytes)
    backend._ahead.join()
    kv = backend.namespace.kv
    backend.write_pages([40], np.zeros((1, kv.strips, kv.strip_bytes), np.uint8))
    backend._ahead.join()
    assert backend._ahead.ready == 41 + 64
    backend.execute([Slice(np.array([1, 2, 3], np.uint32), 0, np.array([90], np.int32), None)])
    backend._ahead.join()
    assert backend._ahead.ready == 91 + 64
    backend.close()


def _gives_ahead() -> bool:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        memory.madvise(ahead.POPULATE_WRITE)
    except OSError:
        return False
    return True


def _resident(cache: torch.Tensor) -> int:
    """Bytes of the page tensor that have memory."""
    kilobytes = next(line.split()[1] for line in _mapping(cache.data_ptr()) if line.startswith("Rss:"))
    return int(kilobytes) * 1024


def _flags(address: int) -> list[str]:
    """What the kernel has noted of the mapping that an address is in."""
    return next(line.split()[1:] for line in _mapping(address) if line.startswith("VmFlags:"))


def _mapping(address: int) -> Iterator[str]:
    """What the kernel tells of the mapping that an address is in, line by line."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.partition(" ")[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(each, 16) for each in first.split("-"))
            inside = start <= address < end
        elif inside:
            yield line
