"""The gateway's engine room: requests in flight, links, what is known of the cluster. HTTP is app.py's, choices are
request.py's; this file carries messages between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from pyengine.config import GatewayConfig
from pyengine.gateway.budget import Budget
from pyengine.gateway.links import Link
from pyengine.gateway.metrics import Families, Metrics, exposition
from pyengine.gateway.recent import Recent
from pyengine.gateway.request import Action, ErrorKind, Request, RequestError, State, Terms, ToConductor
from pyengine.gateway.siblings import Siblings, Told
from pyengine.gateway.threads import Threads
from pyengine.gateway.tracing import Timeline, Tracer
from pyengine.grammar import Grammars
from pyengine.scheduler.explanation import Explanation
from pyengine.scheduler.messages import (
    Abort,
    ClearOutcome,
    ClusterState,
    Codec,
    ConductorToGateway,
    Explain,
    Explained,
    Failed,
    FindHot,
    GatewayAlive,
    GatewayHello,
    GatewayPing,
    HotPrefix,
    HotPrefixes,
    Message,
    Planned,
    PrefillReport,
    PromptTold,
    Tokens,
    WorkerPing,
    WorkerToGateway,
)
from pyengine.scheduler.types import Grammar, Logprobs, SamplingParams, WorkerInfo
from pyengine.text import NOTHING, Detokenizer, Tokenizer

log = logging.getLogger("pyengine.gateway")

#: How often time is looked at, seconds: the grain of retries and heartbeats, far below the promised 5 s.
TICK = 0.05
#: Models remembered after their workers have gone, so that a restart is a wait and not a 404.
MAX_MODELS = 256


#: Unknown fields of requests that the log has named: each once.
MAX_FIELDS = 1024
#: Seconds that a grammar may take to be compiled, with those before it: ten of the worst.
GRAMMAR_PATIENCE = 5.0
#: Seconds that the conductor has for an answer to a question: it answers at once, unless it hangs.
ANSWER_PATIENCE = 5.0
#: In place of what no worker told (one of an earlier version may not).
UNTOLD = Logprobs(-math.inf, 0, ())


#: What `Generation.take` says while there is nothing to say.
NOTHING_NEW: tuple[str, list[int], str | None, list[Logprobs] | None] = ("", [], None, None)


class Keys(Protocol):
    """Block keys of one cluster (the hash key is inside)."""

    def root(self, namespace: bytes, salt: bytes = b"") -> bytes:
        """key[-1] for a namespace digest and a tenant's salt, with no adapter."""
        ...

    def blocks(self, tokens: bytes, block_tokens: int, root: bytes) -> bytes:
        """16 bytes per full block of uint32 LE tokens."""
        ...


class Model(msgspec.Struct, frozen=True):
    """What the workers that serve a name have announced. room: tokens the largest decode worker can hold."""

    name: str
    tokenizer: str
    namespace: bytes
    block_tokens: int
    vocab_size: int
    max_positions: int
    room: int


