"""The threads of our own kernels and products in this process: one pool, which all of them share.

PyTorch's operators have threads of OpenMP, which look out for work for some milliseconds after theirs and keep a core
from ours. Where ours compute all that is large, PyTorch is left with one thread.
"""

from __future__ import annotations

import functools

import torch
from pyengine._native import LinearThreads

_wanted: int | None = None


def use(count: int | None) -> None:
    """So many threads from here on; None: as many as PyTorch has."""
    global _wanted
    _wanted = count


def pool() -> LinearThreads:
    """The pool of as many threads as are wanted now."""
    return _pool(_wanted or torch.get_num_threads())


@functools.cache
def _pool(count: int) -> LinearThreads:
    return LinearThreads(count)
