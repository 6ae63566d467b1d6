"""Who may use a gateway: API keys, the tenants they belong to, and what each tenant may have. No file, no clock, no
socket.

A key is `pye-ID-SECRET`: eight hex digits that name it in lists and logs, and 32 random bytes (base64url). The book
keeps a BLAKE2b-256 of the whole. No salt and no slow hash: these make it dear to try out what people choose as
passwords, and nobody tries out 256 random bits. So a request costs one hash of a microsecond, and a book that is read
by a stranger lets nobody in.

    book --key--> Key --tenant--> Tenant --shared?--> salt of block keys
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from pyengine.scheduler.types import tenant_number

#: What a key opens. api: completions and what belongs to them. watch: metrics, load, cluster and dashboard, of all
#: tenants. all: both.
Scope: TypeAlias = Literal["api", "watch", "all"]
SCOPES: tuple[Scope, ...] = ("api", "watch", "all")
#: Keys and tenants of one book. A book of so many is 3 MB and is read in some tens of ms.
MAX_ENTRIES = 10_000
#: Most that a limit may be: beyond it is no limit, and below it all arithmetic of limiter.py is exact.
MAX_LIMIT = 10**9
#: Steps of priority to either side of 0 (as in openai.py).
MAX_PRIORITY = 1_000

_KEY = re.compile(rb"pye-([0-9a-f]{8})-[A-Za-z0-9_-]{43}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Compared with where no key of this name is known, so that the answer takes as long.
_NOBODY = bytes(32)


class BookError(ValueError):
    """A book, or a wish to change it, is impossible; the text says what to do."""


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One API key. id: its name. digest: hex of BLAKE2b-256. created: seconds since 1970."""

    id: str
    digest: str
    tenant: str
    scope: Scope = "api"
    created: int = 0


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the requests of one tenant may have, whichever key they come with; 0: no limit.

    requests_per_minute, tokens_per_minute, concurrent: of one gateway, see limiter.py. priority: the most urgent that
    its requests may ask for (vLLM's: lower is earlier). shared: name of a KV namespace that it shares with all tenants
    that name the same; "": its KV is its own. dram_bytes, ssd_bytes: what its KV may take on each node.
    """

    name: str
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0
    priority: int = 0
    shared: str = ""
    dram_bytes: int = 0
    ssd_bytes: int = 0

    def check(self) -> None:
        """Raises BookError."""
        _check_name("tenant", self.name)
        if self.shared:
            _check_name("shared", self.shared)
        for field in ("requests_per_minute", "tokens_per_minute", "concurrent"):
            if not 0 <= getattr(self, field) <= MAX_LIMIT:
                raise BookError(f"{field} must be between 0 (no limit) and {MAX_LIMIT}, not {getattr(self, field)}")
        for field in ("dram_bytes", "ssd_bytes"):
            if not 0 <= getattr(self, field) < 1 << 63:
                raise BookError(f"{field} must be a number of bytes, or 0 for no limit, not {getattr(self, field)}")
        if abs(self.priority) > MAX_PRIORITY:
            raise BookError(f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, not {self.priority}")


class Access(msgspec.Struct, frozen=True):
    """Whom a request comes from: a key that is known, and its tenant."""

    key: str
    scope: Scope
    tenant: Tenant


class Book(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All keys and tenants, as they are kept in a file."""

    keys: tuple[Key, ...] = ()
    tenants: tuple[Tenant, ...] = ()

    def check(self) -> None:
        """Raises BookError, naming the entry."""
        if max(len(self.keys), len(self.tenants)) > MAX_ENTRIES:
            raise BookError(f"more than {MAX_ENTRIES} keys or tenants: revoke keys that nobody uses")
        for tenant in self.tenants:
            tenant.check()
        names = {tenant.name for tenant in self.tenants}
        if len(names) != len(self.tenants):
            raise BookError(f"tenant {_twice(tenant.name for tenant in self.tenants)!r} is there twice: remove one")
        if len({key.id for key in self.keys}) != len(self.keys):
            raise BookError(f"key {_twice(key.id for key in self.keys)!r} is there twice: revoke it and add another")
        for key in self.keys:
            if not re.fullmatch(r"[0-9a-f]{8}", key.id) or not re.fullmatch(r"[0-9a-f]{64}", key.digest):
                raise BookError(f"key {key.id!r} is damaged: revoke it and add another")
            if key.tenant not in names:
                raise BookError(f"key {key.id!r} is of tenant {key.tenant!r}, who is not in the book: revoke it")

    def tenant(self, name: str) -> Tenant | None:
        return next((tenant for tenant in self.tenants if tenant.name == name), None)

    def with_tenant(self, tenant: Tenant) -> Book:
        """The same with this tenant, in place of the one of its name. Raises BookError."""
        tenants = {known.name: known for known in self.tenants} | {tenant.name: tenant}
        return self._changed(tenants=tuple(tenants.values()))

    def with_key(self, tenant: str, scope: Scope, now: int) -> tuple[Book, Key, str]:
        """The same with a new key for `tenant`, the key's entry, and the key itself, which is kept nowhere.

        A tenant who is new gets no limits. Raises BookError.
        """
        taken = {key.id for key in self.keys}
        while (name := secrets.token_hex(4)) in taken:
            pass
        text = f"pye-{name}-{base64.urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b'=').decode()}"
        key = Key(id=name, digest=_digest(text.encode()).hex(), tenant=tenant, scope=scope, created=now)
        tenants = self.tenants if self.tenant(tenant) is not None else (*self.tenants, Tenant(name=tenant))
        return self._changed(keys=(*self.keys, key), tenants=tenants), key, text

    def without_key(self, name: str) -> Book:
        """The same without the key of this name. Its tenant stays, with its limits. Raises BookError."""
        left = tuple(key for key in self.keys if key.id != name)
        if len(left) == len(self.keys):
            known = ", ".join(key.id for key in self.keys[:8]) or "none"
            raise BookError(f"there is no key {name!r}; known are: {known} (pyengine keys list)")
        return self._changed(keys=left)

    def _changed(self, **changes: tuple[Key, ...] | tuple[Tenant, ...]) -> Book:
        book: Book = msgspec.structs.replace(self, **changes)
        book.check()
        return book


class Register:
    """A book made ready to be asked."""

    def __init__(self, book: Book) -> None:
        """book: checked."""
        tenants = {tenant.name: tenant for tenant in book.tenants}
        self._keys = {
            key.id: (bytes.fromhex(key.digest), Access(key.id, key.scope, tenants[key.tenant])) for key in book.keys
        }
        self.tenants = tenants

    def find(self, presented: bytes) -> Access | None:
        """Whose key this is. Takes any bytes; how long it takes does not tell how much of a key is right."""
        match = _KEY.fullmatch(presented)
        name = match[1].decode() if match else ""
        expected, access = self._keys.get(name, (_NOBODY, None))
        right = hmac.compare_digest(_digest(presented), expected)
        return access if right else None

    def now(self, access: Access) -> Access | None:
        """The same access as it is in this book; None if its key has been revoked."""
        return self._keys.get(access.key, (b"", None))[1]


def salt_of(access: Access | None, own: str) -> bytes:
    """What block keys of a request begin with, so who can find its KV. `own`: the client's `cache_salt`.

    Injective: kinds, names and salts are parted by a byte that no name has, and the client's part comes last. So a
    client can only narrow what its key opens. access None: the gateway asks nobody for a key.
    """
    if access is None:
        return b"open\0" + own.encode() if own else b""
    tenant = access.tenant
    kind, name = ("shared", tenant.shared) if tenant.shared else ("tenant", tenant.name)
    return f"{kind}\0{name}\0{own}".encode()


def quota_tables(tenants: Iterable[Tenant]) -> str:
    """`[[quota]]` tables (docs/transferd.md) for the daemons' file; "" if no tenant has a limit there."""
    tables = []
    for tenant in tenants:
        limits = [(field, getattr(tenant, field)) for field in ("dram_bytes", "ssd_bytes") if getattr(tenant, field)]
        if limits:
            lines = "".join(f"{field} = {value}\n" for field, value in limits)
            tables.append(f'[[quota]]\n# {tenant.name}\ntenant = "{tenant_number(tenant.name):016x}"\n{lines}')
    # The last names nobody: all others are told apart too, so that none of them takes what another has in use.
    return "\n".join([*tables, "[[quota]]\nshare = 1\n"]) if tables else ""


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32, person=b"pyengine-key").digest()


def _check_name(field: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise BookError(
            f"{field} {name!r} is no name: write 1 to 64 of letters, digits, dots, dashes and underscores, the first of"
            " them a letter or a digit"
        )


def _twice(names: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
