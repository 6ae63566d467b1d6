"""One call of one contract, in numpy, and how the oracle and the implementations answer it.

What is passed about is plain data, so that another process can compute it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pyengine.kernels import reference

if TYPE_CHECKING:
    import torch

#: Modules under pyengine.kernels.torch and pyengine.kernels.jax that have every contract.
TORCH = ("eager", "native", "triton")
JAX = ("jnp", "pallas", "ffi")
IMPLEMENTATIONS = TORCH + JAX
WRITTEN = {"rope_write": "kv", "gather": "strips", "scatter": "cache", "shape_logits": "logits"}
#: What a contract returns several of.
RESULTS = {"rms_norm": ("normed", "stream"), "logprobs": ("chosen", "ranks", "ids", "values")}
#: Contracts about logits, which are float32 whatever the type of the model.
OF_LOGITS = ("sample", "shape_logits", "logprobs")
BITS = {"float32": np.int32, "bfloat16": np.int16, "float16": np.int16}
#: float32 whatever the type of the model.
WIDE = ("cosines", "sines", "logits")

Answer = dict[str, np.ndarray[Any, Any]]


def computes(implementation: str, contract: str, dtype: str) -> bool:
    """No model on a CPU is computed in float16, so ours for CPUs refuse it, but where bits are only moved."""
    refuses = implementation in ("native", "ffi") and dtype == "float16"
    return not refuses or contract in ("gather", "scatter", *OF_LOGITS)


@dataclass(frozen=True)
class Sparse:
    """A page tensor [2, K, total, B, D] of zeros but for some pages [N] with values [2, K, N, B, D]."""

    total: int
    pages: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]


@dataclass(frozen=True)
class Call:
    """A contract, the type its tensors have, and its arguments: float64 arrays whose values that type can hold.

    Strips and their page tensors are integers of the type's size: any bits. strided: tensors are handed over with gaps
    between their rows. tuning: which of the configurations that Triton would choose from, or None: its choice.
    """

    contract: str
    dtype: str
    arguments: dict[str, Any]
    strided: bool = False
    tuning: int | None = None

    def changed(self, **arguments: Any) -> Call:
        return replace(self, arguments=self.arguments | arguments)


def oracle(call: Call) -> Answer:
    """What the reference answers, in float64."""
    arguments = copy.deepcopy(call.arguments)
    attention = call.contract.endswith("_attention")
    result = getattr(reference, "paged_attention" if attention else call.contract)(**arguments)
    return _answer(call, result, arguments)


def compute(call: Call, implementation: str, device: str) -> Answer:
    """What an implementation answers. Raises ValueError where it refuses."""
    if implementation in JAX:
        from tests.kernels import jax_calls

        return jax_calls.compute(call, implementation)
    import torch

    kernels = importlib.import_module(f"pyengine.kernels.torch.{implementation}")
    arguments = {
        name: _tensor(name, value, call, device) if isinstance(value, np.ndarray | Sparse) else value
        for name, value in call.arguments.items()
    }
    if isinstance(norms := arguments.get("norms"), tuple):
        arguments["norms"] = (*(_tensor("norms", weight, call, device) for weight in norms[:2]), norms[2])
    with torch.inference_mode(), _tuned(call):
        if call.contract.endswith("_attention"):
            query = arguments.pop("query")
            result = getattr(kernels, call.contract)(**arguments)(query, arguments["kv"])
        else:
            result = getattr(kernels, call.contract)(**arguments)
    return _answer(call, result, arguments)


@contextlib.contextmanager
def _tuned(call: Call) -> Iterator[None]:
    if call.tuning is None:
        yield
        return
    name = call.contract.removesuffix("_attention")
    tuner = getattr(importlib.import_module(f"pyengine.kernels.torch.triton.{name}"), f"_{name}")
    all_of_them = tuner.configs
    tuner.configs = [all_of_them[call.tuning]]
    try:
        yield
    finally:
        tuner.configs = all_of_them


def rounded(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The nearest values that `dtype` can hold."""
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return np.where(np.isnan(values), np.nan, ((bits + up) & np.uint32(0xFFFF0000)).view(np.float32)).astype(float)
    return values.astype(dtype).astype(np.float64)


def _tensor(name: str, value: np.ndarray[Any, Any] | Sparse, call: Call, device: str) -> torch.Tensor:
    import torch

    dtype = getattr(torch, "float32" if name in WIDE else call.dtype)
    if isinstance(value, Sparse):
        two, heads, _, *page = value.values.shape
        zeros = np.zeros((two, heads, value.total, *page), BITS[call.dtype])  # memory comes when it is used
        whole = torch.from_numpy(zeros).view(dtype).to(device)
        whole[:, :, value.pages] = torch.from_numpy(value.values).to(device, dtype)
        return whole
    if value.dtype == BITS[call.dtype]:
        tensor = torch.from_numpy(value.copy()).view(dtype)
    elif value.dtype == np.float64:
        tensor = torch.from_numpy(value.copy()).to(dtype)
    else:
        tensor = torch.from_numpy(value.copy())
    tensor = tensor.to(device)
    if call.strided and tensor.ndim > 1:
        wide = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] + 16), dtype=tensor.dtype, device=device)
        wide[..., : tensor.shape[-1]] = tensor
        tensor = wide[..., : tensor.shape[-1]]
    return tensor


def _answer(call: Call, result: Any, arguments: dict[str, Any]) -> Answer:
    answer = {}
    if (names := RESULTS.get(call.contract)) is not None:
        answer = dict(zip(names, result, strict=True))
    elif result is not None:
        answer = {"result": result}
    if (written := WRITTEN.get(call.contract)) is not None:
        answer[written] = arguments[written]
    return {name: _array(value, call) for name, value in answer.items()}


def _array(value: Any, call: Call) -> np.ndarray[Any, Any]:
    if isinstance(value, np.ndarray):
        return value
    if call.contract in ("gather", "scatter"):
        import torch

        bits: np.ndarray[Any, Any] = value.cpu().contiguous().view(getattr(torch, BITS[call.dtype].__name__)).numpy()
        return bits
    array: np.ndarray[Any, Any] = value.cpu().numpy() if not value.is_floating_point() else value.cpu().double().numpy()
    return array
