"""Goal: a key opens what it is for and nothing else, and its file survives whatever happens to who writes it.
Method: the pure book with random input; the command line as a user runs it, on real files, several writers at once.
"""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine import env, keys
from pyengine.cli import app
from pyengine.config import ConfigError
from pyengine.tenants import MAX_ENTRIES, Access, Book, BookError, Key, Register, Tenant, quota_tables, salt_of

NAMES = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=8).filter(
    lambda name: name[0].isalnum()
)


def run(path: Path, *arguments: str) -> int:
    """The command line, in this process."""
    status = app(["keys", *arguments, "--keys-file", str(path)], exit_on_error=False, result_action="return_value")
    assert isinstance(status, int)
    return status


# -- the book ------------------------------------------------------------------------------------------------------


def test_a_key_is_found_by_all_of_it_and_by_nothing_else() -> None:
    book, key, text = Book().with_key("alice", "api", 5)
    register = Register(book)
    assert register.find(text.encode()) == Access(key.id, "api", Tenant(name="alice"))
    assert text not in str(book)
    assert text.rpartition("-")[2] not in str(book)
    for at in range(len(text)):
        for other in ("A", "0", "a"):
            wrong = text[:at] + other + text[at + 1 :]
            assert (register.find(wrong.encode()) is None) == (wrong != text)
    for wrong in ("", text + " ", text + "\n", text[:-1], text + "A", text.upper(), f"pye-{key.id}-", key.digest):
        assert register.find(wrong.encode()) is None
    assert Register(book.without_key(key.id)).find(text.encode()) is None


@given(st.binary(max_size=100))
@settings(max_examples=200, deadline=None)
def test_no_bytes_are_a_key_by_chance_or_break_anything(presented: bytes) -> None:
    book, _, text = Book().with_key("alice", "api", 5)
    register = Register(book)
    assert register.find(presented) is None
    # Nor behind the name of a key that is there.
    assert register.find(text.encode()[:13] + presented) is None or text.encode()[13:] == presented


def test_keys_differ_in_all_their_digits() -> None:
    texts = [Book().with_key("a", "api", 0)[2] for _ in range(200)]
    assert len(set(texts)) == len({text[4:12] for text in texts}) == 200
    for at in range(13, 55):
        assert len({text[at] for text in texts}) > 20, f"digit {at} is hardly random"


def test_access_follows_the_book() -> None:
    book, key, text = Book().with_key("alice", "all", 0)
    access = Register(book).find(text.encode())
    assert access is not None
    limited = Register(book.with_tenant(Tenant(name="alice", concurrent=2)))
    assert limited.now(access) == Access(key.id, "all", Tenant(name="alice", concurrent=2))
    assert Register(book.without_key(key.id)).now(access) is None


@given(st.lists(st.tuples(st.sampled_from(["", "tenant", "shared"]), NAMES, st.text(max_size=4)), max_size=8))
@settings(max_examples=100, deadline=None)
def test_salts_are_equal_only_within_a_tenant_or_what_it_shares(asked: list[tuple[str, str, str]]) -> None:
    """A client chooses its own salt freely, and so it can only narrow: no choice makes it another's."""
    whose: dict[bytes, tuple[str, str, str]] = {}
    for kind, name, own in asked:
        tenant = Tenant(name="t" if kind == "shared" else name, shared=name if kind == "shared" else "")
        access = Access("k", "api", tenant) if kind else None
        who = (kind, name if kind else "", own)
        assert whose.setdefault(salt_of(access, own), who) == who


@pytest.mark.parametrize("own", ["tenant\0a\0", "a\0", "\0", "shared\0s\0x"])
def test_no_salt_of_a_client_is_anothers(own: str) -> None:
    a, b = (Access("k", "api", Tenant(name=name)) for name in "ab")
    shared = Access("k", "api", Tenant(name="c", shared="s"))
    mine = [salt_of(access, "") for access in (a, shared, None)]
    # Where one ends and the next begins is no matter of luck.
    assert salt_of(Access("k", "api", Tenant(name="ab")), "c") != salt_of(a, "bc")
    assert salt_of(b, own) not in mine
    assert salt_of(None, own) not in mine


