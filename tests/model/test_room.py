"""Goal: a model that does not fit is refused before it is read, with what it needs and what there is.

Method: a made-up /proc and /sys; a backend on a machine that says it has little memory.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest

from pyengine.backends import lacking, load_backend
from pyengine.checkpoint import ModelError, resolve
from pyengine.checkpoint.room import GIB, check_room, free_memory
from tests.model.checkpoints import tiny_config, write_tiny


def machine(root: Path, groups: str, **files: dict[str, str]) -> Path:
    """A machine with 8 GiB available; files: folder below sys/fs/cgroup, "__" for "/", to its files."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for folder, contents in files.items():
        path = root / "sys/fs/cgroup" / folder.replace("__", "/")
        path.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (path / name).write_text(content)
    return root


def of_version_2(limit: str, used: int, file: int) -> dict[str, str]:
    return {"memory.max": limit, "memory.current": str(used), "memory.stat": f"anon 5\nfile {file}\n"}


def test_the_machine_has_what_is_available(tmp_path: Path) -> None:
    assert free_memory(machine(tmp_path, "0::/\n")) == 8 * GIB
    assert free_memory() > 0


def test_a_limit_counts_wherever_it_is(tmp_path: Path) -> None:
    for name, outer, inner, expected in (
        ("own", ("max", 0, 0), (str(4 * GIB), 2 * GIB, GIB), 3 * GIB),  # files can be dropped
        ("parent", (str(2 * GIB), GIB // 2, 0), ("max", 0, 0), 3 * GIB // 2),
        ("none", ("max", 0, 0), (str(100 * GIB), 0, 0), 8 * GIB),
        ("full", ("max", 0, 0), (str(GIB), 2 * GIB, 0), 0),
    ):
        root = machine(tmp_path / name, "0::/pods/one\n", pods=of_version_2(*outer), pods__one=of_version_2(*inner))
        assert free_memory(root) == expected, name


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/not/there\n")
    for name, content in of_version_2(str(GIB), 0, 0).items():
        (root / "sys/fs/cgroup").mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(content)
    assert free_memory(root) == GIB


def test_version_1(tmp_path: Path) -> None:
    files = {
        "memory.limit_in_bytes": str(2 * GIB),
        "memory.usage_in_bytes": str(GIB),
        "memory.stat": f"cache 0\ntotal_cache {GIB // 2}\n",
    }
    root = machine(tmp_path, "9:name=systemd:/\n8:cpu,memory:/box\n", memory__box=files)
    assert free_memory(root) == 3 * GIB // 2


def test_what_does_not_fit_is_told_with_both_numbers() -> None:
    config = tiny_config(hidden_size=4096, vocab_size=2**18)  # two matrices of 2 ** 30 numbers, and little more
    with pytest.raises(ModelError, match=r"of 'big' in float32 need 8\.0 GiB, and 2\.0 GiB are free: use --dtype bfl"):
        check_room("big", config, "float32", 2 * GIB)
    with pytest.raises(ModelError, match=r"in bfloat16 need 4\.0 GiB, and 2\.0 GiB are free: use a smaller model"):
        check_room("big", config, "bfloat16", 2 * GIB)
    check_room("big", config, "float32", 2 * GIB, ranks=8)
    check_room("big", config, "bfloat16", 5 * GIB)


def test_a_backend_asks_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs the torch extra")
    from pyengine.backends.torch import TorchBackend, model

    checkpoint = resolve(str(write_tiny(tmp_path / "tiny")), tmp_path)
    monkeypatch.setattr(model, "free_memory", lambda: 1000)
    monkeypatch.setattr(model, "Weights", None)  # reading anything would raise
    with pytest.raises(ModelError, match="the weights of 'tiny' in float32 need"):
        TorchBackend(checkpoint)


def test_matrices_that_stay_in_bfloat16_need_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs whose kernels widen them as they are used, what is computed in float32 included."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    from pyengine.backends.torch import TorchBackend, model
    from pyengine.kernels.torch import choice

    checkpoint = resolve(str(write_tiny(tmp_path / "tiny", bfloat16=True)), tmp_path)
    numbers = sum(math.prod(shape) for shape in checkpoint.config.shapes().values())
    monkeypatch.setattr(model, "free_memory", lambda: numbers * 5 // 2)
    if choice.keeps(torch.device("cpu"), torch.float32, torch.bfloat16):
        TorchBackend(checkpoint, threads=1)
    else:
        with pytest.raises(ModelError, match="float32 need"):
            TorchBackend(checkpoint, threads=1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bfloat16", [False, True])
def test_jax_needs_what_it_will_hold(
    tied: bool, bfloat16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of its parameters but the angles'; padding of packed matrices and vectors are a little more or less."""
    if reason := lacking("jax"):
        pytest.skip(reason)
    import jax

    from pyengine.backends.jax import JaxBackend, backend

    folder = write_tiny(
        tmp_path / "tiny", bfloat16=bfloat16, tie_word_embeddings=tied, hidden_size=128, max_position_embeddings=32
    )
    checkpoint = resolve(str(folder), tmp_path)
    loaded = JaxBackend(checkpoint, compiled=tmp_path / "xla", dtype="float32")
    needed = sum(array.nbytes for array in jax.tree.leaves(loaded._programs.state))
    monkeypatch.setattr(backend, "free_memory", lambda: needed * 11 // 10)
    JaxBackend(checkpoint, compiled=tmp_path / "xla", dtype="float32")
    monkeypatch.setattr(backend, "free_memory", lambda: needed * 9 // 10)
    with pytest.raises(ModelError, match="the weights of 'tiny' in"):
        JaxBackend(checkpoint, compiled=tmp_path / "xla", dtype="float32")


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_pages_that_do_not_fit_are_refused_before_they_are_used(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the system would grant them, and end the process when they fill."""
    if reason := lacking(framework):
        pytest.skip(reason)
    module = importlib.import_module(f"pyengine.backends.{framework}.backend")
    backend = load_backend(framework, str(write_tiny(tmp_path / "tiny")), cache=tmp_path, threads=1)
    block = backend.namespace.kv.block_bytes
    monkeypatch.setattr(module, "free_memory", lambda: 4 * block)
    told = rf"5 KV pages need {5 * block} bytes \(.* GiB\) on cpu, and 0\.0 GiB are free; ask for fewer"
    with pytest.raises(MemoryError, match=told):
        backend.allocate(5)
    backend.allocate(4)
    backend.close()
