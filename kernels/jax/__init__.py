"""JAX kernels: page tensor and attention over it. `import jax` is the framework, absolute, as everywhere."""

import jax
from pyengine.kernels.inputs import Draws, Sequences, Shapes

# What the host tells of a step is an argument of jitted functions.
jax.tree_util.register_dataclass(Sequences, ["rows", "lengths", "tables"], [])
jax.tree_util.register_dataclass(Draws, ["temperature", "min_p", "top_k", "top_p", "uniform"], [])
jax.tree_util.register_dataclass(Shapes, ["seen_rows", "seen", "factors", "rows", "ids", "add", "masked", "masks"], [])
