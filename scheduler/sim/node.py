"""A node's daemon, modelled: the production pool without memory, and what the engine does with it, with time in it.

Grants wait in arrival order. What is brought from other nodes or the SSD holds slots only while it comes, so nobody who
waits for a grant elsewhere holds the last slot here (as in the engine).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pyengine._native import GiveUpError

from ..changes import CHANGE_BYTES
from ..events import BlocksChanged, DaemonHeartbeat, DaemonReport
from ..messages import LoadSample
from ..types import KEY_BYTES, Node, Source
from .compute import StepTime
from .pool import NodePool
from .spec import Failure

if TYPE_CHECKING:
    from .cluster import Simulation

#: Where blocks of a prefix were found, as `PrefillReport.tiers` names it.
TIERS = ("device", "dram", "ssd", "peer_dram", "peer_ssd")
DEVICE, DRAM, SSD, PEER_DRAM, PEER_SSD = range(5)
#: Measured loads kept for a heartbeat.
LOADS = 256
#: What pools say of a block.
_IN_DRAM, _ON_SSD = bytes([1]), bytes([2])


class Grant(NamedTuple):
    """Who waits for slots of a node. then: called when they are held, with the leading blocks that are there."""

    tag: int
    keys: bytes
    private: int
    then: Callable[[int], None]


class Place(NamedTuple):
    """Of a block in its prefix: its index, and the key before it, if one is."""

    position: int = 0
    parent: bytes | None = None


HEAD = Place()


class NodeModel:
    """One node, or a group of `share` nodes that hold a share of the layers each. sim: the world around it."""

    def __init__(self, sim: Simulation, name: str, number: int, share: int, costs: StepTime) -> None:
        spec = sim.spec.node
        self._spec = msgspec.structs.replace(
            spec, dram_tokens=share * spec.dram_tokens, ssd_tokens=share * spec.ssd_tokens
        )
        self._costs = costs
        self.sim = sim
        self.number = number
        self.node = Node(name, f"{name}:1", 1)
        self.dram = share * spec.dram_tokens // sim.spec.block_tokens
        self.ssd_rate = share * spec.ssd_rate
        self.device_rate = share * spec.device_rate
        self.up = True
        #: It takes on nothing new, as it will be stopped.
        self.draining: Failure | None = None
        self.hits = 0
        self.pool = NodePool(self._spec, self.sim.block_tokens, self._costs)
        self._open()

    def _open(self) -> None:
        self.sequence = 0
        self.waiting: deque[Grant] = deque()
        #: What is on its way here, and who waits for it.
        self.coming: dict[bytes, list[Callable[[], None]]] = {}
        #: Measured loads, for a worker's next heartbeat.
        self.loads: list[LoadSample] = []
        self._ssd_free = 0.0
        self._reporting = False

    @property
    def name(self) -> str:
        return self.node.node

    # -- life ------------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """The machine is gone, with all it holds but what is on its SSD."""
        self.up, self.draining = False, None
        self.waiting.clear()
        self.coming.clear()

    def revive(self) -> None:
        """Its next life finds what the SSD has, and tells of it as of all that is new."""
        self.pool.restart()
        self.node = Node(self.name, self.node.address, self.node.incarnation + 1)
        self.up = True
        self._open()
        self.report()

    # -- reports to the conductor ----------------------------------------------------------------------------------

    def report(self) -> None:
        """What has come and gone is told, a message's delay later: once for all that happens until then."""
        if not self._reporting:
            self._reporting = True
            self.sim.loop.after(self.sim.delay, self._report, self.node)

    def _report(self, node: Node) -> None:
        if node is self.node and self.up:
            self._reporting = False
            for event in self.changes():
                self.sim.conduct(event)

    def changes(self) -> list[DaemonReport]:
        """Events for all that has changed since the last call."""
        packed = self.pool.changes()
        if not packed:
            return []
        first = self.sequence
        self.sequence += len(packed) // CHANGE_BYTES
        return [BlocksChanged(self.node, first, packed)]

    def heartbeat(self) -> DaemonHeartbeat:
        """To be said after `changes`, as a daemon's queue does."""
        count, digest = self.pool.model.digest()
        free = self.pool.free
        slots = f'pyengine_pool_blocks{{node="{self.name}",tier="dram",state='
        counters = {f'{slots}"free"}}': free, f'{slots}"cached"}}': self.dram - free}
        return DaemonHeartbeat(self.node, self.sequence, count, digest, counters, self.draining is not None)

    # -- grants ----------------------------------------------------------------------------------------------------

    def grant(self, tag: int, keys: bytes, private: int, then: Callable[[int], None]) -> None:
        """Reserves or pins all, as soon as nobody who came earlier waits. Never, if the pool is too small."""
        self.waiting.append(Grant(tag, keys, private, then))
        self._serve()

    def _serve(self) -> None:
        while self.waiting:
            grant = self.waiting[0]
            here = self.leading(grant.keys)[0]
            if not self.take(grant.tag, grant.keys, grant.private):
                return
            self.waiting.popleft()
            self.report()
            grant.then(here)

    def end(self, tag: int) -> None:
        """All that the tag holds, or waits for, is let go."""
        if not self.up:
            return
        for index, grant in enumerate(self.waiting):
            if grant.tag == tag:
                del self.waiting[index]
                break
        else:
            self.pool.release(tag)
            self.report()
        if self.waiting:
            self._serve()

    @property
    def idle(self) -> bool:
        """Nobody holds anything, nor waits for it, nor is anything on its way."""
        return not self.waiting and not self.coming and self.pool.available == self.dram - 1

    def leading(self, keys: bytes) -> tuple[int, int]:
        """Blocks of the longest prefix that DRAM has, and of the longest that DRAM and SSD have together."""
        found = self.pool.find(keys)
        ssd = found.find(_ON_SSD)
        return (len(found) if ssd < 0 else ssd), len(found)

    def take(self, tag: int, keys: bytes, private: int, place: Place = HEAD) -> bool:
        """Pins and reserves, all or nothing. place: of the first. False: there is no room now, or never."""
        try:
            return self.pool.take(tag, keys, private, position=place.position, parent=place.parent)
        except GiveUpError:
            return False

    def store(self, tag: int, keys: bytes) -> None:
        """Blocks that a worker here has computed are cached, if there is room at once; the tag holds them."""
        if keys and self.take(tag, keys, 0):
            self.pool.commit(tag, keys)
            self.report()

    def forget(self, keys: bytes) -> None:
        """By order of the conductor, which knows of copies elsewhere."""
        if self.up:
            self.pool.drop(keys)
            self.report()

    # -- bringing --------------------------------------------------------------------------------------------------

    def bring(
        self,
        keys: bytes,
        sources: tuple[Source, ...],
        then: Callable[[dict[int, int]], None],
        place: Place = HEAD,
    ) -> None:
        """Has what this node's SSD and the sources have of these blocks, which follow each other, brought into DRAM, if
        there is room.

        then: called when no more comes, with the tier in which each block that came was found. place: of the first.
        """
        if self.draining is not None:
            then({})
            return
        Bringing(self, keys, sources, then, place).go()

    def read_ssd(self, blocks: int, then: Callable[[bool], None]) -> None:
        """Reads of a node's SSD are one after the other. then: told whether the node still lives."""
        loop, node = self.sim.loop, self.node
        self._ssd_free = max(self._ssd_free, loop.now) + blocks * self.sim.block_bytes / self.ssd_rate
        loop.at(self._ssd_free, lambda: then(self.lives(node)))

    def lives(self, node: Node) -> bool:
        """Whether that life of this node goes on."""
        return self.up and self.node is node

    def arrived(self, keys: bytes) -> None:
        """What was on its way is here, or will not come: who waited for it looks again."""
        waiting: list[Callable[[], None]] = []
        for i in range(0, len(keys), KEY_BYTES):
            waiting += self.coming.pop(keys[i : i + KEY_BYTES], ())
        for call in waiting:
            call()

    def check(self) -> None:
        """Raises AssertionError if something is held for nobody: to be called when nobody is there."""
        self.pool.check()
        held = self.dram - 1 - self.pool.available
        about = f"{len(self.waiting)} wait for slots, {len(self.coming)} are on their way, {held} are held"
        assert self.idle, f"{self.name}: {about}, for nobody"


