"""Goal: `pyengine serve` with one framework for prefill and another for decode answers as either does alone, and each
works where the other is not installed.

Method: real processes, a tiny random model in float32, twenty prompts against transformers over tcp; `/metrics` for the
blocks that crossed. What is not installed is kept out by an import hook in every process (sitecustomize on PYTHONPATH).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.server import Server
from tests import crossing, oracle
from tests.system.conftest import PATIENCE, complete, crossed, stream, until

pytestmark = pytest.mark.timeout(600)
pytest.importorskip("torch", reason="the torch extra is not installed")
pytest.importorskip("transformers", reason="the oracle is not installed")
pytest.importorskip("flax", reason="the jax extra is not installed")

#: What comes with a framework, and is gone with it.
PACKAGES = {
    "torch": ("torch", "triton", "transformers"),
    "jax": ("jax", "jaxlib", "flax", "ml_dtypes", "orbax", "optax"),
}
HOOK = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (kept out by a test)", name=name)


sys.meta_path.insert(0, Absent())
"""
#: Seconds until a JAX worker is ready, on a machine that does much else: it compiles.
COMPILED = 400.0
#: Few sequences and tokens a step are few programs.
SMALL = ("--dram-bytes", "64MiB", "--pages", "128", "--max-sequences", "4", "--max-tokens-per-step", "64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return crossing.write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def cases(model: Path) -> list[oracle.Case]:
    return crossing.cases(model)


@pytest.fixture
def without(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """The environment of processes in which a framework is not installed."""

    def made(framework: str) -> dict[str, str]:
        folder = tmp_path / f"no-{framework}"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(HOOK.format(names=PACKAGES[framework]))
        return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}

    return made


def compare(server: Server, cases: list[oracle.Case]) -> None:
    def one(case: oracle.Case) -> oracle.Comparison:
        comparison = oracle.Comparison(case)
        while (wanted := comparison.wanted()) is not None:
            answer = complete(server, *wanted, model="tiny", return_token_ids=True)
            comparison.feed(answer["choices"][0]["token_ids"])
        return comparison

    with ThreadPoolExecutor(4) as threads:
        oracle.assert_few_ties(list(threads.map(one, cases)))


@pytest.mark.parametrize(("prefill", "decode"), [("jax", "torch"), ("torch", "jax")])
def test_kv_crosses_over_tcp(prefill: str, decode: str, model: Path, cases: list[oracle.Case], state_dir: Path) -> None:
    flags = ("--nodes", "2", "--transport", "tcp", "--prefill-backend", prefill, "--decode-backend", decode)
    with Server(*flags, *SMALL, model=str(model), state_dir=state_dir, start_timeout=COMPILED) as server:
        compare(server, cases)
        blocks = sum(-(-len(case.ids) // 16) for case in cases)
        until(lambda: min(crossed(server, "tcp")) >= blocks, "every block has crossed, as both nodes count")
        assert server.metric("pyengine_worker_tokens_total", worker="decode-0", phase="prefill") == 0
        assert server.metric("pyengine_recomputed_tokens_total") == 0
        assert f"prefill-0 ({prefill}), decode-0 ({decode})" in server.log
        for worker, backend in (("prefill-0", prefill), ("decode-0", decode)):
            assert server.metric("pyengine_worker_info", worker=worker, backend=backend, kv_dtype="float32") == 1
        longest = max((case.ids for case in cases), key=len)
        again = complete(server, longest, 4, model="tiny")
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(longest) - 1) // 16 * 16
        for piece in stream(server, longest, 300, model="tiny", ignore_eos=True):
            assert piece is not None
            break  # the client goes
        until(lambda: server.metric("pyengine_worker_requests") == 0, "the request is aborted")
        until(lambda: server.metric("pyengine_worker_pages", state="referenced") == 0, "pages are released")
        until(lambda: server.metric("pyengine_pool_grants") == 0, "grants are dropped")


@pytest.mark.parametrize(("framework", "other"), [("torch", "jax"), ("jax", "torch")])
def test_each_serves_without_the_other(
    framework: str,
    other: str,
    model: Path,
    cases: list[oracle.Case],
    state_dir: Path,
    without: Callable[[str], dict[str, str]],
) -> None:
    environment = without(other)
    probe = "import importlib.util as u\ntry: u.find_spec({!r})\nexcept ImportError: print('absent')"
    shown = subprocess.run(
        [sys.executable, "-c", probe.format(other)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "absent\n", "the hook works"
    with Server(
        *SMALL,
        model=str(model),
        backend=framework,
        state_dir=state_dir,
        environment=environment,
        start_timeout=COMPILED,
    ) as server:
        compare(server, cases[::4])


@pytest.mark.parametrize(("framework", "other"), [("torch", "jax"), ("jax", "torch")])
def test_a_framework_that_is_not_installed_is_named(
    framework: str, other: str, model: Path, state_dir: Path, without: Callable[[str], dict[str, str]]
) -> None:
    """Before anything starts, in one sentence that says what to do; and LLM() says the same."""
    environment = {**os.environ, **without(framework)}
    command = [sys.executable, "-m", "pyengine", "serve", "--model", str(model), "--state-dir", str(state_dir)]
    for flags in (("--backend", framework), ("--backend", other, "--decode-backend", framework)):
        served = subprocess.run(
            [*command, *flags], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert served.returncode == 2
        assert served.stdout == ""
        assert f"backend {framework} needs {framework}" in served.stderr
        assert f"extra {framework!r}" in served.stderr and f"choose the backend {other}" in served.stderr
        assert len(served.stderr.splitlines()) == 1
    code = f"""
import pyengine
try:
    pyengine.LLM({str(model)!r}, backend={framework!r})
except ValueError as error:
    print(error)
"""
    called = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert called.stdout.startswith(f"backend {framework} needs {framework}"), called.stderr


def test_workers_of_different_dtypes_are_refused_at_start(model: Path, state_dir: Path) -> None:
    """Only a worker knows what "auto" means to it, so it is found when both have loaded."""
    command = [sys.executable, "-m", "pyengine", "serve", "--model", str(model), "--state-dir", str(state_dir), *SMALL]
    served = subprocess.run(
        [*command, "--decode-dtype", "bfloat16"], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert served.returncode == 2
    assert "prefill-0 and decode-0 cannot share KV: `compute_dtype` differs: float32 and bfloat16" in served.stderr
    assert "--convert-kv" in served.stderr
    assert "Ready" not in served.stdout


def test_dtypes_cross_by_conversion(model: Path, cases: list[oracle.Case], state_dir: Path) -> None:
    """It serves; that the numbers are right is for tests/worker/test_conversion.py. The first token is prefill's."""
    flags = ("--convert-kv", "--dtype", "float32", "--decode-dtype", "bfloat16", "--nodes", "2", "--transport", "tcp")
    with Server(*flags, *SMALL, model=str(model), state_dir=state_dir, start_timeout=COMPILED) as server:
        asked = cases[8:12]
        for case in asked:
            answer = complete(server, case.ids, 8, model="tiny", return_token_ids=True)
            ids = answer["choices"][0]["token_ids"]
            assert len(ids) == 8
            if not case.is_tie(0):
                assert ids[0] == case.tokens[0]
        assert server.metric("pyengine_recomputed_tokens_total") == 0
        blocks = sum(-(-len(case.ids) // 16) for case in asked)
        until(lambda: crossed(server, "tcp") == (blocks, blocks), "all blocks have crossed")
        layers, heads, head_dim = 3, 2, 16
        block_bytes = layers * 2 * heads * 16 * head_dim * 2
        assert crossed(server, "tcp", "bytes") == (blocks * block_bytes, blocks * block_bytes), "in bfloat16"
