"""Goal: what several nodes hold equally well comes from all of them, by load; each stands in for the others.

Method: properties of the pure function over random runs; examples through the conductor.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pyengine.scheduler.changes import Change, pack
from pyengine.scheduler.messages import LoadSample
from pyengine.scheduler.prefix_index import TIER, PrefixIndex, Run
from pyengine.scheduler.spreading import HOLDERS, STRIPE_BYTES, spread
from pyengine.scheduler.types import Medium, Plan, Role

from .world import SPEC, World, chain, worker

#: Blocks of the smallest stripe.
LEAST = -(-STRIPE_BYTES // SPEC.block_bytes)


def holders(count: int, length: int) -> tuple[World, list[bytes]]:
    """A worker with nothing, and `count` nodes that hold all of a prefix."""
    world = World(
        worker("both-0", Role.BOTH, "node-0", pages=8192, max_positions=1 << 20),
        *(
            worker(f"decode-{k}", Role.DECODE, f"node-{k}", pool_slots=8192, pages=8192, max_positions=1 << 20)
            for k in range(1, count + 1)
        ),
    )
    keys = chain(*range(length))
    for k in range(1, count + 1):
        pool = world.pools[f"node-{k}"]
        for position, key in enumerate(keys):
            world.conductor.on(pool.store(key, keys[position - 1] if position else bytes(16), position), world.now)
    return world, keys


def first_choices(plan: Plan) -> dict[int, list[str]]:
    """By block, who is asked in which order: as the mover reads it."""
    asked: dict[int, list[str]] = {}
    for source in plan.sources:
        for block in range(source.first, source.last):
            if source.node.node not in asked.setdefault(block, []):
                asked[block].append(source.node.node)
    return asked


def test_two_holders_send_a_part_each_and_stand_in_for_each_other() -> None:
    world, keys = holders(2, 4 * LEAST)
    plan = world.plan(keys)
    asked = first_choices(plan)
    assert set(asked) == set(range(len(keys)))
    assert all(sorted(nodes) == ["node-1", "node-2"] for nodes in asked.values())
    counts = [sum(nodes[0] == name for nodes in asked.values()) for name in ("node-1", "node-2")]
    assert counts == [2 * LEAST, 2 * LEAST]
    # Each charged for its part only.
    queues = [world.conductor.links.queue(name, world.now) for name in ("node-1", "node-2")]
    assert queues[0] == queues[1] > 0


def test_a_loaded_or_slow_holder_sends_less() -> None:
    world, keys = holders(2, 32 * LEAST)
    # node-1 sends at a third of the rate of node-2.
    for node, seconds in (("node-1", 3.0), ("node-2", 1.0)):
        samples = tuple(LoadSample(source=node, size=1 << 30, seconds=seconds) for _ in range(9))
        world.alive("both-0", loads=samples)
    asked = first_choices(world.planned_alone(keys))
    slow = sum(nodes[0] == "node-1" for nodes in asked.values())
    assert abs(slow - 8 * LEAST) <= 2 * LEAST
    # With a queue of some seconds, none of it.
    world.conductor.links.order("node-2", "node-0", 8 << 30, world.now)
    asked = first_choices(world.plan(keys))
    assert {nodes[0] for nodes in asked.values()} == {"node-1"}
    assert {nodes[1] for nodes in asked.values()} == {"node-2"}


def test_a_small_prefix_has_one_source_and_a_stand_in() -> None:
    world, keys = holders(2, 4)
    assert [nodes for nodes in first_choices(world.plan(keys)).values()] == [["node-1", "node-2"]] * 4


runs = st.builds(
    lambda first, count, medium: Run("a", first, first + count, medium),
    *(
        st.integers(0, 100),
        st.integers(1, 2000),
        st.sampled_from(Medium),
    ),
)
others = st.dictionaries(st.sampled_from("bcdefg"), st.integers(1, 2000))
seconds = st.dictionaries(st.sampled_from("abcdefg"), st.floats(0, 10))


@given(runs, others, st.sampled_from([1 << 12, 1 << 18, 1 << 21]), seconds, seconds)
def test_stripes_cover_the_run_once_and_only_by_who_has_it(
    run: Run, longer: dict[str, int], block_bytes: int, queues: dict[str, float], per_block: dict[str, float]
) -> None:
    shared = {node: min(run.first + count, run.last) for node, count in longer.items()}
    stripes, others = spread(
        run, shared, block_bytes, lambda node: queues.get(node, 0.0), lambda node: 1e-3 + per_block.get(node, 0.0)
    )
    at = run.first
    for stripe in stripes:
        assert stripe.first == at < stripe.last
        assert stripe.medium is run.medium
        assert stripe.node == "a" or shared[stripe.node] >= stripe.last
        at = stripe.last
    assert at == run.last
    names = [stripe.node for stripe in stripes]
    assert len(set(names)) <= HOLDERS
    assert len(names) <= len(set(names)) + 1
    assert all(other.node == "a" or shared[other.node] >= other.last for other in others)
    if len(stripes) > 1:
        assert set(names) <= {other.node for other in others}


nodes = st.sampled_from("abc")


@given(st.lists(st.tuples(nodes, st.integers(0, 7), st.sampled_from(Medium))), nodes, st.sets(nodes), st.integers(0, 7))
def test_who_shares_a_run(blocks: list[tuple[str, int, Medium]], node: str, avoid: set[str], first: int) -> None:
    keys = chain(*range(8))
    index = PrefixIndex()
    for name, at, medium in blocks:
        index.apply(name, pack([Change(False, TIER[medium], keys[at], keys[at - 1] if at else bytes(16), at)]))
    run = Run(node, first, 8, Medium.DRAM)
    wanted = {}
    for name in set("abc") - avoid - {node}:
        end = first
        while end < 8 and (name, end, Medium.DRAM) in blocks:
            end += 1
        if end > first:
            wanted[name] = end
    assert index.shared(b"".join(keys), run, avoid) == wanted
