"""HTTP/1.1 as uvicorn speaks it, with limits on what a client may send before anything looks at it.

    connection --HEAD_SECONDS--> header complete --REQUEST_SECONDS--> body complete --> answer --5 s idle--> closed
                  431: more than MAX_HEADER_BYTES or MAX_HEADERS, 408: too slow

A client that is slow on purpose holds a descriptor and some kB for so long, and nobody else up. Tested against
uvicorn's httptools protocol, whose callbacks these are. The size of a body is app.py's to refuse, by `max_body_bytes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from pyengine.gateway.errors import ApiError

#: Seconds for request line and header: hundreds of round trips.
HEAD_SECONDS = 10.0
#: Seconds for the whole request: the largest body (16 MiB) at 2 Mbit/s.
REQUEST_SECONDS = 60.0
#: Bytes of request line and header together, and fields: four times what browsers and proxies send at most.
MAX_HEADER_BYTES = 32 << 10
MAX_HEADERS = 100
TOO_LARGE = f"the header is larger than {MAX_HEADER_BYTES} bytes: send less"


#: What the line of an answer is called among the extensions of its scope.
LINE = "pyengine.line"


class Refused(Exception):
    """Ends the parsing of a request that has been answered already."""


class Line:
    """Where parts of one chunked answer are written once its start is sent, by whoever has them, without a task.

    Whoever writes looks at `full` first: what the client does not take is not to be made. The last part is ASGI's to
    send.
    """

    __slots__ = ("_cycle", "_flow", "_protocol", "_write")

    def __init__(self, protocol: GuardedProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def full(self) -> bool:
        """The client has not taken what it was sent before."""
        return self._flow.write_paused

    def when_open(self, call: Callable[[], None]) -> None:
        """`call` is called once when the line is not full any more. There is one waiter, the last that has asked."""
        self._protocol.waiter = call

    def write(self, part: bytes) -> None:
        """part: not empty, which would end the answer. Who is gone is sent nothing."""
        assert part, "an empty part would end the answer"
        if not self._cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(part), part))


def line_of(scope: MutableMapping[str, Any]) -> Line:
    """Of the answer to this request."""
    line = scope["extensions"][LINE]["line"]
    assert isinstance(line, Line)
    return line


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    head_seconds = HEAD_SECONDS
    request_seconds = REQUEST_SECONDS

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timer: asyncio.TimerHandle | None = None
        #: Whether a header is what comes next, and whether some of it has come.
        self._in_header = True
        self._begun = False
        self._header_bytes = 0
        self._size = 0
        #: Who waits for the client to take what it was sent: answers are written one behind the other.
        self.waiter: Callable[[], None] | None = None

    # -- connection ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._within(self.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._within(None)
        super().connection_lost(exc)
        # Nothing is taken any more, and nothing waits for that.
        self._opened()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._opened()

    def _opened(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        idle = self.cycle is None or self.cycle.response_complete
        if self._in_header:
            if self._timer is None and idle:
                # A further request on this connection, or what never becomes one.
                self._within(self.head_seconds)
            self._header_bytes += len(data)
        super().data_received(data)
        # Only a header that is still not complete: this read may have brought much of a body, too.
        if self._in_header and self._header_bytes > MAX_HEADER_BYTES and self._timer is not None:
            self._refuse(431, TOO_LARGE)

    # -- parser ----------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_header = self._begun = True
        self._size = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        if not self._in_header:
            # Behind a chunked body. Nobody here knows any such field, and this one may be one that somebody in front of
            # this server takes care to set or to drop.
            return
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(431, f"the header has more than {MAX_HEADERS} fields: send less")
            raise Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_header = False
        self._header_bytes = 0
        if self.transport.is_closing():
            raise Refused
        super().on_headers_complete()
        if self.cycle is not None:
            self.scope["extensions"] = {LINE: {"line": Line(self, self.cycle)}}
        # While it waits for earlier ones nothing is read: its time begins with its turn.
        self._within(None if self.pipeline else self.request_seconds)

    def on_message_complete(self) -> None:
        self._in_header, self._begun = True, False
        self._within(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or self.pipeline:
            return
        done = self.cycle.response_complete
        if self._in_header and self._begun and done:
            # Half of the next request came while this one was answered.
            self._unset_keepalive_if_required()
            self._within(self.head_seconds)
        elif not self._in_header and not done:
            # It is the next one's turn, of whose body half has come.
            self._within(self.request_seconds)

    def handle_websocket_upgrade(self) -> None:
        # It has a protocol of its own from here on, and all the time it wants.
        self._within(None)
        super().handle_websocket_upgrade()

    # -- limits ----------------------------------------------------------------------------------------------------

    def _within(self, seconds: float | None) -> None:
        """What the client is to send next must have come by then. None: it is not waited for."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._too_slow)

    def _too_slow(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._in_header:
            self._refuse(408, f"the header did not come within {self.head_seconds:g} s")
        else:
            self._refuse(408, f"the request did not come within {self.request_seconds:g} s")

    def _count(self, size: int) -> None:
        # One read may bring a whole header, however long: the parser is stopped in it.
        self._size += size
        if self._size > MAX_HEADER_BYTES:
            self._refuse(431, TOO_LARGE)
            raise Refused

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no HTTP/1.1 request")

    def _refuse(self, status: int, text: str) -> None:
        """Answers, unless an answer has begun, and closes."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        # An earlier request, whose answer anything written now would be part of; or this one's own answer.
        begun = bool(self.pipeline)
        if cycle is not None:
            begun = begun or (not cycle.response_complete if self._in_header else cycle.response_started)
        if not begun:
            self.transport.write(b"".join(_answer(status, text)))
        self.transport.close()


def _answer(status: int, text: str) -> Iterator[bytes]:
    body = ApiError(status, text).body()
    yield STATUS_LINE[status]
    yield b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    yield body
