"""One worker process: loads the model, joins its node's daemon, and turns sockets into steps."""

from __future__ import annotations

import gc
import logging
import secrets
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from pyengine import _native
from pyengine._native import PoolClient
from pyengine.backend import Backend
from pyengine.backends import load_backend
from pyengine.config import WorkerConfig
from pyengine.conversion import Converted
from pyengine.kv_mover import TIERS
from pyengine.ranks import Ranked
from pyengine.scheduler.changes import CHANGE_BYTES
from pyengine.scheduler.messages import Abort, PagesChanged, SetRole, Work, WorkerAlive
from pyengine.scheduler.types import Namespace, Node, Role, WorkerInfo
from pyengine.secret import read_secret
from pyengine.worker.calibrate import calibrate
from pyengine.worker.core import Worker
from pyengine.worker.links import WorkerLinks

logger = logging.getLogger(__name__)

#: Seconds a starting worker waits for its daemon, which looks through its SSD first: it reads a footer of each segment,
#: and after a crash the headers of batches, never the blocks. Generous: a part that gives up is started again anyway.
DAEMON_PATIENCE = 600.0
#: Seconds after which it says that it does.
DAEMON_LATE = 10.0
#: Seconds a signal may have to wait meanwhile, as it is looked at between two attempts. Below the launcher's patience.
SIGNAL_LATE = 1.0
#: Seconds between attempts to reach a daemon that died.
RECONNECT_EVERY = 0.2
#: The coefficients of `CostFit`, as metrics name them: seconds per each of these.
COST_TERMS = ("step", "prompt_token", "prompt_context_token", "decoding_sequence", "decoding_context_token")
#: Seconds between reports of changed pages while the worker computes: what changes twice meanwhile is not told.
PAGES_EVERY = 0.1
#: Changes in one message, 160 KiB of it.
CHANGES_AT_ONCE = 4096
#: Milliseconds the idle loop sleeps at most; every event wakes it before.
IDLE_POLL = 1000


