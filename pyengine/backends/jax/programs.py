"""What XLA compiles for one model: a program for each shape of a call, and for each number of pages that is copied.

All are functions of arrays over a mesh, run on every device with its part (`shard_map`). The page tensor is donated:
what writes into it gives it back in the same memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jax.stages import Compiled, Wrapped

from pyengine.backend import NOTHING_LEFT
from pyengine.backends.jax.buckets import Shape
from pyengine.backends.jax.mesh import KV
from pyengine.backends.jax.models.decoder import Batch, Decoder
from pyengine.kernels.inputs import Draws, Shapes
from pyengine.kernels.jax.contract import Kernels
from pyengine.kernels.jax.padding import pad_draws
from pyengine.sampling import draws
from pyengine.scheduler.types import MOST_LOGPROBS

#: The page tensor [layers, 2, K, P, B, D] and strips [N, layers, 2, K, B, D] are cut by KV head.
CACHE, STRIPS, EVERYWHERE = (
    PartitionSpec(*axes)  # type: ignore[no-untyped-call]
    for axes in ((None, None, KV), (None, None, None, KV), ())
)
#: Pages of one copy. More are several copies, fewer are padded to the next. Of 64, strips of SmolLM2 (47 MB) were
#: memory that the system gave and took at each copy: 2 GB/s on a CPU; of 16, 10 to 20 GB/s.
COPIES = (1, 4, 16)


class Programs:
    """Those that one backend has used, compiled when they are first needed."""

    def __init__(
        self, model: Decoder, kernels: Kernels, mesh: Mesh, alone: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """alone: held while one compiles, so that of two workers the other finds what this one has left."""
        graph, self.state = nnx.split(model)
        specs = jax.tree.map(lambda array: array.sharding.spec, self.state)
        leaves, structure = jax.tree.flatten(specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
        module: Any = kernels  # a module, or what else can be a key
        self._make = functools.partial(_function, graph, module, mesh, structure, tuple(leaves))
        self._alone = alone
        self._compiled: dict[tuple[str, Shape | int], Compiled] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def step(
        self, cache: jax.Array, shape: Shape, batch: Batch, before: jax.Array, chosen: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(chosen with the likeliest tokens in their places, logits float32 [S, vocab], cache).

        before, chosen: int32 [slices], the tokens of the step before and of this one.
        """
        results: tuple[jax.Array, jax.Array, jax.Array]
        results = self._run("step", shape, self.state, cache, batch, before, chosen)
        return results

    def sample(self, logits: jax.Array, draws: Any, places: Any, chosen: jax.Array) -> jax.Array:
        """Chosen with drawn tokens. A program of its own: as part of every step it would double the time to compile."""
        tokens: jax.Array = self._run("sample", len(logits), logits, draws, places, chosen)
        return tokens

    def shape(self, logits: jax.Array, shapes: Shapes) -> jax.Array:
        """Other logits: those as the model made them may still be asked for."""
        shaped: jax.Array = self._run("shape", len(logits), logits, shapes)
        return shaped

    def logprobs(
        self, logits: jax.Array, places: Any, chosen: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Of each row, for the token in its place; as the kernel has them, for MOST_LOGPROBS tokens."""
        told: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
        told = self._run("logprobs", len(logits), logits, places, chosen)
        return told

    def gather(self, cache: jax.Array, pages: Any) -> jax.Array:
        """pages: int32 [N], N of COPIES. Strips [N, layers, 2, K, B, D]."""
        strips: jax.Array = self._run("gather", len(pages), cache, pages)
        return strips

    def scatter(self, cache: jax.Array, pages: Any, strips: Any) -> jax.Array:
        """The cache."""
        written: jax.Array = self._run("scatter", len(pages), cache, pages, strips)
        return written

    def _run(self, what: str, shape: Shape | int, *arguments: Any) -> Any:
        """Compiled for its shape by hand and not by a call: arguments of another are an error, not a new program."""
        program = self._compiled.get((what, shape))
        if program is None:
            decoding = isinstance(shape, Shape) and shape.decoding
            with self._alone():
                program = self._make(what, decoding).lower(*arguments).compile()
            self._compiled[what, shape] = program
        return program(*arguments)


@functools.lru_cache(maxsize=64)
def _function(
    graph: nnx.GraphDef[Decoder],
    kernels: Kernels,
    mesh: Mesh,
    structure: jax.tree_util.PyTreeDef,
    leaves: tuple[PartitionSpec, ...],
    what: str,
    decoding: bool,
) -> Wrapped:
    """One of the functions, traced once for all models of a process that are alike."""
    weights = jax.tree.unflatten(structure, leaves)

    def sample(logits: jax.Array, draws: Draws, places: jax.Array, chosen: jax.Array) -> jax.Array:
        tokens = kernels.sample(logits, draws)
        tokens = jnp.where((tokens < 0) & (logits.max(axis=-1) == -jnp.inf), NOTHING_LEFT, tokens)
        return chosen.at[places].set(tokens, mode="drop")

    def logprobs(logits: jax.Array, places: jax.Array, chosen: jax.Array) -> tuple[jax.Array, ...]:
        tokens = chosen.at[places].get(mode="fill", fill_value=0)
        return kernels.logprobs(logits, tokens, min(MOST_LOGPROBS, logits.shape[-1]))

    def step(
        state: nnx.State[Any, Any], cache: jax.Array, batch: Batch, before: jax.Array, chosen: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        # float32 is float32: accelerators multiply it in fewer bits unless they are told. Nothing changes for bfloat16.
        with jax.default_matmul_precision("highest"):
            logits, cache = nnx.merge(graph, state)(batch, before, cache, decoding=decoding)
        greedy = pad_draws(draws([], []), len(logits))
        return sample(logits, greedy, batch.places, chosen), logits, cache

    if what == "step":
        return _over(mesh, step, (weights, CACHE, *[EVERYWHERE] * 3), (EVERYWHERE, EVERYWHERE, CACHE), donated=1)
    if what == "sample":
        return _over(mesh, sample, (EVERYWHERE,) * 4, EVERYWHERE)
    if what == "shape":
        return _over(mesh, kernels.shape_logits, (EVERYWHERE,) * 2, EVERYWHERE)
    if what == "logprobs":
        return _over(mesh, logprobs, (EVERYWHERE,) * 3, (EVERYWHERE,) * 4)
    if what == "gather":
        return _over(mesh, kernels.gather, (CACHE, EVERYWHERE), STRIPS)
    return _over(mesh, kernels.scatter, (CACHE, EVERYWHERE, STRIPS), CACHE, donated=0)


def _over(mesh: Mesh, function: Callable[..., Any], inputs: Any, outputs: Any, donated: int | None = None) -> Wrapped:
    # What is said to be the same on all devices is so by the kernels and the sums; JAX cannot see it through loops.
    mapped = jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    return jax.jit(mapped, donate_argnums=() if donated is None else donated)
