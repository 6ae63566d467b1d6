"""`Backend` on JAX: turns the slices of a step into calls of compiled programs over a mesh of devices.

fp32 on the CPU, where it is tested; bf16 on TPUs and GPUs, on which it has never been run.
"""

from __future__ import annotations

import contextlib
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

from pyengine import env
from pyengine.backend import U8, Deferred, Pending, Readable, Slice, WorkerBroken, Written
from pyengine.backends import MAX_SEQUENCES, MAX_TOKENS, check_dtype
from pyengine.backends.jax.buckets import Buckets, Call
from pyengine.backends.jax.mesh import COPY, cut, make_mesh
from pyengine.backends.jax.models import MODELS
from pyengine.backends.jax.models.decoder import Batch
from pyengine.backends.jax.programs import CACHE, COPIES, Programs
from pyengine.backends.jax.shards import Shards, held
from pyengine.checkpoint import Checkpoint, ModelError, Weights, resolve
from pyengine.checkpoint.files import locked
from pyengine.checkpoint.room import check_room, free_memory
from pyengine.kernels.jax import pages as page_tensor
from pyengine.kernels.jax.choice import choose
from pyengine.kernels.memory import too_many_pages
from pyengine.ranks import uninterrupted
from pyengine.scheduler.types import BLOCK_TOKENS

logger = logging.getLogger(__name__)