class Bringing:
    """One prefix on its way into a node's DRAM: part after part, each from the first who is said to have it."""

    def __init__(
        self,
        node: NodeModel,
        keys: bytes,
        sources: tuple[Source, ...],
        then: Callable[[dict[int, int]], None],
        place: Place,
    ) -> None:
        self.node = node
        self.place = place
        self.keys = keys
        self.sources = [source for source in sources if source.node.node != node.name]
        self.then = then
        self.tiers: dict[int, int] = {}
        self.life = node.node
        #: Parts under way, and the block up to which all is here, on its way, or asked for.
        self.parts = 0
        self.reached = 0
        self.over = False

    def go(self) -> None:
        """Asks for all that is to be had and not here yet; ends when nothing is under way."""
        node, total = self.node, len(self.keys) // KEY_BYTES
        while self.reached < total:
            rest = self.keys[self.reached * KEY_BYTES :]
            here, reach = node.leading(rest)
            if here:
                self.reached += here
                continue
            if (waiting := node.coming.get(rest[:KEY_BYTES])) is not None:
                # Somebody else has it brought.
                self.parts += 1
                waiting.append(self._again)
                return
            if reach:
                count = _run(node, rest, reach)
                if not self._begin(count, None):
                    break
                continue
            source = next((s for s in self.sources if s.first <= self.reached < s.last), None)
            if source is None:
                break
            count = min(source.last, total) - self.reached
            if not self._begin(count, source):
                break
        if not self.parts and not self.over:
            self.over = True
            self.then(self.tiers)

    def _again(self) -> None:
        self.parts -= 1
        self.go()

    def _begin(self, count: int, source: Source | None) -> bool:
        """The next `count` blocks, from a source or this node's SSD. False: nothing more can be brought."""
        node, sim = self.node, self.node.sim
        first, began = self.reached, sim.loop.now
        keys = self.keys[first * KEY_BYTES : (first + count) * KEY_BYTES]
        if source is None:
            tag = sim.tag()
            if not node.take(tag, self.keys[: (first + count) * KEY_BYTES], 0, self.place):
                return False
            self._under_way(keys)
            node.read_ssd(count, lambda _: self._came(tag, keys, first, count, SSD, began, node.name))
            return True
        peer = sim.nodes.get(source.node.node)
        if peer is None or not peer.up or peer.node != source.node:
            self.sources.remove(source)
            return True
        dram, reach = peer.leading(keys)
        count = min(dram or _run(peer, keys, reach) if reach else 0, count)
        keys = keys[: count * KEY_BYTES]
        tag, theirs = sim.tag(), sim.tag()
        if not count or not peer.take(theirs, self.keys[: (first + count) * KEY_BYTES], 0, self.place):
            # It has it no more, or no room to read it.
            self.sources.remove(source)
            return True
        if not node.take(tag, self.keys[: (first + count) * KEY_BYTES], 0, self.place):
            peer.end(theirs)
            return False
        self._under_way(keys)
        life = peer.node

        def sent(done: bool) -> None:
            if peer.lives(life):
                peer.end(theirs)
            if done:
                self._came(tag, keys, first, count, PEER_DRAM if dram else PEER_SSD, began, peer.name)
            elif node.lives(self.life):
                node.end(tag)
                self.sources = [s for s in self.sources if s.node.node != peer.name]
                self.reached = min(self.reached, first)
                self._ended(keys)

        def send(alive: bool) -> None:
            if not alive:
                sent(False)
                return
            if not dram:
                peer.pool.commit(theirs, keys)
                peer.report()
            sim.send(peer, node, count * sim.block_bytes, sent)

        if dram:
            send(True)
        else:
            peer.read_ssd(count, send)
        return True

    def _under_way(self, keys: bytes) -> None:
        for i in range(0, len(keys), KEY_BYTES):
            self.node.coming.setdefault(keys[i : i + KEY_BYTES], [])
        self.parts += 1
        self.reached += len(keys) // KEY_BYTES
        self.node.report()

    def _came(self, tag: int, keys: bytes, first: int, count: int, tier: int, began: float, source: str) -> None:
        node = self.node
        if not node.lives(self.life):
            return
        if tier != PEER_SSD and len(node.loads) < LOADS:
            size, seconds = count * node.sim.block_bytes, node.sim.loop.now - began
            node.loads.append(LoadSample(source=source, size=size, seconds=seconds))
        node.pool.commit(tag, keys)
        node.end(tag)
        self.tiers.update(dict.fromkeys(range(first, first + count), tier))
        self._ended(keys)

    def _ended(self, keys: bytes) -> None:
        self.parts -= 1
        self.node.arrived(keys)
        self.go()


def _run(node: NodeModel, keys: bytes, reach: int) -> int:
    """How many of the leading `reach` blocks, the first of which is on the SSD only, come before one in DRAM."""
    dram = node.pool.find(keys).find(_IN_DRAM)
    return reach if dram < 0 else dram


__all__ = ["DEVICE", "DRAM", "LOADS", "PEER_DRAM", "PEER_SSD", "SSD", "TIERS", "NodeModel", "Place"]
