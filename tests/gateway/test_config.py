"""Goal: settings come in by file and flag, with one meaning, and impossible ones are refused with what to do.
Method: the structs alone; the command line in processes.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pyengine import env
from pyengine.config import (
    ConfigError,
    DaemonConfig,
    GatewayConfig,
    ServeConfig,
    WorkerConfig,
    memory_bytes,
    parse_size,
)
from pyengine.origins import load
from pyengine.scheduler.types import Role, Slo
from pyengine.secret import MARK, claim_ssd, read_secret, secret_file


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("1.5 KiB", 1536), ("10MB", 10**7), ("7", 7), (9, 9), ("3 tib", 3 << 40), ("5B", 5)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2 gigs", "-1", "1e9", -4, True])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('model = "a"\ndram_bytes = "1GiB"\nport = 9000\n')
    config = load(ServeConfig, file, {"port": 9001, "model": None})
    assert (config.model, config.dram_bytes, config.port) == ("a", 1 << 30, 9001)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefil = 1", "did you mean prefill?"),
        ("dram-bytes = 1", "did you mean dram_bytes?"),
        ("zzz = 1", "known are: model"),
        ('port = "x"', "port"),
        ("port = ", "not valid TOML"),
        ('dram_bytes = "lots"', "not a size"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load(ServeConfig, file, {})


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(ServeConfig, tmp_path / "none.toml", {})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"backend": "toch"}, "did you mean torch?"),
        ({"decode_backend": "jaxx"}, "unknown decode_backend 'jaxx'; did you mean jax?"),
        ({"prefill_backend": "fake"}, "no other can use its KV"),
        ({"both": 1, "prefill_backend": "torch"}, "no.*--prefill 1"),
        ({"both": 1, "decode": 1, "prefill_dtype": "float32"}, "no.*--prefill 1"),
        ({"dtype": "float23"}, "did you mean float32?"),
        ({"prefill_dtype": "float32", "decode_dtype": "bfloat16"}, "one --dtype.*--convert-kv"),
        ({"dtype": "float32", "decode_dtype": "bfloat16"}, "one --dtype.*--convert-kv"),
        ({"convert_kv": True}, "--prefill-dtype"),
        ({"convert_kv": True, "decode_dtype": "bfloat16"}, "--prefill-dtype"),
        ({"convert_kv": True, "both": 1, "dtype": "float32"}, "leave out --both"),
        ({"tp": 0}, "tp must be at least 1"),
        ({"decode_tp": -1}, "decode_tp must not be negative"),
        ({"both": 1, "decode_tp": 2}, "no.*--decode 1"),
        ({"backend": "fake", "prefill_tp": 2}, "no layers that could be spread: leave out --tp"),
        (
            {"convert_kv": True, "prefill_dtype": "float32", "decode_dtype": "bfloat16", "decode_tp": 2},
            "leave out --convert-kv or --tp",
        ),
        ({"transport": "tpc"}, "did you mean tcp?"),
        ({"transport": "rdma", "tls": True}, "not encrypted"),
        ({"prefill": 1}, "--decode 1"),
        ({"decode": 2}, "--prefill 1"),
        ({"prefill": -1}, "negative"),
        ({"nodes": 0}, "at least 1"),
        ({"nodes": 3}, "fewer --nodes"),
        ({"port": 70000}, "65535"),
        ({"admission": "at-arrival"}, "--slo-ttft"),
        ({"admission": "predictive"}, "--slo-ttft"),
        ({"roles": "atuo"}, "did you mean auto?"),
        ({"slo_class": [{"name": "fast", "ttft": -1.0}]}, "'fast': ttft must be a number of seconds"),
        ({"slo_class": [{"name": "fast"}, {"name": "fast"}]}, "name of its own"),
        ({"slo_class": [{"name": "default", "ttft": 1.0}]}, "slo_ttft"),
        ({"slo_class": [{"name": "fast", "tfft": 1.0}]}, "tfft"),
        ({"slo_class": [{"name": f"class-{i}"} for i in range(65)]}, "at most 64"),
        ({"slo_tbt": -1.0}, "negative"),
        ({"slo_ttft": float("nan")}, "seconds"),
        ({"slo_ttft": float("inf")}, "seconds"),
        ({"dram_bytes": 1 << 60}, "ask for less"),
        ({"ssd_bytes": 1 << 30}, "--ssd-dir"),
        ({"ssd_dir": "kv"}, "--ssd-bytes"),
        ({"ssd_dir": "kv", "ssd_bytes": 1 << 20}, "give more"),
        ({"ssd_dir": "/dev/shm/kv", "ssd_bytes": 1 << 30}, "no disk"),
        ({"ssd_dir": "/proc", "ssd_bytes": 1 << 30}, "no disk"),
    ],
)
def test_impossible_settings(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(ServeConfig, None, settings).check()


def test_backends_and_dtypes_by_role() -> None:
    config = ServeConfig(prefill_backend="jax", decode_dtype="bfloat16", both=1)
    roles = (Role.PREFILL, Role.DECODE, Role.BOTH)
    assert [config.backend_of(role) for role in roles] == ["jax", "torch", "torch"]
    assert [config.dtype_of(role) for role in roles] == ["auto", "bfloat16", "auto"]
    assert [ServeConfig(tp=2, prefill_tp=4).tp_of(role) for role in roles] == [4, 2, 2]
    assert config.converted is None
    converting = ServeConfig(dtype="float32", decode_dtype="bfloat16", convert_kv=True)
    converting.check()
    assert converting.converted == ("float32", "bfloat16")
    assert ServeConfig(dtype="float32", convert_kv=True).converted is None, "there is nothing to convert"


def test_roles_and_derived_values() -> None:
    assert ServeConfig().placement() == [("prefill-0", Role.PREFILL), ("decode-0", Role.DECODE)]
    mixed = ServeConfig(both=1, decode=2, prefill=1)
    assert [name for name, _ in mixed.placement()] == ["prefill-0", "decode-0", "decode-1", "both-0"]
    assert ServeConfig(both=1).placement() == [("both-0", Role.BOTH)]
    derived = ServeConfig().derived()
    assert 0 < derived.dram_bytes <= memory_bytes() // 10
    assert derived.threads >= 1


def worker(**settings: Any) -> WorkerConfig:
    config = WorkerConfig(
        worker="w",
        role=Role.BOTH,
        node="n",
        daemon_socket="s",
        conductor="c",
        work_endpoint="ipc:///run/w",
        secret_file="f",
        model="m",
        backend="fake",
        state_dir="d",
    )
    return msgspec.structs.replace(config, **settings)


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:7610", "tcp://0.0.0.0:7610", "tcp://[::]:7610", "tcp://10.0.0.2:*", "tcp://10.0.0.2:0"]
)
def test_a_worker_is_where_others_can_connect(endpoint: str) -> None:
    for good in ("ipc:///run/w:0", "tcp://10.0.0.2:7610", "tcp://[fe80::1]:7610", "tcp://node-0:10"):
        worker(work_endpoint=good).check()
    with pytest.raises(ConfigError, match=r"as tcp://10\.0\.0\.2:7610"):
        worker(work_endpoint=endpoint).check()


def test_device_pages() -> None:
    assert worker(pages=7).device_pages(1000, 16, 100) == 7
    assert worker(kv_bytes=5500).device_pages(1000, 16, 100_000) == 5
    assert worker(kv_bytes=1 << 40, max_sequences=2).device_pages(1000, 16, 100) == 14
    with pytest.raises(ConfigError, match="give more"):
        worker(kv_bytes=5).device_pages(1000, 16, 100)


def test_daemon_config_is_toml() -> None:
    config = DaemonConfig(
        node='a"b\\', dram_bytes=5, listen="127.0.0.1:0", socket="/tmp/ü", conductor="127.0.0.1:1", secret_file="s"
    )
    assert tomllib.loads(config.toml())["node"] == 'a"b\\'
    assert tomllib.loads(config.toml())["socket"] == "/tmp/ü"
    assert not {"ssd_dirs", "ssd_bytes"} & tomllib.loads(config.toml()).keys()
    keeps = tomllib.loads(msgspec.structs.replace(config, ssd_dirs=("/ssd/ü",), ssd_bytes=1 << 30).toml())
    assert (keeps["ssd_dirs"], keeps["ssd_bytes"]) == (["/ssd/ü"], 1 << 30)


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYENGINE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("PYENGINE_LOG_LEVEL", "DEBUG")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    read = env.read()
    assert (read.state_dir, read.log_level) == (tmp_path, "debug")
    assert read.runtime_dir.is_dir()
    monkeypatch.setenv("PYENGINE_LOG_LEVEL", "chatty")
    with pytest.raises(ValueError, match="set it to one of"):
        env.read()


def test_secret_is_made_once_and_kept_private(tmp_path: Path) -> None:
    state = tmp_path / "state"
    path = secret_file(state)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(read_secret(path)) == 32
    assert secret_file(state).read_bytes() == path.read_bytes()
    assert [entry.name for entry in state.iterdir()] == ["secret"]
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        secret_file(state)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="too short"):
        read_secret(path)


def test_an_ssd_directory_belongs_to_one_secret_and_is_private(tmp_path: Path) -> None:
    secret, other = secret_file(tmp_path / "state"), secret_file(tmp_path / "other")
    kept = tmp_path / "deep" / "kv"
    claim_ssd(kept, secret)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    claim_ssd(kept, secret)
    with pytest.raises(ConfigError, match=r"another secret.*--state-dir"):
        claim_ssd(kept, other)
    kept.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        claim_ssd(kept, secret)
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below"):
        with pytest.raises(ConfigError, match="--ssd-dir"):
            claim_ssd(place, secret)
    assert secret.read_bytes().strip() not in (kept / MARK).read_bytes()
    assert stat.S_IMODE((kept / MARK).stat().st_mode) == 0o600
    assert [entry.name for entry in kept.iterdir()] == [MARK], "the mark was written aside"


def test_a_claim_that_is_broken_off_leaves_no_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, kept = secret_file(tmp_path / "state"), tmp_path / "kv"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match="No space left"):
            claim_ssd(kept, secret)
    assert not list(kept.iterdir())
    claim_ssd(kept, secret)


@pytest.mark.parametrize("mark", [b"", b"of another", b"\xff\xfe\x00"])
def test_a_directory_with_another_mark_is_refused(tmp_path: Path, mark: bytes) -> None:
    kept = tmp_path / "kv"
    kept.mkdir(mode=0o700)
    (kept / MARK).write_bytes(mark)
    with pytest.raises(ConfigError, match="another secret"):
        claim_ssd(kept, secret_file(tmp_path / "state"))
    assert (kept / MARK).read_bytes() == mark


def test_state_directory_that_cannot_be_used(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for state in (file, file / "below"):
        with pytest.raises(ConfigError, match="--state-dir"):
            secret_file(state)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pyengine", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_command_line() -> None:
    assert command("--version").returncode == 0
    shown = command("serve", "--help").stdout
    for flag in ("--model", "--backend", "--prefill", "--decode", "--both", "--nodes", "--transport", "--tls"):
        assert flag in shown
    refused = command("serve", "--backend", "jaxx")
    assert refused.returncode == 2
    assert "did you mean jax?" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert command("worker", "--config", "/no/such/file").returncode == 2


def test_classes_of_objectives_are_chosen_by_name(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text(
        'conductor = "ipc:///c"\nsecret_file = "s"\nslo_ttft = 3.0\n'
        '[[slo_class]]\nname = "batch"\ndeadline = 600\n'
        '[[slo_class]]\nname = "fast"\nttft = 0.5\ntbt = 0.05\n'
    )
    config = load(GatewayConfig, file, {})
    config.check()
    assert config.slo(None) == config.slo("auto") == config.slo("default") == Slo(ttft=3.0)
    assert config.slo("batch") == Slo(deadline=600.0)
    assert config.slo("fast") == Slo(0.5, 0.05)
    assert config.slo("slow") is None
