"""Goal: `pyengine serve` answers right in every shape, through deaths of its parts, and leaves nothing behind.

Method: real processes over the fake backend, whose answer depends on every byte of KV, compared with its oracle.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bench.server import is_alive
from pyengine.backends.fake import fake_tokens
from tests.system.conftest import (
    FAKE_SLOW,
    PATIENCE,
    StreamFailed,
    body,
    complete,
    crossed,
    expect_no_other,
    fake_server,
    needs_rdma,
    prompt,
    stream,
    text,
    until,
)


def expect(answer: dict, ids: list[int], tokens: int) -> None:  # type: ignore[type-arg]
    assert answer["choices"][0]["text"] == text(fake_tokens(ids, tokens))
    assert answer["usage"]["completion_tokens"] == tokens
    assert answer["usage"]["prompt_tokens"] == len(ids)


SHAPES = {
    "one node": (("--prefill", "1", "--decode", "1"), ("prefill-0", "decode-0")),
    "both": (("--both", "1"), ("both-0",)),
    "tcp": (("--prefill", "1", "--decode", "1", "--nodes", "2", "--transport", "tcp"), ("prefill-0", "decode-0")),
    "shm": (("--prefill", "1", "--decode", "1", "--nodes", "2", "--transport", "shm"), ("prefill-0", "decode-0")),
    "rdma": (("--prefill", "1", "--decode", "1", "--nodes", "2", "--transport", "rdma"), ("prefill-0", "decode-0")),
    "tls": (("--nodes", "2", "--transport", "tcp", "--tls"), ("prefill-0", "decode-0")),
    "2 + 2 on two nodes": (
        ("--prefill", "2", "--decode", "2", "--nodes", "2", "--policy", "round-robin"),
        ("prefill-0", "prefill-1", "decode-0", "decode-1"),
    ),
}


@pytest.mark.parametrize("shape", [pytest.param(name, marks=needs_rdma if name == "rdma" else ()) for name in SHAPES])
def test_every_shape_answers_and_its_workers_counters_move(shape: str, state_dir: Path) -> None:
    flags, workers = SHAPES[shape]
    with fake_server(state_dir, *flags) as server:
        for i in range(4):
            expect(complete(server, prompt(100, i), 20), prompt(100, i), 20)

        def worked(worker: str) -> bool:
            phases = ("prefill", "decode") if worker.startswith("both") else (worker.partition("-")[0],)
            return all(server.metric("pyengine_worker_tokens_total", worker=worker, phase=phase) for phase in phases)

        until(lambda: all(map(worked, workers)), "the counters of all workers move")
        assert server.metric("pyengine_recomputed_tokens_total") == 0
        if shape in ("tcp", "tls", "shm", "rdma"):
            transport = "tcp" if shape == "tls" else shape
            # 7 blocks each: six full ones and the partial one.
            until(lambda: crossed(server, transport) == (28, 28), "all blocks have crossed")
            expect_no_other(server, transport)
        if shape == "one node":
            until(
                lambda: server.metric("pyengine_transfer_blocks_total", transport="arena", direction="in") == 28,
                "arena hand-off",
            )
            assert server.metric("pyengine_transfer_bytes_total") == 0
        if shape == "both":
            assert server.metric("pyengine_transfer_blocks_total") == 0


def test_reuse_across_turns_and_nodes(state_dir: Path) -> None:
    """Second turn, and the same prompt on the other node: cached tokens are what the blocks in common allow."""
    flags = ("--prefill", "2", "--decode", "2", "--nodes", "2", "--policy", "round-robin")
    with fake_server(state_dir, *flags) as server:
        first = complete(server, prompt(100), 30)
        answered = list(first["choices"][0]["text"].encode())
        until(lambda: server.metric("pyengine_index_blocks") >= 6 + 2, "the conductor has indexed all blocks")
        for _ in range(2):  # round robin: one of the two prefills where the prompt never was
            again = complete(server, prompt(100), 8)
            expect(again, prompt(100), 8)
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * (99 // 16)
        turn = prompt(100) + answered[:-1] + prompt(20, 1)
        second = complete(server, turn, 8)
        expect(second, turn, 8)
        details = second["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == sum(details["cached_tokens_by_tier"].values()) == 16 * (129 // 16)
        until(
            lambda: server.metric("pyengine_cached_tokens_total") == 2 * 16 * (99 // 16) + 16 * (129 // 16),
            "the workers have counted them",
        )
        assert server.metric("pyengine_cached_tokens_total", tier="peer_dram") >= 16 * (99 // 16)


def test_hot_prefix_is_replicated_by_algorithm_1(state_dir: Path, tmp_path: Path) -> None:
    """Load on the holder makes Algorithm 1 choose the other node, which fetches the prefix instead of computing it."""
    hold = tmp_path / "hold"
    # No hand-off brings the prefix to the other node too.
    flags = ("--both", "2", "--nodes", "2", "--policy", "kvcache-centric")
    with fake_server(state_dir, *flags, model=f"fake:seconds_per_token=0.0005,hold={hold}") as server:
        shared = prompt(800)
        complete(server, shared, 2)
        until(lambda: server.metric("pyengine_index_blocks") >= 50, "the conductor has indexed the prefix")
        held = [server.metric("pyengine_index_blocks", node=f"node-{k}") for k in (0, 1)]
        assert min(held) == 0, f"both nodes hold the prefix already: {held}"
        until(
            lambda: server.metric("pyengine_worker_tokens_total", phase="prefill") == 800,
            "the worker's heartbeat has counted the prefix too",
        )
        # All are routed before any is computed, so that load builds up however slowly they come in.
        hold.touch()
        with ThreadPoolExecutor(24) as threads:
            prompts = [shared + prompt(40, i) for i in range(24)]
            answers = [threads.submit(complete, server, ids, 4) for ids in prompts]
            try:
                until(lambda: server.metric("pyengine_conductor_plans_total") >= 1 + 24, "all are routed")
            finally:
                hold.unlink()
            for ids, promised in zip(prompts, answers, strict=True):
                answer = promised.result(PATIENCE)
                expect(answer, ids, 4)
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 800
        until(
            lambda: server.metric("pyengine_worker_tokens_total", phase="prefill") == 800 + 24 * 40,
            "only the rest was computed",
        )
        workers = [server.metric("pyengine_worker_tokens_total", worker=f"both-{k}", phase="prefill") for k in (0, 1)]
        assert all(workers), f"only one worker was used: {workers}"


def test_openai_client(state_dir: Path) -> None:
    import openai  # here, as it costs the VM of `make test-rdma`, which needs it not, half a minute

    with fake_server(state_dir) as server:
        client = openai.OpenAI(base_url=f"{server.base}/v1", api_key="none")
        assert [model.id for model in client.models.list()] == ["fake"]
        whole = client.completions.create(model="fake", prompt="hello", max_tokens=30, temperature=0)
        pieces = client.completions.create(model="fake", prompt="hello", max_tokens=30, temperature=0, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
        stop = whole.choices[0].text[10:12]
        stopped = client.completions.create(model="fake", prompt="hello", max_tokens=30, temperature=0, stop=stop)
        assert stopped.choices[0].text == whole.choices[0].text.partition(stop)[0]
        assert stopped.choices[0].finish_reason == "stop"
        chat = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=5)
        assert chat.choices[0].message.content


def test_interrupt_ends_all_and_leaves_nothing(state_dir: Path, tmp_path: Path) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    server = fake_server(state_dir, "--nodes", "2", environment={"XDG_RUNTIME_DIR": str(tmp_path)}).start()
    complete(server, prompt(50), 4)
    children = server.children()
    assert sorted(children) == ["conductor", "decode-0", "gateway", "prefill-0", "transferd-0", "transferd-1"]
    assert os.listdir(tmp_path), "the run directory is where the environment says"
    assert server.stop() == 0
    assert not any(is_alive(pid) for pid in children.values())
    assert not os.listdir(tmp_path)
    assert set(os.listdir("/dev/shm")) <= shared_memory


def test_killed_launcher_leaves_no_orphan(state_dir: Path, tmp_path: Path) -> None:
    server = fake_server(state_dir, environment={"XDG_RUNTIME_DIR": str(tmp_path)}).start()
    children = server.children()
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not any(is_alive(pid) for pid in children.values()), "all children die with the launcher")
    server.destroy()


@pytest.mark.parametrize("part", ["prefill-0", "decode-0", "transferd-1"])
def test_a_killed_part_costs_nobody_an_answer(part: str, state_dir: Path) -> None:
    """kill -9 while twelve clients stream: where a twin of the part exists, all get the whole right answer."""
    flags = ("--prefill", "2", "--decode", "2", "--nodes", "2")
    with fake_server(state_dir, *flags, model=FAKE_SLOW) as server:
        flowing = threading.Barrier(13, timeout=PATIENCE)

        def client(i: int) -> str:
            pieces = []
            for piece in stream(server, prompt(150, i), 120):
                pieces.append(piece)
                if len(pieces) == 3 + i:  # tokens have gone out
                    flowing.wait()
            return "".join(pieces)

        with ThreadPoolExecutor(12) as threads:
            answers = [threads.submit(client, i) for i in range(12)]
            flowing.wait()
            server.kill(part)
            for i, answer in enumerate(answers):
                assert answer.result(PATIENCE) == text(fake_tokens(prompt(150, i), 120))
        until(lambda: part in server.children(), "the dead part is started again")
        expect(complete(server, prompt(60), 10), prompt(60), 10)


@pytest.mark.parametrize("part", ["prefill", "transferd"])
def test_a_part_killed_in_the_middle_of_prefill_costs_nobody_an_answer(
    part: str, state_dir: Path, tmp_path: Path
) -> None:
    """Before any token has gone out: prompts are computed anew elsewhere, and nothing stays held anywhere."""

    def busy() -> list[int]:
        # No two workers are measured equally fast: one may have been given all there is.
        return [k for k in range(2) if server.metric("pyengine_worker_requests", worker=f"prefill-{k}") > 0]

    hold = tmp_path / "hold"
    flags = ("--prefill", "2", "--decode", "2", "--nodes", "2")
    with fake_server(state_dir, *flags, model=f"fake:hold={hold}") as server:
        hold.touch()
        prompts = [prompt(1500, i) for i in range(6)]
        with ThreadPoolExecutor(6) as threads:
            answers = [threads.submit(complete, server, ids, 10) for ids in prompts]
            try:
                until(lambda: bool(busy()), "a prefill worker is in the middle of its work")
                server.kill(f"{part}-{busy()[0]}")
            finally:
                hold.unlink()
            for ids, answer in zip(prompts, answers, strict=True):
                expect(answer.result(PATIENCE), ids, 10)
        assert server.metric("pyengine_request_retries_total") > 0
        until(lambda: server.metric("pyengine_worker_requests") == 0, "requests have ended")
        until(lambda: server.metric("pyengine_worker_pages", state="referenced") == 0, "pages are released")
        until(lambda: server.metric("pyengine_pool_grants") == 0, "grants are dropped")
        until(lambda: server.metric("pyengine_pool_blocks", state="pinned") == 0, "pins are dropped")


def test_only_worker_of_a_role_dies(state_dir: Path) -> None:
    """No twin: the client gets a typed error (or the answer, if the restart is quick), and the next one works."""
    with fake_server(state_dir, model=FAKE_SLOW) as server:
        pieces = []
        try:
            for piece in stream(server, prompt(50), 200):
                pieces.append(piece)
                if len(pieces) == 5:
                    server.kill("decode-0")
        except StreamFailed:
            pass
        else:
            assert "".join(pieces) == text(fake_tokens(prompt(50), 200))
        until(lambda: "decode-0" in server.children(), "the worker is started again")
        until(lambda: httpx2.get(f"{server.base}/health").status_code == 200, "the server is well again")
        expect(complete(server, prompt(60), 10), prompt(60), 10)


def test_conductor_restart_harms_no_running_request(state_dir: Path) -> None:
    """Requests go on; everyone dials in again; the index is rebuilt from dumps, so the prefix is still found."""
    with fake_server(state_dir, "--nodes", "2", model=FAKE_SLOW) as server:
        complete(server, prompt(100), 2)
        until(lambda: server.metric("pyengine_index_blocks") >= 6, "blocks are indexed")
        pieces = []
        for piece in stream(server, prompt(90, 1), 100):
            pieces.append(piece)
            if len(pieces) == 5:
                server.kill("conductor")
        assert "".join(pieces) == text(fake_tokens(prompt(90, 1), 100))
        # Until the new conductor, which has planned nothing yet, reports, the gateway shows the old one's counters.
        until(lambda: server.metric("pyengine_conductor_plans_total") == 0, "the new conductor reports")
        until(lambda: server.metric("pyengine_index_blocks") >= 6, "the index is rebuilt")
        again = complete(server, prompt(100), 4)
        expect(again, prompt(100), 4)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


def test_gateway_restart(state_dir: Path) -> None:
    """A dead gateway's requests are aborted by the workers; the new one serves."""
    with fake_server(state_dir, model=FAKE_SLOW) as server:
        with pytest.raises(httpx2.TransportError):
            for count, _ in enumerate(stream(server, prompt(50), 1000)):
                if count == 5:
                    server.kill("gateway")
        until(lambda: "gateway" in server.children(), "the gateway is started again")

        def quiet() -> bool:
            try:
                return (
                    httpx2.get(f"{server.base}/health").status_code == 200
                    and server.metric("pyengine_worker_requests") == 0
                    and server.metric("pyengine_worker_pages", state="referenced") == 0
                )
            except httpx2.TransportError:
                return False

        until(quiet, "the workers have let go of the lost gateway's request")
        expect(complete(server, prompt(60), 10), prompt(60), 10)


