"""`Backend` on PyTorch: turns the slices of a step into one forward pass of `Llama`.

fp32 on the CPU, where it is tested. With a CUDA device it computes in bf16 there; that path has never been run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from pyengine.backend import U8, Slice
from pyengine.backends.torch.llama import DecodeGroup, Llama, PrefillRun, StepInput
from pyengine.checkpoint import Checkpoint, resolve
from pyengine.kernels.torch import attention, pages
from pyengine.sampling import sample
from pyengine.scheduler.types import BLOCK_TOKENS, KvGroup, KvSpec, Namespace

# Decode sequences whose page counts differ by more than this factor are attended to apart: padding costs gathers.
PADDING_FACTOR = 2


class TorchBackend:
    """A Llama model on one device, and its pages."""

    def __init__(self, checkpoint: Checkpoint, *, block_tokens: int = BLOCK_TOKENS, threads: int | None = None) -> None:
        """Loads the weights. threads: CPU threads of PyTorch in this process; None: its own choice."""
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        config = checkpoint.config
        with torch.inference_mode():
            self._model = Llama(checkpoint, dtype, self._device)
        self._cache: torch.Tensor | None = None
        self._written: set[int] = set()  # pages that came from outside, whose tails may hold anything
        dtype_name = str(dtype).removeprefix("torch.")
        group = KvGroup(layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim, dtype=dtype_name)
        self.namespace = Namespace(
            weights=checkpoint.weights_digest,
            config=config.digest(),
            compute_dtype=dtype_name,
            weight_quantization="none",
            kv=KvSpec(groups=(group,), block_tokens=block_tokens),
        )
        self.model = checkpoint.name
        self.tokenizer = str(checkpoint.folder)
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.eos_token_ids = checkpoint.eos_token_ids

    @classmethod
    def load(cls, model: str, *, cache: Path, threads: int | None = None) -> TorchBackend:
        """Resolves and loads a model (see `checkpoint.resolve`). Raises ModelError."""
        return cls(resolve(model, cache), threads=threads)

    def allocate(self, pages_wanted: int) -> None:
        if self._cache is not None:
            raise RuntimeError("pages are allocated once")
        config = self._model.config
        self._cache = pages.allocate(
            config.layers,
            config.kv_heads,
            pages_wanted,
            self.namespace.kv.block_tokens,
            config.head_dim,
            self._model.dtype,
            self._device,
        )

    def execute(self, slices: list[Slice]) -> list[int]:
        chosen = [-1] * len(slices)
        if not slices:
            return chosen
        with torch.inference_mode():
            order = sorted(range(len(slices)), key=lambda index: _cost(slices[index]))
            self._clear_tails(slices)
            step = self._step_input([slices[index] for index in order])
            logits = self._model.forward(step, self._pages)
            sampled = [index for index in order if slices[index].sampling is not None]
            greedy = _likeliest(logits) if sampled else []
            for row, index in enumerate(sampled):
                params = slices[index].sampling
                assert params is not None  # by the choice of `sampled`
                if params.temperature == 0.0:
                    chosen[index] = greedy[row]
                else:
                    position = slices[index].start + len(slices[index].tokens)
                    chosen[index] = sample(logits[row].cpu().numpy(), params, position)
        return chosen

    def logits(self, slices: list[Slice]) -> torch.Tensor:
        """As `execute`, but returns the float32 logits [sampled slices, vocab], in slice order, for tests."""
        with torch.inference_mode():
            order = sorted(range(len(slices)), key=lambda index: _cost(slices[index]))
            self._clear_tails(slices)
            logits = self._model.forward(self._step_input([slices[index] for index in order]), self._pages)
            sampled = [index for index in order if slices[index].sampling is not None]
            return logits[torch.tensor(np.argsort(sampled), dtype=torch.int64, device=self._device)]

    def read_pages(self, page_ids: list[int], out: U8) -> None:
        pages.read_pages(self._pages, page_ids, out)

    def write_pages(self, page_ids: list[int], strips: U8) -> None:
        with torch.inference_mode():
            pages.write_pages(self._pages, page_ids, strips)
        self._written.update(page_ids)

    def close(self) -> None:
        self._cache = None

    @property
    def _pages(self) -> torch.Tensor:
        if self._cache is None:
            raise RuntimeError("no pages: call allocate first, and nothing after close")
        return self._cache

    def _clear_tails(self, slices: list[Slice]) -> None:
        """Zeroes what lies behind the tokens in each slice's last page, when this step begins it or others wrote it."""
        block_tokens = self.namespace.kv.block_tokens
        for slice_ in slices:
            end = slice_.start + len(slice_.tokens)
            index, used = divmod(end, block_tokens)
            if used == 0:
                continue
            page = int(slice_.pages[index])
            if slice_.start <= index * block_tokens or page in self._written:
                pages.clear_tail(self._pages, page, used)
                self._written.discard(page)

    def _step_input(self, slices: list[Slice]) -> StepInput:
        """slices: those with one token first, by length."""
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
            groups=self._decode_groups(slices[:decodes]),
            runs=[
                self._prefill_run(slice_, int(end))
                for slice_, end in zip(slices[decodes:], ends[decodes:], strict=True)
            ],
        )

    def _decode_groups(self, slices: list[Slice]) -> list[DecodeGroup]:
        """Cuts slices, sorted by length, where the page count exceeds PADDING_FACTOR times the group's first."""
        block_tokens = self.namespace.kv.block_tokens
        counts = [slice_.start // block_tokens + 1 for slice_ in slices]
        groups = []
        first = 0
        while first < len(slices):
            last = first
            while last < len(slices) and counts[last] <= counts[first] * PADDING_FACTOR:
                last += 1
            members = slices[first:last]
            table = np.empty((len(members), counts[last - 1]), dtype=np.int64)
            for row, slice_, count in zip(table, members, counts[first:last], strict=True):
                row[:count] = slice_.pages[:count]
                row[count:] = slice_.pages[0]
            lengths = [slice_.start + 1 for slice_ in members]
            mask = None
            if lengths[0] != lengths[-1]:
                mask = attention.padding_mask(lengths, lengths[-1], self._model.dtype, self._device)
            groups.append(DecodeGroup(first, last, self._tensor(table.reshape(-1)), lengths[-1], mask))
            first = last
        return groups

    def _prefill_run(self, slice_: Slice, end: int) -> PrefillRun:
        tokens = len(slice_.tokens)
        length = slice_.start + tokens
        if slice_.start == 0:
            return PrefillRun(end - tokens, end, None, length, None)
        count = -(-length // self.namespace.kv.block_tokens)
        mask = attention.causal_mask(tokens, length, self._model.dtype, self._device)
        return PrefillRun(end - tokens, end, self._tensor(slice_.pages[:count]), length, mask)

    def _tensor(self, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)


def _likeliest(logits: torch.Tensor) -> list[int]:
    """Argmax of each row. Raises ArithmeticError if a row holds a NaN (which argmax takes for the largest) or infinity:
    no token follows from it.
    """
    best = logits.argmax(dim=-1)
    if not logits.gather(-1, best.unsqueeze(-1)).isfinite().all():
        raise ArithmeticError("the model computed logits that are not finite")
    return [int(index) for index in best.tolist()]


def _cost(slice_: Slice) -> tuple[bool, int]:
    """Sort key: single tokens before runs, short before long."""
    return len(slice_.tokens) > 1, slice_.start
