"""A model's files and what they say, for every framework: configuration, weights, tokenizer."""

from pyengine.checkpoint.architectures import ARCHITECTURES
from pyengine.checkpoint.config import ModelConfig
from pyengine.checkpoint.errors import ModelError
from pyengine.checkpoint.folder import Checkpoint
from pyengine.checkpoint.rope import RopeScaling, inverse_frequencies, rotary_tables
from pyengine.checkpoint.sources import SMOLLM2, resolve
from pyengine.checkpoint.weights import Weights

__all__ = [
    "ARCHITECTURES",
    "SMOLLM2",
    "Checkpoint",
    "ModelConfig",
    "ModelError",
    "RopeScaling",
    "Weights",
    "inverse_frequencies",
    "resolve",
    "rotary_tables",
]