def test_client_gone_mid_stream_releases_everything(state_dir: Path) -> None:
    with fake_server(state_dir, "--nodes", "2", model=FAKE_SLOW) as server:
        for piece in stream(server, prompt(100), 2000):
            assert piece is not None
            break
        until(lambda: server.metric("pyengine_worker_requests") == 0, "the request is aborted")
        until(lambda: server.metric("pyengine_worker_pages", state="referenced") == 0, "pages are released")
        until(lambda: server.metric("pyengine_pool_blocks", state="pinned") == 0, "pins are dropped")
        until(lambda: server.metric("pyengine_pool_grants") == 0, "grants are dropped")
        expect(complete(server, prompt(60), 10), prompt(60), 10)


def test_clients_gone_before_and_between_their_tokens_leave_nothing(state_dir: Path, tmp_path: Path) -> None:
    """With three choices each: while they wait for their prefill, while it computes, and while all of them stream."""
    hold = tmp_path / "hold"
    host, port = "127.0.0.1", 0

    def begin(ids: list[int], **fields: Any) -> socket.socket:
        sent = json.dumps(body(ids, 600, n=3, temperature=1, **fields)).encode()
        client = socket.create_connection((host, port), PATIENCE)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(sent)}\r\n\r\n"
        client.sendall(head.encode() + sent)
        return client

    with fake_server(state_dir, "--nodes", "2", model=f"fake:hold={hold},seconds_per_step=0.01") as server:
        port = int(server.base.rpartition(":")[2])
        streams = [begin(prompt(100, i), stream=True) for i in range(2)]
        for client in streams:
            assert client.recv(12) == b"HTTP/1.1 200"
        for client in streams:
            client.close()
        hold.touch()
        # The first are in a step that does not end, the others behind them: a worker in a step reads nothing.
        waiting = [begin(prompt(900, i), stream=bool(i % 2)) for i in range(4)]
        until(lambda: server.metric("pyengine_conductor_foreseen_requests") >= 12, "all have a plan")
        until(lambda: server.metric("pyengine_worker_requests", worker="prefill-0") >= 1, "the first compute")
        for client in waiting:
            client.close()
        until(lambda: server.metric("pyengine_gateway_requests") == 0, "the gateway holds none")
        hold.unlink()
        until(lambda: server.metric("pyengine_worker_requests") == 0, "the requests are aborted")
        until(lambda: server.metric("pyengine_worker_pages", state="referenced") == 0, "pages are released")
        until(lambda: server.metric("pyengine_pool_blocks", state="pinned") == 0, "pins are dropped")
        until(lambda: server.metric("pyengine_pool_grants") == 0, "grants are dropped")
        expect(complete(server, prompt(60), 10), prompt(60), 10)


