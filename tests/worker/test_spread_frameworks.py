"""Goal: KV crosses between frameworks also where they cut a model unlike: processes on one side, devices on the other.

Method: PyTorch in one and in two processes, JAX on one and on two devices, on a random model with eight KV heads; a
prefill worker of each kind in front of a decode worker of the other framework and degree, through one arena and from
node to node. Tokens against the model alone; from the counters: every block crossed, and nothing was computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyengine.backend import Backend
from pyengine.backends import lacking, load_backend
from pyengine.checkpoint import Checkpoint
from tests.model.elsewhere import Elsewhere
from tests.worker.harness import Cluster
from tests.worker.test_ranks import BLOCK, GREEDY, TOKENS, Oracle, checkpoint, oracle, prompt

if reason := lacking("jax"):
    pytest.skip(reason, allow_module_level=True)

__all__ = ["checkpoint", "oracle"]  # fixtures

#: For JAX as few programs as will do.
MAX_TOKENS, MAX_SEQUENCES = 64, 2
PAIRS = [("jax tp 2", "torch"), ("torch tp 2", "jax"), ("jax tp 2", "torch tp 2"), ("torch", "jax tp 2")]
HAND_OFFS = [*PAIRS, ("jax tp 2", "far torch")]


@pytest.fixture(scope="module")
def cluster(checkpoint: Checkpoint) -> Iterator[Cluster]:
    """A worker of each kind on node a, and one in one process on node b."""
    folder = checkpoint.folder
    with Cluster() as cluster:
        backends: dict[str, Backend] = {
            "jax tp 2": Elsewhere("jax", str(folder), folder.parent, tp=2),
            "torch tp 2": load_backend("torch", str(folder), cache=folder.parent, threads=1, tp=2),
            "jax": load_backend("jax", str(folder), cache=folder.parent, threads=1),
            "torch": load_backend("torch", str(folder), cache=folder.parent, threads=1),
            "far torch": load_backend("torch", str(folder), cache=folder.parent, threads=1),
        }
        for node in ("a", "b"):
            cluster.add_node(node, 128, backends["torch"])
        for name, backend in backends.items():
            node = "b" if name.startswith("far") else "a"
            cluster.add_worker(name, node, backend, pages=64, max_tokens=MAX_TOKENS, max_sequences=MAX_SEQUENCES)
            backend.warm_up(MAX_TOKENS, MAX_SEQUENCES)  # to compile takes longer than an event may
        yield cluster


@pytest.mark.parametrize("length", [1, 15, 90])
@pytest.mark.parametrize("pair", HAND_OFFS, ids=lambda pair: " to ".join(pair))
def test_kv_is_handed_on(pair: tuple[str, str], length: int, cluster: Cluster, oracle: Oracle) -> None:
    """A partial block too, and a prompt in two chunks."""
    prefill, decode = pair
    ids = prompt(length, HAND_OFFS.index(pair))
    giver, taker = cluster.workers[prefill], cluster.workers[decode]
    stored, loaded = giver.mover.counters["stored_blocks"], taker.mover.counters["loaded_blocks"]
    computed = dict(taker.counters)
    request = cluster.submit(ids, prefill, decode, sampling=GREEDY)
    cluster.run(request)
    assert request.failed is None and request.ids == oracle.tokens(ids)
    blocks = -(-length // BLOCK)
    assert giver.mover.counters["stored_blocks"] == stored + blocks
    assert taker.mover.counters["loaded_blocks"] == loaded + blocks
    assert taker.counters["recomputed"] == 0 and taker.counters["prefill"] == computed["prefill"]
    assert taker.counters["decode"] == computed["decode"] + TOKENS - 1
    cluster.settle()


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_kv_is_reused(first: str, second: str, cluster: Cluster, oracle: Oracle) -> None:
    """From the pool: what one has cached the other finds, and goes on from it."""
    ids = prompt(100, 10 + PAIRS.index((first, second)))
    for worker in (first, second):
        request = cluster.submit(ids, worker, worker, sampling=GREEDY)
        cluster.run(request)
        cluster.settle()
        assert request.failed is None and request.ids == oracle.tokens(ids)
    assert request.tiers == {"dram": 96}
