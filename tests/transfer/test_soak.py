"""Goal: `make soak` works. Method: a short one."""

from __future__ import annotations

from tests.soak import soak


def test_a_short_soak() -> None:
    table = soak(20.0, seed=1)
    assert "blocks from ssd" in table and "blocks from peer_dram" in table
