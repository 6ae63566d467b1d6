"""The model's twin for tests: no weights, but every KV byte counts.

* The KV of position p is a pseudorandom function of all tokens up to p, of the layer, of k or v, of the head and of the
  dimension.
* The next token is a hash of all KV bytes of positions 0..p, read from the pages. So KV that is lost, late, mixed up or
  altered on its way changes the answer.
* Where choices are shaped, or told of, logits follow from the hash: the token it names has the largest, and what is the
  largest once they are shaped is chosen.

Ids 0-255 are bytes; the hash chooses printable ASCII, so that answers are text and never end by themselves.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from pyengine.backend import NOTHING_LEFT, U8, Deferred, Pending, Readable, Shaping, Slice, Written
from pyengine.kernels import reference
from pyengine.kernels.inputs import Shapes
from pyengine.kernels.memory import too_many_pages
from pyengine.scheduler.types import BLOCK_TOKENS, KvGroup, KvSpec, Logprobs, Namespace, SamplingParams

if TYPE_CHECKING:
    from pyengine.scheduler.sim.compute import StepTime

U64 = npt.NDArray[np.uint64]

VOCAB = 258  # the byte tokenizer's: 256 bytes, then bos and eos
EOS = 257
FIRST_CHOICE, CHOICES = 32, 95  # printable ASCII
MASK = 2**64 - 1
#: Settings that are no whole numbers.
KINDS = {"seconds_per_step": float, "seconds_per_token": float, "hold": str, "cost": str, "time_scale": float}
#: Seconds at the end of a step of a cost model that are not slept.
AWAKE = 3e-4
GOLDEN = 0x9E3779B97F4A7C15


class FakeBackend:
    """Implements `pyengine.backend.Backend` with numpy. KV words are 64 bits, so head_dim is even (float32 pairs)."""

    def __init__(
        self,
        *,
        layers: int = 2,
        kv_heads: int = 2,
        head_dim: int = 16,
        block_tokens: int = BLOCK_TOKENS,
        vocab: int = VOCAB,
        max_positions: int = 65536,
        seconds_per_step: float = 0.0,
        seconds_per_token: float = 0.0,
        hold: str = "",
        cost: str = "",
        time_scale: float = 1.0,
        overlaps: int = 0,
    ) -> None:
        """For tests that need to meet it at work:

        seconds_per_*: how long `execute` sleeps; 0: not at all. hold: a file; while it is there, `execute` waits.

        To compare a live cluster with the simulation of it: `execute` takes as long as a step of the cost model `cost`
        (a name or a file, as `scheduler.sim.compute` has them), times time_scale, to 0.2 ms. Small sizes (layers=1,
        kv_heads=1, head_dim=2) leave the processor to other workers meanwhile: every KV byte is read for every token.

        overlaps=1: steps are computed on a thread, as a device computes beside the host.
        Raises ValueError for a cost model that cannot be had.
        """
        if head_dim % 2 or min(layers, kv_heads, head_dim, block_tokens, max_positions) < 1 or vocab < VOCAB:
            raise ValueError(f"fake model: sizes must be positive, head_dim even, vocab at least {VOCAB}")
        group = KvGroup(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype="float32")
        self.namespace = Namespace(
            weights="fake",
            config=f"vocab {vocab}",
            compute_dtype="float32",
            weight_quantization="none",
            kv=KvSpec(groups=(group,), block_tokens=block_tokens),
        )
        self.model = "fake"
        self.tokenizer = "bytes"
        self.vocab_size = vocab
        self.max_positions = max_positions
        self.eos_token_ids = frozenset({EOS})
        self._seconds_per_step = seconds_per_step
        self._seconds_per_token = seconds_per_token
        self._hold = Path(hold) if hold else None
        if not 0.0 < time_scale < math.inf:
            raise ValueError(f"fake model: time_scale is {time_scale}: give how many seconds one of the model's takes")
        self._cost = _cost_model(cost) if cost else None
        self._time_scale = time_scale
        self._layers = layers
        self._strips = self.namespace.kv.strips
        self._words = head_dim // 2
        self._cache: U64 | None = None
        self.overlaps = bool(overlaps)
        self.layerwise = True
        self._device = ThreadPoolExecutor(1, "device") if overlaps else None
        self._chosen: list[int] = []
        self._told: list[Logprobs | None] = []

    @classmethod
    def load(cls, model: str) -> FakeBackend:
        """From "fake", or "fake:name=value,..." with the constructor's arguments."""
        _, _, settings = model.partition(":")
        arguments: dict[str, float | str] = {}
        for setting in filter(None, settings.split(",")):
            name, _, value = setting.partition("=")
            try:
                kind = KINDS.get(name, int)
                arguments[name] = kind(value)
            except ValueError as error:
                raise ValueError(f"fake model: {setting!r} is not name=number") from error
        try:
            return cls(**arguments)  # type: ignore[arg-type]
        except TypeError as error:
            raise ValueError(f"fake model: unknown setting in {model!r} ({error})") from error

    def allocate(self, pages: int) -> None:
        if self._cache is not None:
            raise RuntimeError("pages are allocated once")
        shape = (pages, self._strips, self.namespace.kv.block_tokens, self._words)
        try:
            self._cache = np.zeros(shape, dtype=np.uint64)
        except MemoryError as error:
            raise too_many_pages(pages, pages * self.namespace.kv.block_bytes, "the fake device") from error

    def warm_up(self, max_tokens: int, max_sequences: int) -> None:
        """Nothing is compiled."""

    def execute(self, slices: list[Slice]) -> list[int]:
        return self._compute(slices)

    def _compute(
        self, slices: list[Slice], written: Written | None = None, readable: Readable | None = None
    ) -> list[int]:
        began = time.perf_counter()
        seconds = self._seconds_per_step + self._seconds_per_token * sum(len(slice_.tokens) for slice_ in slices)
        while self._hold is not None and self._hold.exists():
            time.sleep(0.01)
        slices = [self._known(slice_) for slice_ in slices]
        rows: list[U64] = []
        for layer in range(self._layers):
            if readable is not None:
                readable(layer)
            if not layer:
                fresh: dict[tuple[int, int], int] = {}
                rows = [self._rows(slice_, fresh) for slice_ in slices]
            if seconds:
                time.sleep(max(began + seconds * (layer + 1) / self._layers - time.perf_counter(), 0.0))
            for slice_, kv in zip(slices, rows, strict=True):
                self._write(slice_, kv, layer)
            if written is not None:
                written(layer)
        self._told = [None] * len(slices)
        tokens = [
            -1 if slice_.sampling is None else self._choose(slice_, slice_.sampling, row)
            for row, slice_ in enumerate(slices)
        ]
        if self._cost is not None:
            sleep_until(began + self._time_scale * step_seconds(self._cost, slices))
        self._chosen = tokens
        return tokens

    def submit(self, slices: list[Slice], written: Written | None = None, readable: Readable | None = None) -> Pending:
        told: list[Logprobs | None] = []

        def compute() -> list[int]:
            plain = written is None and readable is None
            tokens = self.execute(slices) if plain else self._compute(slices, written, readable)
            told.extend(self._told)
            return tokens

        return Deferred(compute if self._device is None else self._device.submit(compute).result, lambda: told)

    def _known(self, slice_: Slice) -> Slice:
        """With the token that the step before has chosen for it."""
        if slice_.after is None:
            return slice_
        return msgspec.structs.replace(slice_, tokens=np.array([max(self._chosen[slice_.after], 0)], np.uint32))

    def read_pages(self, pages: list[int], out: U8, layers: range | None = None) -> None:
        strips = self.namespace.kv.strips_of(range(self._layers) if layers is None else layers)
        out[:] = self._pages[pages, strips.start : strips.stop].view(np.uint8).reshape(len(pages), len(strips), -1)

    def write_pages(self, pages: list[int], strips: U8, layers: range | None = None) -> None:
        part = self.namespace.kv.strips_of(range(self._layers) if layers is None else layers)
        shape = (len(pages), len(part), *self._pages.shape[2:])
        self._pages[pages, part.start : part.stop] = np.ascontiguousarray(strips).view(np.uint64).reshape(shape)

    def close(self) -> None:
        if self._device is not None:
            self._device.shutdown()
        self._cache = None

    @property
    def _pages(self) -> U64:
        if self._cache is None:
            raise RuntimeError("no pages: call allocate first, and nothing after close")
        return self._cache

    def _rows(self, slice_: Slice, fresh: dict[tuple[int, int], int]) -> U64:
        """KV of the slice's tokens: uint64 [tokens, strips, words]. fresh: states that this step is to write, by page
        and place in it: the last one of each slice so far.
        """
        block_tokens = self.namespace.kv.block_tokens
        state = 0
        if slice_.start:
            block, offset = divmod(slice_.start - 1, block_tokens)
            page = int(slice_.pages[block])
            known = fresh.get((page, offset))
            state = int(self._pages[page, 0, offset, 0]) if known is None else known
        states = chain(state, slice_.tokens.tolist())
        block, offset = divmod(slice_.start + len(states) - 1, block_tokens)
        fresh[int(slice_.pages[block]), offset] = states[-1]
        return kv_rows(states, self._strips, self._words)

    def _write(self, slice_: Slice, rows: U64, layer: int) -> None:
        block_tokens = self.namespace.kv.block_tokens
        strips = self.namespace.kv.strips_of(range(layer, layer + 1))
        positions = np.arange(slice_.start, slice_.start + len(rows))
        pages, offsets = slice_.pages[positions // block_tokens], positions % block_tokens
        part = slice(strips.start, strips.stop)
        self._pages[pages, part, offsets] = rows[:, part]

    def _choose(self, slice_: Slice, params: SamplingParams, row: int) -> int:
        length = slice_.start + len(slice_.tokens)
        count = -(-length // self.namespace.kv.block_tokens)
        kv = self._pages[slice_.pages[:count]].swapaxes(1, 2).reshape(-1, self._strips, self._words)
        number = hashed(kv[:length], params, length)
        if slice_.shaping is None:
            return choice(number)
        token, self._told[row] = choose_shaped(number, self.vocab_size, slice_.shaping)
        return token


def step_seconds(cost: StepTime, slices: Sequence[Slice]) -> float:
    """What the cost model says of such a step. A token computed alone behind others decodes; a backend cannot know that
    it is the last of a prompt.
    """
    prefill, context, decoding = [], 0, 0
    for slice_ in slices:
        count = len(slice_.tokens)
        if count == 1 and slice_.start:
            decoding += 1
            context += slice_.start + 1
        else:
            prefill.append((slice_.start, count))
    return cost.seconds(prefill, decoding, context)


def sleep_until(deadline: float) -> None:
    """On time.perf_counter. The kernel wakes a sleeper some 0.05 ms late, so the end is waited for awake."""
    rest = deadline - time.perf_counter() - AWAKE
    if rest > 0:
        time.sleep(rest)
    while time.perf_counter() < deadline:
        pass


def _cost_model(name: str) -> StepTime:
    from pyengine.scheduler.sim.compute import StepTime

    return StepTime.load(name)


def chain(state: int, tokens: Sequence[int]) -> list[int]:
    """The 64-bit state after each token, from the state before the first (0 at the start of a sequence)."""
    states = []
    for token in tokens:
        state = ((state ^ (token + 1)) * GOLDEN) & MASK
        state = ((state ^ (state >> 29)) * 0xBF58476D1CE4E5B9) & MASK
        state ^= state >> 32
        states.append(state)
    return states


def kv_rows(states: Sequence[int], strips: int, words: int) -> U64:
    """KV of one position per state: uint64 [positions, strips, words].

    The first word of the first strip is the state itself: a chunk that starts later reads it back from the pages.
    """
    index = np.arange(strips * words, dtype=np.uint64).reshape(strips, words)
    mixed = np.array(states, dtype=np.uint64)[:, None, None] + index * np.uint64(GOLDEN)
    mixed ^= (mixed >> np.uint64(31)) * (index != 0)
    mixed *= np.where(index == 0, np.uint64(1), np.uint64(0x94D049BB133111EB))
    return mixed


def hashed(kv: U64, params: SamplingParams, position: int) -> int:
    """What decides the token at `position` after KV uint64 [position, strips, words]; of seeded draws the seed too."""
    digest = hashlib.blake2b(np.ascontiguousarray(kv).data, digest_size=8)
    if params.temperature > 0.0:
        digest.update(b"%d %d" % (params.seed or 0, position))
    return int.from_bytes(digest.digest(), "little")


def choice(number: int) -> int:
    """The token that a hash names."""
    return FIRST_CHOICE + number % CHOICES


def logits_of(number: int, vocab: int) -> npt.NDArray[np.float32]:
    """float32 [vocab]: 16 for the token that the hash names, 4 to 12 for other text, -4 to 4 for all else."""
    mixed = (np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(GOLDEN)) ^ np.uint64(number)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    logits = ((mixed >> np.uint64(40)) / 2.0**21 - 4.0).astype(np.float32)
    logits[FIRST_CHOICE : FIRST_CHOICE + CHOICES] += 8.0
    logits[choice(number)] = 16.0
    return logits


def choose_shaped(number: int, vocab: int, shaping: Shaping) -> tuple[int, Logprobs | None]:
    """The token, NOTHING_LEFT if none is allowed, and what is told of it."""
    logits = logits_of(number, vocab)[None]
    shaped = logits.copy()
    reference.shape_logits(shaped, Shapes.of([shaping], vocab))
    token = int(shaped.argmax()) if shaped.max() > -np.inf else NOTHING_LEFT
    if shaping.logprobs is None or token < 0:
        return token, None
    chosen, ranks, ids, values = reference.logprobs(logits, np.array([token]), shaping.logprobs)
    top = tuple(zip(ids[0].tolist(), values[0].tolist(), strict=True))
    return token, Logprobs(float(chosen[0]), int(ranks[0]), top)


def fake_tokens(
    prompt: Sequence[int],
    count: int,
    params: SamplingParams | None = None,
    *,
    layers: int = 2,
    kv_heads: int = 2,
    head_dim: int = 16,
) -> list[int]:
    """The oracle: the `count` tokens a FakeBackend of this shape answers to `prompt`, computed with no pages."""
    params = params or SamplingParams(temperature=0.0)
    tokens = list(prompt)
    for _ in range(count):
        kv = kv_rows(chain(0, tokens), layers * 2 * kv_heads, head_dim // 2)
        tokens.append(choice(hashed(kv, params, len(tokens))))
    return tokens[len(prompt) :]
