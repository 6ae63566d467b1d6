"""A server of the API that says what a test wants, in a thread: for clients that have a loop of their own, or none."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any] | str


@dataclass
class Api:
    """url. answers: for each request in turn the pieces of its text, the last again and again; a number is an HTTP
    status. asked: (path, headers, body) of each request. hold: after its pieces, an answer waits until the client goes;
    left: set when one has.
    """

    url: str = ""
    models: list[str] = field(default_factory=lambda: ["tiny"])
    answers: list[list[str] | int] = field(default_factory=lambda: [["Hel", "lo"]])
    asked: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    hold: bool = False
    left: threading.Event = field(default_factory=threading.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            path = head[0].split()[1]
            if path == "/v1/models":
                self._whole(writer, 200, {"data": [{"id": name} for name in self.models]})
                return
            asked = json.loads(body) if body else {}
            self.asked.append((path, headers, asked))
            answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
            if isinstance(answer, int):
                self._whole(writer, answer, {"error": {"message": f"told to say {answer}"}})
                return
            await self._stream(reader, writer, path, answer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _whole(self, writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} -\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    async def _stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, pieces: list[str]
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        chat = "chat" in path
        for number, piece in enumerate(pieces):
            last = "stop" if number == len(pieces) - 1 and not self.hold else None
            said = {"delta": {"content": piece}} if chat else {"text": piece, "token_ids": [number]}
            self._event(writer, {"choices": [{"index": 0, **said, "finish_reason": last}]})
            await writer.drain()
        if self.hold:
            # The end of what it reads: the client has closed the connection.
            await reader.read()
            self.left.set()
            return
        details = {"cached_tokens": 4, "cached_tokens_by_tier": {"dram": 4}}
        usage = {"prompt_tokens": 7, "completion_tokens": len(pieces), "prompt_tokens_details": details}
        self._event(writer, {"choices": [], "usage": usage})
        self._chunk(writer, b"data: [DONE]\n\n")
        self._chunk(writer, b"")
        await writer.drain()

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        self._chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))


@contextmanager
def serving(api: Api) -> Iterator[Api]:
    """`api` on a port of its own until the block ends."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def begin() -> asyncio.Server:
        server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        api.url = f"http://{host}:{port}"
        ready.set()
        return server

    def run() -> None:
        loop.run_until_complete(begin())
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield api
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
