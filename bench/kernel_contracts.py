"""The contracts of kernels/ in SmolLM2's shapes: ours on the CPU beside eager PyTorch, and beside what memory allows.

Where memory is the limit: PyTorch's copy of half as many bytes as the kernel reads and writes together (`limit`), or of
the same bytes (`memcpy`: gather and scatter). A row or few are in the caches, and prompts wait for arithmetic: none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from bench.common import in_turn, line
from pyengine.kernels.inputs import Sequences
from pyengine.kernels.torch import eager, native, pages, threads

LAYERS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 30, 9, 3, 64, 16
HIDDEN, MIDDLE = 576, 1536
#: Sequences, tokens before, new tokens of each.
ATTENTIONS = ((1, 256, 1), (16, 256, 1), (4, 2048, 1), (1, 0, 128), (1, 0, 2048), (1, 1536, 512))


@dataclass(frozen=True)
class Case:
    """read, written: bytes of all layers. run: with an implementation's kernels, all layers once. bound: by memory."""

    name: str
    read: int
    written: int
    run: Callable[[object], None]
    copies: bool = False
    bound: bool = True


def main(count: int, rounds: int) -> None:
    """count: threads; rounds: how often all take their turns."""
    torch.set_num_threads(count)
    threads.use(count)
    cache = pages.allocate(LAYERS, KV_HEADS, 1024, PAGE, HEAD_DIM, torch.float32, torch.device("cpu"))
    cache.uniform_(-1, 1)
    for case in (*strips(cache), *attentions(cache), *rows(cache)):
        source = torch.ones((case.read + case.written) // 8)
        target = torch.empty_like(source)
        runs: dict[str, Callable[[], object]] = {
            "ours": lambda case=case: case.run(native),  # type: ignore[misc]
            "eager": lambda case=case: case.run(eager),  # type: ignore[misc]
            "copy": lambda source=source, target=target: target.copy_(source),  # type: ignore[misc]
        }
        with torch.inference_mode():
            times = in_turn(runs, rounds)
        mine, other, limit = times["ours"], times["eager"], times["copy"]
        line("kernels", case.name, mine * 1e3, "ms", against="eager", ratio=other / mine)
        if not case.bound:
            continue
        line("kernels", case.name, mine * 1e3, "ms", against="memcpy" if case.copies else "limit", ratio=limit / mine)


def strips(cache: torch.Tensor) -> list[Case]:
    blocks = 128
    ids = torch.from_numpy(np.random.default_rng(0).permutation(1024)[:blocks].astype(np.int64))
    out = torch.zeros((blocks, LAYERS, 2, KV_HEADS, PAGE, HEAD_DIM))
    size = out.numel() * 4
    return [
        Case(f"gather {blocks} blocks", size, size, lambda kernels: kernels.gather(cache, ids, out), True),  # type: ignore[attr-defined]
        Case(f"scatter {blocks} blocks", size, size, lambda kernels: kernels.scatter(cache, ids, out), True),  # type: ignore[attr-defined]
    ]


def attentions(cache: torch.Tensor) -> list[Case]:
    cases = []
    for count, before, new in ATTENTIONS:
        each = -(-(before + new) // PAGE)
        order = np.random.default_rng(0).permutation(1024)[: count * each].astype(np.int32)
        sequences = Sequences.of([new] * count, [before + new] * count, list(order.reshape(count, each)))
        query = torch.rand((count * new, HEADS, HEAD_DIM))
        name = "decode_attention" if new == 1 else "prefill_attention"

        def run(
            kernels: object, name: str = name, sequences: Sequences = sequences, query: torch.Tensor = query
        ) -> None:
            attend = getattr(kernels, name)(sequences, cache[0])
            for kv in cache:
                attend(query, kv)

        kv_bytes = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4 * count * (before + new)
        cases.append(Case(f"{name} {count}x{before}+{new}", kv_bytes, LAYERS * query.numel() * 8, run, bound=new == 1))
    return cases


def rows(cache: torch.Tensor) -> list[Case]:
    cases = []
    for tokens in (1, 16, 512):
        x, stream = torch.rand((tokens, HIDDEN)), torch.rand((tokens, HIDDEN))
        gate_up = torch.rand((tokens, 2 * MIDDLE))
        qkv = torch.rand((tokens, HEADS + 2 * KV_HEADS, HEAD_DIM))
        angles, slots = torch.rand((tokens, HEAD_DIM // 2)), torch.arange(tokens)
        weight = torch.rand(HIDDEN)

        def norm(
            kernels: object, x: torch.Tensor = x, stream: torch.Tensor = stream, weight: torch.Tensor = weight
        ) -> None:
            for _ in range(LAYERS):
                kernels.rms_norm(x, weight, 1e-5, stream)  # type: ignore[attr-defined]

        def gated(kernels: object, gate_up: torch.Tensor = gate_up) -> None:
            for _ in range(LAYERS):
                kernels.swiglu(gate_up)  # type: ignore[attr-defined]

        def rope(
            kernels: object, qkv: torch.Tensor = qkv, angles: torch.Tensor = angles, slots: torch.Tensor = slots
        ) -> None:
            for kv in cache:
                kernels.rope_write(qkv, kv, angles, angles, slots)  # type: ignore[attr-defined]

        size = LAYERS * tokens * 4
        cases += [
            Case(f"rms_norm {tokens} rows", 2 * size * HIDDEN, 2 * size * HIDDEN, norm, bound=tokens > 16),
            Case(f"swiglu {tokens} rows", 2 * size * MIDDLE, size * MIDDLE, gated, bound=tokens > 16),
            Case(f"rope_write {tokens} rows", size * qkv[0].numel(), size * qkv[0].numel(), rope, bound=tokens > 16),
        ]
    return cases
