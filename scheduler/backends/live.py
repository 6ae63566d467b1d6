"""A cluster that serves: the trace goes to its gateway at the trace's times, and what a client sees is measured.

An open loop: a request is sent when it is due, whatever has become of those before it, and its TTFT counts from then.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from pyengine import env

from ..explanation import Explanation
from ..sim.report import DROPPED, Report
from ..sim.trace import Request
from . import discovery
from .base import BackendError, Found, Progress, Task, version
from .http import Address, ask, get
from .prompts import prompt
from .replies import Reply, records, running

#: Seconds after which a request is given up, by default: as the gateway does.
TIMEOUT = 600.0
#: Seconds before the first request: connections, imports and the first prompts are made in them.
HEAD_START = 0.2
#: Descriptors that are not connections: files, sockets of the loop, whatever the process had open.
OTHER_DESCRIPTORS = 64


class LiveBackend:
    """url: of the gateway. model: name there (default: the only one). timeout: seconds a request may take in all.
    concurrency: requests that are under way at most; 0: as many as come. The API key is the environment's.

    replies: of the run that goes on, or of the last one, as they come.
    """

    name = "live"
    fidelity = "measured: a live cluster as its client sees it"
    deterministic = False

    def __init__(self, *, url: str, model: str = "", timeout: str = str(TIMEOUT), concurrency: str = "0") -> None:
        self._address = Address(url, env.api_key())
        self.replies: list[Reply] = []
        self._model = model
        try:
            self._timeout = float(timeout)
        except ValueError:
            self._timeout = 0.0
        if not 0 < self._timeout < float("inf"):
            raise BackendError(f"backend live: timeout={timeout} is no number of seconds above 0")
        if not concurrency.isdecimal():
            raise BackendError(f"backend live: concurrency={concurrency} is no number of requests (0: as many as come)")
        self._concurrency = int(concurrency)

    def cluster(self) -> Found:
        return asyncio.run(discovery.discover(self._address))

    def explain(self, task: Task, number: int) -> Explanation:
        raise BackendError(
            "a gateway does not know why: ask its conductor (conductor explain --conductor ENDPOINT --request ID)"
        )

    def run(self, task: Task, progress: Progress | None = None) -> Report:
        return asyncio.run(self._run(task, progress))

    async def _run(self, task: Task, progress: Progress | None) -> Report:
        model = self._model or await self._only_model()
        limit = _connections()
        capped = 0 < self._concurrency < limit
        limit = self._concurrency if capped else limit
        sender = _Sender(self._address, model, self._timeout, task.cluster.block_tokens, limit, progress)
        self.replies = sender.replies
        complete = True
        try:
            await sender.send(iter(task.requests))
        except asyncio.CancelledError:
            # Ctrl-C. What has come is worth a report, and a second Ctrl-C ends this as well.
            complete = False
            await sender.abandon()
        replies = sender.replies
        notes = [f"{count} requests: {reason}" for reason, count in sender.errors.most_common(5)]
        if sender.full:
            remedy = "as was asked" if capped else "raise the limit (ulimit -n)"
            notes.append(f"{sender.full} requests waited for one of {limit} connections: {remedy}")
        return Report(
            records=records(replies),
            workers=[],
            series={"running": running(replies)},
            totals={"requests": len(replies), "late_sent": sum(reply.sent - reply.due > 0.01 for reply in replies)},
            provenance={
                "trace": task.description,
                "backend": self.name,
                "fidelity": self.fidelity,
                "version": version(),
                "url": self._address.url,
                "model": model,
                "policy": "the cluster's own",
                "admission": "the cluster's own",
                "seed": task.run.seed,
            },
            digest="none: a live run is not repeated to the bit",
            complete=complete,
            notes=notes,
        )

    async def _only_model(self) -> str:
        try:
            status, body = await get(self._address, "/v1/models")
        except OSError as error:
            raise BackendError(
                f"no gateway answers at {self._address.url}: {error}; is it started (pyengine serve)?"
            ) from None
        if status in (401, 403):
            raise BackendError(f"{self._address.url} answers {status}: set PYENGINE_API_KEY to a key it knows")
        try:
            names = [str(model["id"]) for model in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            raise BackendError(f"{self._address.url}/v1/models answers {status}, and no list of models") from None
        if len(names) != 1:
            # As `conductor` spells it, and `pyengine`.
            named = ", ".join(names) or "no model"
            raise BackendError(f"{self._address.url} serves {named}: name one (model=NAME, --model NAME)")
        return names[0]


class _Sender:
    """All requests of one run. limit: of connections at once."""

    def __init__(
        self, address: Address, model: str, timeout: float, block_tokens: int, limit: int, progress: Progress | None
    ) -> None:
        self.replies: list[Reply] = []
        self.errors: Counter[str] = Counter()
        self.full = 0
        self._address = address
        self._model = model
        self._timeout = timeout
        self._block_tokens = block_tokens
        self._connections = asyncio.Semaphore(limit)
        self._progress = progress
        self._ended = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._encoder = msgspec.json.Encoder()
        # A cluster that has seen the trace before is to compute it again.
        self._salt = os.urandom(16)

    async def send(self, requests: Iterator[Request]) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time() + HEAD_START
        for number, request in enumerate(requests):
            # The body is made before it is due: a long prompt takes a millisecond.
            body = self._body(request, number)
            reply = Reply(request, start + request.arrival, start)
            await asyncio.sleep(max(reply.due - loop.time(), 0))
            if self._connections.locked():
                self.full += 1
            await self._connections.acquire()
            self.replies.append(reply)
            task = asyncio.create_task(self._one(reply, body))
            self._tasks.add(task)
            task.add_done_callback(self._over)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def abandon(self) -> None:
        """Closes what is open: the gateway aborts these requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._connections.release()
        self._ended += not task.cancelled()
        if self._progress is not None:
            self._progress(self._ended, None, self.replies[-1].request.arrival)

    async def _one(self, reply: Reply, body: bytes) -> None:
        loop = asyncio.get_running_loop()
        reply.sent = loop.time()
        try:
            async with asyncio.timeout(self._timeout):
                status, _ = await ask(
                    self._address,
                    "POST",
                    "/v1/completions",
                    body,
                    lambda status, data: reply.take(status, data, loop.time()),
                )
            reply.close(status, loop.time())
        except TimeoutError:
            reply.fail(DROPPED, f"no end within {self._timeout:g} s")
        except OSError as error:
            reply.fail(DROPPED, str(error) or type(error).__name__)
        if reply.error is not None:
            self.errors[reply.error] += 1

    def _body(self, request: Request, number: int) -> bytes:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt(request, number, self._block_tokens, self._salt).tolist(),
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if request.tenant:
            body["cache_salt"] = request.tenant
        if request.priority:
            body["priority"] = request.priority
        return self._encoder.encode(body)


def _connections() -> int:
    """How many this process may have open, after asking for all that it may ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(min(soft, 1 << 16) - OTHER_DESCRIPTORS, 1)
