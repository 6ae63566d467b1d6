"""A cluster in one process: real daemons and pools, real worker loops, stepped by the test. No conductor, no sockets
but those between daemons. Tests decide who prefills, who decodes, and when anything moves."""

from __future__ import annotations

import secrets
import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from pyengine import _native
from pyengine.backend import Backend
from pyengine.kv_mover import Pool
from pyengine.scheduler.batcher import State
from pyengine.scheduler.messages import Abort, Failed, Message, PrefillReport, PromptTold, Tokens, Work
from pyengine.scheduler.types import FinishReason, Logprobs, Node, Role, SamplingParams, Source
from pyengine.worker.core import Worker

SESSION_KEY = bytes(range(32))
HASH_KEY = bytes(range(32, 64))
#: Generous: an event that takes longer never comes.
PATIENCE = 60.0


class Request(msgspec.Struct):
    """What the test's gateway knows of one attempt."""

    number: int
    attempt: int
    workers: tuple[str, ...]
    tokens: dict[int, int]
    finish: FinishReason | None = None
    failed: Failed | None = None
    cached: int | None = None
    tiers: dict[str, int] = {}
    told: dict[int, Logprobs] = {}
    #: By position in the prompt.
    prompt_told: dict[int, Logprobs] = {}

    @property
    def over(self) -> bool:
        return self.finish is not None or self.failed is not None

    @property
    def ids(self) -> list[int]:
        assert sorted(self.tokens) == list(range(len(self.tokens))), f"token numbers have gaps: {sorted(self.tokens)}"
        return [self.tokens[i] for i in range(len(self.tokens))]


