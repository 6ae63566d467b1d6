"""Sampling without a sort: the last kept logit is found by bisection, then the draw is one scan in the order of ids.

Kept is always a number of first tokens by rank: all above some logit, and of those that equal it the first by id. A
pass over the row counts or weighs what lies above a candidate; floats as integers of the same order make that 32
passes at most, however the logits lie. Weights are float32, their sums float64.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

import torch
from pyengine.kernels.inputs import Draws
from pyengine.kernels.torch.triton.launch import dense
from pyengine.kernels.torch.upload import upload

BLOCK = 4096
LOWEST = tl.constexpr(-(2**31))  # below the order of every float


def sample(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    dense(logits=logits)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        columns = [draws.temperature, draws.min_p, draws.top_k.astype(np.float64), draws.top_p, draws.uniform]
        settings = upload(np.stack(columns, axis=1), logits.device)
        block = min(BLOCK, triton.next_power_of_2(vocab))
        _sample[(rows,)](logits, settings, tokens, logits.stride(0), vocab, BLOCK=block, num_warps=8)
    return tokens


@triton.jit
def _sample(logits, settings, tokens, stride, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    settings += row * 5
    temperature = tl.load(settings).to(tl.float32)
    least_weight = tl.load(settings + 1).to(tl.float32)
    top_k = tl.load(settings + 2)
    top_p = tl.load(settings + 3)
    uniform = tl.load(settings + 4)

    largest, likeliest = _largest(logits, vocab, BLOCK)
    if likeliest < 0 or temperature == 0.0:
        tl.store(tokens + row, likeliest.to(tl.int64))
        return
    beta = 1.0 / temperature

    # Kept are all tokens above `least`, and the first `equals` of those that equal it.
    ceiling = _order(largest).to(tl.int64) + 1
    least = tl.full((), LOWEST, tl.int64)
    equals = tl.full((), 0.0, tl.float64)
    if (top_k > 0.0) & (top_k < vocab):
        least = _bisect(logits, vocab, least, ceiling, top_k, largest, beta, least_weight, True, BLOCK)
        count, _ = _above(logits, vocab, least + 1, largest, beta, least_weight, BLOCK)
        equals = top_k - count
    if top_p < 1.0:
        _, mass = _above(logits, vocab, least + 1, largest, beta, least_weight, BLOCK)
        goal = top_p * (mass + equals * _weight_of(least, largest, beta))
        further = _bisect(logits, vocab, least, ceiling, goal, largest, beta, least_weight, False, BLOCK)
        _, mass = _above(logits, vocab, further + 1, largest, beta, least_weight, BLOCK)
        wanted = tl.maximum(tl.ceil((goal - mass) / tl.maximum(_weight_of(further, largest, beta), 1e-30)), 1.0)
        equals = tl.where(further == least, tl.minimum(equals, wanted), wanted)
        least = further

    # The mass of a block is what its scan ends with, in both passes: so the goal, which is less, is always reached.
    total = tl.full((), 0.0, tl.float64)
    seen = tl.full((), 0, tl.int32)  # of those that equal `least`
    for begin in range(0, vocab, BLOCK):
        _, masses, seen = _kept(logits, vocab, begin, seen, least, equals, largest, beta, least_weight, BLOCK)
        total += tl.max(masses, 0)
    goal = uniform * total
    total = tl.full((), 0.0, tl.float64)
    seen = tl.full((), 0, tl.int32)
    token = vocab
    begin = tl.full((), 0, tl.int32)
    while (begin < vocab) & (token == vocab):
        ids, masses, seen = _kept(logits, vocab, begin, seen, least, equals, largest, beta, least_weight, BLOCK)
        token = tl.min(tl.where(total + masses > goal, ids, vocab), 0)
        total += tl.max(masses, 0)
        begin += BLOCK
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _largest(logits, vocab, BLOCK: tl.constexpr):
    """The largest logit and its first id, -1 if there is a NaN or it is infinite."""
    largest = tl.full((), float("-inf"), tl.float32)
    likeliest = tl.full((), 0, tl.int32)
    broken = tl.full((), 0, tl.int32)
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        value = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
        broken = tl.maximum(broken, tl.max((value != value).to(tl.int32), 0))
        value = tl.where(value != value, float("-inf"), value)
        top = tl.max(value, 0)
        first = tl.min(tl.where(value == top, ids, vocab), 0)
        likeliest = tl.where(top > largest, first, likeliest)
        largest = tl.maximum(largest, top)
    broken = tl.where(tl.abs(largest) == float("inf"), 1, broken)
    return largest, tl.where(broken == 0, likeliest, -1)


@triton.jit
def _order(value):
    """Floats as int32 of the same order; 0 and -0 are one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _weight_of(order, largest, beta):
    """The weight, float64, of a logit by its order; 0 of what is below all."""
    bits = order.to(tl.int32)
    value = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
    return tl.where(order == LOWEST, 0.0, tl.exp((value - largest) * beta)).to(tl.float64)


@triton.jit
def _above(logits, vocab, least, largest, beta, least_weight, BLOCK: tl.constexpr):
    """How many logits, by order, are `least` or more and heavy enough, and their weight: both float64."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        value = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
        weight = tl.exp((value - largest) * beta)
        taken = (_order(value) >= least) & (weight >= least_weight) & (ids < vocab)
        count += taken.to(tl.int32)
        mass += tl.where(taken, weight, 0.0)
    return tl.sum(count, 0).to(tl.float64), tl.sum(mass.to(tl.float64), 0)


@triton.jit
def _bisect(
    logits, vocab, lowest, ceiling, goal, largest, beta, least_weight, COUNTED: tl.constexpr, BLOCK: tl.constexpr
):
    """The highest order at and above which there are `goal` tokens, or that much weight; `lowest` if there are not."""
    while ceiling - lowest > 1:
        middle = (lowest + ceiling) // 2
        count, mass = _above(logits, vocab, middle, largest, beta, least_weight, BLOCK)
        reached = (count if COUNTED else mass) >= goal
        lowest = tl.where(reached, middle, lowest)
        ceiling = tl.where(reached, ceiling, middle)
    return lowest


@triton.jit
def _kept(logits, vocab, begin, seen, least, equals, largest, beta, least_weight, BLOCK: tl.constexpr):
    """(ids, masses, seen) of one block: masses: kept weight up to each id; seen: how many so far equal `least`."""
    ids = begin + tl.arange(0, BLOCK)
    value = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
    weight = tl.exp((value - largest) * beta)
    order = _order(value)
    equal = ((order == least) & (ids < vocab)).to(tl.int32)
    first = (equal == 1) & (seen + tl.cumsum(equal, 0) <= equals)
    kept = ((order > least) | first) & (weight >= least_weight) & (ids < vocab)
    # In float64: rounded to float32, the sum would rise at tokens that weigh next to nothing, and one be drawn in 10^7.
    masses = tl.cumsum(tl.where(kept, weight, 0.0).to(tl.float64), 0)
    return ids, masses, seen + tl.sum(equal, 0)
