"""How positions turn queries and keys: the rotary frequencies of a checkpoint, the same floats for every framework."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from pyengine.checkpoint.errors import ModelError

if TYPE_CHECKING:
    from pyengine.checkpoint.config import ModelConfig
    from pyengine.checkpoint.weights import Weights

F32 = npt.NDArray[np.float32]


class RopeScaling(msgspec.Struct, frozen=True):
    """How rotary frequencies differ from theta ** (-2i / head_dim).

    kind: "default", "linear" (all divided by `factor`), "llama3" (low ones divided by `factor`, a ramp between the two
    wavelength bounds; Llama 3.1), or "factors" (divided one by one by the tensor `rope_factors.weight` of the
    checkpoint, as GGUF files spell llama3).
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


def parse_rope(rope: dict[str, Any]) -> RopeScaling:
    """Hugging Face's `rope_parameters`. Raises ModelError, KeyError where a number is missing."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind=kind, factor=float(rope["factor"]))
    if kind == "factors":
        return RopeScaling(kind=kind)
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    raise ModelError(f"config.json: rope type {kind!r} is not supported; supported: default, linear, llama3")


def rotary_tables(config: ModelConfig, weights: Weights) -> tuple[F32, F32]:
    """Cosines and sines of every position's angles, float32 [max_positions, head_dim / 2] each.

    One table for all frameworks: their own cosines differ in the last bit.
    """
    name = "rope_factors.weight"
    factors = weights.get(name).astype(np.float32) if name in weights else None
    # The angle is rounded to float32, as where models are trained; its cosine is then the nearest float32.
    angles = np.outer(np.arange(config.max_positions, dtype=np.float32), inverse_frequencies(config, factors))
    cosines, sines = np.empty_like(angles), np.empty_like(angles)
    for first in range(0, len(angles), 4096):  # in double, but never all of it
        rows = slice(first, first + 4096)
        exact = angles[rows].astype(np.float64)
        cosines[rows], sines[rows] = np.cos(exact), np.sin(exact)
    return cosines, sines


def inverse_frequencies(config: ModelConfig, factors: F32 | None = None) -> F32:
    """Rotary angle per position of each pair of dimensions, float32 [head_dim / 2].

    factors: the checkpoint's `rope_factors.weight`, for scaling "factors". Source of "llama3": its release code.
    """
    # numpy's float32 power is off by another bit or two on every kind of processor, and a position multiplies that.
    pairs = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies: F32 = (config.rope_theta**-pairs).astype(np.float32)
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        frequencies = frequencies / np.float32(scaling.factor)
    elif scaling.kind == "factors":
        if factors is None:
            raise ModelError("the checkpoint scales rotary frequencies by a tensor, which is missing")
        frequencies = frequencies / factors
    elif scaling.kind == "llama3":
        turns = scaling.original_max_positions * frequencies / np.float32(2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 0: divided by factor, 1: as it is
        frequencies = (1 - keep) * frequencies / scaling.factor + keep * frequencies
    return frequencies.astype(np.float32)
