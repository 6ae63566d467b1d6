"""The checkpoint's numpy arrays as tensors and as matrix products."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pyengine.checkpoint import Weights
from pyengine.kernels.torch.linear import Linear


class Reader:
    """Tensors below one prefix of their names, in the type and on the device of the model."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device, prefix: str = "") -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._prefix = prefix

    def below(self, prefix: str) -> Reader:
        return Reader(self._weights, self._dtype, self._device, self._prefix + prefix)

    def tensor(self, name: str) -> torch.Tensor:
        """Where type and device are the file's, processes share its memory."""
        name = self._prefix + name
        return as_tensor(self._weights.get(name), self._weights.dtype(name)).to(self._device, self._dtype)

    def linear(self, *names: str) -> Linear:
        """The named projections, one below the other as one product."""
        return Linear(*(self.tensor(f"{name}.weight") for name in names))


def as_tensor(values: npt.NDArray[np.generic], dtype: str) -> torch.Tensor:
    """The same memory. dtype: as `Weights.dtype` names it."""
    if dtype == "bfloat16":  # numpy's spelling of it depends on what is installed, its bits do not
        return torch.from_numpy(values.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(values)
