"""Roles: which worker should prefill, decode, or do both, as the load of the two shifts. Slow, and one at a time.

The model. P and D are the work of prefill and of decode that clients ask for, in workers (seconds of a worker per
second, `work.py`), smoothed over WINDOW. With p, d and b workers of the three roles, each of the b worth BOTH_WORTH of
one that does a single thing (chunks of prompts and tokens of answers hold each other up), and requests spread so that
the highest load is as low as it can be, that load is

    L(p, d, b) = max( P / (p + b'),  D / (d + b'),  (P + D) / (p + d + b'),  (P + D) / (b' + p (P + D) / P) )

with b' = BOTH_WORTH * b. The last term: what a worker of role both has prefilled it decodes itself, so the decode
workers get no more than what the prefill workers have computed.

A goal is so many workers of one role taking on another. Towards the best of them one worker is switched if L at the
goal is below (1 - margin) * L here; then all is judged anew. The same L judges the way back, hence

Why it does not oscillate. Let P and D be constant and the estimates within a factor 1 +- e of them. L grows with both,
so each estimate of L is within that factor too. That the goal G is chosen at A then means

    (1 - e) L(G)  <=  L^(G)  <  (1 - m) L^(A)  <=  (1 - m)(1 + e) L(A)

and if m > 2e / (1 + e), L(G) < L(A). Along the way from A to G each term of L is a constant over a linear function of
the workers that have switched, so L is convex there, and lower after the first of them: every switch lowers the true L.
L is a function of (p, d, b) alone, so no state comes back, and as there are finitely many, switching ends. `margin` is
the larger of MARGIN and that bound, with e from what the estimates vary by, so the argument holds for bursty load too:
then nothing is switched until more is known. By e two standard errors are meant; beyond these, the dwell time limits
what chance can do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .types import Role

#: Seconds over which load is smoothed: many requests, and short beside the tides of a day.
WINDOW = 120.0
#: A goal must lower the highest load by this share of it at least: each switch costs a worker's pages, and a drain.
MARGIN = 0.15
#: Below this load nobody gains by a switch.
ENOUGH = 0.3
#: Seconds between two switches. What is asked for does not depend on roles, so the next one rests on nothing that this
#: one has changed; it is for workers to drain and for what was cached there to be fetched elsewhere.
DWELL = 20.0
#: Seconds after which a switch that nobody has heard of again is given up.
PATIENCE = 600.0
#: What a worker of role both is worth, in workers that do one thing. The gaps of its decodes are as long as its steps
#: with a chunk of a prompt in them; to be fitted with measurements.
BOTH_WORTH = 0.8
#: Standard errors that make the e of the argument.
SIGMAS = 2.0


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that may be told to switch. busy: what it has to finish first, in any unit. fixed: it keeps its role."""

    name: str
    role: Role
    busy: float = 0.0
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class Switch:
    worker: str
    role: Role
    why: str


class Rate:
    """Work per second, smoothed over WINDOW, and how far it may be off."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._at = 0.0
        self._work = self._squares = 0.0

    def add(self, work: float, now: float) -> None:
        self._fade(now)
        self._work += work
        self._squares += work * work

    def value(self, now: float) -> float:
        """Work per second; what came so far counts for as long as it came."""
        self._fade(now)
        return self._work / self._span(now)

    def error(self, now: float) -> float:
        """Standard error of `value`, relative to it; infinite while little is known.

        Of arrivals without memory: the sum of the squares is the variance of the sum, and fading halves it.
        """
        self._fade(now)
        if self._work <= 0.0 or self._begun is None or now - self._begun < WINDOW / 2:
            return math.inf
        return math.sqrt(self._squares / 2) / self._work

    def _span(self, now: float) -> float:
        known = 0.0 if self._begun is None else now - self._begun
        return max(WINDOW * (1.0 - math.exp(-known / WINDOW)), 1.0)

    def _fade(self, now: float) -> None:
        if self._begun is None:
            self._begun = self._at = now
        left = math.exp(-max(now - self._at, 0.0) / WINDOW)
        self._work *= left
        self._squares *= left
        self._at = max(now, self._at)


def highest_load(prefill: float, decode: float, counts: tuple[int, int, int]) -> float:
    """L of the module: prefill and decode in workers, counts of prefill, decode and both. Infinite if a part is
    missing.
    """
    p, d, both = counts
    b = BOTH_WORTH * both
    total = prefill + decode
    if total <= 0.0:
        return 0.0
    if p + b <= 0.0 or d + b <= 0.0:
        return math.inf
    # With no prefill at all the last term has nothing to bound.
    reach = math.inf if prefill <= 0.0 else b + p * total / prefill
    return max(prefill / (p + b), decode / (d + b), total / (p + d + b), total / reach)


class Planner:
    """See the module."""

    def __init__(self) -> None:
        self.prefill = Rate()
        self.decode = Rate()
        self._order: tuple[str, Role, float] | None = None
        self._switched = -math.inf
        self.given_up = 0

    def ask(self, prefill: float, decode: float, now: float) -> None:
        """A client asked for so much work (seconds of workers), whether it was admitted or not."""
        self.prefill.add(prefill, now)
        self.decode.add(decode, now)

    def decide(self, members: Iterable[Member], now: float) -> Switch | None:
        """The first switch towards the goal that helps most, if any does enough. It is taken as ordered."""
        workers = sorted(members, key=lambda member: (member.busy, member.name))
        if self._waits(workers, now):
            return None
        count = {role: sum(member.role is role for member in workers) for role in Role}
        here = (count[Role.PREFILL], count[Role.DECODE], count[Role.BOTH])
        prefill, decode = self.prefill.value(now), self.decode.value(now)
        load = highest_load(prefill, decode, here)
        error = SIGMAS * max(self.prefill.error(now), self.decode.error(now))
        if load < ENOUGH or error >= 1.0:
            return None
        margin = max(MARGIN, 2 * error / (1 + error))
        best, most = None, (1.0 - margin) * load
        for source in Role:
            free = [member for member in workers if member.role is source and not member.fixed]
            for moved in range(1, min(len(free), count[source] - 1) + 1):
                for role in Role:
                    if role is source:
                        continue
                    goal = dict(count)
                    goal[source] -= moved
                    goal[role] += moved
                    then = highest_load(prefill, decode, (goal[Role.PREFILL], goal[Role.DECODE], goal[Role.BOTH]))
                    if then < most:
                        why = f"highest load {load:.2f} with {_say(count)}, {then:.2f} with {_say(goal)}"
                        best, most = Switch(free[0].name, role, why), then
        if best is not None:
            self._order = (best.worker, best.role, now)
            self._switched = now
        return best

    def _waits(self, workers: list[Member], now: float) -> bool:
        """Whether a switch is under way, or the last one was only just."""
        if self._order is not None:
            worker, role, since = self._order
            found = next((member for member in workers if member.name == worker), None)
            if found is None or found.role is role:
                self._order = None
            elif now - since >= PATIENCE:
                self._order = None
                self.given_up += 1
            else:
                return True
        return now - self._switched < DWELL


def _say(count: dict[Role, int]) -> str:
    return " + ".join(f"{number} {role.value}" for role, number in count.items() if number)
