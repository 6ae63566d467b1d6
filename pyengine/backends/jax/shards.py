"""A checkpoint's tensors as parameters over a mesh, each device's part read by itself.

What all layers have stands one above the other, [layers, ...]: the model scans over it, and is compiled for one layer.
XLA's products are `x @ w` with w [in, out], the transpose of what files hold: on CPUs it reads rows of w one after the
other, and with 4 to 16 rows of x takes half the time so. Where ours multiply (`kernels/jax/ffi`), matrices are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import Mesh

from pyengine.backends.jax.mesh import BOTH, cut
from pyengine.checkpoint import Checkpoint, ModelConfig, Weights, rotary_tables
from pyengine.kernels.jax import ffi
from pyengine.kernels.jax.contract import Kernels
from pyengine.scheduler.types import DTYPE_BYTES

Array = npt.NDArray[Any]
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
LAYER = "model.layers.{}."
LARGE_PAGE = 2 << 20


def held(checkpoint: Checkpoint, dtype: str, kernels: Kernels) -> tuple[str, int]:
    """In which type matrices will be, and how many bytes are needed beside: the embedding is in `dtype`, and a head
    that is tied to it is stored again.
    """
    config = checkpoint.config
    matrices = "bfloat16" if kernels is ffi and checkpoint.in_bfloat16 else dtype
    each = DTYPE_BYTES[dtype] if config.tied_head else DTYPE_BYTES[dtype] - DTYPE_BYTES[matrices]
    return matrices, config.vocab_size * config.hidden_size * each


class Whole(nnx.Param[jax.Array]):
    """What a layer gets of all layers, not its own alone."""


class Product(nnx.Module):
    """x -> x @ W.T, W a layer's matrix."""

    def __init__(self, weights: nnx.Param[jax.Array], outputs: int, kernels: Kernels) -> None:
        """weights: of all layers; outputs: of one device."""
        self.weights = weights
        self.outputs = outputs
        self.kernels = kernels

    def __call__(self, x: jax.Array, layer: jax.Array | int, wide: bool = False) -> jax.Array:
        """[T, inputs] -> [T, outputs], in x's type or, if wide, in float32."""
        return self.kernels.multiply(x, self.weights[...], layer, self.outputs, wide)


