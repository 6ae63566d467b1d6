"""Goal: the house stays in order. Method: read the source tree and a built wheel, start bare processes."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Floor of each module, by longest matching prefix (design §7). Imports go down or stay, never up.
FLOORS = {
    "pyengine.launch": 4,
    "pyengine.gateway": 4,
    "pyengine.dashboard": 4,
    "pyengine.cli": 4,
    "pyengine.commands": 4,
    "pyengine.__main__": 4,
    "pyengine.llm": 4,
    "pyengine.worker": 3,
    "pyengine.scheduler.service": 3,
    "pyengine.scheduler.cli": 3,
    "pyengine.scheduler.links": 2,
    "pyengine.scheduler.asking": 2,
    "pyengine.scheduler.native_index": 2,
    "pyengine.scheduler.sim": 2,
    "pyengine.scheduler.report": 2,
    "pyengine.scheduler.backends": 2,
    "pyengine.scheduler.commands": 3,
    "pyengine.backends": 2,
    "pyengine.backend": 2,
    "pyengine.kv_mover": 2,
    "pyengine.conversion": 2,
    "pyengine.copier": 2,
    "pyengine.streaming": 2,
    "pyengine.loading": 2,
    "pyengine.group_copier": 2,
    "pyengine.ranks": 2,
    "pyengine.checkpoint": 2,
    "pyengine.sampling": 1,
    "pyengine.text": 2,
    "pyengine.chat": 2,
    "pyengine.grammar": 2,
    "pyengine.config": 2,
    "pyengine.origins": 2,
    "pyengine.env": 2,
    "pyengine.logs": 2,
    "pyengine.secret": 2,
    "pyengine.keys": 2,
    "pyengine.tenants": 2,
    "pyengine.limiter": 2,
    "pyengine.ledger": 2,
    "pyengine._transferd": 2,
    "pyengine.transfer": 2,
    "pyengine.pool": 2,
    "pyengine.kernels": 1,
    "pyengine._native": 1,
    "pyengine.scheduler": 0,
    "pyengine": 4,
}
#: Everything that moves KV is reached through these alone.
TRANSFER_USERS = (
    "pyengine.kv_mover",
    "pyengine.group_copier",
    "pyengine.scheduler.service",
    "pyengine.llm",
    "pyengine.worker.service",
    "pyengine.transfer",
    "pyengine.pool",
)
TRANSFER_NAMES = {"PoolClient", "SharedSlots", "ObjectPool", "Daemon", "ReportEndpoint", "Endpoint"}
FLOOR_0_LIBRARIES = set(sys.stdlib_module_names) | {"numpy", "msgspec", "pyengine"}


def modules() -> dict[str, Path]:
    """Every module of the package by its import name; scheduler and kernels are links inside it."""
    found = {}
    for top, folder in (("pyengine", "pyengine"), ("pyengine.scheduler", "scheduler"), ("pyengine.kernels", "kernels")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "pyengine" and parts[0] in ("scheduler", "kernels"):
                continue
            name = ".".join((top, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


def imports(name: str, path: Path) -> set[str]:
    """Absolute names that a module imports anywhere in it, type-checking blocks included."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def floor(name: str) -> int:
    prefix = max((p for p in FLOORS if name == p or name.startswith(p + ".")), key=len)
    return FLOORS[prefix]


def test_imports_go_down_only() -> None:
    wrong = [
        f"{name} (floor {floor(name)}) imports {imported} (floor {floor(imported)})"
        for name, path in modules().items()
        for imported in imports(name, path)
        if imported.startswith("pyengine.") and floor(imported) > floor(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_floor_0_needs_only_numpy_and_msgspec() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules().items()
        if floor(name) == 0
        for imported in imports(name, path)
        if imported.partition(".")[0] not in FLOOR_0_LIBRARIES
    ]
    assert not wrong, "\n".join(wrong)


def test_transfer_classes_are_used_where_they_may() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules().items()
        if not name.startswith(TRANSFER_USERS)
        for imported in imports(name, path)
        if imported.startswith("pyengine._native.") and imported.rpartition(".")[2] in TRANSFER_NAMES
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "code",
    [
        "import pyengine._native",
        "from pyengine._transferd import transferd_main\nassert transferd_main(['--help']) == 0",
        "import pyengine",
        "import pyengine.cli",
        "import pyengine.scheduler.conductor, pyengine.scheduler.batcher",
    ],
)
def test_loads_no_framework(code: str) -> None:
    check = f"{code}\nimport sys\nassert not {{'torch', 'jax', 'transformers'}} & set(sys.modules), 'framework loaded'"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_environment_is_read_in_one_file() -> None:
    wrong = [
        name
        for name, path in modules().items()
        if name != "pyengine.env" and any(word in path.read_text() for word in ("os.environ", "os.getenv"))
    ]
    assert not wrong, wrong


def test_wheel_has_one_top_level_name(tmp_path: Path) -> None:
    """Builds the wheel (the extension is in cargo's cache by now) and looks into it."""
    subprocess.run(
        [sys.executable, "-m", "maturin", "build", "--release", "--out", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True, timeout=280,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"pyengine"}, tops
    assert any(name.startswith("pyengine/scheduler/") for name in names)
    assert any(name.startswith("pyengine/kernels/") for name in names)
    assert "pyengine/scheduler/sim/models/llama3-70b-a800.toml" in names
    assert "pyengine/py.typed" in names
    assert "pyengine/_native.pyi" in names
    assert {f"pyengine/dashboard/static/{name}" for name in ("style.css", "page.js", "icon.svg")} <= set(names)
