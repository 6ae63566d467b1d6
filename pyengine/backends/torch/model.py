"""A model in PyTorch, over paged KV: embedding, layers, head. What is special to an architecture: models/.

The shapes, once: T input tokens of a whole step (all sequences one after the other), H query heads, K KV heads, D
head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pyengine.backends.torch.layer import Step
from pyengine.backends.torch.models import MODELS
from pyengine.backends.torch.part import Group, Part
from pyengine.backends.torch.weights import Reader
from pyengine.checkpoint import Checkpoint, ModelError, Weights, rotary_tables
from pyengine.checkpoint.room import check_room, free_memory
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.torch.choice import choose, keeps, working_type
from pyengine.kernels.torch.contract import ALL, Attend
from pyengine.kernels.torch.linear import Linear


@dataclass(frozen=True)
class StepInput:
    """What one forward pass computes.

    tokens, positions, slots: int64 [T]; outputs: int64 [samples], the rows whose logits are wanted. The first rows are
    those of `decodes`, all others those of `prefills`.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    outputs: torch.Tensor
    decodes: Sequences
    prefills: Sequences


class Model:
    """Weights and forward pass. Holds no KV: the page tensor is an argument."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, part: Part | None = None
    ) -> None:
        """part: what this rank has of it, None: all. Raises ModelError for an architecture without a file in models/,
        and for weights that are not finite or too large for the memory that is free.
        """
        self.config = config = checkpoint.config
        self.dtype = dtype
        self.device = device
        if config.architecture not in MODELS:
            raise ModelError(
                f"the torch backend has no {config.architecture!r} model; it has: {', '.join(MODELS)}. Another backend "
                "may have it (--backend)"
            )
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
        part = part or Part(config)
        held = torch.bfloat16 if checkpoint.in_bfloat16 and keeps(device, dtype, torch.bfloat16) else dtype
        check_room(checkpoint.name, config, str(held).removeprefix("torch."), free, part.ranks)
        layer = MODELS[config.architecture]
        self.kernels = choose(device, dtype, config.head_dim)
        weights = Weights(checkpoint)
        self.group = Group(part, device)
        self.working = working_type(device, dtype, config.head_dim)
        read = Reader(weights, dtype, self.working, device, self.group)
        self.embedding = read.matrix("model.embed_tokens.weight")
        self.layers = [layer(read.below(f"model.layers.{index}."), config) for index in range(config.layers)]
        self.norm = read.tensor("model.norm.weight")
        self.head = Linear(self.embedding) if config.tied_head else read.linear("lm_head")
        # Weights may be rounded, angles not: at position 8000 half of bf16's eight bits would be gone.
        self.cosines, self.sines = (torch.from_numpy(table).to(device) for table in rotary_tables(config, weights))

    def forward(
        self,
        step: StepInput,
        cache: torch.Tensor,
        written: Callable[[int], None] | None = None,
        readable: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Computes one step, writing KV into `cache`. Returns float32 logits [samples, vocab].

        written: told of each layer whose KV is there (on a GPU: will be, when what is queued so far is done). readable:
        waits for what a layer's pages should hold before.
        """
        attend = self._plan_attention(step, cache[0])
        return self.compute(step.tokens, step.positions, step.slots, attend, cache, step.outputs, written, readable)

    def compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attend: Attend,
        cache: torch.Tensor,
        outputs: torch.Tensor | slice = ALL,
        written: Callable[[int], None] | None = None,
        readable: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """`forward` of what is planned: all that follows from the step's numbers is computed on the device. So a graph
        may repeat it, where the kernels can.
        """
        shared = Step(
            kernels=self.kernels,
            cosines=self.cosines[positions],
            sines=self.sines[positions],
            slots=slots,
            attend=attend,
        )
        x = self._embed(tokens).to(self.working)  # [T, hidden]
        residual: torch.Tensor | None = None
        for index, (layer, kv) in enumerate(zip(self.layers, cache, strict=True)):
            if readable is not None:
                readable(index)
            x, residual = layer(x, residual, kv, shared)
            if written is not None:
                written(index)
        assert residual is not None, "a model has layers"
        x, _ = self.kernels.rms_norm(x[outputs], self.norm, self.config.norm_eps, residual[outputs])
        return self.group.logits(self.head(x).float())

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        part = self.group.part
        if part.ranks == 1:
            return F.embedding(tokens, self.embedding)
        ours = (tokens >= part.vocabulary.start) & (tokens < part.vocabulary.stop)
        x = F.embedding(torch.where(ours, tokens - part.vocabulary.start, 0), self.embedding)
        return self.group.sum(x.masked_fill_(~ours[:, None], 0.0))

    def _plan_attention(self, step: StepInput, kv: torch.Tensor) -> Attend:
        """Decode for the first rows, prefill for the others."""
        window = self.config.window
        decodes = len(step.decodes)
        if not len(step.prefills):
            return self.kernels.decode_attention(step.decodes, kv, window)
        prefill = self.kernels.prefill_attention(step.prefills, kv, window)
        if not decodes:
            return prefill
        decode = self.kernels.decode_attention(step.decodes, kv, window)

        def attend(query: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            return torch.cat((decode(query[:decodes], kv), prefill(query[decodes:], kv)))

        return attend
