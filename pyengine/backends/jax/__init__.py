"""The JAX backend."""

from pyengine.backends.jax.backend import JaxBackend

__all__ = ["JaxBackend"]
