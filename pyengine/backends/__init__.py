"""Implementations of `pyengine.backend.Backend`, by name. A framework is imported only when its backend is loaded."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyengine.backend import Backend

#: Name of each backend, and the packages without which it cannot be loaded.
BACKENDS = {"torch": ("torch",), "jax": ("jax", "flax"), "fake": ()}
#: In which a model can be computed, beside "auto".
DTYPES = ("float32", "bfloat16")
#: Of a worker that is told nothing else: tokens one step computes, sequences that run at once (see WorkerConfig).
MAX_TOKENS, MAX_SEQUENCES = 512, 32


def lacking(name: str) -> str | None:
    """Why this backend cannot be loaded here, with what to do, if a package is missing. Imports nothing of it."""
    missing = [package for package in BACKENDS[name] if not _installed(package)]
    if not missing:
        return None
    others = [other for other, needs in BACKENDS.items() if needs and all(map(_installed, needs))]
    instead = f", or choose the backend {others[0]}" if others else ""
    return f"backend {name} needs {' and '.join(missing)}: install the extra {name!r} (see README){instead}"


def check_dtype(dtype: str) -> None:
    """Raises ValueError unless a model can be computed in it, or it is "auto"."""
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"unknown dtype {dtype!r}; known: auto, {', '.join(DTYPES)}")


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # it is being kept out, or half there
        return False


def load_backend(
    name: str, model: str, *, cache: Path, threads: int | None = None, dtype: str = "auto", tp: int = 1
) -> Backend:
    """Loads `model` on the backend `name`.

    model: see `checkpoint.resolve`; for "fake": "fake" or "fake:name=value,...". cache: folder for converted models.
    threads: CPU threads of the model. dtype: of weights, computing and KV; auto: float32 on CPUs, bfloat16 on
    accelerators. tp: over how many processes (torch) or devices (jax) each layer is spread. Raises ModelError, or
    ValueError for an unknown or missing backend, or another dtype.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}")
    check_dtype(dtype)
    if reason := lacking(name):
        raise ValueError(reason)
    if name == "torch":
        from pyengine.backends.torch import ParallelTorchBackend, TorchBackend
        from pyengine.checkpoint import resolve

        if tp > 1:
            return ParallelTorchBackend(resolve(model, cache), tp, threads=threads, dtype=dtype)
        return TorchBackend.load(model, cache=cache, threads=threads, dtype=dtype)
    if name == "jax":
        from pyengine.backends.jax import JaxBackend

        return JaxBackend.load(model, cache=cache, threads=threads, dtype=dtype, tp=tp)
    from pyengine.backends.fake import FakeBackend

    if tp > 1:
        raise ValueError("the fake backend has no layers that could be spread: leave out --tp")
    if dtype not in ("auto", "float32"):
        raise ValueError("the fake backend's KV is not made of numbers that could be rounded: leave out --dtype")
    return FakeBackend.load(model)
