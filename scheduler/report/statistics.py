"""Which differences are real: paired tests over seeds, exact and without an assumed distribution.

All policies see the same trace under the same seed, so what differs within a seed is the policy's doing. If a policy
made no difference, each seed's differences could as well have had the other sign: so all 2^n signs are tried, and p is
the share of them that give a difference as large. Many comparisons are corrected for at once: each is weighed against
the largest statistic among all of them (Westfall and Young's max-T); a seed's signs flip together, which keeps how the
comparisons depend on each other.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from ..sim.report import F64

#: Differences are called real below this chance that a policy which makes no difference gives one as large, anywhere.
LEVEL = 0.05
#: All signs are tried up to so many seeds (16,384 of them); beyond, so many random ones.
EXACT_SEEDS = 14
RANDOM_FLIPS = 10_000
RESAMPLES = 10_000


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Paired over seeds. mean: of (one minus other). low, high: 95 % interval of the mean, by bootstrap over seeds.

    p: corrected for all comparisons made together. real: p is at most LEVEL.
    """

    mean: float
    low: float
    high: float
    p: float

    @property
    def real(self) -> bool:
        return self.p <= LEVEL


def seeds_needed() -> int:
    """Fewer can never show anything: with all signs equal, 2 of 2^n flips are as extreme."""
    return math.ceil(math.log2(2 / LEVEL))


def compare(differences: F64, seed: int = 0) -> list[Difference]:
    """differences [C, N]: of C comparisons, over N seeds. One result per comparison. seed: of what is drawn."""
    count, seeds = differences.shape
    if not count:
        return []
    random = np.random.default_rng(seed)
    observed = _statistic(differences)
    larger = np.zeros(count)
    flips = _flips(seeds, random)
    for signs in flips:
        # The tolerance is for the rounding of equal sums in another order.
        larger += _statistic(differences * signs).max() >= observed * (1 - 1e-9)
    picks = random.integers(0, seeds, size=(RESAMPLES, seeds))
    low, high = np.percentile(differences[:, picks].mean(axis=2), (2.5, 97.5), axis=1)
    return [
        Difference(mean=float(row.mean()), low=float(low[i]), high=float(high[i]), p=float(larger[i] / len(flips)))
        for i, row in enumerate(differences)
    ]


def interval(values: F64, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean of `values`, by bootstrap."""
    picks = np.random.default_rng(seed).integers(0, len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(values[picks].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def _flips(seeds: int, random: np.random.Generator) -> F64:
    """[F, N] signs; the first leaves all as they are."""
    if seeds <= EXACT_SEEDS:
        bits = np.arange(2**seeds)[:, None] >> np.arange(seeds) & 1
        return np.where(bits == 1, -1.0, 1.0)
    signs: F64 = random.choice([-1.0, 1.0], size=(RANDOM_FLIPS, seeds))
    signs[0] = 1.0
    return signs


def _statistic(differences: F64) -> F64:
    """[C] size of the mean in units of its own error, so that comparisons of unequal scale weigh alike.

    Differences all equal to zero: 0. All equal and not zero: inf, nothing could be clearer.
    """
    seeds = differences.shape[1]
    mean = np.abs(differences.mean(axis=1))
    error = differences.std(axis=1) / math.sqrt(max(seeds - 1, 1))
    # A spread that is mere rounding is none.
    error = np.where(error <= 1e-12 * mean, 0.0, error)
    with np.errstate(divide="ignore", invalid="ignore"):
        size: F64 = np.where(mean == 0, 0.0, mean / error)
    return size
