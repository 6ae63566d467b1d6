"""How the implementations in JAX answer a call: jitted, with shapes padded as a backend pads them.

Padding is full of NaN and must stay as it is; what it adds to an answer is checked and cut off.
"""

from __future__ import annotations

import functools
import importlib
import mmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pyengine.kernels.inputs import Sequences
from pyengine.kernels.jax.padding import bucket, pad_draws, pad_sequences, pad_shapes
from pyengine.kernels.jax.pages import page_dtype
from pyengine.kernels.jax.pallas import attention as attention_of_pallas
from tests.kernels.calls import BITS, RESULTS, WIDE, WRITTEN, Answer, Call, Sparse

#: Least sizes, so that cases share programs: rows, sequences, pages of a sequence and of all, blocks, rows of logits.
ROWS, SEQUENCES, WIDTH, PAGES, BLOCKS = 64, 8, 128, 16, 4
#: Pages of a block of keys in Pallas, as its interpreter takes time for each.
PARTS = 4
#: Arguments whose first axis is a row each, and what is behind the last.
PER_ROW = {"query": np.nan, "x": np.nan, "residual": np.nan, "qkv": np.nan, "cosines": np.nan, "sines": np.nan} | {
    "gate_up": np.nan,
    "logits": np.nan,
    "tokens": 0,
    "slots": -1,
    "pages": -1,
    "strips": 0,
}


def compute(call: Call, implementation: str) -> Answer:
    """Raises ValueError where it refuses."""
    arguments = dict(call.arguments)
    if call.contract == "gather":
        del arguments["strips"]  # JAX makes them
    rows = _rows(call)
    least = BLOCKS if call.contract in ("gather", "scatter") else ROWS if "attention" in call.contract else SEQUENCES
    padded = bucket(rows, least)
    for name, value in PER_ROW.items():
        if name in arguments:
            arguments[name] = _pad(arguments[name], padded, value)
    if (kv := arguments.pop("kv", None)) is not None:
        arguments["cache"] = kv if isinstance(kv, Sparse) else _pad(kv, bucket(kv.shape[2], PAGES), np.nan, axis=2)
    if (sequences := arguments.get("sequences")) is not None:
        pages, page_tokens = call.arguments["kv"].shape[2:4] if not isinstance(kv, Sparse) else (kv.total, 256)
        count, width = bucket(len(sequences), SEQUENCES), bucket(sequences.tables.shape[1], WIDTH)
        arguments["sequences"] = pad_sequences(sequences, count, width, pages, page_tokens)
    if (draws := arguments.get("draws")) is not None:
        arguments["draws"] = pad_draws(draws, padded)
    if (shapes := arguments.get("shapes")) is not None:
        entries = bucket(max(len(shapes.seen), len(shapes.ids)), ROWS)
        arguments["shapes"] = pad_shapes(shapes, padded, entries)
    static: dict[str, Any] = {
        name: arguments.pop(name) for name in ("eps", "window", "layers", "heads", "count") if name in arguments
    }
    if (norms := arguments.pop("norms", None)) is not None:
        static["norm_eps"] = norms[2]
        arguments["norms"] = [_array("norms", weight, call, implementation) for weight in norms[:2]]
    arguments = {
        name: _array(name, value, call, implementation) if isinstance(value, np.ndarray | Sparse) else value
        for name, value in arguments.items()
    }
    function = getattr(importlib.import_module(f"pyengine.kernels.jax.{implementation}"), call.contract)
    program = _program(call.contract, function, tuple((name, _frozen(value)) for name, value in static.items()))
    return {name: _answer(value, call, rows) for name, value in program(**arguments).items()}


