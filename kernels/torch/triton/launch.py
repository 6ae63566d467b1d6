"""What all launches share: configurations, checks of strides, and the host's arrays on the device."""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton

import torch
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.torch.contract import Tables
from pyengine.kernels.torch.upload import upload

#: In the interpreter one program runs after the other: what is asked for there is that every path is taken.
INTERPRETED_PROGRAMS = 16


def interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def fitting(configs: list[Any], _: dict[str, Any], **arguments: Any) -> list[Any]:
    """`early_config_prune`: what fits into registers. In the interpreter one, as nothing can be timed there."""
    if interpreted():
        return configs[:1]
    if arguments["PRECISION"] == "ieee":  # float32 by plain multiplications: larger tiles spill thousands of bytes
        return [min(configs, key=lambda config: (config.kwargs.get("BLOCK_M", 0), config.kwargs["BLOCK_N"]))]
    # The float32 accumulator may have 128 of a thread's 255 registers.
    rows = arguments.get("BLOCK_M", 0)
    return [
        config
        for config in configs
        if config.kwargs.get("BLOCK_M", rows) * arguments["PADDED_DIM"] <= 128 * 32 * config.num_warps
    ]


def dense(**tensors: torch.Tensor | None) -> None:
    """Raises ValueError unless the last axis of each has no gaps."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be dense in its last axis, strides are {tensor.stride()}")


def on_device(sequences: Sequences, device: torch.device) -> Tables:
    """By one transfer."""
    count = len(sequences)
    whole = np.concatenate([sequences.rows, sequences.lengths, sequences.tables.reshape(-1)])
    together = upload(whole, device)
    rows, lengths, tables = torch.split(together, [count + 1, count, sequences.tables.size])
    return Tables(rows, lengths, tables.view(sequences.tables.shape))


def precision(dtype: torch.dtype) -> str:
    """How tensor cores multiply float32: never in TF32, which keeps ten bits."""
    return "ieee" if dtype == torch.float32 else "tf32"


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
