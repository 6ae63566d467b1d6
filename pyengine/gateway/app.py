"""HTTP: bytes of a client in, JSON and server-sent events out. What they mean is openai.py's and answers.py's, what
happens service.py's.

A client that goes away aborts its request at once, in whatever state it is: every wait here is also a wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive

from pyengine.chat import conversation
from pyengine.chat.errors import Unservable
from pyengine.chat.structured import NO_FORM, Form, Wanted, form_of, reasoning_counts
from pyengine.cli import installed_version
from pyengine.dashboard.lazy import Pages, WithDashboard
from pyengine.gateway import answers, openai, schema
from pyengine.gateway.answers import Answer, Endpoint, Told
from pyengine.gateway.auth import Door, Guard, Visit, visit_of
from pyengine.gateway.bodies import decode
from pyengine.gateway.budget import Share
from pyengine.gateway.errors import ApiError, api_error
from pyengine.gateway.exchange import ClientGone, EventStream, Exchange, Prompt
from pyengine.gateway.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from pyengine.gateway.probes import Deep, add_probes
from pyengine.gateway.request import RequestError, Terms
from pyengine.gateway.request_ids import RequestIds
from pyengine.gateway.service import Model, Service
from pyengine.gateway.spelling import Scored, Teller, spell
from pyengine.grammar import GrammarError
from pyengine.scheduler.types import Grammar, WorkerInfo
from pyengine.text import ChatError, Tokenizer

JSON = "application/json"

T = TypeVar("T")


def create_app(service: Service, door: Door | None = None) -> ASGIApp:
    """The ASGI application of one gateway. Starting and closing `service` and `door` follows the application's life.

    door: who is let in; without one, whoever is on this machine.
    """
    door = door or Door(origins=service.config.cors_origin)
    service.counters = door.counters
    pages = Pages(service)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        await door.start()
        try:
            yield
        finally:
            await pages.close()
            await service.close()
            await door.close()

    # Its schema is ours (schema.py): bodies are parsed by msgspec, and one made here would know nothing of them.
    app = FastAPI(title="pyengine", lifespan=lifespan, openapi_url=None)
    app.add_middleware(WithDashboard, pages=pages)
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

    @app.exception_handler(RequestError)
    @app.exception_handler(Unservable)
    async def on_request_error(_: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, RequestError | Unservable)
        return _failure(api_error(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(_: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = f"known are {schema.KNOWN}"
        text = f"{error.detail}; {known}" if error.status_code in (404, 405) else str(error.detail)
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
        return Response(answers.models(names, positions), media_type=JSON)

    # A model's name may have slashes.
    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        found = await _model(service, name)
        return Response(answers.model(found.name, found.max_positions), media_type=JSON)

    @app.post("/tokenize")
    async def tokenize(http: HttpRequest) -> Response:
        request, headers, size, _ = await _parsed(service, http, lambda body: decode(body, TokenizeRequest))
        model, tokenizer = await _tokenizer(service, request.model)
        ids = await _ids(service, request, tokenizer, size)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_positions, "tokens": ids}
        if request.return_token_strs:
            spelled = lambda: [spell(tokenizer, token)[0] for token in ids]  # noqa: E731
            answer["token_strs"] = await service.threads.run(len(ids), spelled)
        return Response(msgspec.json.encode(answer), headers=headers, media_type=JSON)

    @app.post("/detokenize")
    async def detokenize(http: HttpRequest) -> Response:
        request, headers, *_ = await _parsed(service, http, lambda body: decode(body, DetokenizeRequest))
        model, tokenizer = await _tokenizer(service, request.model)
        _known_ids("tokens", request.tokens, model)
        text = await service.threads.run(len(request.tokens), lambda: tokenizer.decode(request.tokens))
        return Response(msgspec.json.encode({"prompt": text}), headers=headers, media_type=JSON)

    @app.get("/version")
    async def version() -> Response:
        return Response(msgspec.json.encode({"version": installed_version()}), media_type=JSON)

    @app.get("/load")
    async def load() -> Response:
        return Response(msgspec.json.encode({"server_load": await service.load()}), media_type=JSON)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(schema.DOCUMENT, media_type=JSON)

    deep = Deep(service)

    @app.get("/health")
    async def health(http: HttpRequest) -> Response:
        if http.query_params.get("deep", "0") not in ("", "0", "false"):
            return await deep.answer(http)
        body: dict[str, Any] = {"status": "ok" if service.healthy else "unavailable"}
        if visit_of(http).watches:
            body["workers"] = {worker.worker: worker.role.value for worker in service.cluster.workers}
        return Response(msgspec.json.encode(body), 200 if service.healthy else 503, media_type=JSON)

    @app.get("/cluster")
    async def cluster() -> Response:
        return Response(msgspec.json.encode([_facts(worker) for worker in service.cluster.workers]), media_type=JSON)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.all_metrics(), media_type="text/plain; version=0.0.4")

    add_probes(app, service)

    return RequestIds(app)


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
    parse: Callable[[bytes], tuple[ChatRequest | CompletionRequest, list[str]]]
    request: ChatRequest | CompletionRequest
    parse = openai.parse_chat if endpoint == "chat" else openai.parse_completion
    request, headers, size, arrived = await _parsed(service, http, parse)
    number = http.state.request_id
    timed = "server-timing" in _preferences(http)
    trace = service.tracer.begin(endpoint, http.headers, arrived) if service.tracer is not None else None
    if trace is not None:
        headers["traceresponse"] = trace.header
    exchange = Exchange(service, asyncio.ensure_future(_gone(http.receive)), number, trace)
    visit = visit_of(http)
    visit.on_revoked = exchange.deny
    try:
        terms = _terms(service, request, arrived, visit)
        model, tokenizer = await exchange.unless_gone(_tokenizer(service, request.model))
        visit.model = model.name
        prompts = await exchange.unless_gone(_prompts(service, request, tokenizer, model, size))
        visit.admit(sum(len(prompt.ids) for prompt in prompts), answers=len(prompts) * request.choices)
        visit.usage = lambda: exchange.spent
        prompt = prompts[0].ids if endpoint == "chat" else None
        forming = service.threads.run(size, lambda: form_of(request.wanted, tokenizer, prompt))
        form = await exchange.unless_gone(forming)
        if form.grammar is not None:
            await exchange.unless_gone(_followed(service, model, form.grammar, request.wanted))
        visit.check()
        exchange.start(request, model, prompts, tokenizer, terms, form)
        told = _told(request, prompts, tokenizer, form)
        if request.scores is not None:
            told = told._replace(scored=Scored(tokenizer, exchange.prompt_logprobs, request.prompt_logprobs))
        answer = Answer(endpoint, model.name, number, told)
        if not request.stream:
            whole = await exchange.whole(answer)
            if timed:
                headers["Server-Timing"] = exchange.timing
            return Response(whole, headers=headers, media_type=JSON)
        # The status line waits for the first token: what fails before it is an HTTP error and no broken stream.
        if request.scores is not None:
            await exchange.prompts_told()
        first = await exchange.next()
        if timed:
            headers["Server-Timing"] = exchange.timing
        return EventStream(exchange, answer, first, headers, timed)
    except BaseException:
        exchange.close()
        raise


async def _followed(service: Service, model: Model, grammar: Grammar, wanted: Wanted) -> None:
    """Refuses a grammar that no worker could follow, before any has work with it. Raises ApiError 400, RequestError."""
    try:
        await service.follow(model, grammar)
    except GrammarError as error:
        param = (
            "tools" if wanted.must_call else "structured_outputs" if wanted.structured_outputs else "response_format"
        )
        raise ApiError(400, f"{param}: {error}", param=param, code="invalid_grammar") from error


def _told(
    request: ChatRequest | CompletionRequest, prompts: list[Prompt], tokenizer: Tokenizer, form: Form = NO_FORM
) -> Told:
    """What the answer is to carry beside its text."""
    each = [prompt for prompt in prompts for _ in range(request.choices)]
    echo = isinstance(request, CompletionRequest) and bool(request.echo)
    return Told(
        usage=request.include_usage,
        running=request.continuous_usage,
        token_ids=bool(request.return_token_ids),
        prompts=[prompt.ids for prompt in each],
        echoes=[prompt.text for prompt in each] if echo else [],
        tellers=[] if request.told is None else [Teller(tokenizer, most=request.told) for _ in each],
        parsers=[] if form.plain else [form.parser() for _ in each],
        counts=reasoning_counts(tokenizer, form, [prompt.ids for prompt in each], isinstance(request, ChatRequest)),
    )


class Parsed(NamedTuple, Generic[T]):
    """headers: of the answer. size: of the body, bytes. arrived: when the last of it had come, seconds, monotonic."""

    request: T
    headers: dict[str, str]
    size: int
    arrived: float


async def _parsed(service: Service, http: HttpRequest, parse: Callable[[bytes], tuple[T, list[str]]]) -> Parsed[T]:
    """The request in a body, which is let go. What was not understood is told in the answer's headers, or refused, if
    the client prefers that. Raises ApiError, RequestError, ClientGone.
    """
    with service.bodies.share() as share:
        body = await _body(http, service.config.max_body_bytes, share)
        arrived, size = time.monotonic(), len(body)
        request, unknown = await service.threads.run(size, lambda: parse(body))
    headers: dict[str, str] = {}
    strict = "handling=strict" in _preferences(http)
    if strict:
        headers["Preference-Applied"] = "handling=strict"
    if unknown and strict:
        text = f"{unknown[0]}: is no field of this API; leave it out, or do not prefer handling=strict"
        raise ApiError(400, text, param=unknown[0], code="unknown_parameter")
    if unknown:
        service.unknown(unknown)
        # Names are the client's: in a header they are ASCII.
        headers["X-Ignored-Fields"] = ", ".join(urllib.parse.quote(name, safe="._-") for name in unknown)
    return Parsed(request, headers, size, arrived)


def _preferences(http: HttpRequest) -> set[str]:
    """Of `Prefer` (RFC 7240): "handling=strict" and "server-timing" are known here."""
    return {
        one.split(";")[0].replace(" ", "").replace('"', "").lower()
        for value in http.headers.getlist("prefer")
        for one in value.split(",")
    }


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


async def _tokenizer(service: Service, name: str | None) -> tuple[Model, Tokenizer]:
    model = await _model(service, name)
    return model, await service.tokenizer(model.tokenizer)


async def _prompts(
    service: Service, request: ChatRequest | CompletionRequest, tokenizer: Tokenizer, model: Model, size: int
) -> list[Prompt]:
    """size: of the request, bytes. Raises ApiError 400."""
    if isinstance(request, ChatRequest):
        return [Prompt(await _chat_ids(service, request, tokenizer, size), "")]
    prompts = []
    for prompt in request.prompts():
        if isinstance(prompt, str):
            ids = await service.threads.run(len(prompt), lambda text=prompt: tokenizer.encode(text))  # type: ignore[misc]
            if not ids:
                raise ApiError(400, "prompt: is empty; send at least one token", param="prompt")
        else:
            ids = prompt
            _known_ids("prompt", ids, model)
        text = prompt if isinstance(prompt, str) else ""
        if request.echo and not text:
            text = await service.threads.run(len(ids), lambda ids=ids: tokenizer.decode(ids))  # type: ignore[misc]
        prompts.append(Prompt(ids, text))
    return prompts


async def _ids(service: Service, request: TokenizeRequest, tokenizer: Tokenizer, size: int) -> list[int]:
    """What /tokenize is asked for. size: of the request, bytes. Raises ApiError 400."""
    text = request.prompt
    if (text is None) == (request.messages is None):
        raise ApiError(400, "prompt: send either a prompt or messages", param="prompt")
    if text is None:
        return await _chat_ids(service, request, tokenizer, size)
    special = request.add_special_tokens is not False
    return await service.threads.run(len(text), lambda: tokenizer.encode(text, special=special))


async def _chat_ids(
    service: Service, request: ChatRequest | TokenizeRequest, tokenizer: Tokenizer, size: int
) -> list[int]:
    """Ids of a conversation, as the model's template has it. size: of the request, bytes, any of which the template may
    show. Raises ApiError 400."""

    def work() -> list[int]:
        tools = request.wanted.shown if isinstance(request, ChatRequest) else []
        given = (request.messages or [], tools, request.chat_template_kwargs)
        return tokenizer.chat(*conversation.templated(*given, tokenizer.template))

    try:
        return await service.threads.run(size, work)
    except ChatError as error:
        raise ApiError(400, f"messages: {error}", param="messages") from error


def _known_ids(field: str, ids: list[int], model: Model) -> None:
    bad = next((token for token in ids if not 0 <= token < model.vocab_size), None)
    if bad is not None:
        text = f"{field}: {bad} is no token id of this model; ids are 0 to {model.vocab_size - 1}"
        raise ApiError(400, text, param=field)


async def _gone(receive: Receive) -> None:
    """Ends when the client has closed the connection. The body has been read already."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(http: HttpRequest, limit: int, share: Share) -> bytes:
    """The request's body. Raises ApiError 413 beyond `limit` bytes, RequestError if all have too many, ClientGone."""
    body = bytearray()
    try:
        async for part in http.stream():
            body += part
            if len(body) > limit:
                raise ApiError(413, f"the body is larger than {limit} bytes: send less")
            share.grow(len(body))
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def _failure(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    return Response(error.body(), error.status, {**(headers or {}), **error.headers()}, JSON)
