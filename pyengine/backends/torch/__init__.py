"""The PyTorch backend."""

from pyengine.backends.torch.backend import TorchBackend

__all__ = ["TorchBackend"]
