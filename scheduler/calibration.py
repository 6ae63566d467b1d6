"""Which steps a worker computes at start-up to learn what steps cost, before the first request asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .cost import StepCost, StepWork, context_of

#: Steps that decode behind each batch of prompts.
DECODES = 2
#: Seconds it may take. On a slow machine it ends early and the first requests teach the rest.
LIMIT = 2.0
#: Of steps with fewer prompt tokens, the step itself is most.
TELLING = 64


@dataclass(frozen=True, slots=True)
class Probe:
    """One step: each of `sequences` computes `count` tokens from position `start` on, of `length` later."""

    sequences: int
    start: int
    count: int
    length: int

    @property
    def work(self) -> StepWork:
        """Whatever starts a sequence is a prompt, whatever goes on decodes."""
        context = self.sequences * context_of(self.start, self.start + self.count)
        if self.start:
            return StepWork(0, 0, self.sequences, context)
        return StepWork(self.sequences * self.count, context, 0, 0)


def probes(max_tokens: int, max_sequences: int) -> Iterator[Probe]:
    """Cheap ones first; those that start at 0 write what the ones behind them read."""
    points = {(1, 16), (1, 64), (4, 16), (8, 32), (1, 256), (2, max_tokens // 2), (1, max_tokens)}
    points.add((max_sequences, max_tokens // max_sequences))
    for sequences, tokens in sorted(points, key=lambda point: (point[0] * point[1], point)):
        if tokens >= 1 and sequences <= max_sequences and sequences * tokens <= max_tokens:
            length = tokens + DECODES
            yield Probe(sequences, 0, tokens, length)
            for start in range(tokens, length):
                yield Probe(sequences, start, 1, length)


def calibrate(
    cost: StepCost, steps: Iterable[Probe], seconds_of: Callable[[Probe], float], limit: float = LIMIT
) -> None:
    """Lets `cost` observe these steps. seconds_of: computes one and says how long it took. limit: seconds in all; none
    is begun that will probably not end in time, as far as those before it tell.
    """
    passed = worst = 0.0
    for probe in steps:
        if passed + worst * probe.work.prefill_tokens > limit:
            break
        seconds = seconds_of(probe)
        passed += seconds
        cost.observe(probe.work, seconds)
        if probe.work.prefill_tokens >= TELLING:
            worst = max(worst, seconds / probe.work.prefill_tokens)