class Shards:
    """Makes the parameters of one model. Names are those of a layer without "model.layers.0."."""

    def __init__(self, weights: Weights, config: ModelConfig, mesh: Mesh, dtype: str, kernels: Kernels) -> None:
        self.config = config
        self.kernels = kernels
        self.mesh = mesh
        self._weights = weights
        self._dtype = DTYPES[dtype]
        self._devices = mesh.size
        self._copies = mesh.shape["copy"]

    def vector(self, name: str) -> nnx.Param[jax.Array]:
        """[layers, width] on every device."""
        values = np.stack([self._get(LAYER.format(layer) + name) for layer in range(self.config.layers)])
        return nnx.Param(jax.device_put(values, cut(self.mesh)))

    def columns(self, *names: str) -> Product:
        """Matrices one above the other: each device has some outputs of each."""
        if self.kernels is ffi:
            return self._packed(self.config.layers, *(LAYER + name for name in names))
        weights = self.biases(*names)
        return Product(weights, weights.shape[-1] // self._devices, self.kernels)

    def biases(self, *names: str) -> nnx.Param[jax.Array]:
        """[layers, out], side by side; of matrices [layers, in, out]. Each device has some outputs of each."""
        widths = [self._weights.shape(LAYER.format(0) + name) for name in names]
        outs = [len(self._part(name, shape[0], 0)) for name, shape in zip(names, widths, strict=True)]
        inner = widths[0][1:]
        shape = (self.config.layers, *inner, sum(outs) * self._devices)

        def part(device: int) -> Array:
            values = np.empty((self.config.layers, *inner, sum(outs)), self._dtype)
            for layer in range(self.config.layers):
                ends = np.cumsum(outs)
                for name, width, end, out in zip(names, widths, ends, outs, strict=True):
                    rows = self._part(name, width[0], device)
                    values[layer, ..., end - out : end] = self._weights.get(LAYER.format(layer) + name, rows=rows).T
            return values

        return self._parts(shape, len(shape) - 1, part)

    def rows(self, name: str) -> Product:
        """Each device has some inputs; what they compute is to be summed."""
        if self.kernels is ffi:
            return self._packed(self.config.layers, LAYER + name)
        outputs, inputs = self._weights.shape(LAYER.format(0) + name)

        def part(device: int) -> Array:
            columns = self._part(name, inputs, device)
            values = np.empty((self.config.layers, len(columns), outputs), self._dtype)
            for layer in range(self.config.layers):
                values[layer] = self._weights.get(LAYER.format(layer) + name, columns=columns).T
            return values

        return Product(self._parts((self.config.layers, inputs, outputs), 1, part), outputs, self.kernels)

    def norm(self) -> nnx.Param[jax.Array]:
        return nnx.Param(jax.device_put(self._get("model.norm.weight"), cut(self.mesh)))

    def embedding(self) -> nnx.Param[jax.Array]:
        """[vocabulary, hidden]: each device has some tokens; zeros behind the last, so that all have as many."""
        return self._tokens("model.embed_tokens.weight", 0)

    def head(self) -> Product:
        """Of the vocabulary, cut as `embedding`. Tied, it is stored again: read as it is it takes twice as long."""
        name = "model.embed_tokens.weight" if self.config.tied_head else "lm_head.weight"
        if self.kernels is ffi:
            return self._packed(1, name)
        weights = self._tokens(name, 1)
        return Product(weights, weights.shape[1] // self._devices, self.kernels)

    def angles(self) -> tuple[nnx.Param[jax.Array], nnx.Param[jax.Array]]:
        """Cosines and sines, float32 [positions, head_dim / 2] on every device.

        Weights may be rounded, angles not: at position 8000 half of bf16's eight bits would be gone.
        """
        cosines, sines = (
            nnx.Param(jax.device_put(table, cut(self.mesh))) for table in rotary_tables(self.config, self._weights)
        )
        return cosines, sines

    def _tokens(self, name: str, axis: int) -> nnx.Param[jax.Array]:
        vocab, hidden = self._weights.shape(name)
        each = -(-vocab // self._devices)

        def part(device: int) -> Array:
            rows = range(min(device * each, vocab), min((device + 1) * each, vocab))
            values = np.zeros((each, hidden) if axis == 0 else (hidden, each), self._dtype)
            (values if axis == 0 else values.T)[: len(rows)] = self._weights.get(name, rows=rows)
            return values

        whole = each * self._devices
        return self._parts((whole, hidden) if axis == 0 else (hidden, whole), axis, part)

    def _packed(self, layers: int, *names: str) -> Product:
        """On the one device that there is then. Matrices that the checkpoint has in bfloat16 stay so, if those of all
        layers are: the same bits, half of the memory.
        """
        shapes = [self._weights.shape(name.format(0)) for name in names]
        outputs, inputs = sum(shape[0] for shape in shapes), shapes[0][1]
        stored = {self._weights.dtype(name.format(layer)) for layer in range(layers) for name in names}
        half = self._dtype == DTYPES["bfloat16"] or stored == {"bfloat16"}
        values = aligned((layers, *ffi.packed_shape(outputs, inputs, half)), np.uint32 if half else np.float32)
        for layer in range(layers):
            parts = [self._weights.get(name.format(layer)) for name in names]
            ffi.pack(
                [part if part.dtype in DTYPES.values() else part.astype(np.float32) for part in parts], values[layer]
            )
        weights = Whole(jax.device_put(values, cut(self.mesh)))
        return Product(weights, outputs, self.kernels)

    def _part(self, name: str, size: int, device: int) -> range:
        """Which outputs (or inputs) of a matrix a device has: KV heads are repeated along "copy"."""
        if ".k_proj." in name or ".v_proj." in name:
            each = size // (self._devices // self._copies)
            first = device // self._copies * each
        else:
            each = size // self._devices
            first = device * each
        return range(first, first + each)

    def _parts(self, shape: Sequence[int], axis: int, part: Callable[[int], Array]) -> nnx.Param[jax.Array]:
        sharding = cut(self.mesh, *(BOTH if index == axis else None for index in range(len(shape))))
        each = shape[axis] // self._devices

        def of_index(index: tuple[slice, ...] | None) -> Array:
            assert index is not None
            return part((index[axis].start or 0) // each)

        return nnx.Param(jax.make_array_from_callback(tuple(shape), sharding, of_index))

    def _get(self, name: str) -> Array:
        return self._weights.get(name).astype(self._dtype)


def aligned(shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
    """Memory that JAX takes as it is: it would copy what does not lie at a multiple of 64. At one of 2 MiB the system
    can give large pages, and streams of weights miss no address translations.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + LARGE_PAGE, np.uint8)
    first = -memory.ctypes.data % LARGE_PAGE
    return memory[first : first + size].view(dtype).reshape(shape)