class Generation:
    """One choice of one HTTP request: its state machine, and the text that comes of its tokens."""

    def __init__(
        self,
        service: Service,
        request: Request,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        wake: Callable[[], None],
        counted: bool = True,
        keep: Mapping[int, str] = NOTHING,
    ) -> None:
        """counted: its prompt is no other choice's, too. keep: of the Detokenizer."""
        self.request = request
        self.emitted = 0
        self.counted = counted
        #: What it goes through, if somebody traces.
        self.timeline: Timeline | None = None
        self._told = self._shown = 0
        self._service = service
        self._metrics = service.metrics.of(request.model)
        self._detokenizer = Detokenizer(tokenizer, stop, request.sampling.min_tokens, keep)
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        self._one_by_one = bool(stop)
        self._wake = wake
        self._closed = False
        #: When the client's tokens came last.
        self.last = request.arrived

    def take(self, *, each: bool = False) -> tuple[str, list[int], str | None, list[Logprobs] | None]:
        """New text, the tokens it came of, the finish reason once the last is there, and what is told of the tokens.

        each: tokens do not wait for text, which half a character has none of yet. Raises RequestError.
        """
        request = self.request
        if self._one_by_one or request.state is State.DONE:
            text, finish = self._take()
        else:
            # As nearly always: it goes on, and nothing in its text can end it.
            fresh = request.tokens[self.emitted : self._shown]
            self.emitted += len(fresh)
            text, finish = self._detokenizer.push(fresh), None
            if self._told + len(fresh) == self.emitted and request.sampling.logprobs is None:
                if not text and not each:
                    return NOTHING_NEW
                self._told = self.emitted
                return text, fresh, None, None
        if not text and finish is None and not each:
            return NOTHING_NEW
        ids = request.tokens[self._told : self.emitted]
        told = None
        if request.sampling.logprobs is not None:
            told = [one or UNTOLD for one in request.logprobs[self._told : self.emitted]]
        self._told = self.emitted
        return text, ids, finish, told

    def _take(self) -> tuple[str, str | None]:
        request = self.request
        fresh = request.tokens[self.emitted : request.shown]
        text: list[str] = []
        # With stop strings token by token, so that usage counts no token behind the stop.
        width = 1 if self._one_by_one else max(len(fresh), 1)
        for at in range(0, len(fresh), width):
            piece = fresh[at : at + width]
            self.emitted += len(piece)
            if self._ends_in_stop_id(piece):
                piece = piece[:-1]
            text.append(self._detokenizer.push(piece))
            if self._detokenizer.stopped:
                self._service.stop(self)
                break
        if request.error is not None:
            raise request.error
        if request.finish is None:
            return "".join(text), None
        if not self._detokenizer.stopped:
            text.append(self._detokenizer.finish())
            if self._detokenizer.stopped:
                return "".join(text), "stop"
        return "".join(text), "stop" if self._detokenizer.stopped else request.finish.value

    def _ends_in_stop_id(self, piece: list[int]) -> bool:
        """The token that ended the request by the client's list is no part of the text."""
        last = self.request.finish is not None and self.emitted == len(self.request.tokens)
        return last and bool(piece) and piece[-1] in self._stop_ids

    def progressed(self, now: float) -> None:
        """Called by the service after each message: measures new tokens, wakes the reader."""
        request, metrics = self.request, self._metrics
        if self.timeline is not None:
            self.timeline.see(request, now)
        before, after = self._shown, request.shown
        if after > before:
            self._shown = after
            metrics.generated_tokens += after - before
            # One that was held when its request failed was shown to nobody.
            if before == 0 and not math.isnan(request.given):
                metrics.ttft.observe(request.given - request.arrived)
                metrics.held.observe(request.given - request.came)
            if gaps := after - (before or 1):
                gap = (now - self.last) / gaps
                metrics.gap.observe(gap, gaps)
                if before <= 1:
                    metrics.second_gap.observe(gap)
            self.last = now
        if after > before or request.state is State.DONE:
            self._wake()

    def close(self, why: str = "") -> None:
        """The reader is through with it: whatever still runs is aborted, as `why` says in the counters. Idempotent."""
        if not self._closed:
            self._closed = True
            self._service.forget(self, why or "abort")


class Asker(Protocol):
    """Whose request is under way."""

    request: Request
    timeline: Timeline | None

    def progressed(self, now: float) -> None:
        """Something has come, or has happened."""
        ...

    def close(self, why: str = "") -> None: ...


