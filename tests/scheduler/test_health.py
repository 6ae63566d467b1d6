"""Goal: the conductor tells who hangs, who went without a word, and who said goodbye. Method: its events by hand."""

from __future__ import annotations

from pyengine.scheduler.events import DaemonGone, DaemonHello, FromWorker, WorkerLost
from pyengine.scheduler.health import MISSED_FOR, samples
from pyengine.scheduler.messages import WorkerHello, WorkerLeaving
from pyengine.scheduler.types import Role
from tests.scheduler.world import World, worker

UP, STALLED = "pyengine_worker_up", "pyengine_worker_stalled_seconds"


def world() -> World:
    return World(worker("prefill-0", Role.PREFILL, "node-0"), worker("decode-0", Role.DECODE, "node-1"))


def told(at: World, name: str, who: str) -> float | None:
    label = "node" if name == "pyengine_node_up" else "worker"
    return samples(at.conductor.cluster, at.now).get(f'{name}{{{label}="{who}"}}')


def test_a_loop_that_turns_is_told_from_one_that_hangs() -> None:
    """Both send heartbeats. It does not matter whether there is work."""
    at = world()
    for turn in range(1, 21):
        at.now += 0.5
        at.alive("prefill-0", progress=turn, running=1)
        at.alive("decode-0", progress=7)
    assert (told(at, UP, "prefill-0"), told(at, STALLED, "prefill-0")) == (1, 0.0)
    assert (told(at, UP, "decode-0"), told(at, STALLED, "decode-0")) == (1, 9.5)
    at.alive("decode-0", progress=8)
    assert told(at, STALLED, "decode-0") == 0.0
    assert at.conductor.counters()[f'{STALLED}{{worker="decode-0"}}'] == 0.0


def test_who_goes_without_a_word_is_missed_for_a_while() -> None:
    at = world()
    at.wait(4.0, silent=("decode-0",))  # as one that is stopped
    assert (told(at, UP, "decode-0"), told(at, STALLED, "decode-0")) == (0, None)
    at.on(FromWorker(WorkerHello(info=at.workers["decode-0"])))
    assert told(at, UP, "decode-0") == 1
    at.on(WorkerLost("decode-0"))  # as one that is killed
    assert told(at, UP, "decode-0") == 0
    at.now += MISSED_FOR
    assert told(at, UP, "decode-0") is None


def test_who_says_goodbye_is_not_missed_and_may_come_back() -> None:
    at = world()
    at.on(FromWorker(WorkerLeaving(worker="decode-0")))
    assert told(at, UP, "decode-0") is None
    at.on(FromWorker(WorkerHello(info=at.workers["decode-0"])))
    assert told(at, UP, "decode-0") == 1
    at.on(WorkerLost("decode-0"))
    assert told(at, UP, "decode-0") == 0
    at.on(FromWorker(WorkerLeaving(worker="nobody")))


def test_nodes_are_missed_likewise() -> None:
    at = world()
    pool = at.pools["node-1"]
    assert told(at, "pyengine_node_up", "node-1") == 1
    at.on(DaemonGone(pool.node))
    assert told(at, "pyengine_node_up", "node-1") == 0
    at.on(DaemonHello(pool.node, pool.sequence))
    at.on(pool.heartbeat())
    assert told(at, "pyengine_node_up", "node-1") == 1
    pool.draining = True
    at.on(pool.heartbeat())
    at.on(DaemonGone(pool.node))
    assert told(at, "pyengine_node_up", "node-1") is None, "it was being emptied: it was to go"
