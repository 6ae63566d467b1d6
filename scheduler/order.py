"""Who computes its prompt next, among those that wait: one line, in a total order at any given time.

1. Those that ran before and were preempted, as they arrived: they hold a client's attention already.
2. Those that have waited for longer than their patience, as they arrived.
3. By priority; then the tenant that was served least; then by slack: whoever must begin first to have its first token
   in time. Those that cannot any more go behind those that can.

Nobody starves: from `arrived + patience` on, only the preempted and those that arrived earlier go before it. With equal
objectives, one tenant and one priority this is first come, first served.

Fairness is start-time fair queueing (Goyal, Vin, Cheng 1996) over the tokens that are to be computed: a tenant that was
away starts at the virtual time of those that were not, so that nobody saves up rights and nobody pays for using what
nobody else wanted.
"""

from __future__ import annotations

import itertools
import math
from heapq import heappop, heappush
from typing import NamedTuple

#: Seconds somebody without an objective may be overtaken. Long beside any prompt, short beside a client's patience.
PATIENCE = 30.0
#: With an objective: so many times that. Who misses it is behind those who do not for as long again, then goes first.
PATIENCE_TTFTS = 2.0
#: Tenants remembered in one busy period of a priority; of more, those that are behind nobody are forgotten first.
TENANTS = 1024


class Place(NamedTuple):
    """One that waits. number: of arrival, unique.

    latest: begun by then, its first token is in time; -inf: its client has had that and waits for the second.
    patience: seconds from `arrived` after which no later one goes before it. resumed: it ran before.
    """

    number: int
    arrived: float = 0.0
    latest: float = math.inf
    patience: float = PATIENCE
    priority: int = 0
    tenant: int = 0
    resumed: bool = False


def rank(place: Place, now: float) -> tuple[float, ...]:
    """Sorts as this file's order does, but for fairness between tenants."""
    if place.resumed:
        return (0, place.number)
    if now >= place.arrived + place.patience:
        return (1, place.number)
    return (2, -place.priority, not _timely(place.latest, now), place.latest, place.number)


def _timely(latest: float, now: float) -> bool:
    return latest >= now or latest == -math.inf


class Line:
    """Those that wait. `push`, `remove`, `served` and `head` cost O(log n), and O(1) per priority there is."""

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._ticket: dict[int, int] = {}
        self._places: dict[int, Place] = {}
        # Heaps of (key…, ticket); an entry whose ticket is not in `_places` any more is dropped when it is met.
        self._resumed: list[tuple[int, int]] = []
        self._aging: list[tuple[float, int]] = []
        self._old: list[tuple[int, int]] = []
        self._classes: dict[int, _Priority] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, number: int) -> bool:
        return number in self._ticket

    def push(self, place: Place) -> None:
        """Raises ValueError if that number waits already."""
        if place.number in self._ticket:
            raise ValueError(f"number {place.number} waits already")
        ticket = next(self._tickets)
        self._ticket[place.number] = ticket
        self._places[ticket] = place
        if place.resumed:
            heappush(self._resumed, (place.number, ticket))
            return
        heappush(self._aging, (place.arrived + place.patience, ticket))
        self._classes.setdefault(place.priority, _Priority()).push(place, ticket)

    def remove(self, number: int) -> None:
        """It waits no more. Raises KeyError if it does not."""
        place = self._places.pop(self._ticket.pop(number))
        if place.resumed:
            return
        group = self._classes[place.priority]
        group.leave(place.tenant)
        if not group.waiting:
            # Nobody of this priority is kept waiting: what was served does not matter any more.
            del self._classes[place.priority]

    def served(self, place: Place, tokens: int) -> None:
        """So many tokens are computed for it: its tenant's next one goes further back. Called before `remove`."""
        if not place.resumed:
            self._classes[place.priority].serve(place.tenant, tokens)

    def head(self, now: float) -> Place | None:
        """Who is next, if anybody waits. Time does not go back."""
        if not self._places:
            return None
        place = self._top(self._resumed)
        if place is not None:
            return place
        while self._aging and (self._aging[0][0] <= now or self._aging[0][1] not in self._places):
            _, ticket = heappop(self._aging)
            if ticket in self._places:
                heappush(self._old, (self._places[ticket].number, ticket))
        place = self._top(self._old)
        if place is not None:
            return place
        return self._classes[max(self._classes)].head(now, self._places)

    def _top(self, heap: list[tuple[int, int]]) -> Place | None:
        while heap:
            place = self._places.get(heap[0][1])
            if place is not None:
                return place
            heappop(heap)
        return None

    def check(self) -> None:
        """Raises AssertionError if the line contradicts itself."""
        assert len(self._ticket) == len(self._places), "somebody waits twice"
        assert all(self._places[ticket].number == number for number, ticket in self._ticket.items())
        waiting = [place for place in self._places.values() if not place.resumed]
        assert set(self._classes) == {place.priority for place in waiting}, "a priority waits for nobody"
        for priority, group in self._classes.items():
            group.check([place for place in waiting if place.priority == priority])


