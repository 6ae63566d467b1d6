"""Goal: who has no key, or not the right one, gets nothing and learns nothing; who has one gets what it is for.
Method: a real HTTP server over a scripted cluster (cluster.py), a file of keys that changes while it runs; the door
alone with random headers. Time is an argument: nothing here sleeps.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine import keys
from pyengine.gateway import audit as audits
from pyengine.gateway import auth
from pyengine.gateway.audit import AuditLog
from pyengine.gateway.auth import API, Door, Guard
from pyengine.gateway.errors import ApiError
from pyengine.gateway.service import Generation
from pyengine.scheduler.types import FinishReason, Role, tenant_number
from pyengine.tenants import SCOPES, Access, Book, Scope, Tenant
from tests.gateway.cluster import Cluster, cluster, failing, silent, tokens, whole_answer

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
PATIENCE = 60.0
WATCH = ("/metrics", "/cluster", "/load", "/dashboard", "/nothing", "/", "/v2", "/v1x")


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: the name of a unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="pyk") as name:
        yield Path(name)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def add(folder: Path, tenant: str, scope: Scope = "api", **limits: Any) -> str:
    """A new key for a tenant with these limits."""

    def change(book: Book) -> tuple[Book, str]:
        book, _, text = book.with_key(tenant, scope, 0)
        return book.with_tenant(Tenant(name=tenant, **limits)) if limits else book, text

    return keys.change(folder / keys.NAME, change)


def revoke(folder: Path, text: str) -> None:
    keys.change(folder / keys.NAME, lambda book: (book.without_key(text[4:12]), None))


def door_of(folder: Path, **more: Any) -> Door:
    return Door(folder / keys.NAME, **more)


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def basic(text: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(b"anybody:" + text.encode()).decode()}


async def ask(
    http: aiohttp.ClientSession, at: Cluster, text: str = "", path: str = "/v1/chat/completions", **fields: Any
) -> tuple[int, Any, aiohttp.ClientResponse]:
    headers = bearer(text) if text else {}
    known = CHAT if "prompt" not in fields else {}
    async with http.post(at.url + path, json={**known, **fields}, headers=headers) as response:
        return response.status, json.loads(await response.read()), response


# -- who is let in -------------------------------------------------------------------------------------------------


async def test_scopes(folder: Path, http: aiohttp.ClientSession) -> None:
    text = {scope: add(folder, "alice", scope) for scope in SCOPES}
    async with cluster(folder, Role.BOTH, door=door_of(folder)) as at:

        async def status(path: str, scope: Scope | None) -> int:
            async with http.get(at.url + path, headers=bearer(text[scope]) if scope else {}) as response:
                found: int = response.status
                return found

        for path in ("/v1/models", *WATCH):
            api = path.startswith("/v1/")
            found = {scope: await status(path, scope) for scope in (*SCOPES, None)}
            assert found[None] == 401
            assert found["watch" if api else "api"] == 403
            assert found["api" if api else "watch"] == found["all"] in (200, 404)
        # Probes have no key, and learn no name.
        async with http.get(f"{at.url}/health") as response:
            assert (response.status, await response.json()) == (200, {"status": "ok"})
        async with http.get(f"{at.url}/health", headers=bearer(text["watch"])) as response:
            assert (await response.json())["workers"] == {"both-0": "both"}
        assert [await status("/health?deep=1", scope) for scope in (None, "api", "watch")] == [401, 403, 200]
        for method in ("PUT", "OPTIONS", "DELETE", "HEAD"):
            async with http.request(method, f"{at.url}/v1/chat/completions") as response:
                assert response.status == 401, method
        # But for what the health check asks itself.
        assert [route for route in at.conductor.routes if route.tenant != "pyengine health"] == []


async def test_what_a_refusal_looks_like(folder: Path, http: aiohttp.ClientSession) -> None:
    good, watch = add(folder, "alice"), add(folder, "ops", "watch")
    async with cluster(folder, Role.BOTH, door=door_of(folder)) as at:
        wrong = good[:-1] + ("A" if good[-1] != "A" else "B")
        for text in ("", wrong, "sk-123"):
            status, body, response = await ask(http, at, text)
            assert (status, body["error"]["code"], body["error"]["param"]) == (401, "invalid_api_key", None)
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert good not in body["error"]["message"]
        status, body, _ = await ask(http, at, watch)
        assert (status, body["error"]["code"]) == (403, "insufficient_permissions")
        assert (await ask(http, at, good, max_tokens=2))[0] == 200
        # Browsers ask for a password where they may use one.
        async with http.get(f"{at.url}/metrics") as response:
            assert response.headers["WWW-Authenticate"].startswith("Basic ")
        async with http.get(f"{at.url}/metrics", headers=basic(watch)) as response:
            assert response.status == 200
            assert "pyengine_gateway_wrong_keys_total 4" in await response.text()
        async with http.post(f"{at.url}/v1/completions", headers=basic(good), data=b"{}") as response:
            assert response.status == 401, "a password a browser sends by itself starts no work"


async def test_the_openai_client(folder: Path) -> None:
    text = add(folder, "alice")
    async with cluster(folder, Role.BOTH, door=door_of(folder)) as at:
        async with openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key=text, max_retries=0) as client:
            answer = await client.completions.create(model="fake", prompt="What is it?", max_tokens=3)
            assert answer.choices[0].text == "The"
        async with openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


HEADER = st.binary(max_size=80)
SCHEMES = st.sampled_from([b"Bearer ", b"bearer ", b"BEARER  ", b"Basic ", b"Digest ", b"", b"Bearer\t", b"Bearer"])


@given(
    values=st.lists(
        st.tuples(SCHEMES, st.one_of(HEADER, HEADER.map(base64.b64encode), st.just(b"x" * 100_000))), max_size=3
    ),
    others=st.lists(st.tuples(st.sampled_from([b"host", b"origin", b"cookie", b"x"]), HEADER), max_size=3),
    path=st.one_of(st.sampled_from(["/v1/models", "/metrics", "/health", "", "//v1/models"]), st.text(max_size=20)),
    query=st.binary(max_size=5),
)
@settings(max_examples=400, deadline=None)
def test_no_headers_open_the_door(
    values: list[tuple[bytes, bytes]], others: list[tuple[bytes, bytes]], path: str, query: bytes
) -> None:
    """Nor do any break it: all that comes out is a typed error, but for probes."""
    headers = [(b"authorization", scheme + value) for scheme, value in values] + others
    for door, status in ((DOOR, 401), (OPEN, 403)):
        found: Access | int | None
        try:
            found = door.identify(headers, path, query)
        except ApiError as error:
            found = error.status
            error.body().decode()
        assert found == status or (found is None and (door is OPEN or path in auth.PUBLIC))


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_right_key_opens_it_in_one_header_only(data: st.DataObject) -> None:
    form = data.draw(
        st.sampled_from(["Bearer {}", "bearer {}", "BEARER   {}", " Bearer {} ", "Basic {}", "{}", "Token {}"])
    )
    count = data.draw(st.integers(0, 3))
    path = data.draw(st.sampled_from(["/v1/models", "/metrics"]))
    shown = base64.b64encode(b"user:" + RIGHT.encode()).decode() if "Basic" in form else RIGHT
    headers = [(b"authorization", form.format(shown).encode())] * count
    good = count == 1 and ("earer" in form.replace("BEARER", "Bearer") or ("Basic" in form and path == "/metrics"))
    if good:
        access = DOOR.identify(headers, path)
        assert access is not None and access.tenant.name == "alice"
    else:
        with pytest.raises(ApiError):
            DOOR.identify(headers, path)


_FOLDER = tempfile.TemporaryDirectory(prefix="pyk")
RIGHT = add(Path(_FOLDER.name), "alice", "all")
DOOR = door_of(Path(_FOLDER.name))
OPEN = Door()


def test_a_wrong_key_costs_the_same_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings decide nothing here: what is counted are whole comparisons, of equal length, by the function for
    secrets."""
    compared: list[tuple[int, int]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr("pyengine.tenants.hmac.compare_digest", compare)
    for text in (RIGHT, RIGHT[:-1] + "!", "pye-00000000-" + RIGHT[13:], "nonsense", ""):
        with contextlib.suppress(ApiError):
            DOOR.identify([(b"authorization", b"Bearer " + text.encode())], "/v1/models")
    assert compared == [(32, 32)] * 5


# -- without keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:9"}, 200),
        ({"Host": "[::1]:9"}, 200),
        ({"Host": "127.0.0.2"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "127.0.0.1@evil.example"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "192.0.2.1"}, 403),
        ({"Host": "localhost:9", "Origin": "http://localhost:9"}, 200),
        ({"Host": "localhost:9", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost:9", "Origin": "null"}, 403),
        ({"Host": "localhost:9", "Origin": "http://["}, 403),
    ],
)
async def test_pages_of_others_may_not_use_an_open_gateway(
    folder: Path, http: aiohttp.ClientSession, headers: dict[str, str], status: int
) -> None:
    async with cluster(folder, Role.BOTH) as at, http.get(f"{at.url}/v1/models", headers=headers) as response:
        assert response.status == status
        if status == 403:
            assert "pyengine keys add" in await response.text() or "--cors-origin" in await response.text()


async def test_cors_is_off_and_can_be_allowed(folder: Path, http: aiohttp.ClientSession) -> None:
    text = add(folder, "alice")
    origin, other = "https://app.example", "https://evil.example"
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for allowed in ((), (origin,)):
        async with cluster(folder, Role.BOTH, door=door_of(folder), cors_origin=allowed) as at:
            for who in (origin, other):
                async with http.options(f"{at.url}/v1/models", headers={**asking, "Origin": who}) as response:
                    may = response.headers.get("Access-Control-Allow-Origin")
                    assert may == (who if who in allowed else None)
                    assert (response.status == 200) == (who in allowed)
                async with http.get(f"{at.url}/v1/models", headers={"Origin": who, **bearer(text)}) as response:
                    assert response.headers.get("Access-Control-Allow-Origin") == (who if who in allowed else None)


async def test_an_open_gateway_asks_from_the_moment_there_is_a_key(folder: Path, http: aiohttp.ClientSession) -> None:
    door = door_of(folder)
    async with cluster(folder, Role.BOTH, door=door) as at:
        assert (await ask(http, at, max_tokens=2))[0] == 200
        text = add(folder, "alice")
        door.look()
        assert (await ask(http, at, max_tokens=2))[0] == 401
        assert (await ask(http, at, text, max_tokens=2))[0] == 200
        # No key left is no key for anybody, not a gateway that asks for none.
        revoke(folder, text)
        door.look()
        assert (await ask(http, at, text, max_tokens=2))[0] == 401
        (folder / keys.NAME).unlink()
        door.look()
        assert (await ask(http, at, max_tokens=2))[0] == 401


async def test_a_file_that_breaks_while_it_runs_changes_nothing(
    folder: Path, http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    text = add(folder, "alice")
    good = (folder / keys.NAME).read_bytes()
    door = door_of(folder)
    async with cluster(folder, Role.BOTH, door=door) as at:
        for content, mode in ((b"{", 0o600), (good, 0o644)):
            (folder / keys.NAME).write_bytes(content)
            (folder / keys.NAME).chmod(mode)
            caplog.clear()
            door.look()
            door.look()
            assert sum("stay as they were" in record.message for record in caplog.records) == 1
            assert (await ask(http, at, text, max_tokens=2))[0] == 200
        (folder / keys.NAME).chmod(0o600)
        revoke(folder, text)
        door.look()
        assert (await ask(http, at, text, max_tokens=2))[0] == 401


async def test_a_file_that_cannot_be_read_for_a_moment_is_read_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Descriptors run out just as a key is revoked: nothing changes in the file when there are some again."""
    text = add(folder, "alice")
    door = door_of(folder)
    headers = [(b"authorization", f"Bearer {text}".encode())]
    revoke(folder, text)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        door.look()
        door.look()
        assert door.identify(headers, "/v1/models") is not None
        assert sum("Too many open files" in record.message for record in caplog.records) == 1
    door.look()
    with pytest.raises(ApiError):
        door.identify(headers, "/v1/models")


# -- tenants -------------------------------------------------------------------------------------------------------


async def test_kv_is_a_tenants_own_unless_it_is_shared(folder: Path, http: aiohttp.ClientSession) -> None:
    """Block keys of equal prompts differ wherever KV is not shared, and a client's salt only narrows."""
    limits: dict[str, dict[str, Any]] = {"a": {}, "b": {}, "c": {"shared": "s"}, "d": {"shared": "s"}, "s": {}}
    texts = {name: add(folder, name, **more) for name, more in limits.items()}
    again = add(folder, "a")
    async with cluster(folder, Role.BOTH, door=door_of(folder)) as at:
        cases = [(name, text, own) for name, text in texts.items() for own in (None, "x", "a", "tenant\0a\0", "\0")]
        cases.append(("a", again, None))
        found = {}
        for name, text, own in cases:
            assert (await ask(http, at, text, max_tokens=2, cache_salt=own))[0] == 200
            route, work = at.conductor.routes[-1], at.workers["both-0"].work[-1]
            assert (route.tenant, work.tenant) == (name, tenant_number(name)), "a salt makes nobody another tenant"
            found[name, text, own] = route.keys
        for one in cases:
            for other in cases:
                same = one[2] == other[2] and (one[0] == other[0] or {one[0], other[0]} == {"c", "d"})
                assert (found[one] == found[other]) == same, (one, other)


async def test_priority_is_bounded(folder: Path, http: aiohttp.ClientSession) -> None:
    plain, urgent, late = add(folder, "a"), add(folder, "b", priority=-5), add(folder, "c", priority=3)
    async with cluster(folder, Role.BOTH, door=door_of(folder)) as at:
        for text, priority, status in ((plain, -1, 403), (plain, 0, 200), (urgent, -5, 200), (urgent, -6, 403)):
            found, body, _ = await ask(http, at, text, max_tokens=2, priority=priority)
            assert found == status
            if status == 403:
                assert body["error"]["param"] == "priority"
        # Who may only be late is so without saying it.
        assert (await ask(http, at, late, max_tokens=2, priority=2))[0] == 403
        assert (await ask(http, at, late, max_tokens=2))[0] == 200
        assert at.conductor.routes[-1].priority == -3


async def test_requests_a_minute(folder: Path, http: aiohttp.ClientSession) -> None:
    text, other, clock = add(folder, "a", requests_per_minute=2), add(folder, "b"), Clock()
    second = add(folder, "a")
    async with cluster(folder, Role.BOTH, door=door_of(folder, clock=clock)) as at:
        assert (await ask(http, at, text, max_tokens=2))[0] == 200
        assert (await ask(http, at, second, max_tokens=2))[0] == 200
        # What is not understood costs a request as well: it is how a client in a loop looks.
        status, body, response = await ask(http, at, text, temperature="hot")
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert (body["error"]["code"], body["error"]["param"]) == ("rate_limit_exceeded", "requests_per_minute")
        assert response.headers["Retry-After"] == "30"
        assert (await ask(http, at, other, max_tokens=2))[0] == 200
        # Looking costs nothing.
        async with http.get(f"{at.url}/v1/models", headers=bearer(text)) as response:
            assert response.status == 200
        clock.now = 29.5
        assert (await ask(http, at, text, max_tokens=2))[0] == 429
        clock.now = 30.0
        assert (await ask(http, at, text, max_tokens=2))[0] == 200


async def test_tokens_a_minute_count_prompts_and_answers(folder: Path, http: aiohttp.ClientSession) -> None:
    prompt = len("user: What is the capital of France?\nassistant:")
    text, clock = add(folder, "a", tokens_per_minute=2 * prompt), Clock()
    async with cluster(folder, Role.BOTH, door=door_of(folder, clock=clock)) as at:
        assert (await ask(http, at, text, max_tokens=10))[0] == 200
        status, body, response = await ask(http, at, text, max_tokens=10)
        assert (status, body["error"]["param"]) == (429, "tokens_per_minute")
        # Ten are missing, of 2 * prompt a minute.
        assert int(response.headers["Retry-After"]) == -(-60 * 10 // (2 * prompt))
        clock.now = 60 * 10 / (2 * prompt)
        assert (await ask(http, at, text, max_tokens=10))[0] == 200
        # What could never be admitted is not told to come again.
        long = [{"role": "user", "content": "x" * 2 * prompt}]
        status, body, response = await ask(http, at, text, messages=long)
        assert (status, body["error"]["param"]) == (400, "tokens_per_minute")
        assert "Retry-After" not in response.headers
        assert len(at.conductor.routes) == 2
        assert at.service.active == 0


async def test_requests_at_once(folder: Path, http: aiohttp.ClientSession) -> None:
    text, door = add(folder, "a", concurrent=1), door_of(folder)
    async with cluster(folder, Role.BOTH, door=door) as at:
        worker = at.workers["both-0"]
        worker.script = silent
        waiting = asyncio.create_task(ask(http, at, text))
        await asyncio.wait_for(worker.arrived.wait(), PATIENCE)
        status, body, response = await ask(http, at, text)
        assert (status, body["error"]["param"], response.headers["Retry-After"]) == (429, "concurrent", "1")
        # However a request ends, its place is free again.
        waiting.cancel()
        await asyncio.wait_for(worker.aborted.wait(), PATIENCE)
        worker.script = whole_answer
        while door.limiter.under_way():
            await asyncio.sleep(0)
        for fields, expected in (({"max_tokens": 2}, 200), ({"temperature": "hot"}, 400), ({"model": "none"}, 404)):
            assert (await ask(http, at, text, **fields))[0] == expected
        assert door.limiter.under_way() == {}
        assert at.service.metrics_text().count(b'pyengine_tenant_refused_total{tenant="a",limit="concurrent"} 1') == 1


async def test_answers_at_once_are_counted_and_not_requests(folder: Path, http: aiohttp.ClientSession) -> None:
    """Two prompts with two choices each are four, from when that is known until the request ends, however it does."""
    text, door = add(folder, "a", concurrent=4, tokens_per_minute=10_000), door_of(folder)
    four = {"model": "fake", "prompt": ["ab", "cd"], "n": 2, "max_tokens": 3, "temperature": 1.0}

    def completion(**fields: Any) -> asyncio.Task[tuple[int, Any, Any]]:
        return asyncio.create_task(ask(http, at, text, "/v1/completions", **four | fields))

    async def all_arrive(works: int) -> None:
        while len(worker.work) < works:
            worker.arrived.clear()
            await asyncio.wait_for(worker.arrived.wait(), PATIENCE)

    async with cluster(folder, Role.BOTH, door=door) as at:
        worker = at.workers["both-0"]
        # More than there ever is room for is not told to come again.
        status, body, response = await completion(n=3)
        assert (status, body["error"]["param"], "Retry-After" in response.headers) == (400, "concurrent", False)
        worker.script = silent
        three = completion(prompt="ab", n=3)
        await all_arrive(3)
        assert door.limiter.under_way() == {"a": 3}
        # There is room for its first answer, not for the second: nothing of it is begun, nor left.
        status, body, response = await completion(prompt="ab")
        assert (status, body["error"]["param"], response.headers["Retry-After"]) == (429, "concurrent", "1")
        assert (len(worker.work), door.limiter.under_way()) == (3, {"a": 3})
        with door.limiter._ledger.usage("a") as usage:
            spent = usage.tokens.missing
        assert (await completion(prompt="ab"))[0] == 429
        with door.limiter._ledger.usage("a") as usage:
            assert usage.tokens.missing == spent, "tokens were taken for what was refused"
        three.cancel()
        while door.limiter.under_way():
            await asyncio.sleep(0)
        # A worker's failure ends all, a revoked key too, and so does the last token.
        worker.script = failing("bug")
        assert (await completion())[0] == 500
        assert door.limiter.under_way() == {}
        worker.script = whole_answer
        assert (await completion())[0] == 200
        assert door.limiter.under_way() == {}
        worker.script = silent
        worker.work.clear()
        denied = completion()
        await all_arrive(4)
        assert door.limiter.under_way() == {"a": 4}
        revoke(folder, text)
        door.look()
        assert (await denied)[0] == 401
        assert door.limiter.under_way() == {}
        assert at.service.active == 0


async def test_what_was_generated_is_charged_also_if_nobody_takes_it(
    folder: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client leaves with the first token; of the others it has taken none."""
    text = add(folder, "a", tokens_per_minute=1000)
    lines: list[dict[str, Any]] = []
    audit = AuditLog(folder / "audit")
    monkeypatch.setattr(audit, "put", lines.append)
    door = door_of(folder, clock=Clock(), audit=audit)
    async with cluster(folder, Role.BOTH, door=door) as at:
        worker = at.workers["both-0"]
        worker.script = lambda w, identity, work: w.send(identity, tokens(work, 0, 1))
        # It reads the first part, and no other.
        taken, reading = Generation.take, []

        def take(own: Generation, **each: bool) -> Any:
            reading.append(own)
            return taken(own, **each) if not own.emitted else ("", [], None, None)

        monkeypatch.setattr(Generation, "take", take)
        url, body = f"{at.url}/v1/chat/completions", {**CHAT, "stream": True, "max_tokens": 500}
        response = await asyncio.wait_for(http.post(url, json=body, headers=bearer(text)), PATIENCE)
        (work,) = worker.work
        for identity in worker.peers:
            worker.send(identity, tokens(work, 1, 300))
        while len(reading[0].request.tokens) < 301:
            await asyncio.sleep(0)
        response.close()
        while door._visits or not lines:
            await asyncio.sleep(0)
        assert [line["completion_tokens"] for line in lines] == [301]
        assert door.tokens["a", "generated"] == 301


# -- revoked -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_revoked_in_the_middle_ends_its_answers(
    folder: Path, http: aiohttp.ClientSession, stream: bool
) -> None:
    """By the gateway's own look at the file, which nothing here calls."""
    text, other = add(folder, "alice"), add(folder, "alice")
    door = door_of(folder)
    async with cluster(folder, Role.BOTH, door=door) as at:
        worker = at.workers["both-0"]
        worker.script = lambda w, identity, work: w.send(identity, tokens(work, 0, 3))
        url = f"{at.url}/v1/chat/completions"
        body = {**CHAT, "stream": stream, "max_tokens": 100}
        first = asyncio.create_task(http.post(url, json=body, headers=bearer(text)))
        second = asyncio.create_task(http.post(url, json=body, headers=bearer(other)))
        while len(worker.work) < 2:
            await asyncio.sleep(0)
        if stream:
            await asyncio.wait_for(first, PATIENCE)
        revoke(folder, text)
        response = await asyncio.wait_for(first, PATIENCE)
        data = (await asyncio.wait_for(response.read(), PATIENCE)).decode()
        if stream:
            assert response.status == 200
            *_, failure, end = (line.removeprefix("data: ") for line in data.splitlines() if line)
            assert end == "[DONE]"
        else:
            assert response.status == 401
            failure = data
        assert json.loads(failure)["error"]["code"] == "invalid_api_key"
        # Its work has ended everywhere; that of the tenant's other key has not.
        await asyncio.wait_for(worker.aborted.wait(), PATIENCE)
        (aborted,) = worker.aborts
        assert at.service.active == len(door._visits) == 1
        assert (await ask(http, at, text))[0] == 401
        left = next(work for work in worker.work if work.request != aborted.request)
        for identity in worker.peers:
            worker.script = lambda *_: None
            worker.send(identity, tokens(left, 3, 97, FinishReason.LENGTH))
        assert (await (await asyncio.wait_for(second, PATIENCE)).read()).count(b"invalid_api_key") == 0


async def test_a_key_revoked_before_work_is_sent(folder: Path, http: aiohttp.ClientSession) -> None:
    """While the body is on its way: the request is known already, and nothing of it runs yet."""
    text = add(folder, "alice")
    door = door_of(folder)
    async with cluster(folder, Role.BOTH, door=door) as at:
        held = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            data = json.dumps(CHAT).encode()
            yield data[:10]
            await held.wait()
            yield data[10:]

        sending = asyncio.create_task(http.post(f"{at.url}/v1/chat/completions", data=body(), headers=bearer(text)))
        while not door._visits:
            await asyncio.sleep(0)
        revoke(folder, text)
        door.look()
        held.set()
        response = await asyncio.wait_for(sending, PATIENCE)
        assert (response.status, at.conductor.routes) == (401, [])


async def test_a_key_revoked_while_its_grammar_is_compiled(
    folder: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are admitted, and nothing of it runs that could be ended."""
    text = add(folder, "alice")
    door = door_of(folder)
    async with cluster(folder, Role.BOTH, door=door) as at:

        async def follow(*_: Any) -> None:
            revoke(folder, text)
            door.look()

        monkeypatch.setattr(at.service, "follow", follow)
        status, body, _ = await ask(http, at, text, structured_outputs={"regex": "a"})
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert (at.conductor.routes, at.service.active) == ([], 0)


async def test_web_sockets_need_a_key_and_end_with_it(folder: Path) -> None:
    """Nothing here speaks them yet but a dashboard: the door alone, with an application that waits for ever."""
    watch, api = add(folder, "ops", "watch"), add(folder, "alice")
    door = door_of(folder)
    began = asyncio.Event()

    async def application(*_: Any) -> None:
        began.set()
        await asyncio.Event().wait()

    async def knock(*headers: tuple[bytes, bytes]) -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        scope = {"type": "websocket", "path": "/dashboard/ws", "headers": list(headers), "query_string": b""}
        await Guard(application, door)(scope, receive, send)
        return sent

    def header(text: str) -> tuple[bytes, bytes]:
        return b"authorization", basic(text)["Authorization"].encode()

    for headers in ([], [header(api)], [header(watch), (b"host", b"a"), (b"origin", b"http://b")]):
        (closed,) = await knock(*headers)
        assert (closed["type"], closed["code"]) == ("websocket.close", 1008)
    assert not began.is_set()
    open_ = asyncio.create_task(knock(header(watch), (b"host", b"a"), (b"origin", b"http://a")))
    await asyncio.wait_for(began.wait(), PATIENCE)
    revoke(folder, watch)
    door.look()
    (closed,) = await asyncio.wait_for(open_, PATIENCE)
    assert (closed["code"], closed["reason"]) == (1008, auth.REVOKED)


# -- audit ---------------------------------------------------------------------------------------------------------


async def test_the_audit_log_says_who_and_never_what(folder: Path, http: aiohttp.ClientSession) -> None:
    text, path = add(folder, "alice"), folder / "audit.jsonl"
    log = AuditLog(path)
    secret = "a prompt that nobody else may read"
    message = [{"role": "user", "content": secret}]
    async with cluster(folder, Role.BOTH, door=door_of(folder, audit=log)) as at:
        assert (await ask(http, at, text, max_tokens=3, messages=message))[0] == 200
        assert (await ask(http, at, text, messages=secret))[0] == 400
        async with http.get(f"{at.url}/metrics", headers=bearer(text)) as response:
            assert response.status == 403
        worker = at.workers["both-0"]
        worker.script = silent
        worker.arrived.clear()
        gone = asyncio.create_task(ask(http, at, text, max_tokens=3, messages=message))
        await asyncio.wait_for(worker.arrived.wait(), PATIENCE)
        gone.cancel()
        await asyncio.wait_for(worker.aborted.wait(), PATIENCE)
        for _ in range(3):
            assert (await ask(http, at, text + "x"))[0] == 401
    raw = path.read_text()
    lines = [json.loads(line) for line in raw.splitlines()]
    known = [line for line in lines if "key" in line]
    prompt = len(f"user: {secret}\nassistant:")
    assert [line["status"] for line in known] == [200, 400, 403, 499]
    assert {(line["tenant"], line["key"]) for line in known} == {("alice", text[4:12])}
    first = known[0]
    assert (first["model"], first["prompt_tokens"], first["completion_tokens"]) == ("fake", prompt, 3)
    assert first["cached_tokens"] == prompt // 16 * 16
    assert first["ms"] > 0 and first["when"].endswith("Z") and first["path"] == "/v1/chat/completions"
    for hidden in (secret, text[13:], "The"):
        assert hidden not in raw
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_audit_log_is_bounded_and_never_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "OLDER_FILES", 2)
    path = folder / "audit.jsonl"
    for number in range(12):
        log = AuditLog(path, file_bytes=100)
        for part in range(4):
            log.put({"number": number * 4 + part, "text": "x" * 20})
        log.close()
        log.close()
    assert sorted(entry.name for entry in folder.iterdir() if entry.name != "audit.jsonl") == [
        "audit.jsonl.1",
        "audit.jsonl.2",
    ]
    # Whole lines, in order, the latest.
    text = "".join((folder / name).read_text() for name in ("audit.jsonl.2", "audit.jsonl.1"))
    numbers = [json.loads(line)["number"] for line in text.splitlines()]
    assert numbers == list(range(48 - len(numbers), 48))
    # A disk that does not answer: lines are dropped and counted, nobody waits.
    monkeypatch.setattr(audits, "MAX_WAITING", 5)
    monkeypatch.setattr(AuditLog, "_write_for_ever", lambda _: None)
    log = AuditLog(path)
    for _ in range(8):
        log.put({})
    assert log.dropped == 3


def test_an_audit_log_that_cannot_be_written_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="--audit-log"):
        AuditLog(folder / "none" / "audit.jsonl")
    log = AuditLog(folder / "audit.jsonl")
    (folder / "audit.jsonl").unlink()
    (folder / "audit.jsonl").mkdir()
    log.put({"lost": 1})
    log.close()
    assert log.dropped == 1
    assert "cannot be written" in caplog.text


def test_no_half_line_is_left_where_a_disk_takes_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write may take less than it is given; a full disk takes a part, then nothing."""
    real, room = os.write, [10**6]

    def write(file: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = real(file, data[: min(7, room[0])])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", write)
    path = folder / "audit.jsonl"
    lines = [{"number": number} for number in range(10)]
    length = len(b'{"number":0}\n')

    def put() -> AuditLog:
        log = AuditLog(path)
        for line in lines:
            log.put(line)
        log.close()
        return log

    assert put().dropped == 0
    # After four lines, in the middle of a line, and before the first.
    for at, spare in enumerate((4 * length, 2 * length + 5, 0)):
        room[0] = spare
        assert put().dropped == (6, 8, 10)[at]
    room[0] = 10**6
    assert put().dropped == 0
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*lines, *lines[:4], *lines[:2], *lines]


def test_gateways_that_share_a_file_lose_nothing_when_it_is_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each full file is moved once: another one would move a file that is hardly begun, and at last one too many."""
    monkeypatch.setattr(audits, "OLDER_FILES", 200)
    path = folder / "audit.jsonl"
    logs = [AuditLog(path, file_bytes=300) for _ in range(3)]

    def write(at: int) -> None:
        # A line at a time, as their threads do it when requests come one by one.
        for number in range(300):
            logs[at]._write([json.dumps({"log": at, "number": number}).encode() + b"\n"])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    for log in logs:
        log.close(PATIENCE)
    assert [log.dropped for log in logs] == [0, 0, 0]
    older = [entry for entry in folder.iterdir() if entry != path]
    assert len(older) > 50 and all(entry.stat().st_size >= 300 for entry in older)
    found = [json.loads(line) for entry in folder.iterdir() for line in entry.read_text().splitlines()]
    assert sorted((each["log"], each["number"]) for each in found) == [(at, n) for at in range(3) for n in range(300)]


def test_paths_of_the_api_are_those_it_has() -> None:
    """A new path of the application is watched over, unless somebody says otherwise here."""
    assert set(API) == {"/v1", "/tokenize", "/detokenize", "/version", "/openapi.json"}
