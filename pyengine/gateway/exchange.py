"""One HTTP request's choices on their way: read together, sent whole or as a stream, let go when the client is gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyengine.chat.structured import Form
from pyengine.gateway import openai, timing
from pyengine.gateway.answers import Answer, Piece, Usage
from pyengine.gateway.errors import api_error
from pyengine.gateway.listener import STALL
from pyengine.gateway.openai import ChatRequest, CompletionRequest
from pyengine.gateway.protocol import line_of
from pyengine.gateway.recent import Record, record_of
from pyengine.gateway.request import RequestError, Terms
from pyengine.gateway.service import Generation, Model, Service
from pyengine.gateway.tracing import Timeline, Trace
from pyengine.scheduler.types import Logprobs
from pyengine.text import Tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is there to answer."""


class Prompt(NamedTuple):
    """text: as the client sent it, or what its ids say; "" if nobody wants to see it."""

    ids: list[int]
    text: str


class Exchange:
    """The choices of one HTTP request, read together until all have ended or the client is gone.

    number: the request's, for the log. trace: if it is traced.
    """

    def __init__(self, service: Service, gone: asyncio.Future[None], number: str, trace: Trace | None = None) -> None:
        self._service = service
        self._gone = gone
        self.number = number
        self._trace = trace
        #: Who is called when there may be something new, and whether that has been asked for.
        self._on_news: Callable[[], None] | None = None
        self._due = False
        #: Done when there may be something new, as long as nobody is called.
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._generations: list[Generation] = []
        self._answers = 1
        #: Choices that have not ended.
        self.open: dict[int, Generation] = {}
        self._user = ""
        self._closed, self._why = False, ""
        #: What `Recent` calls it, once it has begun.
        self._begun = 0
        #: Whoever asks for tokens has each at once, as its gaps are what it may be measuring.
        self._each = False
        #: Whoever has a prompt scored only sees nothing of the answer.
        self._silent = False
        gone.add_done_callback(lambda _: self._wake())

    def start(
        self,
        request: ChatRequest | CompletionRequest,
        model: Model,
        prompts: list[Prompt],
        tokenizer: Tokenizer,
        terms: Terms,
        form: Form,
    ) -> None:
        """Checks all before the first starts. Raises ApiError, RequestError.

        All answers to a prompt start together: the conductor sends them where it sent the first, and the batcher there
        computes what they share once.
        """
        model_room = (model.max_positions, model.room, model.vocab_size)
        settings = [openai.sampling(request, len(prompt.ids), *model_room, form.grammar) for prompt in prompts]
        self._service.room_for(len(prompts) * request.choices)
        self._each = bool(request.return_token_ids)
        self._silent = request.max_tokens == 0
        self._answers = request.choices
        self._user = request.user or ""
        for prompt, sampling in zip(prompts, settings, strict=True):
            for answer in range(request.choices):
                own = openai.nth(sampling, answer)
                timeline = None
                if self._trace is not None:
                    timeline = Timeline()
                    self._trace.timelines.append(timeline)
                generation = self._service.generate(
                    *(model, prompt.ids, own, tokenizer, self._wake, terms),
                    counted=not answer,
                    keep=form.keep,
                    timeline=timeline,
                )
                self.open[len(self._generations)] = generation
                self._generations.append(generation)
        self._begun = self._service.recent.begin(self.number, self._record)

    @property
    def choices(self) -> int:
        return len(self._generations)

    @property
    def usage(self) -> Usage:
        """Of answers to one prompt, that is counted once: what it had found is what the luckless one of them found."""
        prompt = cached = 0
        tiers: dict[str, int] = {}
        for first in range(0, len(self._generations), self._answers):
            requests = [generation.request for generation in self._generations[first : first + self._answers]]
            prompt += len(requests[0].prompt)
            found = min(requests, key=lambda request: len(request.prompt) if request.cached is None else request.cached)
            cached += found.cached or 0
            for tier, tokens in found.tiers.items():
                tiers[tier] = tiers.get(tier, 0) + tokens
        completion = 0 if self._silent else sum(generation.emitted for generation in self._generations)
        return Usage(prompt=prompt, completion=completion, cached=cached, tiers=tiers)

    @property
    def spent(self) -> Usage:
        """As `usage`, with all that was generated: also what the client did not take."""
        completion = 0 if self._silent else sum(len(generation.request.tokens) for generation in self._generations)
        return msgspec.structs.replace(self.usage, completion=completion)

    @property
    def timing(self) -> str:
        """Where the time to the first choice's first token went (see timing.py)."""
        return timing.header(self._generations[0].request)

    def _record(self, now: float, wall: float) -> Record:
        ends = [_end(generation, self._why) if self._closed else "" for generation in self._generations]
        requests = [(generation.request, end) for generation, end in zip(self._generations, ends, strict=True)]
        return record_of(self.number, requests, self.spent, ",".join(sorted({*ends} - {""})), now, wall)

    def _wake(self) -> None:
        if self._on_news is not None:
            if not self._due:
                self._due = True
                self._service.soon(self._on_news)
        elif not self._ready.done():
            self._ready.set_result(None)

    def listen(self, on_news: Callable[[], None]) -> None:
        """From now on `on_news` is called when there may be something new; nobody waits in `next`."""
        self._on_news = on_news
        # What has come since `next` was left has woken nobody.
        self._wake()

    def news(self) -> list[Piece]:
        """New pieces, if there are any. Raises RequestError, ClientGone."""
        self._due = False
        if self._gone.done():
            raise ClientGone
        each = self._each
        news, ended = [], False
        for index, generation in self.open.items():
            text, ids, finish, told = generation.take(each=each)
            if self._silent:
                text, ids, finish, told = "", [], finish and "length", None if told is None else []
            if text or ids or finish is not None:
                news.append(Piece(index, text, ids, finish, told))
                ended = ended or finish is not None
        if ended:
            for piece in news:
                if piece.finish is not None:
                    del self.open[piece.choice]
        return news

    def prompt_logprobs(self, choice: int) -> list[Logprobs]:
        """Of the prompt of a choice, from its second token on."""
        return self._generations[choice - choice % self._answers].request.prompt_logprobs

    async def prompts_told(self) -> None:
        """Until all that was asked for of prompts is there, or no more of it comes. Raises ClientGone."""
        requests = [generation.request for generation in self._generations[:: self._answers]]
        while not all(request.prompt_is_told or request.done for request in requests):
            await self._ready
            self._ready = self._loop.create_future()
            if self._gone.done():
                raise ClientGone
        # What came meanwhile is still to be taken.
        self._wake()

    async def next(self) -> list[Piece]:
        """New pieces, at least one. Raises RequestError, ClientGone."""
        while True:
            await self._ready
            self._ready = self._loop.create_future()
            if news := self.news():
                return news

    async def whole(self, answer: Answer) -> bytes:
        """The complete answer. Raises RequestError, ClientGone."""
        parts: list[list[Piece]] = [[] for _ in range(self.choices)]
        while self.open:
            for piece in await self.next():
                parts[piece.choice].append(piece)
        body = answer.whole([_joined(index, pieces) for index, pieces in enumerate(parts)], self.usage)
        self.close()
        return body

    def deny(self, error: RequestError) -> None:
        """The client may have no more: what runs fails with `error`."""
        for generation in self.open.values():
            self._service.deny(generation, error)

    async def unless_gone(self, work: Awaitable[T]) -> T:
        """The result of `work`, or ClientGone, whichever comes first."""
        task = asyncio.ensure_future(work)
        await asyncio.wait((task, self._gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise ClientGone
        return await task

    def close(self, why: str = "") -> None:
        """Aborts what still runs, and says in the log how it went. why: it did not go well. Idempotent."""
        self._gone.cancel()
        if self._closed:
            return
        self._closed, self._why = True, why
        self._service.recent.end(self._begun)
        if self._generations:
            metrics = self._service.metrics.of(self._generations[0].request.model)
            metrics.cached_tokens += self.usage.cached
            metrics.observe("vllm:request_params_n", self._answers)
            longest = max(len(generation.request.tokens) for generation in self._generations)
            metrics.observe("vllm:request_max_num_generation_tokens", longest)
        if self._generations and log.isEnabledFor(logging.INFO):
            ends = {_end(generation, why) for generation in self._generations}
            usage, spent = self.usage, self.timing
            counts = f"prompt={usage.prompt} cached={usage.cached} completion={usage.completion}"
            retries = sum(max(generation.request.attempt, 0) for generation in self._generations)
            model, user = self._generations[0].request.model, f" user={self._user!a:.80}" if self._user else ""
            log.info(
                "request %s model=%s%s choices=%d %s retries=%d end=%s %s",
                *(self.number, model, user, self.choices, counts, retries, ",".join(sorted(ends)), spent),
                extra={"request": self.number},
            )
        for generation in self._generations:
            generation.close(why)
        self._end_trace(why)

    def _end_trace(self, why: str) -> None:
        tracer, trace = self._service.tracer, self._trace
        if tracer is None or trace is None:
            return
        attributes: dict[str, str | float] = {"pyengine.request_id": self.number}
        requests = [generation.request for generation in self._generations]
        if requests:
            usage = self.usage
            ends = sorted({_end(generation, why) for generation in self._generations})
            attributes |= {
                "gen_ai.request.model": requests[0].model,
                "gen_ai.usage.input_tokens": usage.prompt,
                "gen_ai.usage.output_tokens": usage.completion,
                "pyengine.cached_tokens": usage.cached,
                "pyengine.end": ",".join(ends),
            }
            # Of the first choice, as in the header.
            attributes |= {f"pyengine.{name}_seconds": spent for name, spent in timing.parts(requests[0]).items()}
        tracer.end(trace, requests, attributes, time.monotonic())


def _joined(index: int, pieces: list[Piece]) -> Piece:
    told = None
    if pieces and pieces[0].told is not None:
        told = [one for piece in pieces for one in piece.told or ()]
    ids = [token for piece in pieces for token in piece.ids]
    return Piece(index, "".join(piece.text for piece in pieces), ids, pieces[-1].finish, told)


def _end(generation: Generation, why: str) -> str:
    request = generation.request
    if request.error is not None:
        return request.error.kind.value
    return request.finish.value if request.finish is not None else why or "gone"


class EventStream(Response):
    """Sends an exchange as server-sent events, one body part per batch of tokens that came together.

    Parts are written where tokens come in: the task that answers sleeps until the last one, as to wake it costs more
    than to make an event. While the client takes nothing, tokens wait as what they are, ids.

    first: what has come already. timed: a comment behind the last event tells where the time went, the hand-off's, too.
    """

    def __init__(
        self, exchange: Exchange, answer: Answer, first: list[Piece], headers: dict[str, str], timed: bool
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", **headers})
        # A stream has no length; Response put the empty body's there.
        del self.headers["content-length"]
        self._exchange = exchange
        self._answer = answer
        self._running = answer.running_usage
        self._first = first
        self._timed = timed
        #: Since when a part waits for the client to take it, by the loop's clock.
        self._waits: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._line = line_of(scope)
        #: The last part.
        self._last: asyncio.Future[bytes] = loop.create_future()
        task = asyncio.current_task()
        assert task is not None, "a response is sent by a task"
        self._timer = loop.call_later(STALL, self._watch, task)
        why = ""
        try:
            self._waits = loop.time()
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._waits = None
            self._put(self._answer.opening(self._exchange.usage, self._exchange.choices), self._first)
            self._exchange.listen(self._advance)
            await self._end(send, await self._last)
        except ClientGone:
            pass
        except RequestError as error:
            await self._end(send, self._answer.failure(api_error(error)))
        except asyncio.CancelledError:
            if self._waits is None or loop.time() - self._waits < STALL:
                raise
            # The answer stays unfinished, which makes the server close the connection.
            why = "slow_reader"
            task.uncancel()
            log.warning(
                "a client has taken nothing for %g s: it is dropped, its request ended",
                STALL,
                extra={"request": self._exchange.number},
            )
        finally:
            self._timer.cancel()
            self._last.cancel()
            self._exchange.close(why)

    async def _end(self, send: Send, last: bytes) -> None:
        self._waits = self._loop.time()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _watch(self, task: asyncio.Task[Any]) -> None:
        """Cancels the stream whose client has stalled. One timer a stream, and nothing at each token."""
        now = self._loop.time()
        if self._waits is not None and now - self._waits >= STALL:
            task.cancel()
            return
        due = STALL if self._waits is None else self._waits + STALL - now
        self._timer = self._loop.call_later(due, self._watch, task)

    def _advance(self) -> None:
        """There may be something new, and the client may take it."""
        if self._last.done():
            return
        if self._line.full:
            if self._waits is None:
                self._waits = self._loop.time()
                self._line.when_open(self._advance)
            return
        self._waits = None
        try:
            if news := self._exchange.news():
                self._put(b"", news)
        except Exception as error:  # noqa: BLE001 - its own task is to hear of it, and no other stream
            self._last.set_exception(error)

    def _put(self, prefix: bytes, news: list[Piece]) -> None:
        exchange, answer = self._exchange, self._answer
        usage = exchange.usage if self._running else None
        if len(news) == 1:
            part = answer.delta(news[0], usage)
        else:
            part = b"".join([answer.delta(piece, usage) for piece in news])
        if prefix:
            part = prefix + part
        if not exchange.open:
            timed = f": server-timing {exchange.timing}\n\n".encode() if self._timed else b""
            self._last.set_result(b"%b%b%b" % (part, timed, answer.closing(exchange.usage)))
        elif part:
            # What has come may be half a mark, and say nothing yet.
            self._line.write(part)