def test_nobody_who_asks_no_key_shares_what_was_there_before_keys() -> None:
    assert salt_of(None, "") == b""


@pytest.mark.parametrize(
    ("tenant", "says"),
    [
        (Tenant(name=""), "no name"),
        (Tenant(name="a\0b"), "no name"),
        (Tenant(name="-a"), "no name"),
        (Tenant(name='a"'), "no name"),
        (Tenant(name="a" * 65), "no name"),
        (Tenant(name="é"), "no name"),
        (Tenant(name="a", shared="b c"), "shared"),
        (Tenant(name="a", concurrent=-1), "concurrent"),
        (Tenant(name="a", requests_per_minute=10**10), "requests_per_minute"),
        (Tenant(name="a", dram_bytes=1 << 63), "dram_bytes"),
        (Tenant(name="a", priority=1001), "priority"),
    ],
)
def test_what_no_tenant_can_be(tenant: Tenant, says: str) -> None:
    with pytest.raises(BookError, match=says):
        Book().with_tenant(tenant)


def test_quotas_are_tables_of_toml() -> None:
    assert quota_tables([Tenant(name="a")]) == ""
    tables = tomllib.loads(
        quota_tables([Tenant(name="a", dram_bytes=7), Tenant(name="b"), Tenant(name="c", ssd_bytes=8)])
    )
    assert [set(table) for table in tables["quota"]] == [{"tenant", "dram_bytes"}, {"tenant", "ssd_bytes"}, {"share"}]


# -- the file ------------------------------------------------------------------------------------------------------


