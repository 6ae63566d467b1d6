"""The checkpoint's numpy arrays as tensors and as matrix products."""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt
import torch

from pyengine.checkpoint import Weights
from pyengine.kernels.torch.choice import keeps
from pyengine.kernels.torch.linear import Linear, Scratch


class Reader:
    """Tensors below one prefix of their names, in the types and on the device of the model."""

    def __init__(self, weights: Weights, dtype: torch.dtype, working: torch.dtype, device: torch.device) -> None:
        """dtype: of matrices; working: of what belongs to activations (norms, biases), see `choice.working_type`."""
        self._weights = weights
        self._dtype = dtype
        self._working = working
        self._device = device
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

    def linear(self, *names: str) -> Linear:
        """The named projections, one below the other as one product."""
        matrices = [self.matrix(f"{name}.weight") for name in names]
        if len({matrix.dtype for matrix in matrices}) > 1:
            matrices = [matrix.to(self._dtype) for matrix in matrices]
        return Linear(*matrices, scratch=self._scratch)

    def _read(self, name: str) -> torch.Tensor:
        name = self._prefix + name
        return as_tensor(self._weights.get(name), self._weights.dtype(name))


def as_tensor(values: npt.NDArray[np.generic], dtype: str) -> torch.Tensor:
    """The same memory. dtype: as `Weights.dtype` names it."""
    if dtype == "bfloat16":  # numpy's spelling of it depends on what is installed, its bits do not
        return torch.from_numpy(values.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(values)
