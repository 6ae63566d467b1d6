"""Goal: a client that sends too much, too slowly or nonsense costs a descriptor for a time, and nobody else anything.
Method: bytes over real sockets against the gateway's own HTTP server; limits of time are shortened, and what is waited
for is always the server's answer.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn

from pyengine.config import ConfigError, GatewayConfig
from pyengine.gateway.protocol import MAX_HEADER_BYTES, MAX_HEADERS, GuardedProtocol
from pyengine.scheduler.types import Role
from tests.certificate import make_certificate
from tests.gateway.cluster import ANSWER, Cluster, cluster, tokens, whole_answer

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
PATIENCE = 60.0
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: the name of a unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="pyp") as name:
        yield Path(name)


async def dial(at: Cluster) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(at.url.rpartition(":")[2]))


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes."""
    try:
        return await asyncio.wait_for(reader.read(), PATIENCE)
    except ConnectionResetError:
        return b""


async def exchange(at: Cluster, *pieces: bytes) -> tuple[int, Any]:
    """Sends the pieces one by one; status and parsed body of the one answer, after which the server has closed."""
    reader, writer = await dial(at)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass
    head, _, body = (await rest(reader)).partition(b"\r\n\r\n")
    writer.close()
    return int(head[9:12]), json.loads(body)


@pytest.mark.parametrize(
    "pieces",
    [
        (GET + b"".join(b"X-%d: a\r\n" % i for i in range(MAX_HEADERS)) + b"\r\n",),
        (GET + b"X: " + b"a" * MAX_HEADER_BYTES + b"\r\n\r\n",),
        (GET + b"".join(b"X: " + b"a" * 1000 + b"\r\n" for _ in range(40)) + b"\r\n",),
        (GET + b"X: ", *[b"a" * 4096] * 12),
        (GET, *[b"X: a\r\n"] * (MAX_HEADERS + 1), b"\r\n"),
        (b"GET /" + b"a" * MAX_HEADER_BYTES + b" HTTP/1.1\r\n\r\n",),
        (b"GET /", *[b"a" * 4096] * 12),
    ],
    ids=["fields", "field", "together", "endless field", "one by one", "address", "endless address"],
)
async def test_a_header_has_a_size(folder: Path, pieces: tuple[bytes, ...]) -> None:
    async with cluster(folder, Role.BOTH) as at:
        status, body = await exchange(at, *pieces)
        assert status == 431
        assert "send less" in body["error"]["message"]


async def test_a_header_below_the_limits_is_fine(folder: Path) -> None:
    fields = b"".join(b"X-%d: %s\r\n" % (i, b"a" * 250) for i in range(MAX_HEADERS - 2))
    async with cluster(folder, Role.BOTH) as at:
        status, body = await exchange(at, GET + b"Connection: close\r\n" + fields + b"\r\n")
        assert (status, body["object"]) == (200, "list")