@functools.cache
def _program(contract: str, function: Any, static: tuple[tuple[str, Any], ...]) -> Any:
    """The contract in JAX's form, jitted; what it writes is donated."""
    settings = {name: slice(*value) if isinstance(value, tuple) else value for name, value in static}
    interpreted = ".pallas." in function.__module__
    if interpreted:
        attention_of_pallas.PARTS = PARTS
    # Compiled with care: what is run so, and computed in another order without. What is interpreted: in half the time.
    options = {"xla_backend_optimization_level": 0} if interpreted else None
    if contract.endswith("_attention"):
        plan = jax.jit(functools.partial(function, **settings), static_argnames="rows")
        attend = jax.jit(lambda attend, query, cache: attend(query, cache, 0), compiler_options=options)

        def attention(query: jax.Array, cache: jax.Array, sequences: Sequences) -> dict[str, jax.Array]:
            return {"result": attend(plan(sequences, rows=len(query)), query, cache)}

        return attention

    def rope_write(cache: jax.Array, norms: list[jax.Array] | None = None, **rest: Any) -> dict[str, jax.Array]:
        weights = None if norms is None else (*norms, settings["norm_eps"])
        queries, cache = function(cache=cache, layer=0, norms=weights, **rest)
        return {"result": queries, "kv": cache}

    def any_other(**arguments: Any) -> dict[str, jax.Array]:
        result = function(**arguments, **settings)
        if (names := RESULTS.get(contract)) is not None:
            return dict(zip(names, result, strict=True))
        return {WRITTEN.get(contract, "result"): result}

    if contract == "rope_write":
        return jax.jit(rope_write, donate_argnames="cache", compiler_options=options)
    return jax.jit(any_other, donate_argnames="cache" if contract == "scatter" else (), compiler_options=options)


def _rows(call: Call) -> int:
    for name in ("pages", "query", "x", "qkv", "gate_up", "logits"):
        if name in call.arguments:
            return len(call.arguments[name])
    raise AssertionError(call.contract)


def _pad(array: np.ndarray[Any, Any], size: int, value: float, axis: int = 0) -> np.ndarray[Any, Any]:
    more = [(0, 0)] * array.ndim
    more[axis] = (0, size - array.shape[axis])
    return np.pad(array, more, constant_values=value)


def _frozen(value: Any) -> Any:
    return (value.start, value.stop) if isinstance(value, slice) else value


def _array(name: str, value: np.ndarray[Any, Any] | Sparse, call: Call, implementation: str) -> jax.Array:
    dtype = jnp.dtype("float32" if name in WIDE else call.dtype)
    page = dtype if implementation == "pallas" and "kv" in call.arguments else page_dtype(dtype, "cpu")  # as on a TPU
    if isinstance(value, Sparse):
        two, heads, _, *page = value.values.shape
        shape = (1, two, heads, value.total, *page)
        memory = mmap.mmap(-1, int(np.prod(shape)) * dtype.itemsize)  # aligned, so that JAX takes it as it is
        whole = np.frombuffer(memory, dtype).reshape(shape)
        whole[0, :, :, value.pages] = value.values.transpose(2, 0, 1, 3, 4)
        return jnp.asarray(whole)
    if value.dtype == BITS[call.dtype]:
        return jnp.asarray(value.view(page))
    if value.dtype == np.float64:
        typed = value.astype(dtype)
        if name == "cache":
            typed = typed.view(page)[None]
        return jnp.asarray(typed)
    return jnp.asarray(value.astype(np.int32))


def _answer(value: jax.Array, call: Call, rows: int) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    if call.contract in ("gather", "scatter"):
        array = array.view(BITS[call.dtype])
        return array[:rows] if call.contract == "gather" else array
    if value.ndim == 6:  # the page tensor
        array = array.view(jnp.dtype(call.dtype))
        pages = call.arguments["kv"].shape[2]
        assert np.isnan(array[:, :, :, pages:]).all(), "written into a page that nobody has"
        return array[0, :, :, :pages].astype(np.float64)
    if call.contract.endswith("_attention"):
        assert (array[rows:] == 0).all(), "rows that belong to nobody are not 0"
    if call.contract == "sample":
        assert (array[rows:] == -1).all(), "a token of logits that are NaN"
        return array[:rows]
    return array[:rows].astype(np.float64)
