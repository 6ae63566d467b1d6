"""Serves large language models with prefill and decode apart, around one shared KV cache.

Importing this package loads neither torch nor jax: its names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyengine.llm import LLM, AsyncLLM
    from pyengine.pool import AsyncPool, Pool
    from pyengine.scheduler.types import SamplingParams
    from pyengine.transfer import TransferEngine

#: Public name -> module that defines it.
_LAZY = {
    "LLM": "pyengine.llm",
    "AsyncLLM": "pyengine.llm",
    "AsyncPool": "pyengine.pool",
    "Pool": "pyengine.pool",
    "SamplingParams": "pyengine.scheduler.types",
    "TransferEngine": "pyengine.transfer",
}

__all__ = ["LLM", "AsyncLLM", "AsyncPool", "Pool", "SamplingParams", "TransferEngine"]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
