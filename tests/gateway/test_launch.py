"""Goal: the launcher minds its children as promised: ready, restarted with back-off, ended in time, never orphaned.
Method: the real supervisor over stand-in children (standin.py), real processes and signals.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from msgspec.structs import replace

from bench.server import free_port
from pyengine import keys, launch
from pyengine.config import ConfigError, GatewayConfig, ServeConfig, WorkerConfig
from pyengine.gateway.auth import Door
from pyengine.gateway.listener import check_reach, listen
from pyengine.launch import Part, StartError, Supervisor, expect_shared_kv, plan_parts, run_directory, run_serve
from pyengine.scheduler.types import KvGroup, KvSpec, Namespace, Role, tenant_number
from pyengine.tenants import Book, Tenant
from tests.gateway.cluster import cluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: the name of a unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="pyl") as name:
        yield Path(name)


class Report:
    """Lines of the launcher, and a way to wait for one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._more = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._more.set()

    async def until(self, text: str, count: int = 1) -> None:
        while sum(text in line for line in self.lines) < count:
            self._more.clear()
            await asyncio.wait_for(self._more.wait(), 60)


def part(name: str, behaviour: str = "serve", front: bool = True) -> Part:
    return Part(name=name, module="tests.gateway.standin", arguments=(behaviour, "{ready}"), front=front)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_starts_and_ends_all() -> None:
    report = Report()
    supervisor = Supervisor([part("a"), part("b", front=False)], report)
    await supervisor.start()
    pids = supervisor.pids
    assert set(pids) == {"a", "b"}
    assert any(line.startswith("a ") and "(here)" in line for line in report.lines)
    titles = Path(f"/proc/{pids['a']}/cmdline").read_bytes()
    assert titles.startswith(b"pyengine: a")
    await supervisor.stop()
    assert all(is_gone(pid) for pid in pids.values())
    assert not any("killed" in line for line in report.lines)


async def test_dead_child_is_reported_and_restarted() -> None:
    report = Report()
    supervisor = Supervisor([part("a"), part("b")], report)
    await supervisor.start()
    before = supervisor.pids
    os.kill(before["a"], signal.SIGKILL)
    await report.until("ready again")
    assert "a was killed by SIGKILL: restarting it in 0.2 s" in report.lines
    after = supervisor.pids
    assert after["a"] != before["a"]
    assert after["b"] == before["b"]
    await supervisor.stop()


async def test_pauses_double_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(launch, "LAST_PAUSE", 0.2)
    report = Report()
    supervisor = Supervisor([part("a", "flash")], report)
    await supervisor.start()
    await report.until("restarting", 3)
    await supervisor.stop()
    pauses = [line.rpartition(" in ")[2] for line in report.lines if "restarting" in line]
    assert pauses[:3] == ["0.1 s", "0.2 s", "0.2 s"]


async def test_impossible_part_ends_the_start() -> None:
    report = Report()
    supervisor = Supervisor([part("a"), part("b", "impossible")], report)
    with pytest.raises(StartError, match="b cannot start") as ended:
        await supervisor.start()
    assert ended.value.status == 2, "that a restart would not help is true of the launcher too"
    await supervisor.stop()
    assert supervisor.pids == {}
    assert not any("restarting" in line for line in report.lines)


async def test_part_that_always_crashes_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FIRST_PAUSE", 0.01)
    report = Report()
    supervisor = Supervisor([part("a", "crash")], report)
    with pytest.raises(StartError) as ended:
        await supervisor.start()
    assert ended.value.status == 1
    await supervisor.stop()
    assert sum("restarting" in line for line in report.lines) == launch.START_ATTEMPTS - 1


async def test_stubborn_child_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STOP_FRONT", 0.2)
    report = Report()
    supervisor = Supervisor([part("a", "stubborn"), part("b", front=False)], report)
    await supervisor.start()
    pids = supervisor.pids
    await supervisor.stop()
    assert all(is_gone(pid) for pid in pids.values())
    assert "a did not end in time: killed" in report.lines


