"""The checkpoint's numpy arrays as tensors and as matrix products."""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt
import torch

from pyengine.backends.torch.part import Group
from pyengine.checkpoint import Weights
from pyengine.kernels.torch.choice import keeps
from pyengine.kernels.torch.linear import Linear, Scratch


class Reader:
    """Tensors below one prefix of their names, in the types and on the device of the model: this rank's part."""

    def __init__(
        self, weights: Weights, dtype: torch.dtype, working: torch.dtype, device: torch.device, group: Group
    ) -> None:
        """dtype: of matrices; working: of what belongs to activations (norms, biases), see `choice.working_type`."""
        self._weights = weights
        self._dtype = dtype
        self._working = working
        self._device = device
        self._group = group
        self._scratch = Scratch()
        self._prefix = ""

    def below(self, prefix: str) -> Reader:
        below = copy.copy(self)
        below._prefix += prefix
        return below

    def tensor(self, name: str) -> torch.Tensor:
        """Where type and device are the file's, processes share its memory."""
        return self._read(name).to(self._device, self._working)

    def matrix(self, name: str) -> torch.Tensor:
        """In the type of the model's matrices, or in the file's where that loses nothing and is read faster."""
        matrix = self._read(name)
        return matrix.to(self._device, matrix.dtype if keeps(self._device, self._dtype, matrix.dtype) else self._dtype)

    def linear(self, *names: str) -> Linear | Summed:
        """The named projections, one below the other as one product."""
        weights = [f"{name}.weight" for name in names]
        matrices = [self.matrix(weight) for weight in weights]
        if len({matrix.dtype for matrix in matrices}) > 1:
            matrices = [matrix.to(self._dtype) for matrix in matrices]
        product = Linear(*matrices, scratch=self._scratch)
        cut = [self._group.part.columns(self._prefix + weight) is not None for weight in weights]
        assert len(set(cut)) == 1, "one product is summed over all ranks, or not at all"
        return Summed(product, self._group) if cut[0] else product

    def _read(self, name: str) -> torch.Tensor:
        name, part = self._prefix + name, self._group.part
        values = self._weights.get(name, part.rows(name), part.columns(name))
        return as_tensor(values, self._weights.dtype(name))


class Summed:
    """A product with weights of which each rank has some columns."""

    def __init__(self, product: Linear, group: Group) -> None:
        self._product = product
        self._group = group

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """As `Linear`."""
        return self._group.sum(self._product(x, out))


def as_tensor(values: npt.NDArray[np.generic], dtype: str) -> torch.Tensor:
    """The same memory. dtype: as `Weights.dtype` names it."""
    if dtype == "bfloat16":  # numpy's spelling of it depends on what is installed, its bits do not
        return torch.from_numpy(values.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(values)
