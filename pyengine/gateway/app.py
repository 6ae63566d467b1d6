"""HTTP: bytes of a client in, JSON and server-sent events out. Their meaning is openai.py's, what happens service.py's.

A client that goes away aborts its request at once, in whatever state it is: every wait here is also a wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyengine.gateway import openai
from pyengine.gateway.auth import Door, Guard, Visit, visit_of
from pyengine.gateway.openai import Answer, ApiError, ChatRequest, CompletionRequest, Piece, Usage
from pyengine.gateway.request import RequestError, Terms
from pyengine.gateway.service import Generation, Model, Service
from pyengine.scheduler.types import WorkerInfo
from pyengine.text import ChatError, Tokenizer

JSON = "application/json"
#: Text longer than this (characters) is tokenized off the loop: 10 ms of work that would hold up every stream.
LONG_TEXT = 20_000
#: Bodies larger than this (bytes) are parsed off the loop: the largest take most of a second, without a heartbeat.
LONG_BODY = 256 << 10

T = TypeVar("T")
Endpoint = Literal["chat", "completion"]


class ClientGone(Exception):
    """Nobody is there to answer."""


def create_app(service: Service, door: Door | None = None) -> FastAPI:
    """The ASGI application of one gateway. Starting and closing `service` and `door` follows the application's life.

    door: who is let in; without one, whoever is on this machine.
    """
    door = door or Door(origins=service.config.cors_origin)
    service.counters = door.counters

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        await door.start()
        try:
            yield
        finally:
            await service.close()
            await door.close()

    # No generated schema: bodies are parsed by msgspec, and a schema without them would mislead.
    app = FastAPI(title="pyengine", lifespan=lifespan, openapi_url=None)
    app.add_middleware(Guard, door=door)
    if service.config.cors_origin:
        # Around the door: browsers ask whether they may ask before they have a key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.config.cors_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )

    @app.exception_handler(ApiError)
    async def on_api_error(_: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _failure(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(_: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = (
            "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health, GET /cluster, GET /metrics"
        )
        text = f"{error.detail}; known are {known}" if error.status_code in (404, 405) else str(error.detail)
        return _failure(ApiError(error.status_code, text), error.headers)

    @app.exception_handler(ClientGone)
    async def on_client_gone(_: HttpRequest, __: Exception) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def on_bug(_: HttpRequest, __: Exception) -> Response:
        # The exception is raised again behind this answer, and logged.
        return _failure(ApiError(500, "this server failed on the request; its log says why", code="internal_error"))

    @app.post("/v1/chat/completions")
    async def chat_completions(http: HttpRequest) -> Response:
        return await _complete(service, http, "chat")

    @app.post("/v1/completions")
    async def completions(http: HttpRequest) -> Response:
        return await _complete(service, http, "completion")

    @app.get("/v1/models")
    async def models() -> Response:
        names = sorted(service.models)
        positions = {name: service.models[name].max_positions for name in names}
        return Response(openai.models(names, positions), media_type=JSON)

    @app.get("/health")
    async def health(http: HttpRequest) -> Response:
        body: dict[str, Any] = {"status": "ok" if service.healthy else "unavailable"}
        if visit_of(http).watches:
            body["workers"] = {worker.worker: worker.role.value for worker in service.cluster.workers}
        return Response(msgspec.json.encode(body), 200 if service.healthy else 503, media_type=JSON)

    @app.get("/cluster")
    async def cluster() -> Response:
        return Response(msgspec.json.encode([_facts(worker) for worker in service.cluster.workers]), media_type=JSON)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics_text(), media_type="text/plain; version=0.0.4")

    return app


def _facts(worker: WorkerInfo) -> dict[str, Any]:
    """What a worker can do, for who simulates it; no address, as anybody may ask."""
    kv = worker.namespace.kv
    return {
        "worker": worker.worker,
        "role": worker.role,
        "node": worker.node.node,
        "model": worker.model,
        "block_tokens": kv.block_tokens,
        "block_bytes": kv.block_bytes,
        "layers": sum(group.layers for group in kv.groups),
        "pages": worker.pages,
        "pool_slots": worker.pool_slots,
        "max_tokens_per_step": worker.max_tokens_per_step,
        "max_sequences": worker.max_sequences,
    }


async def _complete(service: Service, http: HttpRequest, endpoint: Endpoint) -> Response:
    """Both completion endpoints: parse, start, and answer whole or as a stream."""
    body = await _body(http, service.config.max_body_bytes)
    arrived = time.monotonic()
    parse: Callable[[bytes], ChatRequest | CompletionRequest]
    parse = openai.parse_chat if endpoint == "chat" else openai.parse_completion
    request: ChatRequest | CompletionRequest
    request = await asyncio.to_thread(parse, body) if len(body) > LONG_BODY else parse(body)
    gone = asyncio.ensure_future(_gone(http.receive))
    exchange = Exchange(service, gone)
    visit = visit_of(http)
    visit.on_revoked = exchange.deny
    try:
        terms = _terms(service, request, arrived, visit)
        model = await exchange.unless_gone(_model(service, request.model))
        visit.model = model.name
        tokenizer = await exchange.unless_gone(service.tokenizer(model.tokenizer))
        prompts = await exchange.unless_gone(_prompts(request, tokenizer, model))
        visit.admit(sum(map(len, prompts)))
        visit.usage = lambda: exchange.usage
        exchange.start(request, model, prompts, tokenizer, terms)
        answer = Answer(endpoint, model.name, request.include_usage, bool(request.return_token_ids))
        if not request.stream:
            return Response(await exchange.whole(answer), media_type=JSON)
        # The status line waits for the first token: what fails before it is an HTTP error and no broken stream.
        stream = EventStream(exchange, answer, await exchange.next())
    except RequestError as error:
        exchange.close()
        raise openai.api_error(error) from error
    except BaseException:
        exchange.close()
        raise
    return stream


def _terms(service: Service, request: ChatRequest | CompletionRequest, arrived: float, visit: Visit) -> Terms:
    """What the client was promised, and how urgent it says it is. Raises ApiError 400."""
    slo = service.config.slo(request.service_tier)
    if slo is None:
        known = ", ".join(["auto", "default", *(known.name for known in service.config.slo_class)])
        text = f"service_tier: there is no {request.service_tier!r} here; send one of: {known}"
        raise ApiError(400, text, param="service_tier")
    if request.timeout is not None:
        slo = msgspec.structs.replace(slo, deadline=min(request.timeout, slo.deadline or request.timeout))
    # To vLLM's clients lower is earlier; among ourselves higher goes first.
    priority, salt = visit.priority(request.priority), request.cache_salt or ""
    return Terms(slo=slo, priority=-priority, tenant=visit.tenant(salt), salt=visit.salt(salt), arrived=arrived)


async def _model(service: Service, name: str | None) -> Model:
    model = await service.model(name)
    if model is None:
        known = ", ".join(sorted(service.models))
        text = f"model: is required here; send one of: {known}"
        if name is not None:
            text = f"model: there is no {name!r} here; send one of: {known}"
        raise ApiError(404 if name is not None else 400, text, param="model", code="model_not_found")
    return model


async def _prompts(request: ChatRequest | CompletionRequest, tokenizer: Tokenizer, model: Model) -> list[list[int]]:
    """Token ids of each choice's prompt. Raises ApiError 400."""
    if isinstance(request, ChatRequest):
        messages = request.conversation()
        size = sum(len(message["content"]) for message in messages)
        try:
            return [await _maybe_in_thread(size, lambda: tokenizer.chat(messages))]
        except ChatError as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error
    prompts = []
    for prompt in request.prompts():
        if isinstance(prompt, str):
            ids = await _maybe_in_thread(len(prompt), lambda text=prompt: tokenizer.encode(text))  # type: ignore[misc]
            if not ids:
                raise ApiError(400, "prompt: is empty; send at least one token", param="prompt")
        else:
            ids = prompt
            if bad := next((token for token in ids if not 0 <= token < model.vocab_size), None):
                text = f"prompt: {bad} is no token id of this model; ids are 0 to {model.vocab_size - 1}"
                raise ApiError(400, text, param="prompt")
        prompts.append(ids)
    return prompts


