"""Goal: the first use of a KV page costs as little as the next.

Method: the kernel says of the page tensor's mapping whether it may be of huge pages, of which one KV page would touch
as many as there are layers and heads.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyengine.kernels.torch import pages

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


def _flags(address: int) -> list[str]:
    """What the kernel has noted of the mapping that an address is in."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, end = (int(each, 16) for each in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return rest.split()
    raise AssertionError("no mapping has this address")
