"""`Backend` on PyTorch: turns the slices of a step into one forward pass of `Model`.

fp32 on the CPU unless told otherwise: there a sequence's tokens do not depend on the batch, to the last bit, nor on how
its prompt was cut into chunks or what of it was cached, as all that is computed has one order (`rust/linear`,
`rust/kernels`). With a CUDA device it computes in bf16 there; that path has never been run.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch

from pyengine.backend import NOTHING_LEFT, U8, Deferred, Pending, Readable, Slice, Written
from pyengine.backends import check_dtype
from pyengine.backends.torch.graphs import CudaRecorder, DecodeGraphs, DecodeStep, Recorder, sizes_up_to
from pyengine.backends.torch.model import Model, StepInput
from pyengine.backends.torch.part import Group, Part
from pyengine.backends.torch.shaping import Told, choose_shaped
from pyengine.checkpoint import Checkpoint, resolve
from pyengine.checkpoint.room import free_memory
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.memory import too_many_pages
from pyengine.kernels.torch import native, pages
from pyengine.kernels.torch import threads as kernel_threads
from pyengine.kernels.torch.ahead import Ahead
from pyengine.kernels.torch.upload import upload
from pyengine.sampling import draws
from pyengine.scheduler.types import BLOCK_TOKENS, Logprobs

logger = logging.getLogger(__name__)


class TorchBackend:
    """A model on one device, and its pages."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        block_tokens: int = BLOCK_TOKENS,
        threads: int | None = None,
        dtype: str = "auto",
        part: Part | None = None,
    ) -> None:
        """Loads the weights. threads: CPU threads of this process; None: PyTorch's own choice. dtype: of weights and
        KV, as `load_backend` has it; sums are float32 in any case. part: what this rank has of the model, None: all.
        """
        if threads is not None:
            torch.set_num_threads(threads)
            kernel_threads.use(threads)
        cuda = f"cuda:{part.rank}" if part is not None else "cuda"
        self._device = torch.device(cuda if torch.cuda.is_available() else "cpu")
        check_dtype(dtype)
        if dtype == "auto":
            dtype = "bfloat16" if self._device.type == "cuda" else "float32"
        config = checkpoint.config
        with torch.inference_mode():
            self._model = Model(checkpoint, getattr(torch, dtype), self._device, part)
        if threads is not None and self._model.kernels is native:
            torch.set_num_threads(1)  # what is large is computed by ours: see kernels/torch/threads.py
        self._cache: torch.Tensor | None = None
        #: What records decode steps at `warm_up`; None: nothing does.
        self.recorder: Recorder | None = None
        if self._device.type == "cuda" and part is None:
            self.recorder = CudaRecorder(self._device)
        self._graphs: DecodeGraphs | None = None
        self._ahead: Ahead | None = None
        # A CPU's cores compute the step: what the host did meanwhile, it would do in the step's time.
        self.overlaps = self._device.type == "cuda"
        # On a GPU a copy on another thread would wait for all that is queued: it needs a stream of its own too.
        self.layerwise = self._device.type == "cpu"
        # int64, by row of the step launched last: its tokens, which the next one may compute from.
        self._chosen = torch.empty(0, dtype=torch.int64)
        self.namespace = checkpoint.namespace(dtype, block_tokens)
        self.model = checkpoint.name
        self.tokenizer = str(checkpoint.folder)
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.eos_token_ids = checkpoint.eos_token_ids

    @classmethod
    def load(cls, model: str, *, cache: Path, threads: int | None = None, dtype: str = "auto") -> TorchBackend:
        """Resolves and loads a model (see `checkpoint.resolve`). Raises ModelError."""
        return cls(resolve(model, cache), threads=threads, dtype=dtype)

    def allocate(self, pages_wanted: int) -> None:
        if self._cache is not None:
            raise RuntimeError("pages are allocated once")
        config, part = self._model.config, self._model.group.part
        if self._device.type == "cpu" and part.rank == 0:
            # For all ranks: they share the machine's memory, which is granted now and missed later.
            needed = pages_wanted * self.namespace.kv.block_bytes * part.heads.count * part.ranks // part.heads.of
            if needed > (free := free_memory()):
                raise too_many_pages(pages_wanted, needed, "cpu", free)
        self._cache = pages.allocate(
            config.layers,
            part.heads.count,
            pages_wanted,
            self.namespace.kv.block_tokens,
            config.head_dim,
            self._model.dtype,
            self._device,
        )
        if self._device.type == "cpu":
            self._ahead = Ahead(self._cache)

    def warm_up(self, max_tokens: int, max_sequences: int) -> None:
        """Records decode steps of up to so many sequences as CUDA graphs. Where that cannot be done all is computed
        call by call, and the log says why.
        """
        if self.recorder is None:
            why = "a CPU has none" if self._device.type == "cpu" else "they are not written for several ranks"
            logger.info("decode without CUDA graphs: %s", why)
            return
        decode = getattr(self._model.kernels, "decode_tables", None)
        if decode is None:
            logger.warning("decode without CUDA graphs, which is slower: these kernels cannot be captured")
            return
        try:
            with torch.inference_mode():
                self._graphs = DecodeGraphs(self.recorder, self._model, decode, self._pages, sizes_up_to(max_sequences))
        except Exception as error:  # noqa: BLE001 (whatever went wrong, what is computed without them is the same)
            logger.warning("decode without CUDA graphs, which is slower: capturing failed: %r", error)

    def execute(self, slices: list[Slice]) -> list[int]:
        return self._launch(slices).tokens()

    def submit(self, slices: list[Slice], written: Written | None = None, readable: Readable | None = None) -> Pending:
        written = written if self.layerwise else None
        if self.overlaps:
            return self._launch(slices, written, readable)
        launched: list[Launched] = []

        def tokens() -> list[int]:
            launched.append(self._launch(slices, written, readable))
            return launched[0].tokens()

        return Deferred(tokens, lambda: launched[0].logprobs())

    def _launch(
        self, slices: list[Slice], written: Written | None = None, readable: Readable | None = None
    ) -> Launched:
        """Computes a step; on a GPU it is queued, and nobody waits for it."""
        with torch.inference_mode():
            chosen = torch.full((len(slices),), -1, dtype=torch.int64, device=self._device)
            order = _order(slices)
            asked = [(index, params) for index in order if (params := slices[index].sampling) is not None]
            rows = [index for index, _ in asked]
            logits = self._forward(slices, order, written, readable) if slices else None
            shapings, told = [slices[index].shaping for index in rows], None
            if logits is not None and asked:
                positions = [slices[index].start + len(slices[index].tokens) for index in rows]
                drawn = draws([params for _, params in asked], positions)
                if any(shapings):
                    tokens, told = choose_shaped(self._model.kernels, logits, drawn, shapings)
                else:
                    tokens = self._model.kernels.sample(logits, drawn)
                chosen[self._index(rows)] = tokens
            self._chosen = chosen
            return Launched(chosen, rows, [bool(shaping) for shaping in shapings], told)

    def compute(self, slices: list[Slice]) -> None:
        """A rank's part of a step whose tokens are chosen by rank 0."""
        with torch.inference_mode():
            self._forward(slices, _order(slices))

    def logits(self, slices: list[Slice]) -> torch.Tensor:
        """As `execute`, but returns the float32 logits [sampled slices, vocab], in slice order, for tests."""
        with torch.inference_mode():
            order = _order(slices)
            logits = self._forward(slices, order)
            sampled = [index for index in order if slices[index].sampling is not None]
            return logits[torch.tensor(np.argsort(sampled), dtype=torch.int64, device=self._device)]

    def read_pages(self, page_ids: list[int], out: U8, layers: range | None = None) -> None:
        cache = self._pages if layers is None else self._pages[layers.start : layers.stop]
        blocks = pages.as_blocks(cache, out)
        strips = blocks if cache.device.type == "cpu" else torch.empty_like(blocks, device=cache.device)
        self._model.kernels.gather(cache, self._index(page_ids), strips)
        if strips is not blocks:
            blocks.copy_(strips)

    def write_pages(self, page_ids: list[int], strips: U8, layers: range | None = None) -> None:
        cache = self._pages if layers is None else self._pages[layers.start : layers.stop]
        if self._ahead is not None:
            self._ahead.used([np.array(page_ids, np.int32)])
        with torch.inference_mode():
            blocks = pages.as_blocks(cache, strips if strips.flags.writeable else strips.copy()).to(cache.device)
            self._model.kernels.scatter(cache, self._index(page_ids), blocks)

    def close(self) -> None:
        self._graphs = None
        if self._ahead is not None:
            self._ahead.join()
            self._ahead = None
        self._cache = None

    @property
    def group(self) -> Group:
        """The ranks that share the model, and this one's part of it."""
        return self._model.group

    @property
    def _pages(self) -> torch.Tensor:
        if self._cache is None:
            raise RuntimeError("no pages: call allocate first, and nothing after close")
        return self._cache

    def _forward(
        self,
        slices: list[Slice],
        order: list[int],
        written: Written | None = None,
        readable: Readable | None = None,
    ) -> torch.Tensor:
        slices = [slices[index] for index in order]
        whole = written is None and readable is None
        graphs = self._graphs if whole and all(len(slice_.tokens) == 1 for slice_ in slices) else None
        if graphs is not None and graphs.holds(len(slices)):
            return self._replay(graphs, slices)
        step = self._step_input(slices)
        if self._ahead is not None:
            self._ahead.used(slice_.pages for slice_ in slices)
        self._feed(slices, step.tokens)
        return self._model.forward(step, self._pages, written, readable)

    def _replay(self, graphs: DecodeGraphs, slices: list[Slice]) -> torch.Tensor:
        """`_forward` of a decode step that a graph can compute. The next one overwrites what it returns."""
        block_tokens = self.namespace.kv.block_tokens
        positions = np.array([slice_.start for slice_ in slices])
        slots = [int(slice_.pages[slice_.start // block_tokens]) * block_tokens for slice_ in slices]
        step = DecodeStep(
            np.concatenate([slice_.tokens for slice_ in slices]),
            positions,
            np.array(slots) + positions % block_tokens,
            self._sequences(slices),
        )
        logits = graphs.run(step, lambda tokens: self._feed(slices, tokens))
        wanted = [row for row, slice_ in enumerate(slices) if slice_.sampling is not None]
        return logits if len(wanted) == len(slices) else logits[self._index(wanted)]

    def _feed(self, slices: list[Slice], tokens: torch.Tensor) -> None:
        """Brings tokens of the step before to those who compute from them."""
        # Single tokens come first, so the row of such a slice is the row of its token.
        fed = {row: slice_.after for row, slice_ in enumerate(slices) if slice_.after is not None}
        if fed:
            # A step that has failed chose -1: this one has no meaning then, but must not read beside the embedding.
            tokens[self._index([*fed])] = self._chosen[self._index([*fed.values()])].clamp(min=0)

    def _step_input(self, slices: list[Slice]) -> StepInput:
        """slices: those with one token first."""
        block_tokens = self.namespace.kv.block_tokens
        positions = [np.arange(slice_.start, slice_.start + len(slice_.tokens)) for slice_ in slices]
        slots = [
            slice_.pages[position // block_tokens].astype(np.int64) * block_tokens + position % block_tokens
            for slice_, position in zip(slices, positions, strict=True)
        ]
        ends = np.cumsum([len(slice_.tokens) for slice_ in slices])
        outputs = [end - 1 for end, slice_ in zip(ends, slices, strict=True) if slice_.sampling is not None]
        decodes = sum(len(slice_.tokens) == 1 for slice_ in slices)
        return StepInput(
            tokens=self._tensor(np.concatenate([slice_.tokens for slice_ in slices])),
            positions=self._tensor(np.concatenate(positions)),
            slots=self._tensor(np.concatenate(slots)),
            outputs=self._tensor(np.array(outputs, dtype=np.int64)),
            decodes=self._sequences(slices[:decodes]),
            prefills=self._sequences(slices[decodes:]),
        )

    def _sequences(self, slices: list[Slice]) -> Sequences:
        block_tokens = self.namespace.kv.block_tokens
        counts = [len(slice_.tokens) for slice_ in slices]
        lengths = [slice_.start + count for slice_, count in zip(slices, counts, strict=True)]
        used = [slice_.pages[: -(-length // block_tokens)] for slice_, length in zip(slices, lengths, strict=True)]
        return Sequences.of(counts, lengths, used)

    def _tensor(self, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return upload(values.astype(np.int64), self._device)

    def _index(self, page_ids: list[int]) -> torch.Tensor:
        return upload(np.array(page_ids, np.int64), self._device)


class Launched:
    """A step whose tokens are on their way to the host."""

    def __init__(self, chosen: torch.Tensor, asked: list[int], shaped: list[bool], told: Told | None) -> None:
        """chosen: int64 [slices], -1 where none was asked for. asked: rows where one was; shaped: whether each of
        these was. told: of these, by their number.
        """
        self._slices, self._asked, self._shaped = len(chosen), asked, shaped
        self._told = told
        self._event: torch.cuda.Event | None = None
        self._host = _to_host(chosen)
        self._numbers = _to_host(told.numbers) if told is not None else None
        if chosen.device.type != "cpu":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def tokens(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._host.tolist()
        for row, shaped in zip(self._asked, self._shaped, strict=True):
            if tokens[row] < 0 and not (shaped and tokens[row] == NOTHING_LEFT):
                raise ArithmeticError("the model computed logits that are not finite")
        return tokens

    def logprobs(self) -> list[Logprobs | None]:
        if self._told is None or self._numbers is None:
            return []
        told: list[Logprobs | None] = [None] * self._slices
        for number, logprobs in self._told.read(self._numbers).items():
            told[self._asked[number]] = logprobs
        return told


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same on the host, once what is queued now is done."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _order(slices: list[Slice]) -> list[int]:
    """Single tokens before runs, short before long: decode takes neighbours of similar length together."""
    return sorted(range(len(slices)), key=lambda index: (len(slices[index].tokens) > 1, slices[index].start))