async def _maybe_in_thread(size: int, work: Callable[[], list[int]]) -> list[int]:
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()


class Exchange:
    """The choices of one HTTP request, read together until all have ended or the client is gone."""

    def __init__(self, service: Service, gone: asyncio.Future[None]) -> None:
        self._service = service
        self._gone = gone
        self._ready = asyncio.Event()
        self._generations: list[Generation] = []
        self._open: dict[int, Generation] = {}
        #: Whoever asks for tokens has each at once, as its gaps are what it may be measuring.
        self._each = False
        gone.add_done_callback(lambda _: self._ready.set())

    def start(
        self,
        request: ChatRequest | CompletionRequest,
        model: Model,
        prompts: list[list[int]],
        tokenizer: Tokenizer,
        terms: Terms,
    ) -> None:
        """Checks all before the first starts. Raises ApiError, RequestError."""
        settings = [openai.sampling(request, len(ids), model.max_positions, model.room) for ids in prompts]
        self._each = bool(request.return_token_ids)
        for index, (ids, sampling) in enumerate(zip(prompts, settings, strict=True)):
            generation = self._service.generate(model, ids, sampling, tokenizer, self._ready.set, terms)
            self._generations.append(generation)
            self._open[index] = generation

    @property
    def choices(self) -> int:
        return len(self._generations)

    @property
    def finished(self) -> bool:
        return not self._open

    @property
    def usage(self) -> Usage:
        tiers: Counter[str] = Counter()
        for generation in self._generations:
            tiers.update(generation.request.tiers)
        return Usage(
            prompt=sum(len(generation.request.prompt) for generation in self._generations),
            completion=sum(generation.emitted for generation in self._generations),
            cached=sum(generation.request.cached or 0 for generation in self._generations),
            tiers=dict(tiers),
        )

    async def next(self) -> list[Piece]:
        """New pieces, at least one. Raises RequestError, ClientGone."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            if self._gone.done():
                raise ClientGone
            news = []
            for index, generation in list(self._open.items()):
                piece = Piece(index, *generation.take(each=self._each))
                if piece.finish is not None:
                    del self._open[index]
                if piece.text or piece.ids or piece.finish is not None:
                    news.append(piece)
            if news:
                return news

    async def whole(self, answer: Answer) -> bytes:
        """The complete answer. Raises RequestError, ClientGone."""
        wholes = [Piece(index, "", [], None) for index in range(self.choices)]
        while not self.finished:
            for index, text, ids, finish in await self.next():
                before = wholes[index]
                wholes[index] = Piece(index, before.text + text, before.ids + ids, finish)
        body = answer.whole(wholes, self.usage)
        self.close()
        return body

    def deny(self, error: RequestError) -> None:
        """The client may have no more: what runs fails with `error`."""
        for generation in self._open.values():
            self._service.deny(generation, error)

    async def unless_gone(self, work: Awaitable[T]) -> T:
        """The result of `work`, or ClientGone, whichever comes first."""
        task = asyncio.ensure_future(work)
        await asyncio.wait((task, self._gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise ClientGone
        return await task

    def close(self) -> None:
        """Aborts what still runs. Idempotent."""
        self._gone.cancel()
        for generation in self._generations:
            generation.close()


class EventStream(Response):
    """Sends an exchange as server-sent events, one body part per batch of tokens that came together."""

    def __init__(self, exchange: Exchange, answer: Answer, first: list[Piece]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        # A stream has no length; Response put the empty body's there.
        del self.headers["content-length"]
        self._exchange = exchange
        self._answer = answer
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, answer = self._exchange, self._answer
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            news = self._first
            prefix = answer.opening(exchange.choices)
            while True:
                events = b"".join(answer.delta(piece) for piece in news)
                if exchange.finished:
                    await send(_part(prefix + events + answer.closing(exchange.usage), more=False))
                    return
                await send(_part(prefix + events, more=True))
                prefix = b""
                news = await exchange.next()
        except ClientGone:
            pass
        except RequestError as error:
            await send(_part(answer.failure(openai.api_error(error)), more=False))
        finally:
            exchange.close()


def _part(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _gone(receive: Receive) -> None:
    """Ends when the client has closed the connection. The body has been read already."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(http: HttpRequest, limit: int) -> bytes:
    """The request's body. Raises ApiError 413 beyond `limit` bytes, ClientGone."""
    body = bytearray()
    try:
        async for part in http.stream():
            body += part
            if len(body) > limit:
                raise ApiError(413, f"the body is larger than {limit} bytes: send less")
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def _failure(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    extra = dict(headers or {})
    if error.retry_after is not None:
        extra["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    return Response(error.body(), error.status, extra, JSON)
