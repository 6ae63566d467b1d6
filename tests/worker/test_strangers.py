"""Goal: KV of another model never takes the place of this one's, however alike the two are.

Method: two models with blocks of one size, whose namespaces differ in one field; workers of both on one node and on
two; work as a right gateway sends it, and as a wrong one would: with this model's keys for a worker of that one.
"""

from __future__ import annotations

from typing import Any

import pytest

from pyengine import _native
from pyengine.backends.fake import FakeBackend, fake_tokens
from tests.worker.harness import HASH_KEY, PATIENCE, Cluster
from tests.worker.test_worker import prompt

IDS = prompt(70, 5)


@pytest.fixture(params=["one node", "two nodes"])
def cluster(request: pytest.FixtureRequest) -> Any:
    """ "prefill" and "decode" of one model, "stranger" of another on the prefill's node."""
    with Cluster() as cluster:
        here, there = ("n", "n") if request.param == "one node" else ("p", "d")
        for node in sorted({here, there}):
            cluster.add_node(node, 128, FakeBackend())
        cluster.add_worker("prefill", here, FakeBackend())
        cluster.add_worker("decode", there, FakeBackend())
        cluster.add_worker("stranger", here, FakeBackend(vocab=300))
        yield cluster


def test_they_differ_in_nothing_that_a_pool_could_see(cluster: Cluster) -> None:
    ours, theirs = (cluster.workers[name].backend.namespace for name in ("decode", "stranger"))
    assert ours.kv == theirs.kv
    assert ours.difference(theirs) == "`config` differs: vocab 258 and vocab 300"
    assert ours.owner() != theirs.owner()


def test_what_one_has_cached_the_other_never_finds(cluster: Cluster) -> None:
    first = cluster.submit(IDS, "stranger", "stranger")
    cluster.run(first)
    cluster.settle()
    second = cluster.submit(IDS, "prefill", "prefill", sources=cluster.source(cluster.node_of["stranger"], 4))
    cluster.run(second)
    assert second.cached == 0
    assert second.ids == fake_tokens(IDS, 8)
    again = cluster.submit(IDS, "prefill", "prefill")
    cluster.run(again)
    assert again.cached == 64, "its own it does find"


def test_work_for_one_is_refused_by_the_other(cluster: Cluster) -> None:
    request = cluster.submit(IDS, "stranger", "decode")
    cluster.run(request)
    assert request.failed is not None
    assert "another model or KV layout" in request.failed.reason
    cluster.settle()


def test_a_block_offered_under_a_key_of_another_model_is_not_let_in(cluster: Cluster) -> None:
    """The gateway gives the stranger our keys and says that they are its own: from the work alone it cannot tell."""
    ours, theirs = (cluster.workers[name].namespace for name in ("decode", "stranger"))
    root = _native.root_key(ours, b"", b"", HASH_KEY)
    assert root != _native.root_key(theirs, b"", b"", HASH_KEY)
    waiting = cluster.submit(IDS, "stranger", "decode", parts=("decode",))
    forged = cluster.submit(
        IDS, "stranger", "decode", parts=("prefill",), number=waiting.number, changes={"namespace": theirs}
    )
    cluster.run(forged)
    assert forged.failed is not None
    assert "protocol" in forged.failed.reason
    cluster.settle()
    right = cluster.submit(IDS, "prefill", "decode", deadline=PATIENCE)
    cluster.run(right)
    assert right.ids == fake_tokens(IDS, 8), "nothing of the stranger's was adopted or cached"
    assert right.cached == 0
    cluster.settle()
