"""Goal: several gateways behind one address are one to clients, operators and tenants, also when one of them dies.
Method: real processes with a fake backend; who serves a connection is read from the sockets that a process has.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import httpx2

from bench.server import Server, ServerError, is_alive
from pyengine import keys
from pyengine.tenants import Tenant
from tests.system.conftest import PATIENCE, body, prompt, until
from tests.system.test_tenants import add

GENERATED = "vllm:generation_tokens_total"
#: Tokens of a short answer.
TOKENS = 4


def limit(state: Path, tenant: Tenant) -> None:
    """Other limits for a tenant, as an operator sets them beside the running cluster."""
    keys.change(state / keys.NAME, lambda book: (book.with_tenant(tenant), None))


def held(pid: int) -> int:
    """Connections of a process: its sockets of TCP, less the one that listens."""
    tcp = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "01":
            tcp.add(f"socket:[{fields[9]}]")
    found = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(file) in tcp
    return found


def test_several_gateways_are_one(tmp_path: Path) -> None:
    operator, key = add(tmp_path, "ops", "all"), add(tmp_path, "alice")
    own = {"Authorization": f"Bearer {key}"}
    server = Server(
        *("--gateways", "2", "--dram-bytes", "32MiB"),
        model="fake:seconds_per_step=0.01",
        backend="fake",
        state_dir=tmp_path,
        key=operator,
    )
    with server, contextlib.ExitStack() as stack:

        def post(tokens: int = TOKENS) -> httpx2.Response:
            """On a connection of its own, which any of them may take."""
            wish = body(prompt(20), tokens)
            return httpx2.post(f"{server.base}/v1/completions", json=wish, headers=own, timeout=PATIENCE)

        clients: list[httpx2.Client] = []
        at_second: list[httpx2.Client] = []

        def spread() -> bool:
            """One more connection that stays, to whoever takes it; whether each has taken one."""
            before = held(server.children()["gateway-1"])
            client = stack.enter_context(httpx2.Client(base_url=server.base, timeout=PATIENCE))
            assert client.get("/livez").status_code == 200
            clients.append(client)
            if held(server.children()["gateway-1"]) > before:
                at_second.append(client)
            return 0 < len(at_second) < len(clients)

        until(spread, "both have accepted")
        # What all have counted, whoever answers; and nothing twice.
        generated = 0
        for client in clients:
            answer = client.post("/v1/completions", json=body(prompt(20), TOKENS), headers=own)
            assert answer.status_code == 200, answer.text
            generated += TOKENS
        text = [client.get("/metrics", headers={"Authorization": f"Bearer {operator}"}).text for client in clients]
        assert {_value(each, GENERATED) for each in text} == {generated}
        assert {_value(each, "pyengine_tenant_tokens_total", 'kind="generated"') for each in text} == {generated}
        assert {_value(each, "vllm:time_to_first_token_seconds_count") for each in text} == {len(clients)}

        # A page and its socket must come to one process: all send who wants the dashboard to the first.
        watcher = {"Authorization": f"Bearer {operator}"}
        pages = {client.get("/dashboard", headers=watcher).headers.get("location", "") for client in clients}
        assert len(pages) == 1
        (page,) = pages
        assert page.startswith("http://127.0.0.1:") and not page.startswith(server.base)
        first = httpx2.get(page.replace("/dashboard/", "/livez"), timeout=PATIENCE)
        assert first.status_code == 200

        # A tenant's limits are those of all together.
        limit(tmp_path, Tenant(name="alice", concurrent=1))
        wish, one = body(prompt(20), 100_000, stream=True), body(prompt(20), 1)
        with at_second[0].stream("POST", "/v1/completions", json=wish, headers=own) as running:
            assert running.status_code == 200
            lines = running.iter_lines()  # kept: to let go of it ends the stream
            next(lines)
            others = [client for client in clients if client is not at_second[0]]

            def statuses() -> set[int]:
                return {client.post("/v1/completions", json=one, headers=own).status_code for client in others}

            until(lambda: statuses() == {429}, "all have read the limit, and hold to it")
            # The gateway that holds the request is killed: others take what comes, and know what it had counted.
            victim = server.children()["gateway-1"]
            os.kill(victim, signal.SIGKILL)
            until(lambda: not is_alive(victim), "it is dead")

            def answers() -> bool:
                """What was dealt to the one that died, and not accepted yet, is reset: a client asks again."""
                with contextlib.suppress(OSError, ServerError):
                    return server.get("/livez")[0] == 200 and server.metric(GENERATED) >= generated
                return False

            until(answers, "the others answer, and know what it had counted")
        until(lambda: server.children().get("gateway-1", victim) != victim, "it is born again")
        until(lambda: "gateway-1    ready again" in server.log, "it serves again")
        until(lambda: post().status_code == 200, "nothing is held for the dead")
        before = server.metric(GENERATED)
        assert before >= generated + TOKENS
        assert {server.metric(GENERATED) for _ in range(20)} == {before}


def _value(text: str, name: str, label: str = "") -> float:
    found = [line for line in text.splitlines() if line.startswith(name) and line[len(name)] in "{ " and label in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)
