"""`pyengine keys`: API keys and what their tenants may have.

A gateway that runs takes every change in within a second. Exit status as in cli.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from cyclopts import App, Parameter

from pyengine import keys, origins
from pyengine.config import ConfigError, parse_size
from pyengine.tenants import Book, BookError, Scope, Tenant, quota_tables

IMPOSSIBLE = 2

app = App(name="keys", help="API keys of a gateway, and what their tenants may have.")

KeysFile = Annotated[Path | None, Parameter(name="--keys-file")]
Json = Annotated[bool, Parameter(name="--json", negative=())]
T = TypeVar("T")


@app.command
def add(tenant: str, *, scope: Scope = "api", json: Json = False, keys_file: KeysFile = None) -> int:
    """Makes a key and shows it, once: it is kept nowhere.

    Parameters
    ----------
    tenant
        Whose it is. A tenant who is new has no limits (pyengine keys limit).
    scope
        api: completions. watch: metrics, load, cluster and dashboard, which show all tenants. all: both.
    json
        As one JSON object.
    keys_file
        The file of keys (default: where pyengine serve looks for it, the setting keys_file, else keys.json in the
        state directory).
    """

    def run(path: Path) -> None:
        def change(book: Book) -> tuple[Book, tuple[str, str]]:
            book, key, text = book.with_key(tenant, scope, int(time.time()))
            return book, (key.id, text)

        name, text = keys.change(path, change)
        if json:
            _print_json({"id": name, "tenant": tenant, "scope": scope, "key": text})
        else:
            print(text)
            print(f"key {name} of tenant {tenant}, scope {scope}: shown this once, keep it safe", file=sys.stderr)

    return _guarded(keys_file, run)


@app.command(name="list")
def show(*, json: Json = False, keys_file: KeysFile = None) -> int:
    """Shows all keys by their names, and what tenants may have.

    Parameters
    ----------
    json
        As one JSON object.
    keys_file
        The file of keys.
    """

    def run(path: Path) -> None:
        book = keys.read_book(path)
        if json:
            listed = [{"id": k.id, "tenant": k.tenant, "scope": k.scope, "created": k.created} for k in book.keys]
            _print_json({"keys": listed, "tenants": book.tenants})
        elif not path.exists():
            print(f"there is no {path}: nobody needs a key")
        else:
            _print_table([("key", "tenant", "scope", "created"), *((*_shown(key),) for key in book.keys)])
            print()
            _print_table([("tenant", "may have"), *((tenant.name, _limits(tenant)) for tenant in book.tenants)])

    return _guarded(keys_file, run)


@app.command
def revoke(name: str, *, json: Json = False, keys_file: KeysFile = None) -> int:
    """Ends a key. Answers that run under it end with an error within a second.

    Parameters
    ----------
    name
        Name of the key: the eight digits behind "pye-".
    json
        As one JSON object.
    keys_file
        The file of keys.
    """

    def run(path: Path) -> None:
        # Whoever pastes the whole key means it, too.
        key = name.removeprefix("pye-")[:8]
        keys.change(path, lambda book: (book.without_key(key), None))
        if json:
            _print_json({"id": key, "revoked": True})
        else:
            print(f"key {key} is revoked")

    return _guarded(keys_file, run)


@app.command
def limit(
    tenant: str,
    *,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    concurrent: int | None = None,
    priority: int | None = None,
    shared: str | None = None,
    dram_bytes: str | None = None,
    ssd_bytes: str | None = None,
    json: Json = False,
    keys_file: KeysFile = None,
) -> int:
    """Sets what a tenant may have; what is not named stays. 0: no limit.

    Parameters
    ----------
    tenant
        Its name.
    requests_per_minute
        At each gateway.
    tokens_per_minute
        Of prompts and answers together, at each gateway.
    concurrent
        Answers at once, at each gateway: n choices are n.
    priority
        The most urgent that its requests may ask for; lower is earlier (default 0).
    shared
        Name of a KV namespace: its KV is shared with all tenants that name the same. "": with nobody.
    dram_bytes
        What its KV may take of each node's memory, for example 10GiB. Daemons read it when they start.
    ssd_bytes
        What its KV may take on each node's SSD, likewise.
    json
        As one JSON object.
    keys_file
        The file of keys.
    """
    wishes: dict[str, Any] = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent": concurrent,
        "priority": priority,
        "shared": shared,
        "dram_bytes": dram_bytes,
        "ssd_bytes": ssd_bytes,
    }

    def run(path: Path) -> None:
        named = {name: value for name, value in wishes.items() if value is not None}
        sized = {name: parse_size(value) if name.endswith("_bytes") else value for name, value in named.items()}

        def change(book: Book) -> tuple[Book, Tenant]:
            known = book.tenant(tenant)
            if known is None:
                raise BookError(f"there is no tenant {tenant!r}: add a key for it first (pyengine keys add {tenant})")
            changed = msgspec.structs.replace(known, **sized)
            return book.with_tenant(changed), changed

        changed = keys.change(path, change)
        if json:
            _print_json(changed)
        else:
            print(f"{tenant}: {_limits(changed)}")

    return _guarded(keys_file, run)


@app.command
def quotas(*, keys_file: KeysFile = None) -> int:
    """Prints tenants' limits on KV as the tables that transferd's file takes (docs/transferd.md).

    `pyengine serve` gives them to its daemons itself.

    Parameters
    ----------
    keys_file
        The file of keys.
    """
    return _guarded(keys_file, lambda path: print(quota_tables(keys.read_book(path).tenants), end=""))


def _guarded(keys_file: Path | None, run: Callable[[Path], None]) -> int:
    """Runs a command; an impossible wish becomes one readable line and status 2."""
    try:
        run(keys_file or origins.keys_file())
    except (ConfigError, ValueError) as error:
        print(f"pyengine keys: error: {error}", file=sys.stderr)
        return IMPOSSIBLE
    return 0


def _print_json(value: Any) -> None:
    print(msgspec.json.encode(value).decode())


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def _shown(key: Any) -> tuple[str, str, str, str]:
    made = datetime.fromtimestamp(key.created, UTC).strftime("%Y-%m-%d %H:%M") if key.created else "unknown"
    return key.id, key.tenant, key.scope, made


def _limits(tenant: Tenant) -> str:
    said = [f"{getattr(tenant, name)} {name}" for name in _NUMBERS if getattr(tenant, name)]
    said += [f"priority {tenant.priority}"] if tenant.priority else []
    said += [f"KV shared as {tenant.shared}"] if tenant.shared else []
    return ", ".join(said) or "no limits"


_NUMBERS = ("requests_per_minute", "tokens_per_minute", "concurrent", "dram_bytes", "ssd_bytes")