@pytest.mark.parametrize(
    "nonsense", [b"\0\0\0\0", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n"]
)
async def test_what_is_no_http_is_answered_in_the_apis_form(folder: Path, nonsense: bytes) -> None:
    async with cluster(folder, Role.BOTH) as at:
        status, body = await exchange(at, nonsense)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /v1/models HTTP/1.1\r\nHost: local",
        b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
        GET + b"\r\n" + GET,
    ],
    ids=["nothing", "half a header", "an empty line", "half a body", "half a second request"],
)
async def test_who_is_slow_is_let_go(folder: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(GuardedProtocol, "head_seconds", 0.2)
    monkeypatch.setattr(GuardedProtocol, "request_seconds", 0.2)
    async with cluster(folder, Role.BOTH) as at:
        reader, writer = await dial(at)
        writer.write(sent)
        answers = await rest(reader)
        # Whole answers, then the reason, then the end: the server closes, the client has not.
        assert answers.count(b"HTTP/1.1 408 ") == 1
        assert answers.count(b"HTTP/1.1 200 ") == (1 if sent.count(b"GET") == 2 else 0)
        assert b"did not come within 0.2 s" in answers
        writer.close()
        assert at.service.active == 0


def post(body: bytes, sent: bytes) -> bytes:
    """A request of this body, of which only so much comes."""
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + sent


@pytest.mark.parametrize(
    ("behind", "complete"),
    [
        (post(b"ab", b"a"), 0),
        (GET + b"\r\n" + post(b"ab", b"a"), 1),
        (GET + b"\r\n" + GET, 1),
        (b"\0\0\0\0", None),
        (GET + b"\r\n" + b"\0\0\0\0", None),
        (b"GET /" + b"a" * MAX_HEADER_BYTES, None),
    ],
    ids=["half a body", "half a third body", "half a third header", "nonsense", "nonsense third", "endless"],
)
async def test_nothing_is_written_into_an_earlier_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, behind: bytes, complete: int | None
) -> None:
    """Behind a request that is being answered come others, of which the last is never complete, or is none. complete:
    how many answers there are behind the first before a 408; None: the connection ends, and no answer is another's."""
    monkeypatch.setattr(GuardedProtocol, "head_seconds", 0.1)
    monkeypatch.setattr(GuardedProtocol, "request_seconds", 0.1)
    body = json.dumps({**CHAT, "max_tokens": len(ANSWER), "stream": True}).encode()
    async with cluster(folder, Role.BOTH) as at:
        worker = at.workers["both-0"]
        arrived = asyncio.Event()
        worker.script = lambda *_: arrived.set()
        reader, writer = await dial(at)
        writer.write(post(body, body))
        await asyncio.wait_for(arrived.wait(), PATIENCE)
        writer.write(behind)
        if complete is None:
            assert await rest(reader) == b""
            return
        # Many times the limits, by the loop's own clock: what would close has had its turn.
        passed = asyncio.Event()
        asyncio.get_running_loop().call_later(0.5, passed.set)
        await passed.wait()
        (work,) = worker.work
        for identity in worker.peers:
            whole_answer(worker, identity, work)
        answers = await rest(reader)
        first, *others = answers.split(b"HTTP/1.1 ")[1:]
        assert first.startswith(b"200 ") and first.count(b"data: [DONE]") == 1
        assert [one[:4] for one in others] == [b"200 "] * complete + [b"408 "]
        writer.close()


async def test_fields_behind_a_body_are_no_headers() -> None:
    """What stands in front of a server sets or drops fields of the header, and looks at no others."""
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        seen.append(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b""})

    server = uvicorn.Server(uvicorn.Config(app, http=GuardedProtocol, log_level="error", lifespan="off", ws="none"))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
    writer.write(b"0\r\nAuthorization: Bearer k\r\nX-Request-Id: t\r\n\r\n")
    assert (await rest(reader)).startswith(b"HTTP/1.1 200 ")
    assert [[name for name, _ in headers] for headers in seen] == [[b"host", b"transfer-encoding"]]
    writer.close()
    server.should_exit = True
    await asyncio.wait_for(serving, PATIENCE)