def test_bad_requests_are_told_what_to_do(state_dir: Path) -> None:
    with fake_server(state_dir, "--pages", "64") as server:

        def post(path: str, **fields: object) -> httpx2.Response:
            return httpx2.post(f"{server.base}{path}", json=fields, timeout=30)

        answers = {
            "empty messages": post("/v1/chat/completions", model="fake", messages=[]),
            "negative max_tokens": post("/v1/completions", model="fake", prompt="a", max_tokens=-1),
            "unknown model": post("/v1/completions", model="nope", prompt="a"),
            "longer than the KV space": post("/v1/completions", model="fake", prompt=prompt(2000), max_tokens=1),
            "longer than the model": post("/v1/completions", model="fake", prompt=[65] * 70000, max_tokens=1),
            "invalid JSON": httpx2.post(f"{server.base}/v1/completions", content=b'{"model": ', timeout=30),
        }
        for what, response in answers.items():
            assert response.status_code in (400, 404), f"{what}: {response.status_code} {response.text}"
            message = response.json()["error"]["message"]
            assert len(message) > 15, f"{what}: {message}"
        assert "fake" in answers["unknown model"].json()["error"]["message"]
        expect(complete(server, prompt(60), 10), prompt(60), 10)


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("--model", "/no/such/path", "--backend", "torch"), "no such"),
        (("--backend", "jaxx"), "jax"),
        (("--transport", "tpc"), "tcp"),
        (("--ssd-bytes", "1GiB"), "--ssd-dir"),
        (("--prefill", "1"), "--decode"),
        (("--dram-bytes", "900TiB"), "memory"),
        (("--pages", "2000000000"), "fewer pages"),
        (("--host", "0.0.0.0", "--policy", "nonsense", "--backend", "fake", "--model", "fake"), "kvcache-centric"),
    ],
)
def test_impossible_settings_are_refused_with_a_remedy(flags: tuple[str, ...], hint: str, state_dir: Path) -> None:
    command = [sys.executable, "-m", "pyengine", "serve", "--state-dir", str(state_dir), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 2, "a restart would not help"
    assert hint in result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
