"""How a program that XLA compiles for a CPU calls ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

import jax
import jax.numpy as jnp
from pyengine._native import xla_handlers


def use_threads(count: int) -> None:
    """With how many threads they compute; the first call in a process decides. 0: one for each core."""
    xla_handlers(count)


def call(name: str, results: Any, in_place: Mapping[int, int] | None = None) -> Callable[..., Any]:
    """results: their shapes and types; in_place: which argument's memory a result has, by their numbers."""
    _register()
    aliases = None if in_place is None else dict(in_place)
    function: Callable[..., Any] = jax.ffi.ffi_call(f"pyengine_{name}", results, input_output_aliases=aliases)
    return function


def shaped(shape: tuple[int, ...], dtype: npt.DTypeLike) -> jax.ShapeDtypeStruct:
    """A result. Raises ValueError for a type that ours do not compute in."""
    if (name := np.dtype(dtype).name) not in ("float32", "bfloat16"):
        raise ValueError(f"ours on CPUs compute in float32 and bfloat16, not in {name}")
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def like(array: jax.Array) -> jax.ShapeDtypeStruct:
    """A result of the shape and type of an argument. Raises ValueError as `shaped` does."""
    return shaped(array.shape, array.dtype)


def integers(values: Any) -> jax.Array:
    """As ours take them."""
    return jnp.asarray(values, jnp.int32)


@functools.cache
def _register() -> None:
    for name, handler in xla_handlers(0).items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu", api_version=1)
