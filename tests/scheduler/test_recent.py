"""Goal: sums over the last minutes are those of what was given. Method: against a list of all that was given."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.scheduler.recent import WINDOW, Recent
from pyengine.scheduler.types import Role

from .world import World, chain, worker


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(-1, 90), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=60))
def test_the_window_slides_by_the_second(given_: list[tuple[float, int, int, int]]) -> None:
    """Time may stand still, or go back a little: what comes then counts as of the latest second."""
    recent, now, second, all_given = Recent(), 0.0, 0, list[tuple[int, int, int, int]]()
    for step, prompt, computed, output in given_:
        now = max(now + step, 0.0)
        second = max(second, int(now))
        recent.add(now, prompt, computed, output)
        all_given.append((second, prompt, computed, output))
        all_given = [entry for entry in all_given if entry[0] >= now - WINDOW]
        sums = [sum(entry[i] for entry in all_given) for i in (1, 2, 3)]
        assert [recent.prompt, recent.computed, recent.output] == sums
        assert len(recent._seconds) <= WINDOW + 1
    recent.expire(now + WINDOW + 100)
    assert (recent.prompt, recent.computed, recent.output) == (0, 0, 0)


def test_the_view_shows_what_workers_were_given_and_what_their_nodes_hold() -> None:
    world = World(worker("d", Role.DECODE, "n0"), worker("p", Role.PREFILL, "n1"), policy="cache-aware")
    keys = chain(1, 2, 3)
    world.store("n1", keys[:2])
    world.on(world.pools["n1"].heartbeat())
    world.plan(keys, max_tokens=16)
    info = world.workers["p"]
    view = world.conductor.cluster.view("model", info.namespace.digest(), 0, world.now)
    assert view is not None
    prompt = 3 * 16 + 5
    assert view.cached_blocks.tolist() == [0, 2]
    assert view.recent_prompt.tolist() == [0, prompt]
    assert view.recent_computed.tolist() == [0, prompt - 32]
    assert view.recent_output.tolist() == [16, 0]
    assert view.running_context.tolist() == [prompt + 1, 0]
    world.wait(WINDOW + 2.0)
    view = world.conductor.cluster.view("model", info.namespace.digest(), 0, world.now)
    assert view is not None
    assert not (view.recent_prompt.any() or view.recent_output.any() or view.running_context.any())
