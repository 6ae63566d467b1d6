"""Goal: what pages name is there: settings in their files, metrics, variables of the environment, our own files.

Method: the code that reads each of them reads it here too.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from pyengine import env, origins
from pyengine.config import GatewayConfig, ServeConfig, WorkerConfig
from pyengine.gateway import catalog

from .pages import ROOT, Snippet, pages, parse, snippets

ALL = snippets()
TOML = [snippet for snippet in ALL if snippet.language == "toml"]
#: The first line of a TOML block says whose it is: `# transferd.toml`, `# worker-0.toml`, ...
CONFIGS: dict[str, type[ServeConfig | GatewayConfig | WorkerConfig]] = {
    "serve": ServeConfig,
    "gateway": GatewayConfig,
    "worker": WorkerConfig,
}
METRIC = re.compile(r"\b(?:vllm:|pyengine_)[a-z][a-z0-9_]*\*?")
#: Begin as metrics do, and are none.
NO_METRICS = {"pyengine_llm", "pyengine_version"}
VARIABLE = re.compile(r"\bPYENGINE_[A-Z][A-Z0-9_]*")
#: Made up for an example, or Kubernetes'.
NO_VARIABLES = {"PYENGINE_SERVICE_HOST"}
#: What a page tells its reader to write.
NO_FILES = {"pyengine/backends/torch/models/foo.py", "pyengine/backends/jax/models/foo.py"}
FILE = re.compile(r"(?<![\w/.-])(?:tests|bench|docs|pyengine|rust|scheduler|kernels)/[\w./-]*\w")


def expect_settings(snippet: Snippet, folder: Path) -> None:
    """Raises AssertionError if the process that the block is for would refuse it."""
    read = tomllib.loads(snippet.text)
    head = re.match(r"# ([a-z]+)[a-z0-9-]*\.toml", snippet.text)
    assert head, f"{snippet.where}: its first line is to say whose it is, as `# serve.toml`"
    kind = head[1]
    if kind == "pyproject":
        groups = read["project"]["entry-points"]
        assert groups.keys() <= {"pyengine.policies", "pyengine.cluster_backends"}
        return
    path = folder / "settings.toml"
    path.write_text(snippet.text)
    if kind == "transferd":
        expect_transferd_takes(path, read)
        return
    assert kind in CONFIGS, f"{snippet.where}: {kind} reads no file"
    config = CONFIGS[kind]
    try:
        origins.load(config, path, required(config, read))
    except ValueError as error:
        raise AssertionError(f"{snippet.where}: {error}") from error


def required(config: type[msgspec.Struct], read: dict[str, object]) -> dict[str, object]:
    """Something for each setting without a default that a block, being a part of a file, leaves out."""
    fields = msgspec.structs.fields(config)
    return {
        field.name: "prefill" if field.name == "role" else "x"
        for field in fields
        if field.required and field.name not in read
    }


def expect_transferd_takes(path: Path, read: dict[str, object]) -> None:
    """It starts, and ends when what it is tied to does. Its places are replaced: those of a page are a machine's."""
    small = ["--dram-bytes", "16MiB", "--listen", "127.0.0.1:0", "--socket", str(path.parent / "s" / "d.sock")]
    secret = path.parent / "secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    small += ["--node", "n", "--secret-file", str(secret), *(["--http", "127.0.0.1:0"] if "http" in read else [])]
    small += ["--ssd-dir", str(path.parent / "ssd"), "--ssd-bytes", "32MiB"]
    command = [sys.executable, "-m", "pyengine._transferd", "--config", str(path), *small, "--ready-fd", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None and daemon.stderr is not None
        ready = daemon.stdout.readline()
        daemon.terminate()
        assert ready, daemon.stderr.read().decode()


@pytest.mark.parametrize("snippet", TOML, ids=lambda snippet: snippet.where)
def test_settings_are_taken(snippet: Snippet, tmp_path: Path) -> None:
    expect_settings(snippet, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "```toml\nport = 1\n```",
        "```toml\n# serve.toml\nprot = 8000\n```",
        '```toml\n# serve.toml\nport = "x"\n```',
        "```toml\n# transferd.toml\ndram_byte = 1\n```",
        "```toml\n# gateway.toml\n[[slo_class]]\nnam = 'x'\n```",
    ],
)
def test_settings_that_are_wrong_are_found(text: str, tmp_path: Path) -> None:
    [snippet] = parse("page.md", text)
    with pytest.raises(AssertionError):
        expect_settings(snippet, tmp_path)


def test_json_is_json() -> None:
    for snippet in ALL:
        if snippet.language == "json":
            json.loads(snippet.text)


def unknown_metrics(text: str) -> list[str]:
    known = {*catalog.FAMILIES, *catalog.ALIASES}
    known |= {f"{name}_{part}" for name in known for part in ("bucket", "sum", "count")}
    known |= {name.removesuffix("_total") for name in known}
    names = [name for name in METRIC.findall(text) if name not in NO_METRICS]
    return [name for name in names if not any(one == name or one.startswith(name.rstrip("*")) for one in known)]


def unknown_variables(text: str) -> list[str]:
    known = {env.variable(name) for kind in origins.KINDS for name in kind.__struct_fields__}
    known |= {env.variable(name) for name in env.OTHERS} | {env.variable("state_dir")} | NO_VARIABLES
    return [name for name in VARIABLE.findall(text) if name not in known]


def missing_files(text: str) -> list[str]:
    return [name for name in FILE.findall(text) if name not in NO_FILES and not (ROOT / name).exists()]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    assert (unknown_metrics(text), unknown_variables(text), missing_files(text)) == ([], [], [])


def test_names_that_are_wrong_are_found() -> None:
    assert unknown_metrics("`pyengine_no_such_total` vllm:num_requests_running") == ["pyengine_no_such_total"]
    assert unknown_variables("PYENGINE_PROT=1 PYENGINE_PORT=1") == ["PYENGINE_PROT"]
    assert missing_files("tests/no/such.py, bench/serve.py") == ["tests/no/such.py"]
