"""The host's numbers on the device, without waiting for what is queued there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import torch


def upload(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """values, in the type they have, as a tensor there; on a CPU the tensor is `values` itself.

    From pageable memory PyTorch waits for the stream, and so for the step under way. Pinned memory comes from its
    caching allocator, which hands it out again only when the copy is over.
    """
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