def run_worker(config: WorkerConfig, ready: Callable[[dict[str, object]], None] = lambda _: None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status.

    ready: called once when the worker accepts work, with its name, endpoint, number of pages, and what decides with
    whom it can share KV.

    Raises:
        ValueError: the model, the backend or a limit is impossible; the text says what to do.
        RetryError, GiveUpError: the daemon is away or refuses, at the start or when it has come back.
        WorkerBroken: the backend computes nothing any more.
        RuntimeError: the links have failed.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        service = WorkerService(config, stop)
    except Stopped:
        return 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    try:
        ready(
            {
                "worker": config.worker,
                "work": config.work_endpoint,
                "pages": service.info.pages,
                "vocab_size": service.info.vocab_size,
                "namespace": msgspec.to_builtins(service.info.namespace),
            }
        )
        # A launcher says so itself.
        logger.debug("%s serves with %d pages", config.role.value, service.info.pages)
        # What was imported and built, some 200,000 objects with PyTorch, is never garbage: no collection is to look
        # through it while requests wait. With it a full one took 0.5 to 0.9 s.
        gc.freeze()
        if not stop.is_set():
            service.serve()
    finally:
        service.close()
    return 0


class Stopped(Exception):
    """It was told to stop before it could begin."""


class WorkerService:
    """The process's parts, joined. stop: once set, a service that still waits for its daemon raises Stopped instead."""

    def __init__(self, config: WorkerConfig, stop: threading.Event | None = None) -> None:
        secret = read_secret(Path(config.secret_file))
        self._config = config
        self._session_key = _native.derive_key(secret, "session")
        self._backend: Backend = load_backend(
            config.backend,
            config.model,
            cache=Path(config.state_dir) / "models",
            threads=config.threads or None,
            dtype=config.dtype,
            tp=config.tp,
        )
        if config.converted is not None:
            self._backend = Converted(self._backend, *config.converted)
        spec = self._backend.namespace.kv
        pages = config.device_pages(spec.block_bytes, spec.block_tokens, self._backend.max_positions)
        self._backend.allocate(pages)
        self._backend.warm_up(config.max_tokens_per_step, config.max_sequences)
        self._incarnation = secrets.randbits(63)
        self._pool: PoolClient | None = self._await_daemon(stop or threading.Event())
        self._worker = Worker(
            config.worker,
            self._backend,
            pages=pages,
            max_tokens=config.max_tokens_per_step,
            max_sequences=config.max_sequences,
            max_queue=config.max_queue,
            hash_key=_native.derive_key(secret, "hash"),
            incarnation=self._incarnation,
            role=config.role,
        )
        self._worker.grammars.load()
        calibrate(
            self._backend,
            self._worker.batcher.cost,
            pages=pages,
            max_tokens=config.max_tokens_per_step,
            max_sequences=config.max_sequences,
        )
        self._worker.attach(self._pool)
        self.info = describe(config, self._backend, self._incarnation, self._pool, pages)
        #: Who computes, as a sample: what is counted of a worker can be told by it.
        self._says = {info_sample(config, self.info.namespace): 1.0}
        self._links = WorkerLinks(self.info, config.conductor, self._session_key, self._alive)
        self._worker.wake = self._links.wake
        self._poll = select.poll()
        self._poll.register(self._links.arrived, select.POLLIN)
        self._ranks = self._backend.ranks if isinstance(self._backend, Ranked) else None
        if self._ranks is not None:
            self._poll.register(self._ranks.wake, select.POLLIN)
        self._pool_fd = self._watch(self._pool)
        self._redial: threading.Thread | None = None
        self._redialled: PoolClient | None = None
        self._refused: _native.TransferError | None = None
        self._closing = False
        self._stopping = False
        self._pages_due = 0.0
        self._links.start()

    def stop(self) -> None:
        """Makes `serve` return soon. May be called by a signal handler."""
        self._stopping = True
        self._links.wake()  # a poll that a signal interrupts goes on waiting

    def serve(self) -> None:
        """The loop. Everything that happens to this worker happens here, in this order."""
        rested = False
        passed = 0.0  # seconds, in rounds of the steps that have not ended
        while not self._stopping:
            if self._links.failed is not None:
                raise RuntimeError("the worker's links have failed") from self._links.failed
            if self._ranks is not None:
                self._ranks.check()
            began, before = time.perf_counter(), self._worker.model_seconds
            for message in self._links.take():
                match message:
                    case Work():
                        self._worker.accept(message)
                    case Abort():
                        self._worker.abort(message)
                    case SetRole():
                        self._take_role(message.role)
            self._links.send(self._worker.step(), self._worker.take_ended())
            self._tell_pages()
            self._mind_daemon()
            passed += time.perf_counter() - began
            if computed := self._worker.model_seconds - before:
                self._worker.loop_seconds += max(passed - computed, 0.0)
            if computed or not self._worker.computing:
                passed = 0.0
            if not self._worker.busy:
                # Checking costs milliseconds: once whenever the worker comes to rest, not at every look at the clock.
                if self._worker.idle and not rested:
                    self._worker.check()
                rested = self._worker.idle
                longest = IDLE_POLL if self._pool is not None else RECONNECT_EVERY * 1000
                self._poll.poll(min(longest, max(self._worker.due - time.monotonic(), 0.0) * 1000 + 1))

    def _take_role(self, role: Role) -> None:
        """What it has accepted goes on; later work is taken, or answered "wrong_role", by the new role."""
        logger.info("%s takes on the role %s", self._config.worker, role.value)
        self._worker.role = role
        self.info = msgspec.structs.replace(self.info, role=role)
        self._links.announce(self.info)

    def _tell_pages(self) -> None:
        """Tells the conductor which blocks came to device pages and went from there."""
        pool, now = self._worker.batcher.pool, time.monotonic()
        if now < self._pages_due and self._worker.busy:
            return
        if first := self._links.take_unknown():
            packed = pool.take_all()
        elif pool.changed:
            packed = pool.take_changes()
        else:
            return
        self._pages_due = now + PAGES_EVERY
        size = CHANGES_AT_ONCE * CHANGE_BYTES
        parts = [packed[at : at + size] for at in range(0, max(len(packed), 1), size)]
        self._links.tell(
            [
                PagesChanged(worker=self._config.worker, changes=part, first=first and number == 0)
                for number, part in enumerate(parts)
            ]
        )

    def close(self) -> None:
        """Leaves the cluster and frees the model. What ran here is retried elsewhere by its gateway."""
        self._closing = True
        self._worker.wake = lambda: None  # a grammar may still be compiled
        self._links.stop()
        if self._redial is not None:
            self._redial.join()
        self._worker.close()
        self._backend.close()

    def _watch(self, pool: PoolClient) -> int:
        descriptor = pool.fileno()
        self._poll.register(descriptor, select.POLLIN)
        return descriptor

    def _mind_daemon(self) -> None:
        """A dead daemon is dialled again on a thread, so that what decodes goes on meanwhile."""
        if self._pool is not None and self._worker.mover.pool is None:
            # The mover has closed the client, so its descriptor's number is known here only.
            self._poll.unregister(self._pool_fd)
            self._pool = None
            logger.warning("the daemon of %s is gone: serving without its pool until it is back", self._config.node)
            self._redial = threading.Thread(target=self._dial_again, name="redial", daemon=True)
            self._redial.start()
        if self._refused is not None:
            raise self._refused
        if self._redialled is not None:
            self._pool, self._redialled = self._redialled, None
            self._worker.attach(self._pool)
            self._pool_fd = self._watch(self._pool)
            self.info = msgspec.structs.replace(self.info, node=_node(self._pool), pool_slots=self._pool.slots)
            self._links.announce(self.info)

    def _dial_again(self) -> None:
        while not self._closing:
            try:
                self._redialled = self._dial(RECONNECT_EVERY)
                return
            except _native.RetryError:
                continue
            except _native.TransferError as error:
                # A node's daemon that has another layout or secret now: this worker is of no use any more.
                self._refused = error
                return

    def _await_daemon(self, stop: threading.Event) -> PoolClient:
        said = time.monotonic()
        until = said + DAEMON_PATIENCE
        while not stop.is_set():
            try:
                return self._dial(min(DAEMON_LATE, SIGNAL_LATE))
            except _native.RetryError as error:
                now = time.monotonic()
                if now > until:
                    raise
                if now - said >= DAEMON_LATE:
                    said = now
                    logger.warning("waiting for the daemon of %s: %s", self._config.node, error)
        self._backend.close()
        raise Stopped

    def _dial(self, timeout: float) -> PoolClient:
        spec = self._backend.namespace.kv
        return PoolClient.connect(
            self._config.daemon_socket,
            self._session_key,
            self._incarnation,
            spec.strips,
            spec.strip_bytes,
            self._backend.namespace.owner(),
            timeout,
        )

    def _alive(self) -> WorkerAlive:
        """The heartbeat; runs on the links' thread and only reads plain counters."""
        worker, batcher = self._worker, self._worker.batcher
        loads, worker.mover.loads = worker.mover.loads, []
        accepted, worker.accepted = worker.accepted, []
        return WorkerAlive(
            worker=self._config.worker,
            progress=worker.progress,
            queued_requests=worker.load.waiting,
            queued_tokens=worker.load.queued_tokens,
            running=worker.load.running,
            free_pages=batcher.pool.free,
            cost=worker.load.cost,
            counters=self._says | sample_names(self._config.worker, worker),
            loads=tuple(loads),
            queue_seconds=worker.load.queue_seconds,
            running_context=worker.load.running_context,
            expected_tokens=worker.load.expected_tokens,
            accepted=tuple(accepted),
            queue_ahead=worker.load.queue_ahead,
        )


def describe(config: WorkerConfig, backend: Backend, incarnation: int, pool: PoolClient, pages: int) -> WorkerInfo:
    """What the conductor and gateways must know of this worker."""
    return WorkerInfo(
        worker=config.worker,
        incarnation=incarnation,
        role=config.role,
        node=_node(pool),
        work=config.work_endpoint,
        model=backend.model,
        tokenizer=backend.tokenizer,
        namespace=backend.namespace,
        vocab_size=backend.vocab_size,
        max_positions=backend.max_positions,
        pages=pages,
        pool_slots=pool.slots,
        max_tokens_per_step=config.max_tokens_per_step,
        max_sequences=config.max_sequences,
        pinned=config.pinned,
    )


def info_sample(config: WorkerConfig, namespace: Namespace) -> str:
    """Name and labels of the sample that says what computes in this worker, in which dtype, and that of pooled KV."""
    kept = namespace.kv.groups[0].dtype
    return (
        f'pyengine_worker_info{{worker="{config.worker}",backend="{config.backend}",'
        f'dtype="{namespace.compute_dtype}",kv_dtype="{kept}"}}'
    )


def sample_names(name: str, worker: Worker) -> dict[str, float]:
    """The worker's counters as Prometheus samples."""
    label = f'worker="{name}"'
    model = worker.backend.model.replace("\\", "\\\\").replace('"', '\\"')
    # What vLLM counts has the label by which its dashboards choose.
    theirs = f'model_name="{model}",{label}'
    counters, moved, load = worker.counters, worker.mover.counters, worker.load
    pool = worker.batcher.pool
    queried, found = counters["prompt"], counters["cached_device"]
    elsewhere = sum(counters[f"cached_{tier}"] for tier in TIERS) - found
    terms = zip(COST_TERMS, load.cost.coefficients, strict=True)
    return {
        f'pyengine_worker_tokens_total{{{label},phase="prefill"}}': counters["prefill"],
        f'pyengine_worker_tokens_total{{{label},phase="decode"}}': counters["decode"],
        f"pyengine_recomputed_tokens_total{{{label}}}": counters["recomputed"],
        **{f'pyengine_cached_tokens_total{{{label},tier="{tier}"}}': counters[f"cached_{tier}"] for tier in TIERS},
        f"pyengine_worker_steps_total{{{label}}}": counters["steps"],
        f'pyengine_worker_seconds_total{{{label},of="model"}}': worker.model_seconds,
        f'pyengine_worker_seconds_total{{{label},of="predicted"}}': worker.predicted_seconds,
        f'pyengine_worker_seconds_total{{{label},of="loop"}}': worker.loop_seconds,
        f"vllm:num_preemptions_total{{{theirs}}}": counters["preempted"],
        f"vllm:prefix_cache_queries_total{{{theirs}}}": queried,
        f"vllm:prefix_cache_hits_total{{{theirs}}}": found,
        f"vllm:external_prefix_cache_queries_total{{{theirs}}}": queried - found,
        f"vllm:external_prefix_cache_hits_total{{{theirs}}}": elsewhere,
        f'pyengine_worker_blocks_total{{{label},event="stored"}}': moved["stored_blocks"],
        f'pyengine_worker_blocks_total{{{label},event="loaded"}}': moved["loaded_blocks"],
        f'pyengine_worker_blocks_total{{{label},event="uncached"}}': moved["uncached_blocks"],
        f"pyengine_worker_requests{{{label}}}": len(worker.work),
        f'pyengine_worker_pages{{{label},state="referenced"}}': pool.referenced,
        f"vllm:kv_cache_usage_perc{{{theirs}}}": pool.referenced / pool.pages,
        f"vllm:num_requests_running{{{theirs}}}": load.running,
        f"vllm:num_requests_waiting{{{theirs}}}": load.waiting,
        f"pyengine_cost_error{{{label}}}": load.cost.error,
        f"pyengine_cost_samples_total{{{label}}}": load.cost.samples,
        **{f'pyengine_cost_seconds{{{label},per="{term}"}}': seconds for term, seconds in terms},
    }


def _node(pool: PoolClient) -> Node:
    node = pool.node
    return Node(node.node, node.address, node.incarnation)