async def test_stop_while_a_part_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FIRST_PAUSE", 1000.0)
    report = Report()
    supervisor = Supervisor([part("a", "flash")], report)
    await supervisor.start()
    await report.until("restarting")
    await asyncio.wait_for(supervisor.stop(), 60)


def test_killed_launcher_leaves_no_orphan() -> None:
    program = """
import asyncio
from pyengine.launch import Supervisor
from tests.gateway.test_launch import part

async def main():
    supervisor = Supervisor([part("a"), part("b", "stubborn")], lambda line: None)
    await supervisor.start()
    print(*supervisor.pids.values(), flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""
    launcher = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    children = [os.pidfd_open(int(pid)) for pid in launcher.stdout.readline().split()]
    assert len(children) == 2
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    for child in children:
        assert select.select([child], [], [], 60)[0], "a child outlived its launcher"
        os.close(child)


def test_child_whose_parent_is_gone_already_ends() -> None:
    command = [
        sys.executable,
        "-m",
        "pyengine.child",
        "--parent",
        "1",
        "--name",
        "x",
        "tests.gateway.standin",
        "serve",
        "1",
    ]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False, text=True)
    assert ended.returncode == 1
    assert "is gone" in ended.stderr


def test_port_in_use_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        command = [sys.executable, "-m", "pyengine", "serve", "--backend", "fake", "--port", port]
        ended = subprocess.run(
            [*command, "--state-dir", str(tmp_path)], capture_output=True, timeout=60, check=False, text=True
        )
    assert ended.returncode == 2
    assert "choose another --port" in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize("host", ["no-such-host.invalid", "999.1.1.1", "203.0.113.7"])
def test_host_that_is_not_here(host: str) -> None:
    """203.0.113.0/24 is reserved for documentation: no machine has it."""
    with pytest.raises(ConfigError, match="--host"):
        listen(host, 0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::"])
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("encrypted", [False, True])
def test_nobody_beyond_this_machine_is_let_in_without_a_key(
    host: str, asks: bool, encrypted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with listen(host, 0) as listener:
        if host in ("0.0.0.0", "::") and not asks:
            with pytest.raises(ConfigError, match="pyengine keys add"):
                check_reach(listener, asks, encrypted)
            return
        check_reach(listener, asks, encrypted)
    warned = host in ("0.0.0.0", "::") and not encrypted
    assert ["in the clear" in record.message for record in caplog.records] == [True] * warned


def test_serve_refuses_an_address_for_everybody_before_it_starts_anything(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add a key first"):
        run_serve(ServeConfig(backend="fake", model="fake", host="0.0.0.0", port=free_port(), state_dir=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "host", "asks", "said"),
    [
        ("127.0.0.1", "127.0.0.1", False, "127.0.0.1"),
        ("127.0.0.1", "localhost", False, "localhost"),
        ("::1", "::1", False, "[::1]"),
        ("::1", "::1", True, "[::1]"),
        # A name that this machine resolves to its loopback, as Debian does with its own.
        ("127.0.1.1", "bookworm", False, "127.0.1.1"),
        ("127.0.1.1", "bookworm", True, "bookworm"),
        ("0.0.0.0", "0.0.0.0", True, "127.0.0.1"),
        ("::", "::", True, "127.0.0.1"),
    ],
)
async def test_ready_is_said_whatever_the_host_is_called(
    address: str, host: str, asks: bool, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what is printed to try it is let in."""
    if ":" in address and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    file = folder / keys.NAME
    if asks:
        keys.change(file, lambda book: (book.with_key("alice", "api", 0)[0], None))
    # Nothing of a test listens beyond this machine.
    reached = "127.0.0.1" if address in ("0.0.0.0", "::") else address
    async with cluster(folder, Role.BOTH, door=Door(file), address=reached) as at:
        port = int(at.url.rpartition(":")[2])
        config = ServeConfig(backend="fake", model="fake", host=host, port=port)
        await asyncio.wait_for(launch._announce(config, address, time.monotonic()), 60)
        told = capsys.readouterr().out
        assert f"Ready at http://{said}:{port} after" in told and ("$KEY" in told) == asks
        if not asks:
            async with aiohttp.ClientSession() as http, http.get(f"http://{said}:{port}/v1/models") as response:
                assert response.status == 200


