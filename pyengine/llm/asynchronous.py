"""`AsyncLLM`: an `LLM` for asyncio. The engine's thread computes; the event loop only hears that something has come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from pyengine.chat.structured import StructuredOutputs
from pyengine.llm.asking import Asked, Conversation, Prompt, Tools, as_batch
from pyengine.llm.model import LLM, begin
from pyengine.llm.request import Completion, Piece, Request
from pyengine.scheduler.types import SamplingParams


class AsyncLLM:
    """What an LLM can do, for coroutines; `llm` may be used by threads all the while. Tasks and loops may share it.

    A task that is cancelled, or leaves its `async for`, ends its request: all that it held is released.

    Args:
        llm: closed by `aclose` and at the end of `async with`.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        output: Any = None,
        structured: StructuredOutputs | None = None,
    ) -> list[Completion]:
        """See `LLM.generate`."""
        asker = self.llm._asker
        return await self._answer(
            lambda: asker.prompts(as_batch(prompts), sampling, output=output, structured=structured)
        )

    async def chat(
        self,
        messages: Conversation,
        sampling: SamplingParams | None = None,
        *,
        tools: Tools = (),
        tool_choice: str | None = None,
        output: Any = None,
        structured: StructuredOutputs | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Completion:
        """See `LLM.chat`; one conversation a call, as calls run together anyway."""
        (answer,) = await self._answer(
            lambda: self.llm._asker.conversations(
                [messages],
                sampling,
                tools=tools,
                tool_choice=tool_choice,
                output=output,
                structured=structured,
                options=template_options,
            )
        )
        return answer

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        output: Any = None,
        structured: StructuredOutputs | None = None,
    ) -> AsyncStream:
        """See `LLM.stream`; what it raises comes with the first piece."""
        asker = self.llm._asker
        return AsyncStream(self.llm, lambda: asker.prompts([prompt], sampling, output=output, structured=structured))

    def stream_chat(
        self,
        messages: Conversation,
        sampling: SamplingParams | None = None,
        *,
        tools: Tools = (),
        tool_choice: str | None = None,
        output: Any = None,
        structured: StructuredOutputs | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> AsyncStream:
        """See `LLM.stream_chat`; what it raises comes with the first piece."""
        return AsyncStream(
            self.llm,
            lambda: self.llm._asker.conversations(
                [messages],
                sampling,
                tools=tools,
                tool_choice=tool_choice,
                output=output,
                structured=structured,
                options=template_options,
            ),
        )

    async def aclose(self) -> None:
        """Ends what runs, and closes the LLM. Idempotent."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _answer(self, ask: Callable[[], list[Asked]]) -> list[Completion]:
        # Templates and tokenizers take their time, which is not the loop's.
        asked = await asyncio.to_thread(ask)
        news = _News()
        requests = [each.request(news.come) for each in asked]
        try:
            await asyncio.to_thread(begin, self.llm._engine, requests)
            while not (all(request.ended for request in requests) or any(request.error for request in requests)):
                await news.wait()
        finally:
            self.llm._engine.cancel(requests)
        for request in requests:
            if request.error is not None:
                raise request.error
        return [each.completion(request) for each, request in zip(asked, requests, strict=True)]


class AsyncStream(AsyncIterator[Piece]):
    """Pieces of one answer, as they come. For one task at a time; a context manager that ends the answer.

    The request begins with the first piece that is asked for.
    """

    def __init__(self, llm: LLM, ask: Callable[[], list[Asked]]) -> None:
        self._llm = llm
        self._ask = ask
        self._asked: Asked | None = None
        self._request: Request | None = None
        self._closed = False

    async def __anext__(self) -> Piece:
        """Raises ValueError or RuntimeError if the request cannot be made, or fails."""
        request = await self._begun()
        try:
            while True:
                ended = request.ended
                if request.pieces:
                    return request.pieces.popleft()
                if ended:
                    if request.error is not None:
                        raise request.error
                    raise StopAsyncIteration
                await self._news.wait()
        except asyncio.CancelledError:
            self.close()
            raise

    async def completion(self) -> Completion:
        """The whole answer, waiting for its end if need be."""
        request = await self._begun()
        try:
            while not request.ended:
                await self._news.wait()
        except asyncio.CancelledError:
            self.close()
            raise
        assert self._asked is not None
        return self._asked.completion(request)

    def close(self) -> None:
        """Ends the answer. Idempotent."""
        self._closed = True
        if self._request is not None:
            self._llm._engine.cancel([self._request])

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    async def _begun(self) -> Request:
        if self._request is not None:
            return self._request
        if self._closed:
            raise RuntimeError("this stream is closed: make a new one")
        (self._asked,) = await asyncio.to_thread(self._ask)
        self._news = _News()
        self._request = self._asked.request(self._news.come, streamed=True)
        try:
            await asyncio.to_thread(begin, self._llm._engine, [self._request])
        except asyncio.CancelledError:
            self.close()
            raise
        return self._request


class _News:
    """An asyncio.Event that the engine's thread may set."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def come(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        await self._event.wait()
        self._event.clear()
