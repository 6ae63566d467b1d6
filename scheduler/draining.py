"""What only a draining node has, and somebody uses, goes to other nodes before it stops.

    heartbeat says "draining" --> hot blocks that nobody else has --> chains, hottest first, each from its head
    each chain, piece by piece --> the node that has what comes before it, else the one with the most room
    a piece refused --> another node; part of a piece lost --> the rest of its chain is worth nothing there

How long it may take is the daemon's business: it stops when its time is over, whatever is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from .cluster import Daemon
from .prefix_index import Index
from .replication import ORDER_PATIENCE, Copy, Replicator

#: Blocks per order. Small: an order is granted all its slots at once or none, and each shows how far it has come.
PIECE = 64
#: Heat of a block that is moved: one that was reused within ten half-lives.
WORTH = 2.0**-10
#: Orders under way at once for one draining node: enough to keep it sending while others answer.
PIECES = 4


@dataclass(slots=True, eq=False)
class _Chain:
    """Consecutive blocks of one prefix, from block `position` on, behind the block `parent`. at: where they go.
    kept: the room that is kept for them there.
    """

    keys: list[bytes]
    parent: bytes
    position: int
    at: str | None = None
    kept: int = 0
    refused: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Piece:
    chain: _Chain
    copy: Copy
    ordered: float


@dataclass(slots=True)
class _Drain:
    """One node that drains. room: blocks that each other node can still take. of: the chain of each block that goes."""

    chains: deque[_Chain]
    room: dict[str, int]
    of: dict[bytes, _Chain]
    pieces: dict[int, _Piece] = field(default_factory=dict)
    moved: int = 0

    @property
    def left(self) -> int:
        waiting = sum(len(chain.keys) for chain in self.chains)
        return waiting + sum(len(piece.chain.keys) for piece in self.pieces.values())


@dataclass(frozen=True, slots=True)
class Move:
    """Consecutive blocks behind `parent`, as `copy` says."""

    copy: Copy
    keys: list[bytes]
    parent: bytes


class Drains:
    """The nodes that drain, and what is under way because of that."""

    def __init__(self, index: Index, replicator: Replicator) -> None:
        self._index = index
        self._replicator = replicator
        self._drains: dict[str, _Drain] = {}

    def begin(self, node: str, daemons: dict[str, Daemon], now: float) -> None:
        """The node drains, and all that it holds is known. Again: nothing changes."""
        if node not in self._drains:
            draining = {name for name, daemon in daemons.items() if daemon.draining}
            room = {name: _room(daemon) for name, daemon in daemons.items() if daemon.takes}
            chains = self._chains(node, draining, now)
            of = {key: chain for chain in chains for key in chain.keys}
            self._drains[node] = _Drain(deque(chains), room, of)

    def end(self, node: str) -> None:
        """It drains no more, or is gone."""
        self._drains.pop(node, None)

    def lost(self, node: str) -> list[str]:
        """Nothing more goes to this node: it is gone, or drains itself. Returns whose drains that concerns."""
        concerned = [name for name, drain in self._drains.items() if drain.room.pop(node, None) is not None]
        for name in concerned:
            drain = self._drains[name]
            for order, piece in list(drain.pieces.items()):
                if piece.copy.to == node:
                    self._refused(drain, order)
        return concerned

    def progress(self, node: str) -> tuple[int, int] | None:
        """Blocks that are elsewhere now, and that are still to go; None: it is not known to drain."""
        drain = self._drains.get(node)
        return (drain.moved, drain.left) if drain else None

    def moves(self, node: str, now: float) -> list[Move]:
        """What is to be ordered now; whatever was ordered too long ago is given up."""
        drain = self._drains.get(node)
        if drain is None:
            return []
        for order, piece in list(drain.pieces.items()):
            if now - piece.ordered > ORDER_PATIENCE:
                self._refused(drain, order)
        moves: list[Move] = []
        while drain.chains and len(drain.pieces) < PIECES:
            chain = drain.chains.popleft()
            if not chain.kept and not self._find_room(drain, chain):
                continue  # nobody takes it
            assert chain.at is not None, "room is kept somewhere"
            keys = chain.keys[: min(PIECE, chain.kept)]
            chain.kept -= len(keys)
            copy = Copy(self._replicator.number(), node, chain.at, chain.position, chain.position + len(keys))
            drain.pieces[copy.order] = _Piece(chain, copy, now)
            moves.append(Move(copy, keys, chain.parent))
        return moves

    def done(self, order: int, stored: int, missing: int) -> str | None:
        """An order was carried out; which node's drain it belongs to, if to any."""
        for node, drain in self._drains.items():
            piece = drain.pieces.get(order)
            if piece is None:
                continue
            chain, copy = piece.chain, piece.copy
            if not stored:
                self._refused(drain, order)
                return node
            del drain.pieces[order]
            drain.moved += stored
            count = copy.last - copy.first
            if missing or count == len(chain.keys):
                drain.room[copy.to] = drain.room.get(copy.to, 0) + chain.kept
            else:
                chain.parent, chain.position = chain.keys[count - 1], copy.last
                del chain.keys[:count]
                drain.chains.appendleft(chain)
            return node
        return None

    def _refused(self, drain: _Drain, order: int) -> None:
        """The node did not take a piece: another one may."""
        piece = drain.pieces.pop(order)
        chain = piece.chain
        chain.refused.add(piece.copy.to)
        chain.kept = 0
        drain.chains.appendleft(chain)

    def _find_room(self, drain: _Drain, chain: _Chain) -> bool:
        """Keeps room for a chain, or for its head. Prefixes stay together; beyond that, the most room decides."""
        able = [name for name, room in drain.room.items() if room > 0 and name not in chain.refused]
        if not able:
            return False
        trunk = drain.of.get(chain.parent)
        before = {trunk.at} if trunk is not None else set(self._index.holders(chain.parent))
        chain.at = max(able, key=lambda name: (name in before, drain.room[name], name))
        chain.kept = min(len(chain.keys), drain.room[chain.at])
        drain.room[chain.at] -= chain.kept
        return True

    def _chains(self, node: str, draining: Iterable[str], now: float) -> list[_Chain]:
        """The node's blocks that nobody else has and that were reused lately, in the order in which they go."""
        heat = {key: warm for key, warm in self._replicator.heat(now).items() if warm >= WORTH}
        only_here = self._index.only_at(node, draining)
        places = {key: place for key in heat if (place := only_here(key)) is not None}
        # Of equal heat, the longest prefix first: its head comes with it.
        wanted = sorted(places, key=lambda key: (-heat[key], -places[key][1], key))
        chains: list[_Chain] = []
        taken: set[bytes] = set()
        for key in wanted:
            keys: list[bytes] = []
            position = 0
            while key not in taken and (place := only_here(key)) is not None:
                taken.add(key)
                keys.append(key)
                key, position = place
            # What stands behind a block that nobody has is of no use.
            if keys and (not position or self._index.holders(key)):
                chains.append(_Chain(keys[::-1], key, position))
        return chains


def _room(daemon: Daemon) -> int:
    """Blocks that a node can take: what is empty, and half of what is cached, the half that is used least."""
    return daemon.slots("free") + daemon.slots("cached") // 2