async def test_ready_is_said_after_odd_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """What answers while the gateway is between two lives need not be it."""
    models = {"data": [{"id": "fake"}]}
    odd = [(403, {"error": {}}), (200, []), (200, None), (200, "ok"), (200, {"status": ["ok"]})]
    whole = [(200, {"status": "ok"}), (200, {"data": []}), (200, {"status": "ok"}), (200, models)]
    answers = iter([*odd, *whole])
    asked: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
        status, body = next(answers)
        writer.write(f"HTTP/1.1 {status} X\r\n\r\n{json.dumps(body)}".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        config = ServeConfig(backend="fake", model="fake", port=port)
        await asyncio.wait_for(launch._announce(config, "127.0.0.1", time.monotonic()), 60)
    assert "Ready at" in capsys.readouterr().out and len(asked) == len(odd) + len(whole)


def described(namespace: Namespace, vocab_size: int = 258) -> dict[str, Any]:
    """As a worker's ready line says it."""
    facts: dict[str, Any] = json.loads(
        json.dumps({"vocab_size": vocab_size, "namespace": msgspec.to_builtins(namespace)})
    )
    return facts


def test_workers_that_cannot_share_kv_are_told_apart() -> None:
    """Any one field of the namespace, each by its name; and nobody is called a stranger who is none."""
    group = KvGroup(layers=2, kv_heads=2, head_dim=16, dtype="float32")
    space = Namespace("weights", "config", "float32", "none", KvSpec((group,), 16))
    others = {
        "weights": replace(space, weights="others"),
        "config": replace(space, config="other"),
        "compute_dtype": replace(space, compute_dtype="bfloat16"),
        "weight_quantization": replace(space, weight_quantization="q4"),
        "layout_version": replace(space, layout_version=2),
        "kv.block_tokens": replace(space, kv=KvSpec((group,), 32)),
        **{
            f"kv.{field}": replace(space, kv=KvSpec((replace(group, **{field: value}),), 16))
            for field, value in {"layers": 3, "kv_heads": 1, "head_dim": 8, "dtype": "bfloat16", "window": 64}.items()
        },
        "kv.groups": replace(space, kv=KvSpec((group, group), 16)),
    }
    fields = {*space.__struct_fields__, *(f"kv.{field}" for field in group.__struct_fields__), "kv.block_tokens"}
    assert fields - {"kv"} <= others.keys(), "a new field is to be named too"
    same: dict[str, dict[str, Any]] = {"conductor": {}, "prefill-0": described(space), "decode-0": described(space)}
    expect_shared_kv(same)
    for field, other in others.items():
        with pytest.raises(ConfigError, match=rf"decode-0 and both-0 cannot share KV: `{re.escape(field)}` differs: "):
            expect_shared_kv(same | {"both-0": described(other)})
        # Whichever was ready first.
        with pytest.raises(ConfigError, match=rf"decode-0 and both-0 cannot share KV: `{re.escape(field)}` differs: "):
            expect_shared_kv({"both-0": described(other)} | same)
        assert other.digest() != space.digest(), f"{field} is no part of keys"
    with pytest.raises(ConfigError, match="`vocab_size` differs: 258 and 300; all workers must load the same model"):
        expect_shared_kv(same | {"both-0": described(space, 300)})
    with pytest.raises(ConfigError, match=r"differs: float32 and bfloat16; .*--convert-kv"):
        expect_shared_kv(same | {"both-0": described(others["compute_dtype"])})


@pytest.mark.parametrize("setting", [{"policy": "kvcache"}, {"admission": "at-arival"}])
def test_unknown_names_are_said_before_anything_starts(setting: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        run_serve(ServeConfig(backend="fake", model="fake", **setting))  # type: ignore[arg-type]


def test_run_directory_is_private_and_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_RUN_DIRECTORY", 1000)
    abandoned = tmp_path / "pyengine-abandoned"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    beginning = tmp_path / "pyengine-beginning"
    beginning.mkdir()
    with run_directory(tmp_path) as first:
        assert stat.S_IMODE(first.stat().st_mode) == 0o700
        with run_directory(tmp_path) as second:
            assert first != second
            assert first.is_dir()
        assert not second.exists()
    assert not first.exists()
    assert not abandoned.exists()
    assert beginning.exists(), "one without a lock may be about to get it"


def test_long_runtime_directory_is_replaced(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with run_directory(deep) as run:
        assert run.parent == Path("/tmp")


def test_parts_of_a_machine(tmp_path: Path) -> None:
    """Worker k sits on node k mod nodes, prefill workers first; every part finds the others."""
    wish = ServeConfig(
        prefill=2,
        decode=1,
        nodes=2,
        prefill_backend="jax",
        dtype="float32",
        decode_dtype="bfloat16",
        convert_kv=True,
        ssd_dir="/ssd",
        ssd_bytes=1 << 30,
    )
    config = msgspec.structs.replace(wish.derived(), state_dir="/state")
    parts = plan_parts(config, tmp_path, tmp_path / "secret", 5, "127.0.0.1:7000")
    assert [made.name for made in parts] == [
        "conductor", "transferd-0", "transferd-1", "prefill-0", "prefill-1", "decode-0", "gateway"
    ]  # fmt: skip
    workers = [
        msgspec.json.decode((tmp_path / f"{name}.json").read_bytes(), type=WorkerConfig)
        for name in ("prefill-0", "prefill-1", "decode-0")
    ]
    assert [worker.node for worker in workers] == ["node-0", "node-1", "node-0"]
    assert [worker.backend for worker in workers] == ["jax", "jax", "torch"]
    assert {worker.converted for worker in workers} == {("float32", "bfloat16")}
    assert [worker.dtype for worker in workers] == ["float32", "float32", "bfloat16"]
    daemon = tomllib.loads((tmp_path / "node-1.toml").read_text())
    assert daemon["socket"] == workers[1].daemon_socket
    assert daemon["conductor"] == "127.0.0.1:7000"
    assert (daemon["ssd_dirs"], daemon["ssd_bytes"]) == (["/ssd/node-1"], 1 << 30)
    # What a daemon does after its SIGTERM ends before its SIGKILL: drain, write for 3 s at most (daemon.rs), close.
    assert daemon["drain_seconds"] < launch.STOP_BACK
    assert daemon["drain_seconds"] + 3 < launch.STOP_SSD
    assert parts[0].arguments[parts[0].arguments.index("--daemons") + 1] == "127.0.0.1:7000"
    assert parts[-1].fds == (5,)


def test_limits_of_tenants_reach_the_pools(tmp_path: Path) -> None:
    """As tables that transferd reads: what a pool makes of them is in tests/system/test_tenants.py."""
    book = Book(tenants=(Tenant(name="a", dram_bytes=1 << 20, ssd_bytes=5), Tenant(name="b")))
    keys.change(tmp_path / "keys.json", lambda _: (book, None))
    config = msgspec.structs.replace(ServeConfig().derived(), state_dir="/state", keys_file=f"{tmp_path}/keys.json")
    parts = plan_parts(config, tmp_path, tmp_path / "secret", 5, "127.0.0.1:7000")
    daemon = tomllib.loads((tmp_path / "node-0.toml").read_text())
    assert daemon["quota"] == [
        {"tenant": f"{tenant_number('a'):016x}", "dram_bytes": 1 << 20, "ssd_bytes": 5},
        {"share": 1},
    ]
    gateway = msgspec.json.decode((tmp_path / "gateway.json").read_bytes(), type=GatewayConfig)
    assert gateway.keys_file == f"{tmp_path}/keys.json"
    assert parts[-1].name == "gateway"
