"""Goal: `PoolModel` is what its stub says, and the same for the same input. Method: small caches, every argument once.

What it keeps is tested where it is made (`rust/transfer/tests/policies.rs`).
"""

from __future__ import annotations

import numpy as np
import pytest

from pyengine._native import EVICTION_POLICIES, BugError, GiveUpError, PoolModel


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_prefixes_are_found(policy: str) -> None:
    model = PoolModel(policy, 4, 3)
    assert model.policy == policy
    assert model.access(ids(1, 2, 3)) == (0, 0)
    assert model.access(ids(1, 2, 3)) == (3, 0)
    assert model.access(ids(1, 2, 9).tobytes()) == (2, 0), "bytes will do"
    assert model.access(ids(5, 6, 7)) == (0, 0), "the rest makes room, tails first, and is on the SSD now"
    assert model.access(ids(1, 2, 3)) == (1, 2)
    assert model.counts() == {
        "requests": 5,
        "blocks": 15,
        "dram_hits": 6,
        "ssd_hits": 2,
        "evictions": 5,
        "dropped": 2,
        "in_dram": 4,
        "in_ssd": 3,
    }
    model.check()


def test_same_input_same_hits() -> None:
    rows = [np.cumsum(row).astype(np.uint64) for row in np.random.default_rng(0).integers(1, 3, (500, 12))]
    for policy in EVICTION_POLICIES:
        models = [PoolModel(policy, 40, 20) for _ in range(2)]
        first, second = ([model.access(row) for row in rows] for model in models)
        assert first == second
        assert models[0].counts() == models[1].counts()
        assert {dram > 0 for dram, _ in first} == {True, False}


def test_costs_count() -> None:
    # Late blocks are dear where pairs cost and tokens nothing; where it is the other way round, all are alike.
    for costs, late in (((0.0, 1.0, 16.0), 1), ((1.0, 0.0, 16.0), 0)):
        model = PoolModel("cost", 12, costs=costs)
        prefix = np.arange(10, dtype=np.uint64)
        model.access(prefix)
        for other in range(100, 104):
            model.access(ids(other))
        assert (model.access(prefix)[0] == len(prefix)) == bool(late), costs


def test_bad_input_says_what_to_do() -> None:
    with pytest.raises(GiveUpError, match="choose one of cost"):
        PoolModel("mru", 10)
    with pytest.raises(GiveUpError, match="use 2 to"):
        PoolModel("lru", 1)
    model = PoolModel("lru", 10)
    with pytest.raises(BugError, match=r"use numpy\.uint64"):
        model.access(b"1234567")
    with pytest.raises(BugError, match="block 4 is in the request twice"):
        model.access(ids(3, 4, 4))
    assert model.counts()["requests"] == 0
