"""What one rank of a tensor-parallel replica has of a model, and what ranks say to each other while they compute.

Megatron's cut (Shoeybi et al., 2019): queries, keys, values, gate and up by rows, so each rank has whole heads and its
own part of the MLP; output and down by columns, whose products are summed over all ranks; embedding and head by
vocabulary. All else every rank has whole. Layers (models/) know nothing of it: the names of their tensors say how they
are cut.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pyengine.checkpoint import ModelConfig
from pyengine.copier import Heads

#: In which ranks that have all loaded their weights meet.
MEET_WITHIN = timedelta(seconds=60)
#: For everything behind that: a rank that dies is noticed as its connections end, and not by the clock.
FOREVER = timedelta(days=365)


class Part:
    """The share of one rank in rows and columns of the checkpoint's tensors; of a model in one process, all."""

    def __init__(self, config: ModelConfig, rank: int = 0, ranks: int = 1) -> None:
        """Raises ModelError unless whole heads can be given to each rank."""
        config.check_ranks(ranks)
        heads, kv_heads = config.heads, config.kv_heads
        self.rank = rank
        self.ranks = ranks
        replicas = max(1, ranks // kv_heads)
        first, count = rank * kv_heads // ranks, max(1, kv_heads // ranks)
        self.heads = Heads(first, count, kv_heads, stores=rank % replicas == 0)
        dim = config.head_dim
        queries = range(rank * heads // ranks * dim, (rank + 1) * heads // ranks * dim)
        keys = range(first * dim, (first + count) * dim)
        inner, self.vocabulary = self._share(config.intermediate_size), self._share(config.vocab_size)
        self._rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": inner, "up_proj": inner}
        self._rows |= {"embed_tokens": self.vocabulary, "lm_head": self.vocabulary}
        self._columns = {"o_proj": queries, "down_proj": inner}
        #: Of the widest share: what each rank sends of the logits.
        self.width = -(-config.vocab_size // ranks)
        self.vocab_size = config.vocab_size

    def _share(self, size: int, rank: int | None = None) -> range:
        rank = self.rank if rank is None else rank
        return range(rank * size // self.ranks, (rank + 1) * size // self.ranks)

    def rows(self, name: str) -> range | None:
        """Of this tensor (its name in the checkpoint): None: all."""
        return self._rows.get(_owner(name)) if self.ranks > 1 else None

    def columns(self, name: str) -> range | None:
        """As `rows`. A product with such a tensor is summed over all ranks."""
        return self._columns.get(_owner(name)) if self.ranks > 1 else None

    def whole(self, logits: list[torch.Tensor]) -> torch.Tensor:
        """Logits [samples, vocab] of those of each rank, [samples, width]."""
        shares = [len(self._share(self.vocab_size, rank)) for rank in range(self.ranks)]
        return torch.cat([part[:, :share] for part, share in zip(logits, shares, strict=True)], dim=1)


def _owner(name: str) -> str:
    """The module that a tensor belongs to: "q_proj" of "model.layers.0.self_attn.q_proj.weight"."""
    return name.split(".")[-2] if "." in name else name


class Group:
    """Collectives over all ranks. Every rank makes the same calls in the same order; a dead rank makes them raise."""

    def __init__(self, part: Part, device: torch.device) -> None:
        self.part = part
        self._device = device
        self._group: Any = None  # dist.ProcessGroupGloo or ...NCCL: torch's stubs know them by half
        self._gathered = torch.empty(0)

    def meet(self, file: str) -> None:
        """Waits for all ranks; file: a path that all know, in a folder that is nobody else's."""
        rank, ranks = self.part.rank, self.part.ranks
        store = dist.FileStore(file, ranks)  # type: ignore[attr-defined]
        if self._device.type == "cuda":  # never been run
            torch.cuda.set_device(self._device)
            self._group = dist.ProcessGroupNCCL(store, rank, ranks, dist.ProcessGroupNCCL.Options())
            return
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._threads = 1
        options._timeout = MEET_WITHIN
        self._group = dist.ProcessGroupGloo(store, rank, ranks, options)
        self._group.barrier().wait()
        self._group._set_default_timeout(FOREVER)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x of all ranks, summed in place; the same bits everywhere.

        On CPUs in the order of the ranks: a ring would begin each part of x at another rank, so that a token's sum
        would depend on where it stands in the batch. For two ranks it also takes less time (2 KiB by gloo: 210 us, by
        its ring 320).
        """
        if self._group is None:
            return x
        if x.device.type == "cuda":
            self._group.allreduce([x]).wait()
            return x
        ranks = self.part.ranks
        if self._gathered.numel() < ranks * x.numel() or self._gathered.dtype != x.dtype:
            self._gathered = torch.empty(ranks * x.numel(), dtype=x.dtype)
        gathered = self._gathered[: ranks * x.numel()]
        self._group._allgather_base(gathered, x.flatten()).wait()
        first, *others = gathered.view(ranks, *x.shape)
        for other in others[:-1]:
            first += other
        return torch.add(first, others[-1], out=x)

    def logits(self, mine: torch.Tensor) -> torch.Tensor:
        """float32 [samples, own share of the vocabulary] -> [samples, vocab] at rank 0; elsewhere what was given."""
        if self._group is None:
            return mine
        part = self.part
        if not len(mine):
            return mine.new_empty((0, part.vocab_size))
        sent = mine.new_zeros((len(mine), part.width))
        sent[:, : mine.shape[1]] = mine
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(sent) for _ in range(part.ranks)] if part.rank == 0 else []
        self._group.gather([parts] if parts else [], [sent], options).wait()
        return part.whole(parts) if parts else mine

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()
            self._group = None