class JaxBackend:
    """One model over one or more devices, and its pages."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        compiled: Path,
        block_tokens: int = BLOCK_TOKENS,
        tp: int = 1,
        dtype: str = "auto",
    ) -> None:
        """Loads the weights. compiled: folder where programs are kept; tp: devices that share the model; dtype: as
        `load_backend` has it. Raises ModelError.
        """
        check_dtype(dtype)
        config = checkpoint.config
        if config.architecture not in MODELS:
            raise ModelError(
                f"the JAX backend has no {config.architecture!r} model; it has: {', '.join(MODELS)}. Another backend "
                "may have it (--backend)"
            )
        self._mesh = make_mesh(config, tp)
        device = self._mesh.devices.flat[0]
        # A CPU's cores compute the step: what the host did meanwhile, it would do in the step's time.
        self.overlaps = device.platform != "cpu"
        # A step is one program: its layers cannot be told apart from outside.
        self.layerwise = False
        if dtype == "auto":
            dtype = "bfloat16" if self.overlaps else "float32"
        kernels = choose(device, dtype, config.head_dim, self._mesh.size, env.xla_threads())
        # A device that does not say what is free will say so when it is full.
        free = (device.memory_stats() or {}).get("bytes_limit") if self.overlaps else free_memory()
        if free is not None:
            kept, beside = held(checkpoint, dtype, kernels)
            check_room(checkpoint.name, config, kept, int(free) * (tp if self.overlaps else 1), beside=beside)
        shards = Shards(Weights(checkpoint), config, self._mesh, dtype, kernels)
        model = MODELS[config.architecture](shards, kernels)
        self._programs = Programs(model, kernels, self._mesh, _kept(compiled))
        self._cache: jax.Array | None = None
        # int32, by number of the slice: what the step launched last chooses, from which the next may compute.
        self._chosen: jax.Array
        self._nothing: jax.Array
        self.namespace = checkpoint.namespace(dtype, block_tokens)
        self.model = checkpoint.name
        self.tokenizer = str(checkpoint.folder)
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.eos_token_ids = checkpoint.eos_token_ids

    @classmethod
    def load(
        cls, model: str, *, cache: Path, threads: int | None = None, dtype: str = "auto", tp: int = 1
    ) -> JaxBackend:
        """Resolves and loads a model (see `checkpoint.resolve`). Raises ModelError.

        threads: that XLA computes with on a CPU, of the whole process; None: one for each core. tp: as `__init__` has
        it; a CPU is made to be so many devices. Both have no effect once JAX has been used.
        """
        if threads is not None:
            env.limit_xla_threads(threads)
        if tp > 1:
            with contextlib.suppress(RuntimeError):  # JAX has been used: it has the devices that it has
                settings: Any = jax.config
                settings.update("jax_num_cpu_devices", tp)
        return cls(resolve(model, cache), compiled=cache / "xla", tp=tp, dtype=dtype)

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
        if not self.overlaps:
            copies = self._mesh.shape[COPY]  # of every head
            needed = pages * spec.block_bytes * copies
            if needed > (free := free_memory()):
                raise too_many_pages(pages, needed, "cpu", free)
        sharding = jax.sharding.NamedSharding(self._mesh, CACHE)
        self._cache = page_tensor.allocate(
            group.layers, group.kv_heads, pages, spec.block_tokens, group.head_dim, group.dtype, sharding
        )
        # Until `warm_up` says what a step may compute; more is cut into several calls.
        self._set_buckets(MAX_TOKENS, MAX_SEQUENCES)

    def warm_up(self, max_tokens: int, max_sequences: int) -> None:
        """Compiles every program by running it once, on rows and pages that are nobody's."""
        self._set_buckets(max_tokens, max_sequences)
        began = time.perf_counter()
        for shape in self._buckets.shapes:
            call = self._buckets.empty(shape)
            logits = self._compute(call, self._nothing)
            self._programs.sample(logits, call.draws, call.places, self._chosen)
        for count in COPIES:
            nowhere = np.full(count, -1, np.int32)
            strips = self._programs.gather(self._pages, nowhere)
            with uninterrupted():
                self._cache = self._programs.scatter(self._pages, nowhere, np.asarray(strips))
        logger.info("compiled %d programs in %.1f s", self.compilations, time.perf_counter() - began)

    def execute(self, slices: list[Slice]) -> list[int]:
        return self._launch(slices).tokens()

    def submit(self, slices: list[Slice], written: Written | None = None, readable: Readable | None = None) -> Pending:
        if self.overlaps:
            return self._launch(slices)
        return Deferred(lambda: self.execute(slices))

    def _launch(self, slices: list[Slice]) -> Launched:
        """Queues a step. One of more slices than there are places is several."""
        with self._watched():
            return self._launch_parts(slices)

    def _launch_parts(self, slices: list[Slice]) -> Launched:
        most = self._buckets.slices
        if len(slices) > most and any(slice_.after is not None for slice_ in slices):
            raise ValueError(f"{len(slices)} slices continue a step, {most} at most can")
        parts = []
        for first in range(0, len(slices), most):
            part = slices[first : first + most]
            before, self._chosen = self._chosen, self._nothing
            for call in self._buckets.calls(part):
                self._compute(call, before)
            self._chosen.copy_to_host_async()
            parts.append((self._chosen, [slice_.sampling is not None for slice_ in part]))
        return Launched(parts, self._watched)

    def logits(self, slices: list[Slice]) -> npt.NDArray[np.float32]:
        """As `execute`, but returns the float32 logits [sampled slices, vocab], in slice order, for tests."""
        rows: dict[int, npt.NDArray[np.float32]] = {}
        for call in self._buckets.calls(slices):
            logits = np.asarray(self._compute(call, self._nothing))
            rows |= {place: row for place, row in zip(call.places.tolist(), logits, strict=True) if place < len(slices)}
        return np.stack([rows[index] for index in sorted(rows)])

    def read_pages(self, pages: list[int], out: U8, layers: range | None = None) -> None:
        if layers is not None:
            spec = self.namespace.kv
            whole = np.empty((len(pages), spec.strips, spec.strip_bytes), np.uint8)
            self.read_pages(pages, whole)
            part = spec.strips_of(layers)
            out[:] = whole[:, part.start : part.stop]
            return
        blocks = page_tensor.as_blocks(self._pages, out)
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

    def write_pages(self, pages: list[int], strips: U8, layers: range | None = None) -> None:
        assert layers is None, "it is not layerwise"
        blocks = page_tensor.as_blocks(self._pages, strips)
        with self._watched():
            for first, ids in _copies(pages):
                part = blocks[first : first + len(ids)]
                if len(part) < len(ids):
                    part = np.concatenate([part, np.zeros((len(ids) - len(part), *part.shape[1:]), part.dtype)])
                with uninterrupted():
                    self._cache = self._programs.scatter(self._pages, ids, part)
            self._pages.block_until_ready()  # the strips are the caller's, and may be read until then

    def close(self) -> None:
        self._cache = None

    @property
    def _pages(self) -> jax.Array:
        if self._cache is None:
            raise RuntimeError("no pages: call allocate first, and nothing after close")
        return self._cache

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Raises WorkerBroken if what fails within takes the pages with it: a program is given their memory, and if it
        fails gives nothing back. Whoever is computed next would fail too.
        """
        try:
            yield
        except Exception as error:
            if self._cache is None:
                raise
            self._chosen = self._nothing  # that of a step that has failed may be lost as well
            try:
                self._cache.block_until_ready()
            except RuntimeError:
                raise WorkerBroken(
                    f"a step failed on the device, and all KV pages are lost with it: {error}"
                ) from error
            raise

    def _set_buckets(self, max_tokens: int, max_sequences: int) -> None:
        pages, block_tokens = self._pages.shape[3], self.namespace.kv.block_tokens
        width = min(pages, -(-self.max_positions // block_tokens))
        self._buckets = Buckets(max_tokens, max_sequences, width, pages, block_tokens)
        self._nothing = jax.device_put(np.full(self._buckets.slices, -1, np.int32), cut(self._mesh))
        self._chosen = self._nothing

    def _compute(self, call: Call, before: jax.Array) -> jax.Array:
        """Queues one call, which leaves its tokens in `_chosen`. Returns its logits [S, vocab]."""
        arrays: tuple[Any, ...] = (
            call.tokens,
            call.after,
            call.positions,
            call.slots,
            call.sequences,
            call.outputs,
            call.places,
        )
        # Ctrl-C between the call, which takes the pages, and their coming back would lose them.
        with uninterrupted():
            self._chosen, logits, self._cache = self._programs.step(
                self._pages, call.shape, Batch(*arrays), before, self._chosen
            )
        if call.draws.temperature.any():
            self._chosen = self._programs.sample(logits, call.draws, call.places, self._chosen)
        return logits


class Launched:
    """A step on its way."""

    def __init__(
        self, parts: list[tuple[jax.Array, list[bool]]], watched: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """parts: the tokens of some slices, and whose are wanted. watched: held while they are waited for."""
        self._parts = parts
        self._watched = watched

    def tokens(self) -> list[int]:
        with self._watched():
            return self._tokens()

    def _tokens(self) -> list[int]:
        tokens: list[int] = []
        for chosen, wanted in self._parts:
            for token, asked in zip(np.asarray(chosen).tolist(), wanted, strict=False):
                if asked and token < 0:
                    raise ArithmeticError("the model computed logits that are not finite")
                tokens.append(token if asked else -1)
        return tokens


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
