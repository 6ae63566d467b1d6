"""The PyTorch backend."""

from pyengine.backends.torch.backend import TorchBackend
from pyengine.backends.torch.parallel import ParallelTorchBackend

__all__ = ["ParallelTorchBackend", "TorchBackend"]
