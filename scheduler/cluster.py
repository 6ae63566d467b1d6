"""What the conductor knows of workers and daemons, and the immutable view of it that policies score.

A `View` covers the workers of one model and namespace, in name order, as numpy columns: a policy is a formula over
columns. Columns are kept between requests; a heartbeat rewrites one row.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from .ahead import NOTHING, Ends, Given, Queues
from .cost import F64, UNMEASURED
from .messages import DEAD_AFTER, HEARTBEAT_EVERY, CostFit, WorkerAlive
from .recent import Recent
from .types import Node, Role, WorkerInfo

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def some(mask: Bools | F64) -> bool:
    """Whether any row is true, or not zero. Several times as fast as `any`, and each decision asks it a dozen times."""
    return bool(np.count_nonzero(mask))


def every(mask: Bools) -> bool:
    """Whether all rows are true, by the same."""
    return bool(np.count_nonzero(mask) == mask.size)


#: Roles that are asked for with every plan: to look up an enum's member takes longer than to compare it.
PREFILL, BOTH = Role.PREFILL, Role.BOTH
#: Workers and daemons remembered after their death, for their counters.
MAX_DEAD = 1024
#: A worker whose progress stands still for so long with work queued gets no more of it. A step of a big prompt on a
#: slow machine takes seconds, never this long.
STUCK_AFTER = 30.0


#: Slots of a pool that no grant of a whole prompt may take: they keep blocks in transit moving.
SPARE_SLOTS = 1
#: What a slot of a pool's DRAM may be.
SLOT_STATES = ("free", "cached", "pinned", "reserved", "quarantine")
#: Corrections that differ by less are one: they would only rewrite rows.
SAME_FACTOR = 0.01


class Assigned(msgspec.Struct, frozen=True):
    """What a plan adds to its worker until heartbeats show it.

    seconds: of prefill; point: it goes before those at this point of `ahead.py` and beyond. prompt_tokens: to be
    computed. context: tokens whose KV it will keep while it decodes, and pages those will fill. attempt: of its
    request, which may come to the same worker again.
    """

    at: float
    seconds: float
    prompt_tokens: int
    sequences: int
    context: int = 0
    pages: int = 0
    attempt: int = 0
    point: int = 0


@dataclass(slots=True)
class Sums:
    """Of all plans that a worker is charged with: to add them up anew took most of a decision."""

    sequences: int = 0
    prompt_tokens: int = 0
    context: int = 0
    pages: int = 0

    def add(self, plan: Assigned, sign: int = 1) -> None:
        self.sequences += sign * plan.sequences
        self.prompt_tokens += sign * plan.prompt_tokens
        self.context += sign * plan.context
        self.pages += sign * plan.pages


@dataclass(slots=True, eq=False)
class Worker:
    """One worker as last heard of.

    turned: when its progress last changed; moved: the same, or when it had nothing to do. left: it said goodbye.
    told: when its numbers were last heard. assigned: plans by (gateway, request) that its heartbeats
    cannot show yet, in the order in which they were made. correction: by which its predicted times are multiplied, as
    `accuracy.py` has learnt. recent: what it was given in the last minutes.
    """

    info: WorkerInfo
    heard: float
    alive: bool = True
    progress: int = 0
    moved: float = 0.0
    turned: float = 0.0
    left: bool = False
    told: float = 0.0
    queued_requests: int = 0
    queued_tokens: int = 0
    queue_seconds: float = 0.0
    queue_ahead: tuple[float, ...] = NOTHING
    running: int = 0
    running_context: int = 0
    expected_tokens: int = 0
    free_pages: int = 0
    cost: CostFit = UNMEASURED
    correction: float = 1.0
    counters: dict[str, float] = field(default_factory=dict)
    assigned: dict[tuple[str, int], Assigned] = field(default_factory=dict)
    plans: Sums = field(default_factory=Sums)
    recent: Recent = field(default_factory=Recent)
    given: Given = field(default_factory=Given)
    _ends: Ends | None = None

    @property
    def stuck(self) -> bool:
        return self.heard - self.moved > STUCK_AFTER

    @property
    def ends(self) -> F64:
        """[POINTS + 1] when all prompts accepted or planned so far are computed that go before a newcomer, by its
        length (`ahead.py`): one after the other, and never before they come.
        """
        if self._ends is None:
            self._ends = Ends(self.told, self.queue_ahead, self.queue_seconds, self.correction)
            for plan in self.assigned.values():
                if plan.seconds:
                    self._ends.add(plan.at, plan.seconds, plan.point)
        return self._ends.times

    @property
    def busy_until(self) -> float:
        """When all of them are."""
        return float(self.ends[-1])

    def changed(self) -> None:
        """Its queue was told anew: when it ends is to be worked out again."""
        self._ends = None

    def assign(self, key: tuple[str, int], plan: Assigned) -> None:
        """It is charged with one more plan, the latest."""
        self.unassign(key)
        self.assigned[key] = plan
        self.plans.add(plan)
        if plan.seconds:
            self.given.add(plan.at, plan.seconds, plan.point)
        if plan.seconds and self._ends is not None:
            self._ends.add(plan.at, plan.seconds, plan.point)

    def unassign(self, key: tuple[str, int]) -> bool:
        """It is not charged with this plan any more; False: it was not."""
        plan = self.assigned.pop(key, None)
        if plan is None:
            return False
        self.plans.add(plan, -1)
        if plan.seconds:
            self._ends = None
        return True

    def keep(self, assigned: dict[tuple[str, int], Assigned]) -> None:
        """It is charged with these plans only."""
        self.assigned, self.plans, self._ends = assigned, Sums(), None
        for plan in assigned.values():
            self.plans.add(plan)


@dataclass(slots=True, eq=False)
class Daemon:
    """One node's daemon as last heard of. blocks: published by it, once for each medium. heard: when it said hello, or
    how it does. _named: the counters of its slots, which are asked for with each cold block.
    """

    node: Node
    up: bool
    counters: dict[str, int] = field(default_factory=dict)
    draining: bool = False
    blocks: int = 0
    heard: float = 0.0
    _named: dict[str, str] = field(default_factory=dict)

    @property
    def takes(self) -> bool:
        """It reports, and takes on new work."""
        return self.up and not self.draining

    def slots(self, *states: str) -> int:
        """Slots of its DRAM that are in one of these states, as far as it has told."""
        if not self._named:
            label = f'pyengine_pool_blocks{{node="{self.node.node}",tier="dram",state='
            self._named = {state: f'{label}"{state}"}}' for state in SLOT_STATES}
        counters, named = self.counters, self._named
        return sum([counters.get(named[state], 0) for state in states])


# Neither frozen nor with slots: one is built for each request, of the columns of the one before (`Group.view`).
@dataclass(eq=False)
class View:
    """Columns over `workers` [W], all of one namespace and alive. Seconds, tokens and pages. Columns cannot be written
    to; only whoever makes a view narrows it, before anybody else sees it.

    both: of role both. prefills, decodes: who may take which part. inlines: of role decode, and may take the whole
    request into its decode batches. node: index into `nodes`. takes: its node's daemon reports to the conductor and
    takes on new work. queue_seconds: until all prompts accepted or planned so far are computed. running: sequences that
    decode or wait to, those that were planned included. tbt: predicted gap between tokens with one sequence more, its
    context counted as soon as the request is known; 0 where nothing is decoded. free_pages: what those that wait or
    were planned will leave of them; negative: they will wait for pages. step_seconds, token_seconds, context_seconds:
    predicted cost of one prefill step, of one prompt token, of one token of its context. measured: whether predictions
    rest on samples. turn: plans made so far. queued_requests, queued_tokens: waiting for prefill there, and their
    tokens still to compute. running_context: tokens in the pages of what runs, or will be. sequence_seconds,
    history_seconds: predicted cost of a decoding sequence in a step, and of a token of its context; base_seconds: of a
    step, whatever it computes. error: of predictions of steps, relative. correction: by which its queue and its prefill
    are multiplied already. cached_blocks: that its node holds. recent_prompt, recent_computed, recent_output: tokens of
    the prompts it was given in the last minutes, of these to compute, and of the answers it was to decode, as predicted
    (`recent.py`). fits_all: prompts of so many tokens are too large for nobody.
    """

    workers: tuple[WorkerInfo, ...]
    nodes: tuple[str, ...]
    block_tokens: int
    block_bytes: int
    both: Bools
    prefills: Bools
    decodes: Bools
    node: Ints
    takes: Bools
    queue_seconds: F64
    running: Ints
    free_pages: Ints
    pages: Ints
    pool_slots: Ints
    max_positions: Ints
    max_tokens_per_step: Ints
    tbt: F64
    step_seconds: F64
    token_seconds: F64
    context_seconds: F64
    measured: Bools
    turn: int
    queued_requests: Ints
    queued_tokens: Ints
    running_context: Ints
    max_sequences: Ints
    sequence_seconds: F64
    history_seconds: F64
    base_seconds: F64
    error: F64
    correction: F64
    inlines: Bools
    cached_blocks: Ints
    recent_prompt: Ints
    recent_computed: Ints
    recent_output: Ints
    fits_all: int = 0

    @cached_property
    def half_context(self) -> F64:
        """[W] half of `context_seconds`, which halves no column of each request instead. Groups keep it."""
        return self.context_seconds / 2

    @cached_property
    def prompt_gap(self) -> F64:
        """[W] by which a token of a prompt lengthens the gap between tokens; 0 where nothing is decoded. Groups keep
        it.
        """
        return np.array([float(info.role.decodes) for info in self.workers]) * self.history_seconds

    @cached_property
    def step_tokens(self) -> int:
        """Tokens that every worker computes in one step. Groups keep it."""
        return int(self.max_tokens_per_step.min())

    def prefill_seconds(self, tokens: int, cached: Ints) -> F64:
        """[W] to compute a prompt of `tokens` of which `cached` [W] are reused; one at least is not. Several such
        columns [K, W] at once take no longer than one: most of it is numpy's price per call.
        """
        rest = tokens - cached
        context = rest * (cached + (tokens + 1))
        steps = self.step_seconds
        if tokens > self.step_tokens:
            steps = -(-rest // self.max_tokens_per_step) * steps
        return steps + rest * self.token_seconds + context * self.half_context

    def prefill_seconds_of(self, row: int, tokens: int, cached: int) -> float:
        """The same of one worker: the same number, without ten columns."""
        rest = tokens - cached
        steps = -(-rest // self.max_tokens_per_step.item(row))
        context = rest * (tokens + cached + 1) / 2
        seconds: float = (
            steps * self.step_seconds.item(row)
            + rest * self.token_seconds.item(row)
            + context * self.context_seconds.item(row)
        )
        return seconds


#: Columns that every plan changes, and those that only heartbeats do, in the order in which `Group` writes them.
LOAD_INTS = (
    "running",
    "free_pages",
    "queued_requests",
    "queued_tokens",
    "running_context",
    "cached_blocks",
    "recent_prompt",
    "recent_computed",
    "recent_output",
)
LOAD_FLOATS = ("tbt",)
INTS = ("node", "pages", "pool_slots", "max_positions", "max_tokens_per_step", "max_sequences")
FLOATS = (
    "step_seconds",
    "token_seconds",
    "context_seconds",
    "sequence_seconds",
    "history_seconds",
    "base_seconds",
    "error",
    "correction",
)
BOOLS = ("both", "prefills", "decodes", "takes", "measured", "inlines")
#: Of a view, what follows from columns that only heartbeats change.
DERIVED = ("half_context", "prompt_gap", "step_tokens")


class _Table:
    """Columns of one type. Those that were handed out stay as they were: all are copied before the next change."""

    def __init__(self, names: tuple[str, ...], count: int, kind: type) -> None:
        self._names = names
        self._cells: npt.NDArray[Any] = np.zeros((len(names), count), dtype=kind)
        self._shown: dict[str, npt.NDArray[Any]] | None = None

    def cells(self) -> npt.NDArray[Any]:
        """[column, row], to be written to."""
        if self._shown is not None:
            self._cells, self._shown = self._cells.copy(), None
        return self._cells

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """[row] each, by name; they cannot be written to."""
        if self._shown is None:
            self._cells.flags.writeable = False
            self._shown = dict(zip(self._names, self._cells, strict=True))
        return self._shown


class Group:
    """The workers of one (model, namespace): their columns as rows of a few tables, rewritten worker by worker."""

    def __init__(self, workers: Iterable[Worker], daemons: dict[str, Daemon]) -> None:
        members = sorted(workers, key=lambda worker: worker.info.worker)
        self._infos = tuple(worker.info for worker in members)
        self.row = {info.worker: row for row, info in enumerate(self._infos)}
        self._nodes = tuple(sorted({info.node.node for info in self._infos}))
        self._node_row = {node: row for row, node in enumerate(self._nodes)}
        count = len(members)
        spec = self._infos[0].namespace.kv
        self._block_tokens, self._block_bytes = spec.block_tokens, spec.block_bytes
        self._fits_all = min(
            min(min(info.pages, info.pool_slots - SPARE_SLOTS) * spec.block_tokens, info.max_positions) - 1
            for info in self._infos
        )
        # Of what a view shows, `queue_seconds` only is told otherwise: as the times when the queue will have ended.
        self._queues = Queues(count)
        self._load_ints = _Table(LOAD_INTS, count, np.int64)
        self._load_floats = _Table(LOAD_FLOATS, count, np.float64)
        # Apart, as these stay the same from one plan to the next: a view takes them over as they are.
        self._ints = _Table(INTS, count, np.int64)
        self._floats = _Table(FLOATS, count, np.float64)
        self._bools = _Table(BOOLS, count, np.bool_)
        #: By row, what was last written to these three.
        self._written: list[tuple[object, ...]] = [()] * count
        #: What views take over as it is; None: it is to be gathered anew.
        self._kept: dict[str, object] | None = None
        for worker in members:
            self.update(worker, daemons)

    def update(self, worker: Worker, daemons: dict[str, Daemon]) -> None:
        """Rewrites the worker's row."""
        self.charge(worker, daemons)
        info, cost = worker.info, worker.cost
        base, token, context, sequence, history = cost.coefficients
        step, right = base, worker.correction
        if info.role is BOTH:
            # Beside prefill, each decode step is part of it.
            step += sequence * worker.running + history * worker.running_context
        daemon = daemons.get(info.node.node)
        free = not worker.stuck
        ints = (
            self._node_row[info.node.node],
            info.pages,
            info.pool_slots,
            info.max_positions,
            info.max_tokens_per_step,
            info.max_sequences,
        )
        floats = (step * right, token * right, context * right, sequence, history, base, cost.error, right)
        bools = (
            info.role is BOTH,
            info.role.prefills and free,
            info.role.decodes and free,
            daemon is not None and daemon.takes and daemon.node.incarnation == info.node.incarnation,
            cost.measured,
            False,
        )
        row = self.row[info.worker]
        if self._written[row] != (ints, floats, bools):
            self._written[row], self._kept = (ints, floats, bools), None
            self._ints.cells()[:, row] = ints
            self._floats.cells()[:, row] = floats
            self._queues.measure(row, step / info.max_tokens_per_step + token, context)
            self._bools.cells()[:, row] = bools

    def charge(self, worker: Worker, daemons: dict[str, Daemon]) -> None:
        """Rewrites of the worker's row what plans change."""
        info, plans, recent = worker.info, worker.plans, worker.recent
        running = worker.running + worker.queued_requests + plans.sequences
        kept = worker.running_context + worker.expected_tokens + plans.context
        gap = 0.0
        if info.role is not PREFILL:
            # A decode step carries every sequence.
            step, _, _, sequence, history = worker.cost.coefficients
            gap = step + sequence * (running + 1) + history * kept
        daemon = daemons.get(info.node.node)
        row = self.row[info.worker]
        # Cell by cell: numpy takes longer to make a row of a tuple than to write ten numbers.
        ints, floats = self._load_ints.cells(), self._load_floats.cells()
        ints[0, row] = running
        ints[1, row] = worker.free_pages + -worker.expected_tokens // self._block_tokens - plans.pages
        ints[2, row] = worker.queued_requests + len(worker.assigned)
        ints[3, row] = worker.queued_tokens + plans.prompt_tokens
        ints[4, row] = kept
        ints[5, row] = daemon.blocks if daemon is not None else 0
        ints[6, row] = recent.prompt
        ints[7, row] = recent.computed
        ints[8, row] = recent.output
        floats[0, row] = gap
        if worker.queue_seconds or plans.prompt_tokens:
            self._queues.write(row, worker.ends, worker.given)
        else:
            self._queues.clear(row)

    def view(self, turn: int, now: float) -> View:
        """A snapshot that later heartbeats do not change."""
        if self._kept is None:
            self._kept = {
                "workers": self._infos,
                "nodes": self._nodes,
                "block_tokens": self._block_tokens,
                "block_bytes": self._block_bytes,
                "fits_all": self._fits_all,
                **self._ints.columns(),
                **self._floats.columns(),
                **self._bools.columns(),
            }
            # What each view would work out anew of these.
            first = View.__new__(View)
            first.__dict__.update(self._kept)
            self._kept |= {name: getattr(first, name) for name in DERIVED}
        load = self._load_floats.columns()
        # To hand 35 arguments to a constructor takes longer than all else here.
        view = View.__new__(View)
        view.__dict__.update(self._kept)
        view.__dict__.update(self._load_ints.columns())
        view.turn, view.tbt = turn, load["tbt"]
        view.queue_seconds = self._queues.seconds(now)
        return view

    def queue_before(self, tokens: int, cached: Ints, now: float) -> F64:
        """[W] of the queue of each worker, what goes before a newcomer of so many tokens, without what is cached."""
        return self._queues.before(tokens, cached, now)


