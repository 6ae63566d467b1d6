"""The thread that computes: a worker's loop, role both, over an embedded pool. No conductor, no sockets.

    callers' threads --submit, cancel--> inbox --> [ accept, abort -> Worker.step -> take ] --> callers

Everything that happens to the worker happens on that thread, so callers share batches and none waits for another.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from pyengine import _native
from pyengine.backend import Backend
from pyengine.grammar import GrammarError
from pyengine.llm.request import Request
from pyengine.scheduler.messages import Abort, Failed, PrefillReport, PromptTold, Tokens, Work
from pyengine.scheduler.types import Grammar, Node
from pyengine.worker.core import Worker

NEVER = float("inf")
#: Seconds after which a loop whose pool says nothing looks by itself.
LOOK = 1.0


class Engine:
    """Threads may share it.

    Args:
        new_worker: makes a worker with a link to the pool; called again whenever the one before cannot go on.
        backend: the workers'; closed by the owner, after the engine.
        node: this process.
        hash_key: 32 bytes, for the keys of blocks.
    """

    def __init__(
        self,
        new_worker: Callable[[], tuple[Worker, _native.PoolClient]],
        backend: Backend,
        node: Node,
        hash_key: bytes,
    ) -> None:
        self._new_worker = new_worker
        self._backend = backend
        self._node = node
        self._hash_key = hash_key
        self.worker, self._pool = new_worker()
        self._root = _native.root_key(self.worker.namespace, b"", b"", hash_key)
        self._lock = threading.Lock()
        #: What the thread is to do next, in order: True to begin, False to end it.
        self._inbox: list[tuple[Request, bool]] = []
        self._running: dict[int, Request] = {}
        self._numbers = 0
        #: Who waits for the end of the next round.
        self._settling: list[threading.Event] = []
        self._closing = False
        #: Why nothing can be computed any more, if that is so.
        self._broken: Exception | None = None
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watch_pool()
        self._thread = threading.Thread(target=self._loop, name="llm", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Begins them, together. Raises RuntimeError if it is closed, or cannot compute any more."""
        with self._lock:
            if self._closing:
                raise RuntimeError("this LLM is closed: make a new one")
            if self._broken is not None:
                raise self._unable() from self._broken
            for request in requests:
                self._numbers += 1
                request.number = self._numbers
                self._inbox.append((request, True))
        self._wake()

    def cancel(self, requests: Sequence[Request]) -> None:
        """Ends those that have not ended, and releases all they hold. Idempotent."""
        for request in requests:
            request.cancelled = True  # also for who is yet to be submitted, by a thread that nobody can stop
        with self._lock:
            if self._closing:
                return
            self._inbox += [(request, False) for request in requests if not request.ended]
        self._wake()

    def settle(self) -> None:
        """Waits until all that was submitted or cancelled before is under way, or has let go of all it held."""
        done = threading.Event()
        with self._lock:
            if self._closing or self._broken is not None:
                return
            self._settling.append(done)
        self._wake()
        done.wait()

    def prepare(self, grammar: Grammar) -> None:
        """Compiles it, on the caller's time. Raises GrammarError, or BufferError if too many wait."""
        self.worker.grammars.prepare(grammar).result()

    def close(self) -> None:
        """Ends what runs, with a RuntimeError, and the thread. Idempotent."""
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _unable(self) -> RuntimeError:
        return RuntimeError(f"this LLM cannot compute any more: {self._broken}; make a new one")

    def _wake(self) -> None:
        with self._lock:
            if self._news >= 0:
                os.eventfd_write(self._news, 1)

    def _watch_pool(self) -> None:
        self.worker.wake = self._wake
        self._poll = select.poll()
        self._poll.register(self._news, select.POLLIN)
        self._poll.register(self._pool.fileno(), select.POLLIN)

    # -- on the thread ---------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._closing:
            try:
                self._round()
            except BaseException as error:  # noqa: BLE001 - whatever it is, callers must hear of it
                self._recover(error)
                if self._broken is not None:
                    break
        self._end_all(self._unable() if self._broken else RuntimeError("this LLM has been closed"))
        self.worker.wake = lambda: None  # a grammar may still be compiled
        self.worker.close()
        with self._lock:
            os.close(self._news)
            self._news = -1

    def _round(self) -> None:
        with self._lock:
            inbox, self._inbox = self._inbox, []
            settling = list(self._settling)
        if self.worker.mover.pool is None and inbox and not self._running:
            self._renew()
        for request, begins in inbox:
            if request.cancelled:
                if self._running.pop(request.number, None) is not None:
                    self.worker.abort(Abort(request=request.number, attempt=1))
                request.fail(RuntimeError("this answer was ended before it was complete"))
            elif begins:
                self._running[request.number] = request
                if request.sampling.grammar is not None:
                    self._again(request.sampling.grammar)
                self.worker.accept(self._work(request))
        for message in self.worker.step():
            self._deliver(message)
        for number, _ in self.worker.take_ended():
            ended = self._running.get(number)
            if ended is not None and ended.ended:
                del self._running[number]
        self.worker.mover.flush()
        self._settled(settling)
        if not self.worker.busy:
            self._rest()

    def _again(self, grammar: Grammar) -> None:
        """Of many in one batch the first may be forgotten by now. What is wrong with it, its request is told."""
        with contextlib.suppress(GrammarError, BufferError):
            self.prepare(grammar)

    def _deliver(self, message: object) -> None:
        match message:
            case Tokens() if message.request in self._running:
                if self._running[message.request].take(message):
                    self.worker.abort(Abort(request=message.request, attempt=1))
                if self._running[message.request].ended:
                    del self._running[message.request]
            case PromptTold() if message.request in self._running:
                self._running[message.request].tell(message)
            case PrefillReport() if message.request in self._running:
                self._running[message.request].report = message
            case Failed() if message.request in self._running:
                told = ValueError if message.kind in ("too_large", "refused") else RuntimeError
                text = message.reason if told is ValueError else f"a request failed: {message.reason}"
                self._running.pop(message.request).fail(told(text))

    def _rest(self) -> None:
        """Waits until there may be something to do."""
        longest = None
        if not self.worker.idle:
            longest = min(LOOK, max(self.worker.due - time.monotonic(), 0.0)) * 1000 + 1
        for descriptor, _ in self._poll.poll(longest):
            if descriptor == self._news:
                os.eventfd_read(self._news)

    def _work(self, request: Request) -> Work:
        tokens = np.asarray(request.ids, np.uint32)
        sampling = request.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(62))
        root = self._root
        if sampling.prompt_logprobs is not None:
            # What somebody has computed before tells nothing: nothing of it is found under a root of its own.
            root = _native.root_key(self.worker.namespace, b"", secrets.token_bytes(16), self._hash_key)
        return Work(
            request=request.number,
            attempt=1,
            part="both",
            token_ids=tokens.tobytes(),
            generated=0,
            root=root,
            keys=_native.block_keys(tokens, self.worker.block_tokens, root, self._hash_key),
            sampling=sampling,
            namespace=self.worker.namespace,
            decode_node=self._node,
            decode_incarnation=0,
            deadline=NEVER,
        )

    def _settled(self, waiting: list[threading.Event]) -> None:
        with self._lock:
            self._settling = [each for each in self._settling if each not in waiting]
        for each in waiting:
            each.set()

    def _end_all(self, error: Exception) -> None:
        """Nothing will be computed any more."""
        with self._lock:
            inbox, self._inbox = self._inbox, []
            settling = list(self._settling)
        self._end_running(error)
        for request in [request for request, begins in inbox if begins]:
            request.fail(error)
        self._settled(settling)

    def _end_running(self, error: Exception) -> None:
        for request in self._running.values():
            request.fail(error)
        self._running.clear()

    def _recover(self, error: BaseException) -> None:
        """All that ran has failed, and its books need not agree: a new worker takes over. The pool survives, and what
        is cached there.
        """
        told = RuntimeError(f"the model failed: {str(error) or type(error).__name__}")
        told.__cause__ = error
        try:
            self._renew()
        except Exception as why:  # noqa: BLE001 - told to whoever asks next
            with self._lock:
                self._broken = why
        # Who has not begun yet begins with the new one.
        self._end_running(told)

    def _renew(self) -> None:
        old = self.worker
        old.wake = lambda: None
        old.close()
        fresh, self._pool = self._new_worker()
        fresh.counters, fresh.mover.counters = old.counters, old.mover.counters
        self.worker = fresh
        self._watch_pool()
