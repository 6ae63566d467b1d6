"""The checkpoint's numpy arrays as tensors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def as_tensor(values: npt.NDArray[np.generic], dtype: str) -> torch.Tensor:
    """The same memory. dtype: as `Weights.dtype` names it."""
    if dtype == "bfloat16":  # numpy's spelling of it depends on what is installed, its bits do not
        return torch.from_numpy(values.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(values)