class Cluster:
    """Workers and daemons by name, folded from what they say and from their silence."""

    def __init__(self) -> None:
        self.workers: OrderedDict[str, Worker] = OrderedDict()
        self.daemons: OrderedDict[str, Daemon] = OrderedDict()
        self._groups: dict[tuple[str, bytes], Group] = {}
        self._namespace: dict[str, bytes] = {}

    def live(self) -> list[WorkerInfo]:
        """Workers that are alive, by name."""
        return [worker.info for _, worker in sorted(self.workers.items()) if worker.alive]

    def with_namespace(self, namespace: bytes) -> list[WorkerInfo]:
        """Workers of this namespace digest, the dead included."""
        return [worker.info for name, worker in self.workers.items() if self._namespace[name] == namespace]

    def hello(self, info: WorkerInfo, now: float) -> bool:
        """A worker dialled in; True if that changes who is there. What was learnt of its speed stays."""
        known = self.workers.get(info.worker)
        if known is not None and known.alive and known.info == info:
            known.heard = now
            return False
        worker = Worker(info, now, moved=now, turned=now)
        if known is not None:
            worker.counters = known.counters
            if known.info.namespace == info.namespace:
                worker.cost, worker.correction = known.cost, known.correction
            if known.info.incarnation == info.incarnation:
                worker.running = known.running
                worker.keep(known.assigned)
                worker.queued_tokens, worker.queued_requests = known.queued_tokens, known.queued_requests
                worker.queue_seconds, worker.told = known.queue_seconds, known.told
                worker.queue_ahead = known.queue_ahead
                worker.running_context, worker.expected_tokens = known.running_context, known.expected_tokens
                worker.recent, worker.given = known.recent, known.given
        worker.free_pages = info.pages if not worker.running else 0
        self.workers[info.worker] = worker
        self.workers.move_to_end(info.worker)
        self._namespace[info.worker] = info.namespace.digest()
        self._limit()
        self._groups.clear()
        return True

    def heartbeat(self, message: WorkerAlive, now: float) -> bool:
        """False: from a worker that has not said who it is (it will, its link being new)."""
        worker = self.workers.get(message.worker)
        if worker is None or not worker.alive:
            return False
        worker.heard = worker.told = now
        turned = message.progress != worker.progress or not (message.running or message.queued_requests)
        if turned:
            worker.moved = now
        if message.progress != worker.progress:
            worker.turned = now
        worker.progress = message.progress
        worker.queued_requests, worker.queued_tokens = message.queued_requests, message.queued_tokens
        worker.running, worker.free_pages = message.running, message.free_pages
        worker.queue_seconds, worker.queue_ahead = message.queue_seconds, message.queue_ahead
        worker.running_context, worker.expected_tokens = message.running_context, message.expected_tokens
        worker.counters = message.counters
        if message.cost.measured or not worker.cost.measured:
            # A worker that has just been restarted knows less of its speed than its last life did.
            worker.cost = message.cost
        worker.changed()
        if worker.assigned:
            # Its own counts show now what it has taken in; and whatever was planned before the last heartbeat but one
            # has reached it, or never will: but in the middle of a long step it takes in nothing.
            taken, shown = set(message.accepted), now - 2 * HEARTBEAT_EVERY if turned else -math.inf
            left = {
                key: plan
                for key, plan in worker.assigned.items()
                if plan.at > shown and (key[1], plan.attempt) not in taken
            }
            if len(left) < len(worker.assigned):
                worker.keep(left)
        worker.recent.expire(now)
        if worker.queue_seconds:
            worker.given.pass_by(now)
        self.touch(message.worker)
        return True

    def lost(self, name: str) -> bool:
        """The worker is gone; True if it was alive."""
        worker = self.workers.get(name)
        if worker is None or not worker.alive:
            return False
        worker.alive = False
        worker.keep({})
        self._groups.clear()
        return True

    def silent(self, now: float) -> list[str]:
        """Workers alive so far that have said nothing for too long."""
        return [name for name, worker in self.workers.items() if worker.alive and now - worker.heard > DEAD_AFTER]

    def assign(self, name: str, key: tuple[str, int], plan: Assigned) -> None:
        """A plan sends work there; heartbeats show it only later."""
        worker = self.workers.get(name)
        if worker is not None and worker.alive:
            worker.assign(key, plan)
            self._charge(name, worker)

    def gave(self, name: str, now: float, prompt: int = 0, computed: int = 0, output: int = 0) -> None:
        """A plan gives the worker a prompt, of which so much is to compute, or an answer to decode: for `Recent`."""
        worker = self.workers.get(name)
        if worker is not None:
            worker.recent.add(now, prompt, computed, output)

    def unassign(self, name: str, key: tuple[str, int]) -> None:
        worker = self.workers.get(name)
        if worker is not None and worker.unassign(key):
            self._charge(name, worker)

    def _charge(self, name: str, worker: Worker) -> None:
        group = self._groups.get((worker.info.model, self._namespace[name]))
        if group is not None and worker.alive:
            group.charge(worker, self.daemons)

    def daemon(self, node: Node, now: float = 0.0) -> None:
        """The node's daemon has dialled in. Its counters of before stand until its next heartbeat."""
        known = self.daemons.get(node.node)
        draining = known is not None and known.draining and known.node == node
        self.daemons[node.node] = Daemon(node, True, known.counters if known else {}, draining, heard=now)
        self.daemons.move_to_end(node.node)
        self._limit()
        self._groups.clear()

    def drains(self, node: str, draining: bool) -> bool:
        """The node's daemon takes on nothing new, or does again; True if that is news."""
        daemon = self.daemons[node]
        if daemon.draining == draining:
            return False
        daemon.draining = draining
        self._groups.clear()
        return True

    def daemon_lost(self, node: str) -> None:
        daemon = self.daemons.get(node)
        if daemon is not None:
            daemon.up = False
            self._groups.clear()

    def correct(self, name: str, factor: float) -> None:
        """Predictions for this worker have been so much too short, lately."""
        worker = self.workers.get(name)
        if worker is not None and abs(worker.correction - factor) > SAME_FACTOR:
            worker.correction = factor
            worker.changed()
            self.touch(name)

    def touch(self, name: str) -> None:
        """The worker's row is out of date."""
        worker = self.workers[name]
        group = self._groups.get((worker.info.model, self._namespace[name]))
        if group is not None and worker.alive:
            group.update(worker, self.daemons)

    def view(self, model: str, namespace: bytes, turn: int, now: float) -> View | None:
        """The workers of this model and namespace that are alive, or None if there are none."""
        group = self._groups.get((model, namespace))
        if group is None:
            members = [
                worker
                for name, worker in self.workers.items()
                if worker.alive and worker.info.model == model and self._namespace[name] == namespace
            ]
            if not members:
                return None
            group = self._groups[model, namespace] = Group(members, self.daemons)
        return group.view(turn, now)

    def queue_before(self, model: str, namespace: bytes, tokens: int, cached: Ints, now: float) -> F64:
        """[W] of the queues in the view of these, what goes before a newcomer, without what is cached [W] of it."""
        return self._groups[model, namespace].queue_before(tokens, cached, now)

    def counters(self) -> dict[str, float]:
        """All counters that workers and daemons have reported, those of the dead included; equal names are summed."""
        total: dict[str, float] = {}
        reports: list[Mapping[str, float]] = [worker.counters for worker in self.workers.values()]
        reports += [daemon.counters for daemon in self.daemons.values()]
        for counters in reports:
            # Most name who reports them.
            if total.keys().isdisjoint(counters):
                total.update(counters)
            else:
                total.update({name: total.get(name, 0) + value for name, value in counters.items()})
        return total

    def _limit(self) -> None:
        dead = [name for name, worker in self.workers.items() if not worker.alive]
        for name in dead[: max(len(dead) - MAX_DEAD, 0)]:
            del self.workers[name], self._namespace[name]
        down = [name for name, daemon in self.daemons.items() if not daemon.up]
        for name in down[: max(len(down) - MAX_DEAD, 0)]:
            del self.daemons[name]

    def check(self) -> None:
        """Raises AssertionError if a group holds a dead worker or misses a live one, or what it says is not so."""
        for worker in self.workers.values():
            sums = Sums()
            for plan in worker.assigned.values():
                sums.add(plan)
            assert worker.plans == sums, "a worker is charged with more or less than its plans"
        assert set(self.workers) == set(self._namespace), "a worker has no namespace"
        for model, namespace in self._groups:
            view = self.view(model, namespace, 0, 0.0)
            assert view is not None, "a group is empty"
            names = [info.worker for info in view.workers]
            alive = [info.worker for info in self.live() if info.model == model]
            assert names == [name for name in alive if self._namespace[name] == namespace], "a group is out of date"
            anew = Group([self.workers[name] for name in names], self.daemons).view(0, 0.0)
            # Of its daemon's blocks a row is told with the worker's next heartbeat or plan.
            for column in (*LOAD_INTS, "tbt", *INTS, *FLOATS, "both", "takes", "measured"):
                if column == "cached_blocks":
                    continue
                assert np.array_equal(getattr(view, column), getattr(anew, column)), f"{column} is out of date"