class Cluster:
    """Daemons by node name and workers by name; the test is the gateway."""

    def __init__(self, transport: str = "tcp") -> None:
        self.transport = transport
        self.daemons: dict[str, _native.Daemon] = {}
        self.workers: dict[str, Worker] = {}
        self.node_of: dict[str, str] = {}
        self.requests: dict[tuple[int, int], Request] = {}
        #: Where a node is to be reached instead of its own address (a proxy).
        self.address_of: dict[str, str] = {}
        self._pools: dict[str, _native.PoolClient] = {}

    def add_node(self, name: str, slots: int, backend: Backend) -> None:
        """A daemon whose arena holds at least `slots` blocks (a page of bookkeeping more)."""
        spec = backend.namespace.kv
        slot_bytes = -(-spec.block_bytes // 4096) * 4096 + 4 * spec.strips + 8
        self.daemons[name] = _native.Daemon(
            node=name,
            dram_bytes=slots * slot_bytes + 8192,
            session_key=SESSION_KEY,
            listen="127.0.0.1:0",
            transport=self.transport,
        )

    def add_worker(
        self,
        name: str,
        node: str,
        backend: Backend,
        *,
        pages: int = 256,
        max_tokens: int = 64,
        max_sequences: int = 32,
        role: Role = Role.BOTH,
        wrap: Callable[[_native.PoolClient], Pool] | None = None,
    ) -> Worker:
        backend.allocate(pages)
        worker = Worker(
            name,
            backend,
            pages=pages,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            max_queue=1000,
            hash_key=HASH_KEY,
            incarnation=secrets.randbits(63),
            role=role,
        )
        self.workers[name] = worker
        self.node_of[name] = node
        self.attach(name, wrap)
        return worker

    def attach(self, name: str, wrap: Callable[[_native.PoolClient], Pool] | None = None) -> None:
        """Gives a worker that has no pool a link to its node's daemon."""
        worker = self.workers[name]
        spec = worker.backend.namespace.kv
        owner = worker.backend.namespace.owner()
        pool = self.daemons[self.node_of[name]].attach(worker.mover.incarnation, spec.strips, spec.strip_bytes, owner)
        worker.attach(wrap(pool) if wrap else pool)
        self._pools[name] = pool

    def replace_daemon(self, node: str, slots: int) -> None:
        """Kills a node's daemon and starts another, to which its workers attach when they have noticed."""
        self.daemons[node].stop()
        names = [name for name in self.workers if self.node_of[name] == node]
        self.until(lambda: all(self.workers[name].mover.pool is None for name in names))
        self.add_node(node, slots, self.workers[names[0]].backend)
        for name in names:
            self.attach(name)

    def node(self, name: str) -> Node:
        address = self.daemons[name].address
        return Node(name, self.address_of.get(name, address.address), address.incarnation)

    def submit(
        self,
        prompt: list[int],
        prefill: str,
        decode: str,
        *,
        sampling: SamplingParams | None = None,
        sources: tuple[Source, ...] = (),
        attempt: int = 1,
        number: int | None = None,
        generated: int = 0,
        parts: tuple[str, ...] = ("prefill", "decode"),
        deadline: float = PATIENCE,
        changes: dict[str, Any] | None = None,
    ) -> Request:
        """Sends the work to both workers, or once if they are one. changes: fields that are other than they should."""
        sampling = sampling or SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        number = number if number is not None else secrets.randbits(62)
        changes = changes or {}
        worker = self.workers[decode]
        root = _native.root_key(worker.namespace, b"", b"", HASH_KEY)
        tokens = np.asarray(prompt, np.uint32)

        def work(part: str) -> Work:
            work = Work(
                request=number,
                attempt=attempt,
                part=part,
                token_ids=tokens.tobytes(),
                generated=generated,
                root=root,
                keys=_native.block_keys(tokens, worker.block_tokens, root, HASH_KEY),
                sampling=msgspec.structs.replace(sampling, seed=sampling.seed or 0),
                namespace=worker.namespace,
                decode_node=self.node(self.node_of[decode]),
                decode_incarnation=worker.mover.incarnation,
                sources=sources,
                deadline=deadline,
            )
            return msgspec.structs.replace(work, **changes)

        request = Request(number, attempt, (prefill, decode), {})
        self.requests[number, attempt] = request
        if prefill == decode:
            worker.accept(work("both"))
        else:
            if "prefill" in parts:
                self.workers[prefill].accept(work("prefill"))
            if "decode" in parts:
                self.workers[decode].accept(work("decode"))
        return request

    def together(self, worker: str, submit: Callable[[], list[Request]]) -> list[Request]:
        """Submits requests that run at once at this worker, however long the KV of each takes to come: it admits none
        before all wait to be.
        """
        batcher = self.workers[worker].batcher
        most, batcher.max_sequences = batcher.max_sequences, 0
        requests = submit()
        self.until(lambda: all(sequence.state is State.WAITING for sequence in batcher.sequences.values()))
        batcher.max_sequences = most
        return requests

    def abort(self, request: Request) -> None:
        for name in request.workers:
            self.workers[name].abort(Abort(request=request.number, attempt=request.attempt))

    def step(self, *names: str) -> None:
        """One round of the named workers (all, if none is named); takes in what they say."""
        for name in names or tuple(self.workers):
            for message in self.workers[name].step():
                self._take(message)

    def _take(self, message: Message) -> None:
        request = self.requests[message.request, message.attempt]  # type: ignore[attr-defined]
        match message:
            case Tokens():
                for offset, token in enumerate(message.tokens):
                    assert message.first + offset not in request.tokens, "a token came twice"
                    request.tokens[message.first + offset] = token
                    if message.logprobs is not None:
                        request.told[message.first + offset] = message.logprobs[offset]
                request.finish = message.finish or request.finish
                if message.finish is not None:
                    self.abort(request)
            case Failed():
                request.failed = message
                self.abort(request)
            case PromptTold():
                assert not request.tokens, "the prompt is told of before the answer begins"
                for offset, told in enumerate(message.logprobs):
                    request.prompt_told.setdefault(message.first + offset, told)
            case PrefillReport():
                request.cached, request.tiers = message.cached, message.tiers

    def until(self, condition: Callable[[], bool], *names: str) -> None:
        """Steps until the condition holds; sleeps on the pools' descriptors while nobody has anything to do."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            self.step(*names)
            assert time.monotonic() < deadline, "the event never came"
            if not condition() and not any(self.workers[name].busy for name in names or self.workers):
                poll = select.poll()
                for name, pool in self._pools.items():
                    if self.workers[name].mover.pool is not None:
                        poll.register(pool.fileno(), select.POLLIN)
                poll.poll(50)

    def run(self, *requests: Request) -> None:
        """Steps until these requests are over."""
        self.until(lambda: all(request.over for request in requests))

    def settle(self) -> None:
        """Steps until nothing is held anywhere; fails with what is left if it never comes to that."""
        deadline = time.monotonic() + PATIENCE
        while held := list(self.held()):
            assert time.monotonic() < deadline, f"never released: {held}"
            self.step()
        for worker in self.workers.values():
            worker.check()

    def held(self) -> Iterator[str]:
        """What is still reserved, pinned, granted, referenced or queued, in words."""
        for name, worker in self.workers.items():
            if not worker.idle:
                yield f"{name}: requests {list(worker.work)}"
            if worker.batcher.pool.referenced:
                yield f"{name}: {worker.batcher.pool.referenced} pages referenced"
        for name in self.daemons:
            for sample, value in self.counters(name).items():
                busy = any(
                    f'state="{state}"' in sample for state in ("pinned", "reserved", "quarantine", "held", "waiting")
                )
                if busy and value:
                    yield f"{sample} = {value}"

    def counters(self, node: str) -> dict[str, int]:
        return self.daemons[node].counters()

    def counter(self, node: str, name: str, **labels: str) -> int:
        """Sum over the node's samples of a name that carry these labels."""
        return sum(
            value
            for sample, value in self.counters(node).items()
            if sample.partition("{")[0] == name and all(f'{k}="{v}"' in sample for k, v in labels.items())
        )

    def source(self, node: str, blocks: int) -> tuple[Source, ...]:
        return (Source(self.node(node), 0, blocks),)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.mover.close()
            worker.backend.close()
        for daemon in self.daemons.values():
            daemon.stop()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