class Service:
    """All requests of one gateway process. Everything happens on the loop it was started on."""

    def __init__(self, config: GatewayConfig, session_key: bytes, keys: Keys) -> None:
        self.config = config
        self.metrics = Metrics()
        self.tracer: Tracer | None = None
        #: Those that share its address; None: it is alone.
        self.siblings: Siblings | None = None
        if config.siblings:
            self.siblings = Siblings(Path(config.siblings_dir), config.siblings, config.gateway, self._told)
        self.cluster = ClusterState(workers=(), counters={})
        self.models: dict[str, Model] = {}
        self.threads = Threads()
        #: Bytes of bodies that are read or parsed: four of the largest.
        self.bodies = Budget(4 * config.max_body_bytes)
        #: Paths that health checks have tried so far.
        self.probed = 0
        #: The requests of late.
        self.recent = Recent()
        #: What was asked of the conductor, by number.
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._asked = 0
        self._unknown: set[str] = set()
        #: See `soon`.
        self._calls: list[Callable[[], None]] = []
        #: More samples for /metrics: what the application counts itself.
        self.counters: Callable[[], dict[str, float]] = dict
        self._session_key = session_key
        self._keys = keys
        self._incarnation = secrets.randbits(63)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._conductor: Link | None = None
        self._workers: dict[str, Link] = {}
        self._incarnations: dict[str, int] = {}
        self._generations: dict[int, Asker] = {}
        self._tokenizers: dict[str, asyncio.Future[Tokenizer]] = {}
        self._grammars: dict[str, Grammars] = {}
        #: Of each tokenizer: that it and its vocabulary are being read, or have been.
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._from_worker = Codec(WorkerToGateway)

    # -- for app.py ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        name = self.config.gateway
        if self.config.otlp_endpoint and self.tracer is None:
            self.tracer = Tracer.to(self.config.otlp_endpoint, "pyengine")
        self._conductor = Link(
            self._context,
            self.config.conductor,
            self._session_key,
            Codec(ConductorToGateway),
            on_messages=self._on_conductor,
            on_change=self._on_conductor_change,
            greeting=GatewayHello(gateway=name, incarnation=self._incarnation),
            beat=GatewayAlive(gateway=name),
        )
        self._ticker = asyncio.create_task(self._tick_for_ever())
        if self.siblings is not None:
            await self.siblings.start()

    async def close(self) -> None:
        """Aborts what runs and closes all links. Idempotent."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        for generation in list(self._generations.values()):
            generation.close()
        if self.siblings is not None:
            await self.siblings.close()
        for link in [*self._workers.values(), *([self._conductor] if self._conductor else [])]:
            link.close()
        self.threads.close()
        for reading in self._reading.values():
            reading.cancel()
        for grammars in self._grammars.values():
            grammars.close()
        if self.tracer is not None:
            # It sends what is left, and may wait for a collector.
            await asyncio.to_thread(self.tracer.close)
        self._workers.clear()
        self._conductor = None
        self._context.term()

    @property
    def conductor_up(self) -> bool:
        return self._conductor is not None and self._conductor.up

    @property
    def ticking(self) -> bool:
        """The clock by which retries and heartbeats go."""
        return self._ticker is not None and not self._ticker.done()

    @property
    def healthy(self) -> bool:
        """The conductor is there, some model has workers for every part, and its vocabulary has been read."""
        return self.conductor_up and any(self.servable(name) and self.is_read(name) for name in self.models)

    @property
    def active(self) -> int:
        return len(self._generations)

    def servable(self, model: str) -> bool:
        workers = [worker for worker in self.cluster.workers if worker.model == model]
        return any(worker.role.prefills for worker in workers) and any(worker.role.decodes for worker in workers)

    async def model(self, name: str | None) -> Model | None:
        """The model of this name (or the only one); None if there is none of it. Waits `patience` for a first worker.

        Raises RequestError (unavailable) if none came.
        """
        deadline = time.monotonic() + self.config.patience
        while not self.models:
            left = deadline - time.monotonic()
            if left <= 0:
                raise RequestError(ErrorKind.UNAVAILABLE, "no worker is ready yet", 1.0)
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        return self.models.get(name or "")

    async def tokenizer(self, path: str) -> Tokenizer:
        """Loaded once per path, off the loop."""
        future = self._tokenizers.get(path)
        if future is None:
            future = self._tokenizers[path] = asyncio.ensure_future(asyncio.to_thread(Tokenizer.load, path))
        try:
            return await asyncio.shield(future)
        except (OSError, ValueError):
            self._tokenizers.pop(path, None)
            raise

    async def follow(self, model: Model, grammar: Grammar) -> None:
        """Compiles a grammar as workers will, off the loop, so that one that cannot be is refused before they hear of
        it. Raises GrammarError; RequestError (busy) if others' take too long.
        """
        grammars = await self._grammars_of(model)
        try:
            future = asyncio.wrap_future(grammars.prepare(grammar))
            # Who goes away leaves it to be compiled for the others that want it.
            await asyncio.wait_for(asyncio.shield(future), GRAMMAR_PATIENCE)
        except (BufferError, TimeoutError) as error:
            text = str(error) or f"the grammar has not been compiled within {GRAMMAR_PATIENCE:g} s"
            raise RequestError(ErrorKind.BUSY, text, 1.0) from error

    async def _grammars_of(self, model: Model) -> Grammars:
        grammars = self._grammars.get(model.tokenizer)
        if grammars is None:
            tokenizer = await self.tokenizer(model.tokenizer)
            made = Grammars(tokenizer, model.vocab_size, tokenizer.eos_token_ids)
            grammars = self._grammars.setdefault(model.tokenizer, made)
        return grammars

    async def _read(self, model: Model) -> None:
        """Tokenizer and vocabulary of a model that is new here, before it is told that the model is served: to read
        them stops the loop for a third of a second. What is wrong with them is told by the requests that need them.
        """
        with contextlib.suppress(OSError, ValueError):
            grammars = await self._grammars_of(model)
            await asyncio.to_thread(grammars.load)

    def is_read(self, model: str) -> bool:
        """Whether its vocabulary has been read, as far as it can be."""
        reading = self._reading.get(self.models[model].tokenizer)
        return reading is not None and reading.done()

    def room_for(self, sequences: int) -> None:
        """Raises RequestError (busy) if so many more would be beyond `max_requests`."""
        if len(self._generations) + sequences > self.config.max_requests:
            text = f"this gateway holds {len(self._generations)} of {self.config.max_requests} requests already"
            raise RequestError(ErrorKind.BUSY, text, 1.0)

    def unknown(self, fields: list[str]) -> None:
        """A request had these fields, which nobody knows: the log says so, of each once."""
        for field in fields:
            if field not in self._unknown and len(self._unknown) < MAX_FIELDS:
                self._unknown.add(field)
                log.warning("requests have a field that is ignored: %s", ascii(field))

    def generate(
        self,
        model: Model,
        prompt: Sequence[int],
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        wake: Callable[[], None],
        terms: Terms,
        *,
        counted: bool = True,
        keep: Mapping[int, str] = NOTHING,
        timeline: Timeline | None = None,
    ) -> Generation:
        """Starts one sequence. counted: its prompt is no other choice's, too. keep: special tokens seen in its text.
        timeline: of whoever traces it.
        """
        request = self.request(model, prompt, sampling, terms, patience=self.config.patience)
        generation = Generation(self, request, tokenizer, sampling.stop, wake, counted, keep)
        generation.timeline = timeline
        self._generations[request.id] = generation
        if counted:
            self.metrics.of(model.name).prompt_tokens += len(prompt)
        self._act(generation, request.start(time.monotonic()))
        return generation

    def request(
        self,
        model: Model,
        prompt: Sequence[int],
        sampling: SamplingParams,
        terms: Terms,
        *,
        patience: float,
        excluded: tuple[str, ...] = (),
    ) -> Request:
        """One that has not started. patience, excluded: see Request."""
        root = self._keys.root(model.namespace, terms.salt)

        def alone() -> tuple[bytes, Callable[[bytes], bytes]]:
            own = self._keys.root(model.namespace, terms.salt + b"/alone/" + secrets.token_bytes(16))
            return own, lambda tokens: self._keys.blocks(tokens, model.block_tokens, own)

        return Request(
            secrets.randbits(63),
            prompt,
            sampling,
            model=model.name,
            namespace=model.namespace,
            block_tokens=model.block_tokens,
            root=root,
            key_of=lambda tokens: self._keys.blocks(tokens, model.block_tokens, root),
            patience=patience,
            longest=self.config.request_timeout,
            terms=terms,
            excluded=excluded,
            alone=alone,
        )

    def send(self, probe: Asker) -> None:
        """Starts a request that is no client's."""
        self._generations[probe.request.id] = probe
        self._act(probe, probe.request.start(time.monotonic()))

    def withdraw(self, probe: Asker) -> None:
        """It is over, or whoever asked is through with it. Idempotent."""
        if self._generations.pop(probe.request.id, None) is not None:
            self._act(probe, probe.request.abort())

    def stop(self, generation: Generation) -> None:
        """A stop string has been found."""
        self._act(generation, generation.request.stop())

    def deny(self, generation: Generation, error: RequestError) -> None:
        """Its client may have no more of it."""
        self._act(generation, generation.request.deny(error))

    def forget(self, generation: Generation, why: str) -> None:
        request = generation.request
        if self._generations.pop(request.id, None) is None:
            return
        metrics = self.metrics.of(generation.request.model)
        metrics.ended(request, generation.last, time.monotonic())
        metrics.retries += max(request.attempt, 0)
        if request.finish is not None:
            metrics.finish(request.finish.value)
        else:
            metrics.finish(request.error.kind.value if request.error is not None else why)
        self._act(generation, request.abort())

    async def explain(self, request: int) -> Explanation | None:
        """Why it went where it went, if that is among the conductor's latest decisions. Raises RequestError
        (unavailable).
        """
        answer = await self._ask(lambda number: Explain(number=number, request=request))
        return answer.explanation if isinstance(answer, Explained) else None

    async def hottest(self, most: int) -> tuple[HotPrefix, ...]:
        """The prefixes that are reused most. Raises RequestError (unavailable)."""
        answer = await self._ask(lambda number: FindHot(number=number, most=most))
        return answer.prefixes if isinstance(answer, HotPrefixes) else ()

    async def _ask(self, question: Callable[[int], Message]) -> Message:
        """The conductor's answer. Raises RequestError (unavailable) if it gives none."""
        self._asked += 1
        number = self._asked
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._questions[number] = future
        try:
            if self._conductor is None or not self._conductor.send([question(number)]):
                raise RequestError(ErrorKind.UNAVAILABLE, "the conductor is away", 1.0)
            return await asyncio.wait_for(future, ANSWER_PATIENCE)
        except TimeoutError as error:
            text = f"the conductor has not answered within {ANSWER_PATIENCE:g} s"
            raise RequestError(ErrorKind.UNAVAILABLE, text, 1.0) from error
        finally:
            del self._questions[number]

    def soon(self, call: Callable[[], None]) -> None:
        """Called when all has been taken in that has come together: what it is about is then looked at once. May not
        raise.
        """
        if not self._calls:
            asyncio.get_running_loop().call_soon(self._call)
        self._calls.append(call)

    def _call(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    def families(self) -> Families:
        """What this gateway has counted, and what it has under way."""
        running: dict[str, int] = dict.fromkeys(self.models, 0)
        waiting: dict[str, int] = dict.fromkeys(self.models, 0)
        for generation in self._generations.values():
            count = running if generation.request.state is State.RUNNING else waiting
            count[generation.request.model] = count.get(generation.request.model, 0) + 1
        families = self.metrics.families(running, waiting)
        for sample, value in sorted(self.counters().items()):
            families.setdefault(sample.partition("{")[0], {})[sample] = value
        return families

    def metrics_text(self, families: Families | None = None) -> bytes:
        """For /metrics, with what the cluster tells. families: those of all gateways; None: this one's."""
        own = self.families() if families is None else families
        return exposition(own, self.cluster.counters, self.cluster.workers)

    async def all_metrics(self) -> bytes:
        """For /metrics, with what the gateways beside this one have counted."""
        return self.metrics_text(None if self.siblings is None else (await self.siblings.all()).families)

    async def load(self) -> int:
        """Requests under way, at the gateways beside this one, too."""
        return self.active if self.siblings is None else (await self.siblings.all()).active

    def _told(self) -> Told:
        return Told(families=self.families(), active=self.active)

    # -- messages in -----------------------------------------------------------------------------------------------

    def _on_conductor(self, messages: list[Any]) -> None:
        now = time.monotonic()
        for message in messages:
            if isinstance(message, ClusterState):
                self._on_cluster(message)
                continue
            if isinstance(message, ClearOutcome | Explained | HotPrefixes):
                self._on_answer(message.number, message)
                continue
            answer = message.plan if isinstance(message, Planned) else message.rejection
            generation = self._generations.get(answer.request)
            if generation is None:
                continue
            if isinstance(message, Planned):
                actions = generation.request.on_planned(message.plan, now)
            else:
                servable = self.servable(generation.request.model)
                actions = generation.request.on_rejected(message, now, servable)
            self._act(generation, actions)

    def _on_answer(self, number: int, answer: Message) -> None:
        question = self._questions.get(number)
        if question is not None and not question.done():
            question.set_result(answer)

    def _on_conductor_change(self, up: bool) -> None:
        log.info("conductor %s", "is there" if up else "is away")
        if up:
            now = time.monotonic()
            for generation in list(self._generations.values()):
                self._act(generation, generation.request.ask_again(now))

    def _on_cluster(self, state: ClusterState) -> None:
        self.cluster = state
        named: dict[str, list[WorkerInfo]] = {}
        for worker in state.workers:
            named.setdefault(worker.model, []).append(worker)
            link = self._workers.get(worker.worker)
            if link is None or link.endpoint != worker.work:
                self._dial(worker.worker, worker.work)
        for name, workers in named.items():
            first = workers[0]
            block_tokens = first.namespace.kv.block_tokens
            self.models[name] = Model(
                name=name,
                tokenizer=first.tokenizer,
                namespace=first.namespace.digest(),
                block_tokens=block_tokens,
                vocab_size=first.vocab_size,
                max_positions=min(worker.max_positions for worker in workers),
                room=block_tokens
                * max((min(w.pages, w.pool_slots or w.pages) for w in workers if w.role.decodes), default=first.pages),
            )
        for model in self.models.values():
            if model.tokenizer not in self._reading:
                self._reading[model.tokenizer] = asyncio.create_task(self._read(model))
        while len(self.models) > MAX_MODELS:
            del self.models[next(name for name in self.models if name not in named)]
        present = {worker.worker for worker in state.workers}
        for name in [name for name in self._workers if name not in present and not self._workers[name].up]:
            self._workers.pop(name).close()
            self._incarnations.pop(name, None)
        self._changed.set()

    def _dial(self, worker: str, endpoint: str) -> Link:
        if (old := self._workers.pop(worker, None)) is not None:
            old.close()
            self._on_worker_change(worker, False)
        link = self._workers[worker] = Link(
            self._context,
            endpoint,
            self._session_key,
            self._from_worker,
            on_messages=partial(self._on_worker, worker),
            on_change=partial(self._on_worker_change, worker),
            greeting=GatewayPing(gateway=self.config.gateway),
            beat=GatewayPing(gateway=self.config.gateway),
        )
        return link

    def _on_worker(self, worker: str, messages: list[Any]) -> None:
        now = time.monotonic()
        for message in messages:
            if isinstance(message, WorkerPing):
                self._on_incarnation(worker, message.incarnation)
                continue
            generation = self._generations.get(message.request)
            if generation is None:
                continue
            actions: list[Action] = []
            if isinstance(message, Tokens):
                actions = generation.request.on_tokens(message, now)
                if message.handoff is not None and generation.timeline is not None:
                    generation.timeline.hear(message.attempt, now, handoff=message.handoff)
            elif isinstance(message, PrefillReport):
                generation.request.on_prefill_report(message)
                if generation.timeline is not None:
                    generation.timeline.hear(message.attempt, now, report=message)
            elif isinstance(message, PromptTold):
                generation.request.on_prompt_told(message)
            elif isinstance(message, Failed):
                actions = generation.request.on_failed(message, now)
                level = logging.INFO if actions else logging.DEBUG
                log.log(level, "request %d attempt %d: %s", message.request, message.attempt, message.reason)
            if actions:
                self._act(generation, actions)
            else:
                generation.progressed(now)

    def _on_incarnation(self, worker: str, incarnation: int) -> None:
        if self._incarnations.get(worker) == incarnation:
            return
        self._incarnations[worker] = incarnation
        for generation in list(self._generations.values()):
            plan = generation.request.plan
            parts = (plan.prefill, plan.decode) if plan is not None else ()
            if any(part.worker == worker and part.incarnation != incarnation for part in parts):
                self._act(generation, generation.request.on_lost(worker, time.monotonic(), "has been restarted"))

    def _on_worker_change(self, worker: str, up: bool) -> None:
        if up:
            return
        self._incarnations.pop(worker, None)
        now = time.monotonic()
        for generation in list(self._generations.values()):
            self._act(generation, generation.request.on_lost(worker, now, "the connection is lost"))

    # -- actions out -----------------------------------------------------------------------------------------------

    def _act(self, generation: Asker, actions: list[Action]) -> None:
        request = generation.request
        queue = deque(actions)
        while queue:
            action = queue.popleft()
            if isinstance(action, ToConductor):
                # Unsent while the conductor is away: a Route is asked again, a RouteEnded means nothing to a new one.
                if self._conductor is not None:
                    self._conductor.send([action.message])
                continue
            name, expected = action.worker.worker, action.worker.incarnation
            link = self._workers.get(name)
            if isinstance(action.message, Abort):
                if link is not None:
                    link.send([action.message])
                continue
            if link is None:
                link = self._dial(name, action.worker.work)
            now = time.monotonic()
            if action.message.attempt != request.attempt or request.done:
                continue
            if self._incarnations.get(name, expected) != expected:
                queue.extend(request.on_lost(name, now, "has been restarted"))
            elif not link.send([action.message]):
                queue.extend(request.on_lost(name, now, "is not reachable"))
        generation.progressed(time.monotonic())

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            if self._conductor is not None:
                self._conductor.tick(now)
            for link in list(self._workers.values()):
                link.tick(now)
            for generation in list(self._generations.values()):
                if now >= generation.request.wake_at:
                    self._act(generation, generation.request.tick(now))
