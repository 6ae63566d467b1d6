"""Who computes its prompt next, among those that wait: one line.

1. Those that ran before and were preempted, as they arrived: they hold a client's attention already.
2. Of the others by priority; then the tenant that was served least; then whoever can still be in time, the shortest
   prompt first; then those without an objective, and last those that cannot be in time any more, as they arrived.
3. Those that have waited for longer than their patience, as they arrived: they get a share of OVERDUE of the tokens
   that are computed, whoever else waits, and all of it when nobody else can still be in time.

Why the shortest: a promise is kept or broken, and a short prompt in front delays a long one by little, a long one all
short ones by much. Whose slack is least goes first is best where all can be kept; under load it lets the long ones,
which have the least, take the time of many (2.6 times as many promises kept on the paper's conversation at 1.3 times
its speed with 5 prefill nodes). Why a share: who is overdue has lost already. If all that are had the right of way, one
burst would make everybody behind it late, and these the next.

Nobody starves: from `arrived + patience` on, one token in 1 / OVERDUE is computed for those that came before it and are
overdue, or for it. With one tenant and one priority, and no objectives, this is first come, first served.

Fairness is start-time fair queueing (Goyal, Vin, Cheng 1996) over the tokens that are to be computed: a tenant that was
away starts at the virtual time of those that were not, so that nobody saves up rights and nobody pays for using what
nobody else wanted.
"""

from __future__ import annotations

import itertools
import math
from heapq import heapify, heappop, heappush
from typing import NamedTuple

#: Seconds somebody without an objective may be overtaken. Long beside any prompt, short beside a client's patience.
PATIENCE = 30.0
#: With an objective: so many times that. Who misses it is behind those who do not for as long again.
PATIENCE_TTFTS = 2.0
#: Share of the tokens that are computed for those whose patience is over, while others can still be in time.
OVERDUE = 0.1
#: Entries of those that wait no more may be as many as of those that do, and so many, before they are thrown away.
STALE = 64
#: Tenants remembered in one busy period of a priority; of more, those that are behind nobody are forgotten first.
TENANTS = 1024


class Place(NamedTuple):
    """One that waits. number: of arrival, unique.

    latest: begun by then, its first token is in time; inf: nothing was promised; -inf: its client has had that and
    waits for the second. seconds: that its prompt takes. patience: seconds from `arrived` after which it is overdue.
    resumed: it ran before.
    """

    number: int
    arrived: float = 0.0
    latest: float = math.inf
    patience: float = PATIENCE
    priority: int = 0
    tenant: int = 0
    resumed: bool = False
    seconds: float = 0.0

    @property
    def length(self) -> float:
        """By which those that can be in time are sorted; who was promised nothing is behind all that were."""
        return math.inf if self.latest == math.inf else -math.inf if self.latest == -math.inf else self.seconds

    def timely(self, now: float) -> bool:
        return self.latest >= now or self.latest == -math.inf

    def overdue(self, now: float) -> bool:
        return now >= self.arrived + self.patience


class Line:
    """Those that wait. `push`, `remove`, `served` and `head` cost O(log n), and O(1) per priority there is."""

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._ticket: dict[int, int] = {}
        self._places: dict[int, Place] = {}
        # Heaps of (key…, ticket); an entry whose ticket is not in `_places` any more is dropped when it is met.
        self._resumed: list[tuple[int, int]] = []
        self._aging: list[tuple[float, int]] = []
        self._overdue: list[tuple[int, int]] = []
        # Tokens that are computed of others before somebody overdue has its turn again.
        self._owed = 0.0
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
        self._classes.setdefault(place.priority, _Priority()).push(place, ticket, self._places)

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

    def computed(self, place: Place, tokens: int, now: float) -> None:
        """A step computes so many tokens of one that has left the line: who is overdue has used up its turn."""
        if place.overdue(now):
            self._owed = tokens * (1 / OVERDUE - 1)
        else:
            self._owed = max(self._owed - tokens, 0.0)

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
                heappush(self._overdue, (self._places[ticket].number, ticket))
        overdue = self._top(self._overdue)
        if overdue is not None and not self._owed:
            return overdue
        place = self._classes[max(self._classes)].head(now, self._places)
        return place if overdue is None or place.timely(now) else overdue

    def rank(self, place: Place, now: float) -> tuple[float, ...]:
        """Sorts those that have begun, and the head, as the line would, but for fairness between tenants."""
        if place.resumed:
            return (0, place.number)
        if place.overdue(now):
            return (3 if self._owed else 1, place.number)
        if place.timely(now):
            return (2, -place.priority, 0, place.length, place.number)
        return (2, -place.priority, 1, place.number)

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
    """Heaps of (key, number, ticket): by length those that can be in time, by `latest` all whose time will come, and
    those for whom it is too late. An entry is dropped when it is met and its ticket waits no more, or elsewhere.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._timely: list[tuple[float, int, int]] = []
        self._latest: list[tuple[float, int, int]] = []
        self._late: list[tuple[float, int, int]] = []

    def push(self, place: Place, ticket: int, places: dict[int, Place]) -> None:
        self.waiting += 1
        heappush(self._timely, (place.length, place.number, ticket))
        if math.isfinite(place.latest):
            heappush(self._latest, (place.latest, place.number, ticket))
        # Behind somebody who always waits the others' entries would never be met.
        for heap in (self._timely, self._latest, self._late):
            if len(heap) > 2 * self.waiting + STALE:
                heap[:] = [entry for entry in heap if entry[2] in places]
                heapify(heap)

    def head(self, now: float, places: dict[int, Place]) -> Place:
        while self._latest and self._latest[0][0] < now:
            _, number, ticket = heappop(self._latest)
            if ticket in places:
                heappush(self._late, (0.0, number, ticket))
        while self._timely:
            ticket = self._timely[0][2]
            if ticket in places and places[ticket].timely(now):
                return places[ticket]
            heappop(self._timely)
        while self._late[0][2] not in places:
            heappop(self._late)
        return places[self._late[0][2]]


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

    def push(self, place: Place, ticket: int, places: dict[int, Place]) -> None:
        tenant = self._tenants.get(place.tenant)
        if tenant is None:
            tenant = self._tenants[place.tenant] = _Tenant()
            served = self._served[place.tenant] = max(self._served.get(place.tenant, 0), self._virtual)
            heappush(self._turns, (served, next(self._count), place.tenant))
            self._limit()
        tenant.push(place, ticket, places)
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
