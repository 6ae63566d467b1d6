"""What a layer of a model gets, and must be able to do. The layers themselves: models/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pyengine.backends.torch.weights import Reader
from pyengine.checkpoint import ModelConfig
from pyengine.kernels.torch.contract import Attend, Kernels


@dataclass(frozen=True)
class Step:
    """What all layers of one forward pass share.

    cosines, sines: float32 [T, D / 2], of each token's position; slots: int64 [T], where its KV is written. attend:
    attention as it was planned for these sequences, within the model's window if it has one.
    """

    kernels: Kernels
    cosines: torch.Tensor
    sines: torch.Tensor
    slots: torch.Tensor
    attend: Attend


class Layer(Protocol):
    """One layer's weights and what they compute.

    x is what the layer before has computed and not yet added to the residual stream, as norms add: the first layer gets
    the embedding and no stream.
    """

    def __init__(self, read: Reader, config: ModelConfig) -> None:
        """read: the tensors below "model.layers.N."."""
        ...

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [T, hidden] -> the next layer's. kv: [2, K, pages, page_tokens, D], written at step.slots."""
        ...
