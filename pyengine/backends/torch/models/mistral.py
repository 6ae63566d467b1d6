"""Mistral: Llama's layer, in which each token sees the last `window` tokens only.

The window is a part of the plan of attention, `step.attend`. Later releases have none and are Llama's in all but name.
"""

from __future__ import annotations

from pyengine.backends.torch.models.llama import LlamaLayer


class MistralLayer(LlamaLayer):
    """The same tensors, by the same names."""
