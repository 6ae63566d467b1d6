"""`Backend` on JAX: turns the slices of a step into calls of compiled programs over a mesh of devices.

fp32 on the CPU, where it is tested; bf16 on TPUs and GPUs, on which it has never been run.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from pyengine.backend import U8, Slice
from pyengine.backends.jax.buckets import Buckets, Call
from pyengine.backends.jax.mesh import make_mesh
from pyengine.backends.jax.models import MODELS
from pyengine.backends.jax.models.decoder import Batch
from pyengine.backends.jax.programs import COPIES, Programs, empty_pages
from pyengine.backends.jax.shards import DTYPES, Shards
from pyengine.checkpoint import Checkpoint, Weights, resolve
from pyengine.checkpoint.files import locked
from pyengine.kernels.jax.choice import choose
from pyengine.scheduler.types import BLOCK_TOKENS, KvGroup, KvSpec, Namespace

logger = logging.getLogger(__name__)

#: What a step may compute until `warm_up` says it: the defaults of a worker. More is cut into several calls.
MAX_TOKENS, MAX_SEQUENCES = 512, 32


class JaxBackend:
    """One model over one or more devices, and its pages."""

    def __init__(
        self, checkpoint: Checkpoint, *, compiled: Path, block_tokens: int = BLOCK_TOKENS, tp: int = 1
    ) -> None:
        """Loads the weights. compiled: folder where programs are kept; tp: devices that share the model.

        Raises ModelError, MemoryError.
        """
        config = checkpoint.config
        self._mesh = make_mesh(config, tp)
        self._on_host = jax.devices()[0].platform == "cpu"
        dtype = "float32" if self._on_host else "bfloat16"
        kernels = choose(jax.devices()[0], dtype, config.head_dim)
        model = MODELS[config.architecture](Shards(Weights(checkpoint), config, self._mesh, dtype), kernels)
        self._programs = Programs(model, kernels, self._mesh, _kept(compiled))
        self._cache: jax.Array | None = None
        group = KvGroup(
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            window=config.window,
        )
        self.namespace = Namespace(
            weights=checkpoint.weights_digest,
            config=config.digest(),
            compute_dtype=dtype,
            weight_quantization="none",
            kv=KvSpec(groups=(group,), block_tokens=block_tokens),
        )
        self.model = checkpoint.name
        self.tokenizer = str(checkpoint.folder)
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.eos_token_ids = checkpoint.eos_token_ids

    @classmethod
    def load(cls, model: str, *, cache: Path, tp: int = 1) -> JaxBackend:
        """Resolves and loads a model (see `checkpoint.resolve`). Raises ModelError."""
        return cls(resolve(model, cache), compiled=cache / "xla", tp=tp)

    @property
    def compilations(self) -> int:
        """Programs compiled so far, `programs_at_most` at the most."""
        return len(self._programs)

    @property
    def programs_at_most(self) -> int:
        """One for each shape of a call, of rows that are drawn from, and of a copy in each direction."""
        shapes = self._buckets.shapes
        return len(shapes) + len({shape.sequences for shape in shapes}) + 2 * len(COPIES)

    def allocate(self, pages: int) -> None:
        if self._cache is not None:
            raise RuntimeError("pages are allocated once")
        spec = self.namespace.kv
        group = spec.groups[0]
        shape = (group.layers, 2, group.kv_heads, pages, spec.block_tokens, group.head_dim)
        self._cache = empty_pages(self._mesh, shape, group.dtype)
        self._set_buckets(MAX_TOKENS, MAX_SEQUENCES)

    def warm_up(self, max_tokens: int, max_sequences: int) -> None:
        """Compiles every program by running it once, on rows and pages that are nobody's."""
        self._set_buckets(max_tokens, max_sequences)
        began = time.perf_counter()
        for shape in self._buckets.shapes:
            call = self._buckets.empty(shape)
            self._programs.sample(self._run(call)[1], call.draws)
        for count in COPIES:
            nowhere = np.full(count, -1, np.int32)
            strips = self._programs.gather(self._pages, nowhere)
            self._cache = self._programs.scatter(self._pages, nowhere, np.asarray(strips))
        logger.info("compiled %d programs in %.1f s", self.compilations, time.perf_counter() - began)

    def execute(self, slices: list[Slice]) -> list[int]:
        chosen = [-1] * len(slices)
        # All calls are queued before the first answer is waited for.
        queued = []
        for call in self._buckets.calls(slices):
            tokens, logits = self._run(call)
            if call.draws.temperature.any():
                tokens = self._programs.sample(logits, call.draws)
            if call.sampled:
                tokens.copy_to_host_async()
                queued.append((call.sampled, tokens))
        for sampled, tokens in queued:
            answers = np.asarray(tokens)
            for row, index in sampled:
                chosen[index] = int(answers[row])
                if chosen[index] < 0:
                    raise ArithmeticError("the model computed logits that are not finite")
        return chosen

    def logits(self, slices: list[Slice]) -> npt.NDArray[np.float32]:
        """As `execute`, but returns the float32 logits [sampled slices, vocab], in slice order, for tests."""
        rows: dict[int, npt.NDArray[np.float32]] = {}
        for call in self._buckets.calls(slices):
            logits = np.asarray(self._run(call)[1])
            rows |= {index: logits[row] for row, index in call.sampled}
        return np.stack([rows[index] for index in sorted(rows)])

    def read_pages(self, pages: list[int], out: U8) -> None:
        blocks = self._blocks(out)
        behind: list[tuple[int, int, jax.Array]] = []
        for first, ids in _copies(pages):
            strips = self._programs.gather(self._pages, ids)
            for shard in strips.addressable_shards:
                if shard.replica_id == 0:
                    shard.data.copy_to_host_async()
            behind.append((first, min(len(ids), len(pages) - first), strips))
            if len(behind) > 1:  # one is on its way while the one before is copied
                _store(blocks, *behind.pop(0))
        for copy in behind:
            _store(blocks, *copy)

    def write_pages(self, pages: list[int], strips: U8) -> None:
        blocks = self._blocks(strips)
        for first, ids in _copies(pages):
            part = blocks[first : first + len(ids)]
            if len(part) < len(ids):
                part = np.concatenate([part, np.zeros((len(ids) - len(part), *part.shape[1:]), part.dtype)])
            self._cache = self._programs.scatter(self._pages, ids, part)
        self._pages.block_until_ready()  # the strips are the caller's, and may be read until then

    def close(self) -> None:
        self._cache = None

    @property
    def _pages(self) -> jax.Array:
        if self._cache is None:
            raise RuntimeError("no pages: call allocate first, and nothing after close")
        return self._cache

    def _set_buckets(self, max_tokens: int, max_sequences: int) -> None:
        pages, block_tokens = self._pages.shape[3], self.namespace.kv.block_tokens
        width = min(pages, -(-self.max_positions // block_tokens))
        self._buckets = Buckets(max_tokens, max_sequences, width, pages, block_tokens)

    def _run(self, call: Call) -> tuple[jax.Array, jax.Array]:
        """(the likeliest tokens [S], logits [S, vocab])."""
        arrays: tuple[Any, ...] = (call.tokens, call.positions, call.slots, call.sequences, call.outputs)
        tokens, logits, self._cache = self._programs.step(self._pages, call.shape, Batch(*arrays))
        return tokens, logits

    def _blocks(self, strips: U8) -> npt.NDArray[np.generic]:
        """[blocks, strips, strip_bytes] seen as [blocks, layers, 2, kv_heads, block_tokens, head_dim]."""
        spec = self.namespace.kv
        group = spec.groups[0]
        if (
            strips.dtype != np.uint8
            or strips.shape[1:] != (spec.strips, spec.strip_bytes)
            or not strips.flags.c_contiguous
        ):
            raise ValueError(
                f"strips must be contiguous uint8 [blocks, {spec.strips}, {spec.strip_bytes}], not {strips.shape}"
            )
        shape = (len(strips), group.layers, 2, group.kv_heads, spec.block_tokens, group.head_dim)
        blocks: npt.NDArray[np.generic] = strips.reshape(-1).view(DTYPES[group.dtype]).reshape(shape)
        return blocks


def _kept(folder: Path) -> Callable[[], AbstractContextManager[None]]:
    """Has JAX keep in `folder` what it compiles, unless it was told where. Returns a lock between processes."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: Any = jax.config  # its fields have no types
    if settings.jax_compilation_cache_dir is None:
        settings.update("jax_compilation_cache_dir", str(folder))
        settings.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return functools.partial(locked, folder / "lock")


def _copies(pages: list[int]) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
    """(number of the first, pages of one copy, -1 behind the last)."""
    first = 0
    while first < len(pages):
        size = next((count for count in COPIES if count >= len(pages) - first), COPIES[-1])
        ids = np.full(size, -1, np.int32)
        taken = pages[first : first + size]
        ids[: len(taken)] = taken
        yield first, ids
        first += size


def _store(blocks: npt.NDArray[np.generic], first: int, count: int, strips: jax.Array) -> None:
    """Each device's heads go to their place in the strips by themselves; repeated ones once."""
    for shard in strips.addressable_shards:
        if shard.replica_id == 0:
            blocks[first : first + count, :, :, shard.index[3]] = np.asarray(shard.data)[:count]