async def test_empty_lines_keep_no_connection_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that says nothing behind its answer is let go after uvicorn's time, one that says nothing much after
    ours."""
    monkeypatch.setattr(GuardedProtocol, "head_seconds", 0.2)
    async with cluster(folder, Role.BOTH) as at:
        reader, writer = await dial(at)
        writer.write(GET + b"\r\n")
        await asyncio.wait_for(reader.readuntil(b"}]}"), PATIENCE)
        writer.write(b"\r\n")
        assert b" 408 " in await rest(reader)
        writer.close()


async def test_a_long_answer_is_not_slow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time counts while the client is to send: not while it is served, also not if it sends an empty line meanwhile."""
    monkeypatch.setattr(GuardedProtocol, "head_seconds", 0.05)
    monkeypatch.setattr(GuardedProtocol, "request_seconds", 0.05)
    body = json.dumps({**CHAT, "max_tokens": len(ANSWER), "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with cluster(folder, Role.BOTH) as at:
        worker = at.workers["both-0"]
        worker.script = lambda w, identity, work: w.send(identity, tokens(work, 0, 1))
        reader, writer = await dial(at)
        writer.write(head + body)
        await asyncio.wait_for(reader.readuntil(ANSWER[0].encode() + b'"}'), PATIENCE)
        writer.write(b"\r\n")
        # Many times the limits, by the loop's own clock: what would close has had its turn.
        passed = asyncio.Event()
        asyncio.get_running_loop().call_later(0.5, passed.set)
        await passed.wait()
        (work,) = worker.work
        for identity in worker.peers:
            whole_answer(worker, identity, work)
        answer = await asyncio.wait_for(reader.readuntil(b"[DONE]"), PATIENCE)
        assert b"408" not in answer
        assert b'"finish_reason":"length"' in answer
        writer.close()


async def test_a_flood_of_slow_clients_holds_nobody_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedProtocol, "head_seconds", 1.0)
    async with cluster(folder, Role.BOTH) as at:
        slow = [await dial(at) for _ in range(200)]
        for _, writer in slow:
            writer.write(b"GET / HTTP/1.1\r\nX: ")
        url, body = f"{at.url}/v1/chat/completions", {**CHAT, "max_tokens": 3}
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
            assert response.status == 200
        for reader, writer in slow:
            assert b" 408 " in await rest(reader)
            writer.close()


# -- TLS -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


async def test_https(folder: Path, certificate: tuple[str, str]) -> None:
    """Checked by a client that trusts this certificate alone; plain HTTP gets nothing."""
    cert, key = certificate
    async with cluster(folder, Role.BOTH, tls_cert=cert, tls_key=key) as at:
        trusting = ssl.create_default_context(cafile=cert)
        async with aiohttp.ClientSession() as http:
            url = at.url.replace("http://", "https://") + "/v1/chat/completions"
            async with http.post(url, json={**CHAT, "max_tokens": len(ANSWER)}, ssl=trusting) as response:
                assert (await response.json())["choices"][0]["message"]["content"] == ANSWER
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await http.post(url, json=CHAT)
            with pytest.raises(aiohttp.ClientError):
                await http.post(f"{at.url}/v1/chat/completions", json=CHAT)
        for old in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
            context = ssl.create_default_context(cafile=cert)
            context.set_ciphers("ALL:@SECLEVEL=0")
            with pytest.warns(DeprecationWarning, match="deprecated"):
                context.minimum_version = context.maximum_version = old
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection("localhost", int(at.url.rpartition(":")[2]), ssl=context)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tls_cert": "CERT"}, "give both"),
        ({"tls_key": "KEY"}, "give both"),
        ({"tls_cert": "CERT", "tls_key": "/none"}, "No such file"),
        ({"tls_cert": "KEY", "tls_key": "CERT"}, "PEM"),
        ({"cors_origin": ("https://a.example/path",)}, "no path"),
        ({"cors_origin": ("a.example",)}, "cors_origin"),
    ],
)
def test_settings_that_cannot_work(fields: dict[str, Any], says: str, certificate: tuple[str, str]) -> None:
    named = {"CERT": certificate[0], "KEY": certificate[1]}
    given: dict[str, Any] = {
        name: named.get(value, value) if isinstance(value, str) else value for name, value in fields.items()
    }
    with pytest.raises(ConfigError, match=says):
        GatewayConfig(conductor="", secret_file="", **given).check()


def test_a_key_with_a_password_asks_nobody(certificate: tuple[str, str], tmp_path: Path) -> None:
    locked = str(tmp_path / "locked.pem")
    command = ["openssl", "ec", "-in", certificate[1], "-out", locked, "-aes128", "-passout", "pass:secret"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    with pytest.raises(ConfigError, match="without a password"):
        GatewayConfig(conductor="", secret_file="", tls_cert=certificate[0], tls_key=locked).check()
