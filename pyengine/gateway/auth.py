"""The door of a gateway: who comes in, how often, and what is written down about it. ASGI, around the whole
application.

    request --key?--> 401 --scope?--> 403 --limits?--> 429 --> the application, with a Visit in its scope
                                                                  | prompt tokens (`Visit.admit`), may be 429 too
                                                                  v
                                               the end: tokens are charged, a line of audit

Without a file of keys every visitor is let in, as only this machine can knock (listener.py); then a browser's page of
another origin is turned away, for it is on this machine too. Who keys belong to, and what they open, is tenants.py's;
how much of it, limiter.py's.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import ipaddress
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyengine import keys
from pyengine.config import ConfigError
from pyengine.gateway.audit import AuditLog
from pyengine.gateway.errors import ApiError
from pyengine.gateway.request import ErrorKind, RequestError
from pyengine.limiter import Ledger, Limiter, Refusal
from pyengine.tenants import Access, Book, Register, Tenant, salt_of

log = logging.getLogger("pyengine.gateway")

#: How often the file of keys is looked at, seconds: a revoked key is to be worth nothing within one.
LOOK = 0.5
#: For whoever asks, also without a key: probes have none. They name nobody.
PUBLIC = frozenset({"/health", "/livez", "/readyz"})
#: What keys of scope "api" open, with all below it. Everything else is about all tenants: scope "watch".
API = ("/v1", "/tokenize", "/detokenize", "/version", "/openapi.json")
#: What makes work, and so counts as a request.
WORK = frozenset({"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"})

#: Status of what nobody waited for, as in app.py.
GONE = 499
#: Of web sockets (RFC 6455).
POLICY_VIOLATION = 1008
REVOKED = "this API key has been revoked"


class Counts(Protocol):
    """Tokens of one HTTP request, as the application knows them."""

    @property
    def prompt(self) -> int: ...
    @property
    def completion(self) -> int: ...
    @property
    def cached(self) -> int: ...


class Visit:
    """One HTTP request of somebody who was let in; the application adds what it learns."""

    def __init__(self, door: Door, access: Access | None) -> None:
        self.access = access
        self.model = ""
        #: Tokens so far.
        self.usage: Callable[[], Counts] | None = None
        self.revoked = False
        #: Answers that its tenant's limit counts for it.
        self.answers = 1
        #: Called when the key is revoked, with what the client is told.
        self.on_revoked: Callable[[RequestError], None] = lambda _: None
        self._door = door

    @property
    def watches(self) -> bool:
        """Whether it may see names of workers and nodes."""
        return not self._door.asks if self.access is None else self.access.scope != "api"

    def tenant(self, own: str) -> str:
        """For whom work is done, as the conductor and pools know them; `own`: the client's `cache_salt`."""
        return own if self.access is None else self.access.tenant.name

    def salt(self, own: str) -> bytes:
        """What the request's block keys begin with; `own`: the client's `cache_salt`."""
        return salt_of(self.access, own)

    def priority(self, asked: int | None) -> int:
        """How urgent the request is, lower being earlier. Raises ApiError 403 for more than its tenant may ask for."""
        if self.access is None:
            return asked or 0
        bound = self.access.tenant.priority
        if asked is None:
            return max(0, bound)
        if asked < bound:
            text = f"priority: this tenant's requests may ask for {bound} or later (higher), not for {asked}"
            raise ApiError(403, text, param="priority", code="insufficient_permissions")
        return asked

    def admit(self, prompt_tokens: int, answers: int) -> None:
        """To be called once, before work is sent. answers: sequences that it will be. Raises ApiError 429 if the tenant
        has no tokens for it, or too many answers under way; 401, 400.
        """
        self.check()
        if self.access is not None:
            limiter, tenant = self._door.limiter, self.access.tenant
            # Answers first: tokens once taken are not given back.
            refusal = limiter.more(tenant, answers - 1)
            if refusal is None:
                self.answers = answers
                refusal = limiter.prompt(tenant, prompt_tokens, self._door.clock())
            if refusal is not None:
                self._door.refused[tenant.name, refusal.limit] += 1
                raise _limited(refusal)

    def check(self) -> None:
        """To be called behind every wait before work is sent. Raises ApiError 401 if the key has been revoked."""
        if self.revoked:
            raise _unauthorized(REVOKED)

    def revoke(self) -> None:
        self.revoked = True
        self.on_revoked(RequestError(ErrorKind.DENIED, REVOKED))


