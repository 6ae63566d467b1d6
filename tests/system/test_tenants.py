"""Goal: tenants of one cluster share nothing that they have not been told to share, and a key that is revoked is worth
nothing. Method: real processes and pools, two nodes, HTTPS; what was reused is read from `usage`, as a bill would be.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2

from bench.server import Server
from pyengine import keys
from pyengine.backends.fake import fake_tokens
from pyengine.tenants import Book, Scope, Tenant
from tests.certificate import make_certificate
from tests.system.conftest import PATIENCE, body, prompt, text, until


def add(state: Path, tenant: str, scope: Scope = "api", **limits: Any) -> str:
    """A new key for a tenant with these limits."""

    def change(book: Book) -> tuple[Book, str]:
        book, _, text = book.with_key(tenant, scope, 0)
        return book.with_tenant(Tenant(name=tenant, **limits)), text

    return keys.change(state / keys.NAME, change)


def revoke(state: Path, text: str) -> None:
    """As an operator does it, beside the running cluster."""
    command = [sys.executable, "-m", "pyengine", "keys", "revoke", text, "--keys-file", str(state / keys.NAME)]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)


def test_tenants_share_nothing_and_a_revoked_key_ends(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    operator = add(tmp_path, "ops", "all")
    texts = {
        "alice": add(tmp_path, "alice"),
        "bob": add(tmp_path, "bob"),
        "carol": add(tmp_path, "carol", shared="team"),
        "dave": add(tmp_path, "dave", shared="team"),
        "tiny": add(tmp_path, "tiny", dram_bytes=1),
    }
    audit = tmp_path / "audit.jsonl"
    flags = ("--nodes", "2", "--transport", "tcp", "--dram-bytes", "32MiB")
    front = ("--tls-cert", cert, "--tls-key", key, "--audit-log", str(audit))
    ids, trusted = prompt(100), ssl.create_default_context(cafile=cert)
    server = Server(
        *flags, *front, model="fake:seconds_per_step=0.01", backend="fake", state_dir=tmp_path, key=operator
    )
    with server, httpx2.Client(base_url=server.base, verify=trusted, timeout=PATIENCE) as client:

        def post(name: str, **fields: Any) -> Any:
            headers = {"Authorization": f"Bearer {texts[name]}"}
            return client.post("/v1/completions", json=body(ids, 4, **fields), headers=headers)

        def cached(name: str, **fields: Any) -> int:
            answer = post(name, **fields)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == text(fake_tokens(ids, 4))
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("alice") == 0
        most = cached("alice")
        assert most >= 80, "of its own"
        assert (cached("bob"), cached("bob")) == (0, most), "another's: nothing; its own then"
        assert cached("alice", cache_salt="mine") == 0, "its own salt narrows"
        assert cached("alice", cache_salt="bob") == 0
        assert (cached("carol"), cached("dave"), cached("carol")) == (0, most, most), "what they share"
        assert cached("bob", cache_salt="team") == 0, "no salt leads to what others share"
        # Its pools let it have less than one block, so nothing of it can ever be handed off.
        refused = post("tiny")
        assert refused.status_code == 400, refused.text
        assert client.post("/v1/completions", json=body(ids, 4)).status_code == 401
        assert server.metric("pyengine_tenant_tokens_total", tenant="bob", kind="generated") == 12
        until(lambda: "Ready at https://" in server.log, "announced")
        assert "Bearer $KEY" in server.log

        headers = {"Authorization": f"Bearer {texts['alice']}"}
        wish = body(ids, 3000, stream=True)
        with client.stream("POST", "/v1/completions", json=wish, headers=headers) as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            next(lines)
            revoke(tmp_path, texts["alice"])
            *pieces, failure, end = lines
            assert end == "[DONE]"
            assert json.loads(failure)["error"]["code"] == "invalid_api_key"
            assert len(pieces) < 2000
        assert post("alice").status_code == 401
        assert cached("bob") == most
    lines_of = [json.loads(line) for line in audit.read_text().splitlines()]
    kept = [line for line in lines_of if line.get("key") == texts["alice"][4:12]]
    assert [line["revoked"] for line in kept] == [False, False, False, False, True]
    assert kept[-1]["completion_tokens"] >= 1
    secrets = [*texts.values(), operator, (tmp_path / "secret").read_text().strip()]
    assert not any(secret in audit.read_text() + server.log for secret in secrets)
