"""Enough of HTTP/1.1 to ask a gateway and read its answer as it comes: one request, one connection."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

import httptools

from .base import BackendError

#: Seconds to reach the gateway. It is near, or it is not there.
CONNECT_TIMEOUT = 10.0
#: Bytes of an answer that is an error, or no stream: nobody reads more of it.
MAX_BODY = 64 << 20


class Address:
    """Where a gateway is: http(s)://HOST:PORT[/BASE], and the API key it is shown, if any.

    Raises BackendError if that is no such URL, or no such key.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise BackendError(f"{url!r} is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BackendError(f"{url!r} is no URL of a gateway: write http://HOST:PORT")
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self.port = port or (443 if parts.scheme == "https" else 80)
        self.base = parts.path.rstrip("/")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.name = parts.netloc.rpartition("@")[2]
        # It becomes a line of the head, where a line's end would begin another.
        if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
            raise BackendError("the API key has a space or a character that no key has: look at PYENGINE_API_KEY")
        self.key = key


class _Answer:
    """Callbacks of the parser."""

    def __init__(self, on_body: Callable[[int, bytes], None]) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.headers: dict[str, str] = {}
        self.ended = False
        self._on_body = on_body

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._on_body(self.parser.get_status_code(), body)

    def on_message_complete(self) -> None:
        self.ended = True


async def ask(
    address: Address, method: str, path: str, body: bytes, on_body: Callable[[int, bytes], None]
) -> tuple[int, dict[str, str]]:
    """Sends one request; on_body gets (status, bytes) as they come. Returns status and headers (lower case).

    Raises OSError if nobody answers, or the answer breaks off or is no HTTP. Cancelling closes the connection.
    """
    async with asyncio.timeout(CONNECT_TIMEOUT):
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=address.tls)
    try:
        head = (
            f"{method} {address.base}{path} HTTP/1.1\r\nHost: {address.name}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            + (f"Authorization: Bearer {address.key}\r\n\r\n" if address.key else "\r\n")
        )
        writer.write(head.encode("latin-1") + body)
        answer = _Answer(on_body)
        while not answer.ended:
            data = await reader.read(1 << 16)
            if not data:
                raise ConnectionError("the answer broke off")
            try:
                answer.parser.feed_data(data)
            except httptools.HttpParserError as error:
                raise ConnectionError(f"the answer is no HTTP: {error}") from None
        return answer.parser.get_status_code(), answer.headers
    finally:
        writer.close()


async def get(address: Address, path: str) -> tuple[int, bytes]:
    """Status and body. Raises OSError."""
    body = bytearray()

    def keep(_: int, part: bytes) -> None:
        if len(body) + len(part) > MAX_BODY:
            raise ConnectionError(f"{path} answers more than {MAX_BODY} bytes")
        body.extend(part)

    status, _ = await ask(address, "GET", path, b"", keep)
    return status, bytes(body)