class Door:
    """Keys, limits and the audit log of one gateway."""

    def __init__(
        self,
        keys_file: Path | None = None,
        audit: AuditLog | None = None,
        origins: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
        ledger: Ledger | None = None,
    ) -> None:
        """keys_file: asked for keys from the moment it exists. None: nobody is asked. ledger: where tenants' usage is
        counted; None: this gateway is alone. Raises ConfigError.
        """
        self.limiter = Limiter(ledger)
        self.clock = clock
        self.failures = 0
        self.refused: Counter[tuple[str, str]] = Counter()
        self.tokens: Counter[tuple[str, str]] = Counter()
        self._file = keys_file
        self._audit = audit
        self._origins = frozenset(origins)
        self._register: Register | None = None
        self._seen: keys.Mark = None
        #: Why the file could not be read last.
        self._trouble = ""
        self._visits: set[Visit] = set()
        self._told = 0
        self._ticker: asyncio.Task[None] | None = None
        if keys_file is not None and (seen := _mark(keys_file)) is not None:
            self._seen = seen
            self._take(keys.read_book(keys_file))

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._ticker = asyncio.create_task(self._look_for_ever())

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        if self._audit is not None:
            await asyncio.to_thread(self._audit.close)

    @property
    def asks(self) -> bool:
        """Whether a key is needed."""
        return self._register is not None

    @property
    def audits(self) -> bool:
        return self._audit is not None

    def look(self) -> None:
        """Takes in the file of keys if it has changed; ends what runs under keys that are gone.

        A file that is gone has no keys any more; one that cannot be read changes nothing, and is told once.
        """
        if self._file is None:
            return
        try:
            seen = _mark(self._file)
            if seen == self._seen:
                return
            book = keys.read_book(self._file)
        except ConfigError as error:
            if str(error) != self._trouble:
                log.error("API keys stay as they were: %s", error)
            # The file stays unseen: what cannot be read now (too many open files) may be a moment later, unchanged.
            self._trouble = str(error)
            return
        self._seen, self._trouble = seen, ""
        self._take(book)

    def _take(self, book: Book) -> None:
        register = self._register = Register(book)
        self.limiter.keep(set(register.tenants))
        for visit in list(self._visits):
            if visit.access is None:
                continue
            access = register.now(visit.access)
            if access is None:
                visit.revoke()
            else:
                visit.access = access

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            self.look()
            self._write_failures()

    def _write_failures(self) -> None:
        # One line for all of a tick: who floods this gateway with wrong keys is not to fill its disk.
        if self._audit is not None and self.failures > self._told:
            self._audit.put({"when": _when(), "status": 401, "refused": self.failures - self._told})
            self._told = self.failures

    def counters(self) -> dict[str, float]:
        """Samples for /metrics."""
        samples: dict[str, float] = {"pyengine_gateway_wrong_keys_total": self.failures}
        if self._audit is not None:
            samples["pyengine_gateway_audit_dropped_total"] = self._audit.dropped
        for (tenant, kind), count in self.tokens.items():
            samples[f'pyengine_tenant_tokens_total{{tenant="{tenant}",kind="{kind}"}}'] = count
        for (tenant, limit), count in self.refused.items():
            samples[f'pyengine_tenant_refused_total{{tenant="{tenant}",limit="{limit}"}}'] = count
        for tenant, count in self.limiter.under_way().items():
            samples[f'pyengine_tenant_answers{{tenant="{tenant}"}}'] = count
        return samples

    # -- one request -----------------------------------------------------------------------------------------------

    def identify(self, headers: list[tuple[bytes, bytes]], path: str, query: bytes = b"") -> Access | None:
        """Whose request this is; None: nobody is asked. Raises ApiError 401, and 403 for pages of others.

        headers: names in lower case, as ASGI has them. query: behind the path; what is public takes none.
        """
        register = self._register
        if register is None:
            self._check_origin(headers)
            return None
        if path in PUBLIC and not query:
            with contextlib.suppress(ApiError):
                return register.find(_presented(headers, basic=True))
            return None
        try:
            access = register.find(_presented(headers, basic=not _is_api(path)))
            if access is None:
                raise _unauthorized("this API key is not known here: it is mistyped, or has been revoked")
        except ApiError:
            self.failures += 1
            raise
        return access

    @staticmethod
    def check_scope(access: Access | None, path: str, query: bytes = b"") -> None:
        """Raises ApiError 403 if this key does not open what is at `path`."""
        needed = "api" if _is_api(path) else "watch"
        public = path in PUBLIC and not query
        if access is not None and not public and access.scope not in ("all", needed):
            text = f"this API key opens what is of scope {access.scope!r}, and {path!r} is of {needed!r}"
            raise ApiError(403, text, code="insufficient_permissions")

    def _check_origin(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Pages of other origins may not use what asks nobody for a key. Raises ApiError 403."""
        found = {name: value.decode("latin-1") for name, value in headers if name in (b"host", b"origin")}
        host, origin = found.get(b"host", ""), found.get(b"origin")
        if host and not _is_loopback(host):
            # A name that a page's owner had resolved to this machine would pass for its own origin.
            text = f"this gateway has no API keys, so it answers to this machine's own names only, not to {host!r}"
            raise ApiError(403, f"{text}: add a key (pyengine keys add TENANT)", code="forbidden_host")
        allowed = self._origins & {origin, "*"}
        if origin is not None and not allowed and _host_of(origin) != host:
            text = f"pages of {origin!r} may not use this gateway: allow them (--cors-origin), or add API keys"
            raise ApiError(403, text, code="forbidden_origin")

    @contextlib.contextmanager
    def visit(self, access: Access | None, work: bool) -> Iterator[Visit]:
        """A Visit for as long as its request lasts. work: it counts as a request. Raises ApiError 429."""
        visit = Visit(self, access)
        tenant = access.tenant if access is not None and work else None
        if tenant is not None and (refusal := self.limiter.begin(tenant, self.clock())) is not None:
            self.refused[tenant.name, refusal.limit] += 1
            raise _limited(refusal)
        self._visits.add(visit)
        try:
            yield visit
        finally:
            self._visits.discard(visit)
            if tenant is not None:
                self._charge(tenant, visit)

    def _charge(self, tenant: Tenant, visit: Visit) -> None:
        try:
            if visit.usage is not None:
                usage = visit.usage()
                self.tokens[tenant.name, "prompt"] += usage.prompt
                self.tokens[tenant.name, "generated"] += usage.completion
                self.limiter.generated(tenant, usage.completion, self.clock())
        finally:
            # Last: until then a ledger has the tenant's file open.
            self.limiter.end(tenant, visit.answers)

    def write(
        self, visit: Visit | None, access: Access | None, path: str, status: int, request: str, ms: float
    ) -> None:
        """One line of audit."""
        if self._audit is None:
            return
        line: dict[str, Any] = {
            "when": _when(),
            "request": request,
            "tenant": access.tenant.name if access else "",
            "key": access.key if access else "",
            "path": path[:256],
            "status": status,
            "ms": round(ms, 1),
        }
        if visit is not None and visit.model:
            usage = visit.usage() if visit.usage is not None else None
            line["model"] = visit.model
            line["prompt_tokens"] = usage.prompt if usage else 0
            line["cached_tokens"] = usage.cached if usage else 0
            line["completion_tokens"] = usage.completion if usage else 0
            line["revoked"] = visit.revoked
        self._audit.put(line)


class Guard:
    """ASGI middleware: nobody gets past it but as the module says."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        path = scope["path"]
        access: Access | None = None
        visit: Visit | None = None
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        # Every part of a stream goes through it: so only where somebody reads what it finds out.
        answer = watched if self._door.audits else send
        try:
            query = scope.get("query_string", b"")
            access = self._door.identify(scope["headers"], path, query)
            self._door.check_scope(access, path, query)
            if scope["type"] == "websocket":
                _check_socket(scope["headers"])
            with self._door.visit(access, path in WORK) as visit:
                scope["pyengine.visit"] = visit
                if scope["type"] == "websocket":
                    await _until_revoked(self._app(scope, receive, send), visit)
                else:
                    await self._app(scope, receive, answer)
        except ApiError as error:
            # Only the door's own: the application answers for its errors itself.
            if scope["type"] == "websocket":
                with contextlib.suppress(RuntimeError):
                    await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": error.message[:100]})
                return
            await _refuse(error, basic=not _is_api(path), send=answer)
        except Exception:
            status = status or 500
            raise
        finally:
            if scope["type"] == "http" and access is not None:
                request = str(scope.get("state", {}).get("request_id", ""))
                self._door.write(visit, access, path, status or GONE, request, (time.monotonic() - begun) * 1000)


async def _until_revoked(work: Awaitable[None], visit: Visit) -> None:
    """A web socket's whole life. Raises ApiError 401 when the key is revoked."""
    task = asyncio.ensure_future(work)

    def end(_: RequestError) -> None:
        task.cancel()

    visit.on_revoked = end
    try:
        await task
    except asyncio.CancelledError:
        if visit.revoked:
            raise _unauthorized(REVOKED) from None
        raise


def visit_of(connection: HTTPConnection) -> Visit:
    """The visit that a request belongs to."""
    found = connection.scope["pyengine.visit"]
    assert isinstance(found, Visit)
    return found


def _presented(headers: Iterable[tuple[bytes, bytes]], basic: bool) -> bytes:
    """The key that a request carries. basic: as a password too, which is what browsers ask for. Raises ApiError 401."""
    found = [value for name, value in headers if name == b"authorization"]
    if not found:
        raise _unauthorized("an API key is needed: send the header 'Authorization: Bearer KEY'")
    if len(found) > 1:
        raise _unauthorized("there are several Authorization headers: send one")
    scheme, _, credentials = found[0].strip().partition(b" ")
    credentials = credentials.strip()
    if scheme.lower() == b"bearer":
        return credentials
    if basic and scheme.lower() == b"basic":
        with contextlib.suppress(binascii.Error, ValueError):
            return base64.b64decode(credentials, validate=True).partition(b":")[2]
        raise _unauthorized("the Authorization header is not valid base64: send the key as the password")
    raise _unauthorized("the Authorization header is of another scheme: send 'Authorization: Bearer KEY'")


def _check_socket(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """A browser opens web sockets for pages of any origin, with the password it knows. Raises ApiError 403."""
    found = {name: value.decode("latin-1") for name, value in headers if name in (b"host", b"origin")}
    origin = found.get(b"origin")
    if origin is not None and _host_of(origin) != found.get(b"host"):
        raise ApiError(403, f"pages of {origin!r} may open no web socket here", code="forbidden_origin")


def _is_api(path: str) -> bool:
    return any(path == known or path.startswith(f"{known}/") for known in API)


def _is_loopback(host: str) -> bool:
    """host: as in a Host header."""
    try:
        name = urlsplit(f"//{host}").hostname if "@" not in host else None
        return name == "localhost" or ipaddress.ip_address(name or "").is_loopback
    except ValueError:
        return False


def _host_of(origin: str) -> str:
    """Host and port of an Origin header; "" for one that is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _unauthorized(text: str) -> ApiError:
    return ApiError(401, text, code="invalid_api_key")


def _limited(refusal: Refusal) -> ApiError:
    if refusal.wait is None:
        return ApiError(400, refusal.text, param=refusal.limit, code="rate_limit_exceeded")
    text = f"{refusal.text}; try again in {max(1, math.ceil(refusal.wait))} s"
    return ApiError(429, text, param=refusal.limit, code="rate_limit_exceeded", retry_after=refusal.wait)


async def _refuse(error: ApiError, basic: bool, send: Send) -> None:
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status == 401:
        headers.append((b"www-authenticate", b'Basic realm="pyengine", charset="UTF-8"' if basic else b"Bearer"))
    if error.retry_after is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _mark(path: Path) -> keys.Mark:
    """Raises ConfigError."""
    try:
        return keys.mark(path)
    except OSError as error:
        raise ConfigError(f"cannot read the API keys {path}: {error.strerror}") from error


def _when() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
