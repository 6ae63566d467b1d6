"""Goal: the doctor sees what is wrong with a machine and says what to do, and its bundle has nothing private.
Method: a machine made of files, one fault at a time; a bundle of inputs into which secrets and prompts were planted.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import signal
import socket
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pyengine import launch
from pyengine.cli import app
from pyengine.commands import checks
from pyengine.commands.bundle import clean_log, clean_metrics
from pyengine.commands.checks import Machine, examine
from pyengine.launch import Part, Supervisor

from .server import Api, serving

GOOD = {
    "proc/self/limits": "Max open files      65536   65536  files\nMax locked memory  unlimited  unlimited  bytes\n",
    "proc/self/status": "Name:\tx\nCpus_allowed_list:\t0-2,5\n",
    "proc/meminfo": "MemTotal: 99 kB\nMemAvailable:   67108864 kB\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "sys/devices/system/node/node0/x": "",
    "proc/sys/kernel/io_uring_disabled": "0\n",
    "dev/shm/x": "",
}
RDMA = {"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n", "dev/infiniband/uverbs0": ""}
GPU = {"proc/driver/nvidia/gpus/0000:01/x": "", "dev/nvidiactl": ""}
#: What is changed on the good machine, the check that sees it, how it is judged, and what the advice says.
FAULTS: dict[str, tuple[dict[str, str], str, str, str]] = {
    "one core": ({"proc/self/status": "Cpus_allowed_list:\t3\n"}, "cores", "warn", "--both 1"),
    "cgroup of a core": ({"sys/fs/cgroup/cpu.max": "100000 100000\n"}, "cores", "warn", "--both 1"),
    "little memory": ({"proc/meminfo": "MemAvailable: 1000 kB\n"}, "memory", "fail", "2 GiB"),
    "cgroup of memory": (
        {"sys/fs/cgroup/memory.max": str(3 << 30), "sys/fs/cgroup/memory.current": str(2 << 30)},
        "memory",
        "fail",
        "give more",
    ),
    "no meminfo": ({"proc/meminfo": ""}, "memory", "warn", "/proc"),
    "no huge pages": (
        {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"},
        "huge pages",
        "warn",
        "madvise",
    ),
    "memlock": (
        {**RDMA, "proc/self/limits": "Max open files 65536 65536 files\nMax locked memory 65536 65536 bytes\n"},
        "locked memory",
        "fail",
        "ulimit -l unlimited",
    ),
    "no verbs": ({"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n"}, "rdma", "fail", "ib_uverbs"),
    "port down": ({**RDMA, "sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n"}, "rdma", "warn", "cable"),
    "gpu not passed": ({"proc/driver/nvidia/gpus/0000:01/x": ""}, "gpus", "fail", "--gpus all"),
    "few descriptors": (
        {"proc/self/limits": "Max open files 1024 65536 files\nMax locked memory unlimited unlimited bytes\n"},
        "file descriptors",
        "warn",
        "ulimit -n",
    ),
    "hard limit": (
        {"proc/self/limits": "Max open files 1024 2048 files\nMax locked memory unlimited unlimited bytes\n"},
        "file descriptors",
        "warn",
        "LimitNOFILE",
    ),
    "slow clock": (
        {"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n"},
        "clock",
        "warn",
        "clocksource=tsc",
    ),
    "two sockets": ({"sys/devices/system/node/node1/x": ""}, "numa", "warn", "numactl"),
    "no io_uring": ({"proc/sys/kernel/io_uring_disabled": "2\n"}, "io_uring", "warn", "sysctl"),
}


def build(folder: Path, files: dict[str, str]) -> Machine:
    for name, text in files.items():
        path = folder / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Machine(folder / "state", port, folder / "root")


def test_a_good_machine_has_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "version_of", lambda name: "99.0")
    found = examine(build(tmp_path, {**GOOD, **RDMA, **GPU}))
    assert [each for each in found if each.status != "ok" or each.advice] == []
    assert len({each.name for each in found}) == len(found) == len(checks.CHECKS)
    assert {each.name: each.found for each in found}["cores"] == "4"


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_seen_alone(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "version_of", lambda name: "99.0")
    changed, name, status, advice = FAULTS[fault]
    wrong = [each for each in examine(build(tmp_path, {**GOOD, **changed})) if each.status != "ok"]
    assert [(each.name, each.status) for each in wrong] == [(name, status)]
    assert advice in wrong[0].advice


def test_an_empty_machine_is_a_report_too(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    found = examine(Machine(tmp_path / "state", 1, tmp_path / "root"))
    assert all(each.advice for each in found if each.status != "ok")
    assert not [each for each in found if "cannot be told" in each.found]


def test_packages_and_frameworks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = build(tmp_path, GOOD)
    have: dict[str, str | None] = {"numpy": "1.0", "msgspec": None, "torch": "2.15+cpu"}
    monkeypatch.setattr(checks, "version_of", lambda name: have.get(name, "99.0"))
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["numpy>=2", "msgspec>=0.20", "x; extra == 'y'"])
    found = checks.packages(machine)
    assert found.status == "fail" and found.found == "numpy is 1.0, below 2; msgspec is missing"
    build(tmp_path, GPU)
    assert checks.gpus(machine).status == "warn" and "CUDA" in checks.gpus(machine).advice
    monkeypatch.setattr(checks, "version_of", lambda _: None)
    assert checks.frameworks(machine).status == "fail"


def test_a_port_that_is_taken_and_a_secret_that_others_read(tmp_path: Path) -> None:
    machine = build(tmp_path, GOOD)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        machine.port = taken.getsockname()[1]
        found = checks.port(machine)
    assert found.status == "warn" and f"--port {machine.port + 1}" in found.advice
    machine.state_dir.mkdir()
    (machine.state_dir / "secret").write_text("x")
    (machine.state_dir / "secret").chmod(0o644)
    assert "chmod 600" in checks.state_directory(machine).advice
    (machine.state_dir / "secret").chmod(0o600)
    assert checks.state_directory(machine).status == "ok"


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*words: str) -> tuple[int, str, str]:
        status = app(["doctor", *words], exit_on_error=False, result_action="return_value")
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


PROMPT = "my landlord's name is Zebedee"
KEY = "pye-12345678-abcdefghijkl"
SECRET = "0123456789abcdef" * 4
LOG = f"""\
pyengine 0.1.0: smollm2, prefill-0 (torch), decode-0 (torch), nodes: 1
  gateway      ready after 1.9 s