class _Tenant:
    """Heaps of (latest, number, ticket): those that can still be in time, and those that cannot."""

    def __init__(self) -> None:
        self.waiting = 0
        self.timely: list[tuple[float, int, int]] = []
        self.late: list[tuple[float, int, int]] = []

    def head(self, now: float, places: dict[int, Place]) -> Place:
        while self.timely:
            latest, _, ticket = self.timely[0]
            if ticket in places and _timely(latest, now):
                return places[ticket]
            entry = heappop(self.timely)
            if ticket in places:
                heappush(self.late, entry)
        while self.late[0][2] not in places:
            heappop(self.late)
        return places[self.late[0][2]]


class _Priority:
    """Tenants of one priority, by what was served to them since somebody of it began to wait."""

    def __init__(self) -> None:
        self.waiting = 0
        self._tenants: dict[int, _Tenant] = {}
        self._served: dict[int, int] = {}
        self._virtual = 0
        # Heap of (served, count, tenant), stale where `served` has grown; who got there first is first among equals.
        self._turns: list[tuple[int, int, int]] = []
        self._count = itertools.count()

    def push(self, place: Place, ticket: int) -> None:
        tenant = self._tenants.get(place.tenant)
        if tenant is None:
            tenant = self._tenants[place.tenant] = _Tenant()
            served = self._served[place.tenant] = max(self._served.get(place.tenant, 0), self._virtual)
            heappush(self._turns, (served, next(self._count), place.tenant))
            self._limit()
        heappush(tenant.timely, (place.latest, place.number, ticket))
        tenant.waiting += 1
        self.waiting += 1

    def leave(self, name: int) -> None:
        tenant = self._tenants[name]
        tenant.waiting -= 1
        self.waiting -= 1
        if not tenant.waiting:
            del self._tenants[name]

    def serve(self, name: int, tokens: int) -> None:
        served = self._served[name]
        self._virtual = max(self._virtual, served)
        self._served[name] = served + max(tokens, 1)
        heappush(self._turns, (self._served[name], next(self._count), name))

    def head(self, now: float, places: dict[int, Place]) -> Place:
        while True:
            served, _, name = self._turns[0]
            tenant = self._tenants.get(name)
            if tenant is not None and served == self._served[name]:
                return tenant.head(now, places)
            heappop(self._turns)

    def _limit(self) -> None:
        if len(self._served) > TENANTS:
            idle = [name for name in self._served if name not in self._tenants]
            idle.sort(key=lambda name: self._served[name])
            for name in idle[: len(self._served) - TENANTS]:
                del self._served[name]

    def check(self, places: list[Place]) -> None:
        assert self.waiting == len(places) > 0
        names = {place.tenant for place in places}
        assert set(self._tenants) == names, "a tenant waits with nothing, or not at all"
        turns = {(served, name) for served, _, name in self._turns}
        assert all((self._served[name], name) in turns for name in names), "a tenant's turn never comes"
