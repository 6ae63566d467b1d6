"""Who has had more than a fair share of late: weighted max-min over the work of tenants, with nothing to configure.

Work is seconds of workers (`work.py`). Each tenant's demand is what it asked for, its use what was admitted; both fade
with the time constant WINDOW. What was admitted in all is what the cluster can do, so the fair level x solves

    sum over tenants of min(demand, x * weight) = sum of use

A tenant is above its share if its use is above x * weight, and content if it is below. To be above can only be while
somebody is refused: otherwise demand is use, and x is as large as anybody's use. Who asks for more than its share by
asking again and again gains nothing: of its demand no more counts than its share.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

#: Seconds after which work counts 1/e: long beside a request, short beside a tenant's patience.
WINDOW = 60.0
#: Tenants remembered; who asked longest ago is forgotten.
MAX_TENANTS = 1024
#: Shares this near to fair are fair: work is predicted.
TOLERANCE = 0.02


@dataclass(slots=True)
class _Tenant:
    """At the time `at` (seconds)."""

    demand: float
    use: float
    at: float

    def fade(self, now: float) -> None:
        left = math.exp(-max(now - self.at, 0.0) / WINDOW)
        self.demand *= left
        self.use *= left
        self.at = now


class Shares:
    """See the module. weights: by tenant, 1 for all others."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def ask(self, tenant: str, work: float, admitted: bool, now: float) -> None:
        """A request of this tenant, of `work` seconds, was admitted or refused."""
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant(0.0, 0.0, now)
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        known.fade(now)
        known.demand += work
        known.use += work if admitted else 0.0

    def correct(self, tenant: str, work: float) -> None:
        """What was admitted turned out to be so much more work (less, if negative)."""
        known = self._tenants.get(tenant)
        if known is not None:
            known.demand = max(known.demand + work, 0.0)
            known.use = max(known.use + work, 0.0)

    def level(self, now: float) -> float:
        """The fair use per unit of weight; infinite if nobody is refused."""
        parts = []
        used = wanted = 0.0
        for name, tenant in self._tenants.items():
            tenant.fade(now)
            weight = self._weights.get(name, 1.0)
            parts.append((tenant.demand / weight, weight))
            used += tenant.use
            wanted += tenant.demand
        if wanted <= used * (1.0 + TOLERANCE):
            return math.inf
        # Fill up from the smallest demand: whoever is content leaves the rest to the others.
        weights = sum(weight for _, weight in parts)
        for demand, weight in sorted(parts):
            if demand * weights >= used:
                return used / weights
            used -= demand * weight
            weights -= weight
        return math.inf

    def excess(self, tenant: str, now: float, level: float | None = None) -> float:
        """The tenant's use over its fair one: above 1, it has had more. level: if it is known already."""
        known = self._tenants.get(tenant)
        if known is None:
            return 0.0
        level = self.level(now) if level is None else level
        known.fade(now)
        fair = level * self._weights.get(tenant, 1.0)
        return known.use / fair if fair > 0.0 else 0.0

    def above(self, tenant: str, now: float, level: float | None = None) -> bool:
        """Whether it has had more than its share."""
        return self.excess(tenant, now, level) > 1.0 + TOLERANCE

    def content(self, tenant: str, now: float, level: float | None = None) -> bool:
        """Whether it asks for less than its share: then it goes before those that would take more if they could."""
        return self.excess(tenant, now, level) < 1.0 - TOLERANCE

    def wait(self, tenant: str, now: float) -> float:
        """Seconds until its use has faded to its fair share, if it asks for nothing meanwhile."""
        excess = self.excess(tenant, now)
        return WINDOW * math.log(excess) if excess > 1.0 else 0.0

    def check(self) -> None:
        """Raises AssertionError if anybody has had more than was asked for."""
        for name, tenant in self._tenants.items():
            assert 0.0 <= tenant.use <= tenant.demand * (1 + 1e-9) + 1e-9, f"{name!r} used more than it asked for"