def test_add_list_limit_revoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "state" / "keys.json"
    assert run(path, "list") == 0
    assert "nobody needs a key" in capsys.readouterr().out
    assert run(path, "add", "alice", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["tenant"], made["scope"]) == ("alice", "api")
    assert run(path, "add", "ops", "--scope", "watch") == 0
    said = capsys.readouterr()
    assert said.out.startswith("pye-") and said.out.count("\n") == 1, "a key alone, for a script"
    assert "this once" in said.err
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    text = path.read_text()
    assert made["key"] not in text and made["key"][13:] not in text and said.out.strip()[13:] not in text
    assert run(path, "limit", "alice", "--concurrent", "3", "--dram-bytes", "1GiB", "--shared", "team", "--json") == 0
    assert run(path, "limit", "alice", "--tokens-per-minute", "9", "--shared", "") == 0
    capsys.readouterr()
    assert run(path, "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(key["tenant"], key["scope"]) for key in listed["keys"]] == [("alice", "api"), ("ops", "watch")]
    alice = Tenant(name="alice", concurrent=3, dram_bytes=1 << 30, tokens_per_minute=9)
    assert keys.read_book(path).tenant("alice") == alice
    assert run(path, "list") == 0
    shown = capsys.readouterr().out
    assert made["id"] in shown and "9 tokens_per_minute" in shown and made["key"] not in shown
    assert run(path, "quotas") == 0
    assert tomllib.loads(capsys.readouterr().out)["quota"][0]["dram_bytes"] == 1 << 30
    # Pasted whole, it is the same key.
    assert run(path, "revoke", made["key"]) == 0
    assert Register(keys.read_book(path)).find(made["key"].encode()) is None
    assert keys.read_book(path).tenant("alice") == alice
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["keys.json", "keys.json.lock"]


def test_without_a_flag_it_is_the_file_that_serve_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The state directory of the environment, of a file; the file of keys of either, too."""
    file = tmp_path / "settings.toml"

    def added_to(path: Path) -> bool:
        assert app(["keys", "add", "alice"], exit_on_error=False, result_action="return_value") == 0
        said = capsys.readouterr().out.strip()
        return path.exists() and Register(keys.read_book(path)).find(said.encode()) is not None

    for name in (*env.settings(), "config"):
        monkeypatch.delenv(env.variable(name), raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert added_to(tmp_path / "xdg" / "pyengine" / "keys.json")
    monkeypatch.setenv("PYENGINE_CONFIG", str(file))
    file.write_text(f'state_dir = "{tmp_path}/of_file"\nport = 9000\n')
    assert added_to(tmp_path / "of_file" / "keys.json")
    monkeypatch.setenv("PYENGINE_STATE_DIR", str(tmp_path / "of_variable"))
    assert added_to(tmp_path / "of_variable" / "keys.json")
    file.write_text(f'keys_file = "{tmp_path}/of_gateway.json"\nconductor = "tcp://127.0.0.1:1"\n')
    assert added_to(tmp_path / "of_gateway.json")
    monkeypatch.setenv("PYENGINE_KEYS_FILE", str(tmp_path / "named.json"))
    assert added_to(tmp_path / "named.json")
    monkeypatch.delenv("PYENGINE_KEYS_FILE")
    file.write_text("keys_file = 5\n")
    assert app(["keys", "list"], exit_on_error=False, result_action="return_value") == 2
    assert "keys_file is text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("add", "no name"), "no name"),
        (("revoke", "00000000"), "there is no key"),
        (("limit", "nobody", "--concurrent", "1"), "pyengine keys add nobody"),
        (("limit", "alice", "--concurrent", "-1"), "concurrent"),
        (("limit", "alice", "--dram-bytes", "many"), "not a size"),
    ],
)
def test_what_is_impossible_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    path = tmp_path / "keys.json"
    assert run(path, "add", "alice") == 0
    before = path.read_bytes()
    capsys.readouterr()
    assert run(path, *arguments) == 2
    assert says in capsys.readouterr().err
    assert path.read_bytes() == before


_ = {"id": "00000000", "digest": "0" * 64, "tenant": "a"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"keys": 5}',
        b'{"unknown": []}',
        json.dumps({"keys": [_], "tenants": []}).encode(),
        json.dumps({"keys": [{**_, "scope": "root"}], "tenants": [{"name": "a"}]}).encode(),
        json.dumps({"keys": [{**_, "digest": "x"}], "tenants": [{"name": "a"}]}).encode(),
        json.dumps({"keys": [_, _], "tenants": [{"name": "a"}]}).encode(),
        json.dumps({"tenants": [{"name": "a"}, {"name": "a"}]}).encode(),
        json.dumps({"tenants": [{"name": f"t{i}"} for i in range(MAX_ENTRIES + 1)]}).encode(),
        b"[" * 100_000,
    ],
    ids=range(13),
)
def test_a_damaged_file_is_told_and_not_overwritten(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="no file of API keys"):
        keys.read_book(path)
    assert run(path, "add", "alice") == 2
    assert path.read_bytes() == content


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    assert run(path, "add", "alice") == 0
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        keys.read_book(path)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_change_that_is_broken_off_leaves_the_old_book(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "keys.json"
    assert run(path, "add", "alice") == 0
    before = path.read_bytes()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fails)
    assert run(path, "add", "bob") == 2
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["keys.json", "keys.json.lock"]


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    code = (
        "import sys; from pyengine.commands.keys import app; [app(['add', sys.argv[1], '--keys-file', sys.argv[2]], "
        "result_action='return_value') for _ in range(10)]"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, name, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        for name in ("a", "b", "c")
    ]
    shown = [line for writer in writers for line in writer.communicate(timeout=60)[0].split()]
    register = Register(keys.read_book(path))
    assert len(set(shown)) == 30
    assert all(register.find(text) is not None for text in shown)


def test_a_key_entry_has_no_more_than_it_needs() -> None:
    """A book that leaks names tenants, and opens nothing."""
    assert set(Key.__struct_fields__) == {"id", "digest", "tenant", "scope", "created"}
