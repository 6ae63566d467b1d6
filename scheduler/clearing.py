"""Blocks of a namespace or a tenant are forgotten on all nodes: who has been asked, who has answered, who was away.

    asked ──> an order to each daemon that is there ──> all have answered, have gone, or are late ──> the outcome

A daemon that is away keeps what it has on SSD and brings it back when it comes: the outcome names it, and whoever asked
asks again then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .cluster import Daemon
from .events import Action, Cleared, OrderClear, SendToGateway
from .messages import Clear, ClearedNode, ClearOutcome

#: Clearings at once; beyond, one is refused. People give them.
MAX_CLEARINGS = 16
#: Seconds in which a daemon walks over all it has: ten million blocks take some.
PATIENCE = 120.0


@dataclass(slots=True)
class _Clearing:
    asker: str
    number: int
    deadline: float
    away: list[str]
    open: set[str]
    done: list[ClearedNode] = field(default_factory=list)


class Clearings:
    """Those under way, by the number of their order."""

    def __init__(self, first: int = 1) -> None:
        self._next = first
        self._all: dict[int, _Clearing] = {}

    def begin(self, asker: str, message: Clear, daemons: dict[str, Daemon], now: float) -> list[Action]:
        if (message.namespace is None) == (message.tenant is None):
            return _refuse(asker, message.number, "say which namespace or which tenant, one of them")
        if not all(owner is None or 0 <= owner < 1 << 64 for owner in (message.namespace, message.tenant)):
            return _refuse(asker, message.number, "a namespace or tenant is a number of 64 bits, as pools know them")
        if len(self._all) >= MAX_CLEARINGS:
            return _refuse(asker, message.number, f"{MAX_CLEARINGS} clearings are under way: ask again later")
        order, self._next = self._next, self._next + 1
        up = sorted(name for name, daemon in daemons.items() if daemon.up)
        away = sorted(name for name, daemon in daemons.items() if not daemon.up)
        self._all[order] = _Clearing(asker, message.number, now + PATIENCE, away, set(up))
        return [OrderClear(node, order, message.namespace, message.tenant) for node in up] + self._ended(order)

    def on_cleared(self, report: Cleared) -> list[Action]:
        clearing = self._all.get(report.order)
        node = report.node.node
        if clearing is None or node not in clearing.open:
            return []
        clearing.open.discard(node)
        clearing.done.append(ClearedNode(node, report.dropped, report.held, report.durable))
        return self._ended(report.order)

    def on_gone(self, node: str) -> list[Action]:
        """The node's daemon is gone, or is another one now: what it has done of an order is not known."""
        actions: list[Action] = []
        for order, clearing in list(self._all.items()):
            if node in clearing.open:
                clearing.open.discard(node)
                clearing.away.append(node)
                actions += self._ended(order)
        return actions

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for order, clearing in list(self._all.items()):
            if clearing.deadline <= now:
                clearing.away += sorted(clearing.open)
                clearing.open.clear()
                actions += self._ended(order)
        return actions

    def forget(self, asker: str) -> None:
        """Nobody waits for its answers. The orders are carried out all the same."""
        self._all = {order: clearing for order, clearing in self._all.items() if clearing.asker != asker}

    def _ended(self, order: int) -> list[Action]:
        clearing = self._all[order]
        if clearing.open:
            return []
        del self._all[order]
        nodes = tuple(sorted(clearing.done, key=lambda node: node.node))
        outcome = ClearOutcome(number=clearing.number, nodes=nodes, away=tuple(sorted(clearing.away)))
        return [SendToGateway(clearing.asker, outcome)]


def _refuse(asker: str, number: int, reason: str) -> list[Action]:
    return [SendToGateway(asker, ClearOutcome(number=number, nodes=(), away=(), refused=reason))]
