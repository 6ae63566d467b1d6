"""Goal: a prefix that two nodes hold comes from both of them, and from the one alone when the other fails, though its
part was to come from there. Method: real daemons and loops in one process; stripes as the conductor makes them.
"""

from __future__ import annotations

import math
import time

import pytest

from pyengine.backends.fake import fake_tokens
from pyengine.scheduler.prefix_index import Run
from pyengine.scheduler.spreading import STRIPE_BYTES, spread
from pyengine.scheduler.types import Medium, Source, cacheable_blocks
from tests.worker.harness import Cluster
from tests.worker.test_worker import BLOCK, backend, prompt

LENGTH = 16 * BLOCK + 5
BLOCKS = cacheable_blocks(LENGTH, BLOCK)


def sources(cluster: Cluster) -> tuple[Source, ...]:
    """As of blocks that are a stripe each."""
    run = Run("b", 0, BLOCKS, Medium.DRAM)
    stripes, stand_ins = spread(run, {"c": BLOCKS}, STRIPE_BYTES, lambda node: 0.0, lambda node: 1.0)
    return tuple(Source(cluster.node(run.node), run.first, run.last, run.medium) for run in stripes + stand_ins)


@pytest.mark.parametrize("fails", [None, "b", "c"])
def test_each_holder_gives_a_part(fails: str | None) -> None:
    asked = prompt(LENGTH)
    with Cluster() as cluster:
        for node in "abc":
            cluster.add_node(node, 64, backend())
            cluster.add_worker(f"both-{node}", node, backend())
        for name in ("both-b", "both-c"):
            cluster.run(cluster.submit(asked, name, name))
        cluster.settle()
        plan = sources(cluster)
        if fails is not None:
            cluster.daemons[fails].stop()
        request = cluster.submit(asked, "both-a", "both-a", sources=plan)
        cluster.run(request)
        assert request.ids == fake_tokens(asked, 8)
        assert request.tiers == {"peer_dram": BLOCKS * BLOCK}
        sent = {
            node: cluster.counter(node, "pyengine_transfer_blocks_total", transport="tcp", direction="out")
            for node in "bc"
            if node != fails
        }
        assert sent == ({"b": BLOCKS // 2, "c": BLOCKS // 2} if fails is None else {node: BLOCKS for node in sent})


@pytest.mark.parametrize("comes", [True, False])
@pytest.mark.parametrize("decode", ["both-a", "both-c"])
def test_a_prefix_that_is_still_computed_is_waited_for_and_fetched(comes: bool, decode: str) -> None:
    """The plan says that b will have it later; whether it comes or not, the answer is the same."""
    asked = prompt(LENGTH)
    with Cluster() as cluster:
        for node in "abc":
            cluster.add_node(node, 64, backend())
            cluster.add_worker(f"both-{node}", node, backend())
        plan = (Source(cluster.node("b"), 0, BLOCKS, Medium.DRAM, ready=3600.0),)
        request = cluster.submit(asked, "both-a", decode, sources=plan)
        mover = cluster.workers["both-a"].mover
        cluster.until(lambda: mover.due < math.inf)
        assert mover.due > time.monotonic() + 3000
        assert not request.ids
        if comes:
            cluster.run(cluster.submit(asked, "both-b", "both-b"))
            # An answer may be over before its last blocks are in the pool.
            cluster.until(lambda: cluster.counter("b", "pyengine_pool_blocks", state="cached") >= BLOCKS)
        # Now is later.
        mover._later.update(dict.fromkeys(mover._later, 0.0))
        cluster.run(request)
        assert request.ids == fake_tokens(asked, 8)
        assert request.tiers == ({"peer_dram": BLOCKS * BLOCK} if comes else {})
        assert mover.due == math.inf
