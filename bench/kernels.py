"""Kernels beside what else computes the same thing in this process, over SmolLM2's shapes.

`linear`: all products with constant weights of one step, layer by layer, as a decode step (few rows, and the head) or a
prefill chunk (many rows, some of the layers, no head) has them. Beside ours: F.linear, oneDNN with packed weights,
mm(W, x.T), numpy's sgemm. The limits are measured here too: one pass over as many bytes of memory, the fastest of
PyTorch's reductions; the best rate of numpy's sgemm, at 2048 x 2048 x 2048. All other contracts: kernel_contracts.py.

Prints one JSON object a line: bench, case, value, unit, against, ratio (above 1: we are faster). All take turns, round
by round, and the median round counts, so that a busy machine disturbs all alike.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from bench import kernel_contracts
from bench.common import in_turn, line, note
from pyengine._native import LINEAR_LEVELS
from pyengine.kernels.torch import linear

#: [out, in] of a layer's products, how many layers there are, and the head's shape.
LAYER, LAYERS, HEAD = ((960, 576), (576, 576), (3072, 576), (576, 1536)), 30, (49152, 576)
#: Rows, layers; with the head or without.
STEPS = ((1, LAYERS, True), (4, LAYERS, True), (16, LAYERS, True), (128, 10, False), (512, 4, False), (2048, 2, False))
SQUARE = 2048


@dataclass(frozen=True)
class Contender:
    """One way to compute a product: what it keeps of a weight [out, in], and the product of that with x [rows, in]."""

    name: str
    keep: Callable[[torch.Tensor], object]
    product: Callable[[object, torch.Tensor], object]


def ours(name: str, packed: torch.dtype, level: str) -> Contender:
    return Contender(
        name,
        lambda weight: linear.Native((weight,), packed, level),
        lambda kept, x: kept(x, None),  # type: ignore[operator]
    )


CONTENDERS = (
    Contender("F.linear", lambda weight: weight, lambda kept, x: F.linear(x, kept)),  # type: ignore[arg-type]
    Contender(
        "onednn packed",
        lambda weight: linear.OneDnn((weight,), torch.float32),
        lambda kept, x: kept(x, None),  # type: ignore[operator]
    ),
    Contender("mm(W, x.T)", lambda weight: weight, lambda kept, x: torch.mm(kept, x.T)),  # type: ignore[call-overload]
    Contender(
        "numpy sgemm",
        lambda weight: weight.numpy().T,
        lambda kept, x: x.numpy() @ kept,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a minute or two")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--level", choices=LINEAR_LEVELS, default=LINEAR_LEVELS[-1], help="instructions that ours uses")
    parser.add_argument("--rows", type=int, nargs="*", help="only steps of so many rows")
    parser.add_argument("--only", choices=("linear", "contracts"), help="products with constant weights, or all else")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    note(f"{arguments.threads} threads, {arguments.level}")
    if arguments.only != "linear":
        kernel_contracts.main(arguments.threads, rounds=5 if arguments.quick else 15)
        torch.set_num_threads(arguments.threads)
    if arguments.only == "contracts":
        return
    contenders = [
        ours("ours", torch.float32, arguments.level),
        ours("ours bf16", torch.bfloat16, arguments.level),
        *(contender for contender in CONTENDERS if contender.name != "onednn packed" or onednn()),
    ]
    generator = torch.Generator().manual_seed(0)
    layers = [[torch.randn(shape, generator=generator) for shape in LAYER] for _ in range(LAYERS)]
    head = torch.randn(HEAD, generator=generator)
    kept = {
        contender.name: ([[contender.keep(weight) for weight in layer] for layer in layers], contender.keep(head))
        for contender in contenders
    }
    for rows, count, with_head in STEPS:
        if arguments.rows and rows not in arguments.rows:
            continue
        # Of each width once; a layer's input is not its output's successor, but time does not depend on numbers.
        inputs = {width: torch.randn((rows, width), generator=generator) for width in {shape[1] for shape in LAYER}}
        runs: dict[str, Callable[[], object]] = {}
        for contender in contenders:
            matrices = [matrix for layer in kept[contender.name][0][:count] for matrix in layer]
            widths = [shape[1] for _ in range(count) for shape in LAYER]
            if with_head:
                matrices.append(kept[contender.name][1])
                widths.append(HEAD[1])
            runs[contender.name] = partial(step, contender.product, matrices, [inputs[width] for width in widths])
        shapes = [*LAYER * count, *([HEAD] if with_head else [])]
        numbers = sum(outputs * depth for outputs, depth in shapes)
        report(rows, numbers, runs, rounds=5 if arguments.quick else 15)


def step(product: Callable[[object, torch.Tensor], object], matrices: list[object], inputs: list[torch.Tensor]) -> None:
    with torch.inference_mode():
        for matrix, x in zip(matrices, inputs, strict=True):
            product(matrix, x)


def report(rows: int, numbers: int, runs: dict[str, Callable[[], object]], rounds: int) -> None:
    """Times all in turn and prints the lines of one step. numbers: of the step's weights."""
    memory = torch.ones(numbers)
    square = np.ones((SQUARE, SQUARE), np.float32)
    limits: dict[str, Callable[[], object]] = {"sum": memory.sum, "amax": memory.amax}
    if rows >= 128:
        limits = {"square": lambda: square @ square}
    medians = in_turn(runs | limits, rounds)
    mine = medians["ours"]
    case = f"linear {rows} rows"
    if rows >= 128:
        rate = 2 * rows * numbers / mine / 1e9
        best = 2 * SQUARE**3 / medians["square"] / 1e9
        line("kernels", case, rate, "GFLOP/s", against="limit", ratio=rate / best, limit=best)
    else:
        limit = min(medians["sum"], medians["amax"])
        line("kernels", case, mine * 1e3, "ms", against="limit", ratio=limit / mine, limit=limit * 1e3)
    for name in runs:
        if name == "ours bf16":
            line("kernels", f"{case} bf16", medians[name] * 1e3, "ms", against="fp32", ratio=mine / medians[name])
        elif name != "ours":
            line("kernels", case, mine * 1e3, "ms", against=name, ratio=medians[name] / mine)


def onednn() -> bool:
    return linear.OneDnn.can(torch.empty((1, 1)))


if __name__ == "__main__":
    main()
