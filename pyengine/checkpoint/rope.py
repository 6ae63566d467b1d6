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
    wavelength bounds; Llama 3.1), "yarn" (low ones divided by `factor`, a ramp between the dimensions that turn
    `beta_fast` and `beta_slow` times within the original length; cosines and sines times `attention_factor`), or
    "factors" (divided one by one by the tensor `rope_factors.weight` of the checkpoint, as GGUF files spell llama3).
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


def parse_rope(rope: dict[str, Any]) -> RopeScaling:
    """Hugging Face's `rope_parameters`. Raises ModelError, KeyError where a number is missing."""
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("config.json sets 'partial_rotary_factor', which is not supported; use another checkpoint")
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
    if kind == "yarn":
        for key in ("mscale", "mscale_all_dim"):
            if rope.get(key):
                raise ModelError(f"config.json sets {key!r} for yarn, which is not supported; use another checkpoint")
        if not rope.get("truncate", True):
            raise ModelError("config.json turns off yarn's 'truncate', which is not supported; use another checkpoint")
        factor = float(rope["factor"])
        return RopeScaling(
            kind=kind,
            factor=factor,
            original_max_positions=int(rope["original_max_position_embeddings"]),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            attention_factor=float(rope.get("attention_factor") or 0.1 * math.log(max(factor, 1.0)) + 1.0),
        )
    raise ModelError(f"config.json: rope type {kind!r} is not supported; supported: default, linear, llama3, yarn")


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
    scale = np.float32(config.rope_scaling.attention_factor)
    return (cosines, sines) if scale == 1 else (cosines * scale, sines * scale)


def inverse_frequencies(config: ModelConfig, factors: F32 | None = None) -> F32:
    """Rotary angle per position of each pair of dimensions, float32 [head_dim / 2].

    factors: the checkpoint's `rope_factors.weight`, for scaling "factors". Source of "llama3": its release code; of
    "yarn": Peng et al., YaRN, 2023, section 3.2.
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
    elif scaling.kind == "yarn":
        low, high = (_dimension(config, turns) for turns in (scaling.beta_fast, scaling.beta_slow))
        low, high = max(math.floor(low), 0), min(math.ceil(high), config.head_dim - 1)
        ramp = (np.arange(config.head_dim // 2) - low) / max(high - low, 0.001)
        keep = 1 - np.clip(ramp, 0.0, 1.0).astype(np.float32)
        frequencies = (1 - keep) * frequencies / np.float32(scaling.factor) + keep * frequencies
    return frequencies.astype(np.float32)


def _dimension(config: ModelConfig, turns: float) -> float:
    """The pair of dimensions that turns so often within the original context length; between two pairs, a fraction."""
    length = config.rope_scaling.original_max_positions
    return config.head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))
