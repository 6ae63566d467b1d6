"""The tensors of a checkpoint as numpy arrays over its mapped files, whole or in part, for any framework.

Written here, as the safetensors package copies what it gives to numpy and shares nothing between processes. Source of
the format: the package's README (eight bytes little-endian: length of the header; the header, JSON; the data).
"""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from pyengine.checkpoint.errors import ModelError

if TYPE_CHECKING:
    from pyengine.checkpoint.folder import Checkpoint

Array = npt.NDArray[Any]

#: numpy has no bfloat16: it is `ml_dtypes.bfloat16` where that is installed (jax brings it), else the bits in uint16.
DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "F32": ("float32", np.dtype("<f4")),
    "F16": ("float16", np.dtype("<f2")),
    "BF16": ("bfloat16", np.dtype("<u2")),
}
#: By type: its bits without the sign, and the smallest of those that is no finite number.
_NOT_FINITE = {"float32": (0x7FFFFFFF, 0x7F800000), "float16": (0x7FFF, 0x7C00), "bfloat16": (0x7FFF, 0x7F80)}
_CHECKED_AT_ONCE = 1 << 16  # elements: 256 KiB, so that the second look at them is into the cache

try:
    import ml_dtypes

    DTYPES["BF16"] = ("bfloat16", np.dtype(ml_dtypes.bfloat16))
except ImportError:
    pass


class Tensor(msgspec.Struct, frozen=True):
    """One tensor's place: in `path`, from byte `start` on. dtype: as safetensors spells it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


def list_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, from its header. Raises ModelError unless the file is whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise ValueError(f"{size} bytes, the header alone has {length}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if entry["dtype"] in DTYPES and end - start != math.prod(shape) * DTYPES[entry["dtype"]][1].itemsize:
                raise ValueError(f"{name!r}: {list(shape)} of {entry['dtype']} in {end - start} bytes")
            if not 0 <= start <= end <= size - 8 - length:
                raise ValueError(f"{size} bytes, at least {8 + length + end} are expected")
            tensors[name] = Tensor(path, entry["dtype"], shape, 8 + length + start)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not a whole safetensors file ({error}); get it again") from error
    return tensors


class Weights:
    """The tensors of one checkpoint. What `get` returns keeps the mapping alive."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Maps the files, privately: processes share their memory as long as nobody writes to it."""
        self._tensors = checkpoint.weights
        self._mappings: dict[Path, mmap.mmap] = {}
        for path in checkpoint.files:
            with path.open("rb") as file:
                self._mappings[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def dtype(self, name: str) -> str:
        """ "float32", "float16" or "bfloat16", as in `KvGroup`."""
        return DTYPES[self._tensors[name].dtype][0]

    def shape(self, name: str) -> tuple[int, ...]:
        """[out, in], or [out]."""
        return self._tensors[name].shape

    def get(self, name: str, rows: range | None = None, columns: range | None = None) -> Array:
        """One tensor, or rows (first axis) and columns (second axis) of it: a view of the mapped file.

        Raises ModelError where it has NaN or infinity: in a product they would be in every token.
        """
        tensor = self._tensors[name]
        dtype, numpy_dtype = DTYPES[tensor.dtype]
        mapping = self._mappings[tensor.path]
        values: Array = np.frombuffer(mapping, numpy_dtype, math.prod(tensor.shape), tensor.start).reshape(tensor.shape)
        if rows is not None:
            values = values[_slice(rows, tensor.shape[0])]
        if columns is not None:
            values = values[:, _slice(columns, tensor.shape[1])]
        if not values.flags.aligned:  # old writers did not pad the header
            values = values.copy()
        if not _is_finite(values, dtype):
            raise ModelError(
                f"{tensor.path}: tensor {name!r} has values that are NaN or infinite; the checkpoint is damaged, "
                "get it again"
            )
        return values


def _slice(part: range, size: int) -> slice:
    if part.step != 1 or not 0 <= part.start <= part.stop <= size:
        raise ValueError(f"{part} is not a part of {size}")
    return slice(part.start, part.stop)


def _is_finite(values: Array, dtype: str) -> bool:
    """By the bits: one pass over memory, and no type of its own for bfloat16."""
    mask, limit = _NOT_FINITE[dtype]
    bits: npt.NDArray[np.unsignedinteger[Any]] = values.view(np.uint32 if values.itemsize == 4 else np.uint16)
    step = max(1, _CHECKED_AT_ONCE // max(1, math.prod(bits.shape[1:])))
    return all((bits[first : first + step] & mask).max(initial=0) < limit for first in range(0, len(bits), step))
