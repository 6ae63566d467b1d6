"""`Backend` on PyTorch: turns the slices of a step into one forward pass of `Llama`.

fp32 on the CPU, where it is tested. With a CUDA device it computes in bf16 there; that path has never been run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from pyengine.backend import U8, Slice
from pyengine.backends.torch.llama import Llama, StepInput
from pyengine.checkpoint import Checkpoint, resolve
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.torch import pages
from pyengine.sampling import draws
from pyengine.scheduler.types import BLOCK_TOKENS, KvGroup, KvSpec, Namespace


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

    def warm_up(self, max_tokens: int, max_sequences: int) -> None:
        """Nothing is compiled."""

    def execute(self, slices: list[Slice]) -> list[int]:
        chosen = [-1] * len(slices)
        if not slices:
            return chosen
        with torch.inference_mode():
            order = _order(slices)
            logits = self._forward(slices, order)
            asked = [(index, params) for index in order if (params := slices[index].sampling) is not None]
            if not asked:
                return chosen
            positions = [slices[index].start + len(slices[index].tokens) for index, _ in asked]
            tokens = self._model.kernels.sample(logits, draws([params for _, params in asked], positions)).tolist()
        if -1 in tokens:
            raise ArithmeticError("the model computed logits that are not finite")
        for (index, _), token in zip(asked, tokens, strict=True):
            chosen[index] = token
        return chosen

    def logits(self, slices: list[Slice]) -> torch.Tensor:
        """As `execute`, but returns the float32 logits [sampled slices, vocab], in slice order, for tests."""
        with torch.inference_mode():
            order = _order(slices)
            logits = self._forward(slices, order)
            sampled = [index for index in order if slices[index].sampling is not None]
            return logits[torch.tensor(np.argsort(sampled), dtype=torch.int64, device=self._device)]

    def read_pages(self, page_ids: list[int], out: U8) -> None:
        cache, blocks = self._pages, pages.as_blocks(self._pages, out)
        strips = blocks if cache.device.type == "cpu" else torch.empty_like(blocks, device=cache.device)
        self._model.kernels.gather(cache, self._index(page_ids), strips)
        if strips is not blocks:
            blocks.copy_(strips)

    def write_pages(self, page_ids: list[int], strips: U8) -> None:
        cache = self._pages
        with torch.inference_mode():
            blocks = pages.as_blocks(cache, strips if strips.flags.writeable else strips.copy()).to(cache.device)
            self._model.kernels.scatter(cache, self._index(page_ids), blocks)

    def close(self) -> None:
        self._cache = None

    @property
    def _pages(self) -> torch.Tensor:
        if self._cache is None:
            raise RuntimeError("no pages: call allocate first, and nothing after close")
        return self._cache

    def _forward(self, slices: list[Slice], order: list[int]) -> torch.Tensor:
        return self._model.forward(self._step_input([slices[index] for index in order]), self._pages)

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
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _index(self, page_ids: list[int]) -> torch.Tensor:
        return torch.tensor(page_ids, dtype=torch.int64, device=self._device)


def _order(slices: list[Slice]) -> list[int]:
    """Single tokens before runs, short before long: decode takes neighbours of similar length together."""
    return sorted(range(len(slices)), key=lambda index: (len(slices[index].tokens) > 1, slices[index].start))
