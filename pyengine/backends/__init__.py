"""Implementations of `pyengine.backend.Backend`, by name. A framework is imported only when its backend is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyengine import env

if TYPE_CHECKING:
    from pyengine.backend import Backend

BACKENDS = ("torch", "jax", "fake")


def load_backend(name: str, model: str, *, cache: Path, threads: int | None = None) -> Backend:
    """Loads `model` on the backend `name`.

    model: see `checkpoint.resolve`; for "fake": "fake" or "fake:name=value,...". cache: folder for converted models.
    threads: CPU threads of this process. Raises ModelError, or ValueError for an unknown or missing backend.
    """
    if name == "fake":
        from pyengine.backends.fake import FakeBackend

        return FakeBackend.load(model)
    if name == "torch":
        try:
            import torch  # noqa: F401 - only to tell a missing framework from an error of ours
        except ImportError as error:
            raise ValueError("backend 'torch' needs PyTorch: install the torch extra (see README)") from error
        from pyengine.backends.torch import TorchBackend

        return TorchBackend.load(model, cache=cache, threads=threads)
    if name == "jax":
        if threads is not None:
            env.limit_xla_threads(threads)
        try:
            import flax  # noqa: F401 - as above; it needs jax
        except ImportError as error:
            raise ValueError("backend 'jax' needs JAX and Flax: install the jax extra (see README)") from error
        from pyengine.backends.jax import JaxBackend

        return JaxBackend.load(model, cache=cache)
    raise ValueError(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}")
