"""Links between nodes, as fluids: transfers share each sender's way out and each receiver's way in, max-min fair.

A transfer's rate is as high as it can be without lowering that of one that is no faster (progressive filling, Bertsekas
and Gallager, "Data Networks" 6.5.2). Rates change only when a transfer begins or ends, so all times are closed forms:
nothing is stepped. What a change cannot reach, over shared ends, keeps its rate and the float that says when it ends.

    start ──> moving at its rate ──last byte sent──> on its way for `delay` ──> completed
"""

from __future__ import annotations

import heapq
import math
from collections import deque

#: Times that mean nothing any more may be so many for each transfer, before they are thrown away: a rebuild then costs
#: less than a tenth of the pushes since the last one.
STALE = 16


class _End:
    """One direction of a node's link, or the fabric, and who shares it. free, open, mark: scratch of a refill."""

    __slots__ = ("flows", "free", "mark", "open", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.flows: dict[int, _Flow] = {}
        self.free = 0.0
        self.open = 0
        self.mark = 0


class _Flow:
    """`left` bytes at `since`, `rate` from then on; `finish`: when the last byte is sent. mark: scratch of a refill."""

    __slots__ = ("ends", "finish", "id", "left", "mark", "rate", "since", "source", "to")

    def __init__(self, id: int, source: str, to: str, ends: tuple[_End, ...], left: float, now: float) -> None:
        self.id = id
        self.source = source
        self.to = to
        self.ends = ends
        self.left = left
        self.since = now
        self.rate = 0.0
        self.finish = math.inf
        self.mark = 0


class Links:
    """rate: bytes per second out of a node, and as many into it. delay: seconds from the last byte sent to completion.
    fabric_rate: bytes per second of all transfers together, None: no limit.

    Times are seconds and never go backwards from call to call.
    """

    def __init__(self, rate: float, delay: float, fabric_rate: float | None = None) -> None:
        for what, value in (
            ("a link's rate", rate),
            ("the fabric's rate", rate if fabric_rate is None else fabric_rate),
        ):
            if not 0.0 < value < math.inf:
                raise ValueError(f"{what} must be above 0 bytes per second and finite, not {value}")
        if not 0.0 <= delay < math.inf:
            raise ValueError(f"a link's delay must be 0 seconds or more, not {delay}")
        self.rate = rate
        self.delay = delay
        self.now = -math.inf
        self._fabric = None if fabric_rate is None else _End(fabric_rate)
        self._out: dict[str, _End] = {}
        self._into: dict[str, _End] = {}
        self._flows: dict[int, _Flow] = {}
        # When the last byte of whom is sent; entries whose time is not the flow's any more mean nothing.
        self._finishes: list[tuple[float, int]] = []
        # All are as long on their way: first sent, first completed.
        self._sent: deque[tuple[float, int]] = deque()
        self._next = 0
        self._mark = 0

    # -- transfers -------------------------------------------------------------------------------------------------

    def start(self, now: float, source: str, to: str, size: int) -> int:
        """Begins to send `size` bytes. Returns the transfer's id, one more than the last."""
        if size < 0:
            raise ValueError(f"a transfer has 0 bytes or more, not {size}")
        if source == to:
            raise ValueError(f"a transfer from {source} to itself uses no link")
        self._run(now)
        id = self._next
        self._next += 1
        if size == 0:
            self._sent.append((now + self.delay, id))
            return id
        out = self._out.get(source) or self._out.setdefault(source, _End(self.rate))
        into = self._into.get(to) or self._into.setdefault(to, _End(self.rate))
        ends = (out, into) if self._fabric is None else (out, into, self._fabric)
        self._flows[id] = flow = _Flow(id, source, to, ends, float(size), now)
        for end in ends:
            end.flows[id] = flow
        self._refill(now, ends)
        return id

    def cancel(self, now: float, id: int) -> bool:
        """It sends no more and is never completed. False if it was completed, or cancelled, before."""
        self._run(now)
        flow = self._flows.get(id)
        if flow is not None:
            self._leave(flow)
            self._refill(now, flow.ends)
            return True
        for entry in self._sent:
            if entry[1] == id:
                self._sent.remove(entry)
                return True
        return False

    def next(self) -> float:
        """When the next transfer is completed, if no other begins before; inf: none is under way."""
        if self._sent:
            # Whoever still sends is later than whoever has sent.
            return self._sent[0][0]
        finish = self._earliest()
        return finish + self.delay

    def advance(self, now: float) -> list[int]:
        """Ids of the transfers that were completed by now and not told yet, in the order of their completion."""
        self._run(now)
        done = []
        while self._sent and self._sent[0][0] <= now:
            done.append(self._sent.popleft()[1])
        return done

    # -- asking ----------------------------------------------------------------------------------------------------

    def touching(self, node: str) -> list[int]:
        """Ids of the transfers that this node still sends or receives."""
        ends = [end for end in (self._out.get(node), self._into.get(node)) if end is not None]
        return sorted(id for end in ends for id in end.flows)

    def rates(self) -> dict[int, float]:
        """Bytes per second of each that still sends."""
        return {id: flow.rate for id, flow in self._flows.items()}

    def check(self) -> None:
        """Asserts that no link carries too much, and nobody could be faster but at the cost of the slower."""
        slack = 1e-9
        ends = [*self._out.values(), *self._into.values(), *([self._fabric] if self._fabric else [])]
        for end in ends:
            assert sum(flow.rate for flow in end.flows.values()) <= end.rate * (1 + slack), "a link carries too much"
        for id, flow in self._flows.items():
            assert flow.rate > 0 and all(end.flows[id] is flow for end in flow.ends)
            bottlenecks = [
                end
                for end in flow.ends
                if sum(other.rate for other in end.flows.values()) >= end.rate * (1 - slack)
                and flow.rate >= max(other.rate for other in end.flows.values()) * (1 - slack)
            ]
            assert bottlenecks, f"transfer {id} could be faster"

    # -- the fluid -------------------------------------------------------------------------------------------------

    def _earliest(self) -> float:
        finishes, flows = self._finishes, self._flows
        while finishes:
            finish, id = finishes[0]
            flow = flows.get(id)
            if flow is not None and flow.finish == finish:
                return finish
            heapq.heappop(finishes)
        return math.inf

    def _run(self, now: float) -> None:
        """Lets all bytes flow that do by `now`."""
        if now < self.now:
            raise ValueError(f"time goes backwards: {now} s after {self.now} s")
        while (finish := self._earliest()) <= now:
            ends: list[_End] = []
            while self._earliest() == finish:
                flow = self._flows[heapq.heappop(self._finishes)[1]]
                self._leave(flow)
                self._sent.append((finish + self.delay, flow.id))
                ends += flow.ends
            self._refill(finish, ends)
        self.now = now

    def _leave(self, flow: _Flow) -> None:
        del self._flows[flow.id]
        for end in flow.ends:
            del end.flows[flow.id]

    def _refill(self, now: float, changed: list[_End] | tuple[_End, ...]) -> None:
        """Sets the rates of all that share an end with who shares an end ... with a changed one."""
        if len(self._finishes) > STALE * len(self._flows) + STALE:
            self._finishes = [(flow.finish, flow.id) for flow in self._flows.values()]
            heapq.heapify(self._finishes)
        self._mark += 1
        mark = self._mark
        ends: list[_End] = []
        for end in changed:
            if end.mark != mark:
                end.mark = mark
                ends.append(end)
        flows: list[_Flow] = []
        for end in ends:  # grows as it is walked
            for flow in end.flows.values():
                if flow.mark != mark:
                    flow.mark = mark
                    flows.append(flow)
                    for other in flow.ends:
                        if other.mark != mark:
                            other.mark = mark
                            ends.append(other)
        if len(flows) == 1:
            self._set(flows[0], min(end.rate for end in flows[0].ends), now)
            return
        shares = []
        for index, end in enumerate(ends):
            if end.flows:
                end.free, end.open = end.rate, len(end.flows)
                shares.append((end.free / end.open, index))
        heapq.heapify(shares)
        # The end with the smallest share is full first: its flows have their rate. The others' shares only grow by it.
        while shares:
            share, index = heapq.heappop(shares)
            end = ends[index]
            if not end.open:
                continue
            own = end.free / end.open
            if own > share:
                heapq.heappush(shares, (own, index))
                continue
            for flow in end.flows.values():
                if flow.mark == mark:
                    flow.mark = 0
                    self._set(flow, own, now)
                    for other in flow.ends:
                        other.free -= own
                        other.open -= 1

    def _set(self, flow: _Flow, rate: float, now: float) -> None:
        if rate == flow.rate:
            return
        flow.left = max(flow.left - flow.rate * (now - flow.since), 0.0)
        flow.since = now
        flow.rate = rate
        flow.finish = now + flow.left / rate
        heapq.heappush(self._finishes, (flow.finish, flow.id))
