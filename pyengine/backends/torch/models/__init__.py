"""The layer of each architecture, by the name in `ModelConfig.architecture`. How to add one: docs/backends.md."""

from pyengine.backends.torch.layer import Layer
from pyengine.backends.torch.models.llama import LlamaLayer
from pyengine.backends.torch.models.mistral import MistralLayer
from pyengine.backends.torch.models.qwen2 import Qwen2Layer
from pyengine.backends.torch.models.qwen3 import Qwen3Layer

MODELS: dict[str, type[Layer]] = {
    "llama": LlamaLayer,
    "mistral": MistralLayer,
    "qwen2": Qwen2Layer,
    "qwen3": Qwen3Layer,
}