gateway INFO pyengine.gateway: conductor is there
gateway WARNING pyengine.gateway: refused '{PROMPT}' of {KEY}
worker ERROR pyengine.worker: it isn't the {{"prompt": "{PROMPT}"}} that was wanted
gateway ERROR pyengine.gateway: Authorization Bearer {KEY} is unknown
conductor INFO pyengine.scheduler.service: the secret is {SECRET}
Traceback (most recent call last):
  File "/home/zebedee/lib/pyengine/gateway/app.py", line 12, in answer
    raise ValueError("{PROMPT}")
ValueError: {PROMPT}
{PROMPT}
curl -N http://127.0.0.1:8000/v1/chat/completions -d '{{"messages": [{{"role": "user", "content": "{PROMPT}"}}]}}'
"""
METRICS = f"""\
# HELP pyengine_requests_total {PROMPT}
pyengine_requests_total{{tenant="Zebedee",worker="decode-0"}} 7
pyengine_tokens_total{{tenant="Zebedee"}} 8
pyengine_tokens_total{{tenant="Other"}} 1e3
{PROMPT} 3
"""


def test_the_bundle_has_what_helps_and_nothing_private(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "secret").write_text(SECRET)
    (state / "secret").chmod(0o600)
    (state / "chat_history").write_text(PROMPT)
    log, bundle = tmp_path / "serve.log", tmp_path / "bundle.tar.gz"
    log.write_text(LOG)
    file = tmp_path / "serve.toml"
    file.write_text(f'policy = "random"\nhost = "{KEY}"\n')
    monkeypatch.setenv("PYENGINE_STATE_DIR", str(state))
    monkeypatch.setenv("PYENGINE_CONFIG", str(file))
    monkeypatch.setenv("PYENGINE_API_KEY", "own-key-of-another-form")
    monkeypatch.setenv("PYENGINE_AUDIT_LOG", "/x/own-key-of-another-form")
    monkeypatch.setenv("HOME", str(tmp_path))

    class Metrics(Api):
        def _whole(self, writer: object, status: int, body: object) -> None:
            data = METRICS.encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            writer.write(head + data)  # type: ignore[attr-defined]

    with serving(Metrics(answers=[200])) as api:
        status, _, err = call("--bundle", str(bundle), "--log", str(log), "--url", api.url)
    assert status in (0, 1) and "look at it before you send it" in err
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
    with tarfile.open(bundle) as tar:
        parts = {each.name: tar.extractfile(each).read().decode() for each in tar}  # type: ignore[union-attr]
    assert set(parts) == {"doctor.json", "versions.json", "config.json", "metrics.txt", "logs/0-serve.log"}
    whole = "\n".join(parts.values())
    for private in (PROMPT, "landlord", "Zebedee", KEY, "abcdefghijkl", SECRET, "own-key", str(tmp_path), "Other"):
        assert private not in whole, private
    # And what helps is there.
    assert {each["setting"]: each["value"] for each in json.loads(parts["config.json"])}["policy"] == "random"
    assert 'pyengine_requests_total{tenant="1",worker="decode-0"} 7' in parts["metrics.txt"]
    assert 'pyengine_tokens_total{tenant="2"} 1e3' in parts["metrics.txt"]
    told = parts["logs/0-serve.log"]
    assert "conductor is there" in told and "gateway      ready" in told and "refused <removed>" in told
    assert 'File "pyengine/gateway/app.py", line 12, in answer' in told and "(5 lines of another form" in told
    assert json.loads(parts["doctor.json"]) and "msgspec" in json.loads(parts["versions.json"])


def test_the_command_as_json_and_its_mistakes(call: Call, tmp_path: Path) -> None:
    machine = build(tmp_path, {**GOOD, "proc/meminfo": "MemAvailable: 1 kB\n"})
    status, out, _ = call("--json", "--root", str(machine.root), "--port", str(machine.port))
    found = {each["name"]: each for each in json.loads(out)}
    assert status == 1 and found["memory"]["status"] == "fail"
    status, out, _ = call("--root", str(machine.root), "--port", str(machine.port))
    assert status == 1 and "fail" in out and "give more" in out
    assert call("--log", "x")[0] == 2 and "--bundle FILE" in call("--log", "x")[2]
    assert "name a log file" in call("--bundle", str(tmp_path / "b"), "--log", "/nowhere")[2]
    assert "leave --url out" in call("--bundle", str(tmp_path / "b"), "--url", "http://127.0.0.1:1")[2]
    assert "name another file" in call("--bundle", os.path.join(str(tmp_path), "no", "b"))[2]


def test_nothing_of_a_log_or_metrics_is_kept_by_default() -> None:
    assert clean_log(f"{PROMPT}\n[{PROMPT}]\n") == "(2 lines of another form were left out)\n"
    assert clean_metrics(f"{PROMPT}\nx{{a\n") == ""


def test_of_indented_lines_only_the_launchers_are_kept() -> None:
    """What an error quotes may be indented, and begin with any word."""
    own = [
        "  conductor    ready after 0.4 s",
        "  prefill-0    ready again after 12.3 s",
        "  decode-11 was killed by SIGKILL: restarting it in 0.2 s",
        "  transferd-0 ended with status 1: restarting it in 5.0 s",
        "  both-0, gateway did not end in time: killed",
    ]
    private = [
        "  Alice was treated in May",
        "  she did not tell anyone",
        "  gateway was what she called it",
        "  prefill-0 ready or not",
        "  prefill-0    ready after 1.0 s, said Alice",
        "  decode-0 ended with status 1: Alice",
        "  gateway, Alice did not end in time: killed",
        "  worker was killed by SIGKILL: restarting it in 0.2 s",
    ]
    assert clean_log("\n".join(own + private)).splitlines() == [*own, "(8 lines of another form were left out)"]
    shown = "  transferd-0  ready after 0.4 s  (127.0.0.1:1, 64 pages)"
    assert clean_log(shown).splitlines()[0] == "  transferd-0  ready after 0.4 s  <removed>"


def test_the_state_directory_of_a_file_is_the_one_looked_at(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rights are judged, and its secret kept out of a bundle, whatever form it has."""
    file, log, bundle = tmp_path / "serve.toml", tmp_path / "serve.log", tmp_path / "bundle.tar.gz"
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "secret").write_text("of-some-form")
    (tmp_path / "there" / "secret").chmod(0o644)
    file.write_text(f'state_dir = "{tmp_path}/there"\n')
    log.write_text("conductor INFO pyengine.scheduler.service: the secret is of-some-form\n")
    monkeypatch.delenv("PYENGINE_STATE_DIR", raising=False)
    monkeypatch.setenv("PYENGINE_CONFIG", str(file))
    _, out, _ = call("--json", "--bundle", str(bundle), "--log", str(log))
    assert "chmod 600" in next(each["advice"] for each in json.loads(out) if "there" in each["advice"])
    with tarfile.open(bundle) as tar:
        told = tar.extractfile("logs/0-serve.log").read().decode()  # type: ignore[union-attr]
    assert "the secret is <removed>" in told


async def test_the_launchers_own_lines_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it really says, through a crash, a restart and an end by force."""
    monkeypatch.setattr(launch, "STOP_FRONT", 0.5)
    said: list[str] = []
    again = asyncio.Event()

    def report(line: str) -> None:
        said.append(f"  {line}")
        if "again" in line:
            again.set()

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    parts = [
        Part(name=name, module="tests.gateway.standin", arguments=(behaviour, "{ready}"), front=True)
        for name, behaviour in (("prefill-0", "serve"), ("decode-0", "stubborn"))
    ]
    supervisor = Supervisor(parts, report)
    await supervisor.start()
    os.kill(supervisor.pids["prefill-0"], signal.SIGKILL)
    await asyncio.wait_for(again.wait(), 60)
    await supervisor.stop()
    assert len(said) == 5
    wanted = [re.sub(r"\(.*", "<removed>", line) for line in said]
    assert clean_log("\n".join(said)).splitlines() == [*wanted, "(0 lines of another form were left out)"]
