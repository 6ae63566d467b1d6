"""Views and requests as policies get them, at random: loads, prefixes, masks and roles of a few workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pyengine.scheduler.cluster import View
from pyengine.scheduler.policies.base import Ask
from pyengine.scheduler.types import Role, Slo

from .world import BLOCK, SPEC, worker

#: Columns of an Ask.
COLUMNS = ("prefix", "load_seconds", "transfer_seconds", "device", "ssd")


@st.composite
def situations(draw: st.DrawFn, most: int = 6) -> tuple[View, Ask]:
    """A view of a few workers with random loads, and a request with random prefixes; a pair can always be made."""
    roles = draw(st.lists(st.sampled_from(list(Role)), min_size=1, max_size=most))
    if not any(role.decodes for role in roles):
        roles.append(Role.DECODE)
    if not any(role.prefills for role in roles):
        roles.append(Role.PREFILL)
    count = len(roles)
    infos = tuple(worker(f"w{i}", role, f"n{i}") for i, role in enumerate(roles))

    def floats(low: float, high: float) -> np.ndarray:
        return np.array(draw(st.lists(st.floats(low, high), min_size=count, max_size=count)))

    def ints(low: int, high: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)))

    def some(rows: np.ndarray) -> np.ndarray:
        """Some of these rows, all if it would be none."""
        left = rows & (ints(0, 3) > 0)
        return left if left.any() else rows

    blocks = draw(st.integers(0, 40))
    prefix = ints(0, blocks)
    best = draw(st.integers(int(prefix.max()), blocks))
    both = np.array([role is Role.BOTH for role in roles])
    decodes = some(np.array([role.decodes for role in roles]))
    prompt = ints(0, 5000)
    view = View(
        workers=infos,
        nodes=tuple(info.node.node for info in infos),
        block_tokens=BLOCK,
        block_bytes=SPEC.block_bytes,
        both=both,
        prefills=some(np.array([role.prefills for role in roles])),
        decodes=decodes,
        node=np.arange(count),
        takes=np.ones(count, dtype=bool),
        queue_seconds=floats(0, 5),
        running=ints(0, 90),
        free_pages=ints(-20, 99),
        pages=np.full(count, 128),
        pool_slots=np.full(count, 128),
        max_positions=np.full(count, 4096),
        max_tokens_per_step=ints(1, 512),
        tbt=floats(0.001, 0.5),
        step_seconds=floats(0, 0.1),
        token_seconds=floats(1e-4, 1e-2),
        context_seconds=floats(0, 1e-5),
        measured=np.ones(count, dtype=bool),
        turn=draw(st.integers(0, 20)),
        queued_requests=ints(0, 90),
        queued_tokens=ints(0, 9999),
        running_context=ints(0, 9999),
        max_sequences=np.full(count, 32),
        sequence_seconds=floats(0, 0.1),
        history_seconds=floats(0, 1e-5),
        error=floats(0, 1),
        base_seconds=floats(0, 0.1),
        correction=np.ones(count),
        inlines=decodes & ~both & (ints(0, 2) > 1),
        cached_blocks=ints(0, 200),
        recent_prompt=prompt,
        recent_computed=np.minimum(ints(0, 5000), prompt),
        recent_output=ints(0, 500),
    )
    objectives = st.none() | st.floats(0.01, 5)
    links = np.array(draw(st.lists(st.floats(0, 3), min_size=count * count, max_size=count * count)))
    matrix = links.reshape(count, count)
    ask = Ask(
        prompt_tokens=blocks * BLOCK + draw(st.integers(1, BLOCK)),
        prefix=prefix,
        best=best,
        load_seconds=floats(0, 3),
        transfer_seconds=floats(0, 3),
        slo=Slo(ttft=draw(objectives), tbt=draw(objectives)),
        device=np.minimum(ints(0, blocks), prefix),
        ssd=np.minimum(ints(0, blocks), prefix),
        output_tokens=draw(st.floats(1, 300)),
        handoff_seconds=lambda prefill: matrix[prefill],
    )
    # Servable: who prefills has somebody to hand off to.
    if not view.decodes.any():
        view = replace(view, decodes=np.array([role.decodes for role in roles]))
    return view, ask


def columns(view: View, ask: Ask) -> dict[str, np.ndarray]:
    """All arrays in them, by name."""
    found = {f"view.{f.name}": getattr(view, f.name) for f in fields(view)}
    found |= {f"ask.{name}": getattr(ask, name) for name in COLUMNS}
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}


def taken(view: View, ask: Ask, order: np.ndarray) -> tuple[View, Ask]:
    """The same with worker order[i] in row i: permuted, or repeated."""
    arrays: dict[str, Any] = {
        f.name: getattr(view, f.name)[order] for f in fields(view) if isinstance(getattr(view, f.name), np.ndarray)
    }
    changed = replace(view, workers=tuple(view.workers[i] for i in order), **arrays)
    links = ask.handoff_seconds
    return changed, replace(
        ask,
        **{name: getattr(ask, name)[order] for name in COLUMNS},
        handoff_seconds=lambda prefill: links(int(order[prefill]))[order],
    )


def filled(view: View, ask: Ask, value: float) -> tuple[View, Ask]:
    """The same, with this value in all columns of seconds, whole or in every other row if it is infinite."""
    rows = np.arange(len(view.workers)) % 2 == 0 if np.isinf(value) else np.ones(len(view.workers), dtype=bool)

    def with_value(array: np.ndarray) -> np.ndarray:
        return np.where(rows, value, array)

    changed: dict[str, Any] = {
        f.name: with_value(getattr(view, f.name))
        for f in fields(view)
        if isinstance(getattr(view, f.name), np.ndarray) and getattr(view, f.name).dtype == np.float64
    }
    return replace(view, measured=~rows, **changed), replace(
        ask,
        load_seconds=with_value(ask.load_seconds),
        transfer_seconds=with_value(ask.transfer_seconds),
        handoff_seconds=lambda prefill: with_value(np.zeros(len(view.workers))),
    )


def emptied(view: View, ask: Ask) -> tuple[View, Ask]:
    """The same with nothing counted anywhere: no requests, tokens, pages, slots or blocks."""

    def zeros(of: View | Ask, names: Iterable[str]) -> dict[str, Any]:
        arrays = {name: getattr(of, name) for name in names}
        return {name: np.zeros_like(a) for name, a in arrays.items() if getattr(a, "dtype", None) == np.int64}

    counts = zeros(view, (f.name for f in fields(view) if f.name != "max_tokens_per_step"))
    return replace(view, **counts), replace(ask, best=0, **zeros(ask, COLUMNS))
