"""PyTorch kernels: page tensor and attention over it. `import torch` is the framework, absolute, as everywhere."""
