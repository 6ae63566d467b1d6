"""What happens to the conductor, and what it asks for: plain data, made and carried out by a shell.

Reports of daemons mirror `pyengine._native`, which the conductor must not import. Structs and not frozen dataclasses,
which take ten times as long to build: two or three are built for each request.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from .messages import ConductorToGateway, ConductorToWorker, GatewayToConductor, WorkerToConductor
from .types import Node

# -- events --------------------------------------------------------------------------------------------------------


class FromGateway(msgspec.Struct, frozen=True):
    """gateway: the name it gave in its GatewayHello."""

    gateway: str
    message: GatewayToConductor


class FromWorker(msgspec.Struct, frozen=True):
    message: WorkerToConductor


class GatewayLost(msgspec.Struct, frozen=True):
    """Its link is gone."""

    gateway: str


class WorkerLost(msgspec.Struct, frozen=True):
    """Its link is gone."""

    worker: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. To be sent a few times a second: silence is noticed by it."""


class DaemonHello(msgspec.Struct, frozen=True):
    node: Node
    next_sequence: int


class BlocksChanged(msgspec.Struct, frozen=True):
    """Consecutive changes of what the node holds, packed (`changes.py`). sequence: number of the first of them."""

    node: Node
    sequence: int
    changes: bytes


class BlockDump(msgspec.Struct, frozen=True):
    """Part of a dump of all blocks, packed as changes, cut before change `sequence`; `last` ends it.

    A block is named once for each medium that has it.
    """

    node: Node
    sequence: int
    part: int
    blocks: bytes
    last: bool


class DaemonHeartbeat(msgspec.Struct, frozen=True):
    """count, xor: of all blocks published before change `next_sequence`, as `Index` counts them.

    draining: it takes on nothing new.
    """

    node: Node
    next_sequence: int
    count: int
    xor: bytes
    counters: dict[str, int]
    draining: bool = False


class Replicated(msgspec.Struct, frozen=True):
    node: Node
    order: int
    stored: int
    missing: int


class Cleared(msgspec.Struct, frozen=True):
    node: Node
    order: int
    dropped: int
    held: int
    durable: bool


class DaemonGone(msgspec.Struct, frozen=True):
    node: Node


DaemonReport: TypeAlias = DaemonHello | BlocksChanged | BlockDump | DaemonHeartbeat | Replicated | Cleared | DaemonGone
Event: TypeAlias = FromGateway | FromWorker | GatewayLost | WorkerLost | Tick | DaemonReport

# -- actions -------------------------------------------------------------------------------------------------------


class SendToGateway(msgspec.Struct, frozen=True):
    gateway: str
    message: ConductorToGateway


class SendToWorker(msgspec.Struct, frozen=True):
    worker: str
    message: ConductorToWorker


class OrderDump(msgspec.Struct, frozen=True):
    """The node's daemon is to send all its published blocks."""

    node: str


class OrderReplicate(msgspec.Struct, frozen=True):
    """The node's daemon is to copy these blocks from `source`. keys: 16 bytes each; position: index of the first."""

    node: str
    order: int
    keys: bytes
    parent: bytes
    position: int
    source: Node


class TellMoved(msgspec.Struct, frozen=True):
    """The node's daemon, which drains, is to know how many of its blocks are elsewhere because of that, and how many
    are still to go: none, and it need not wait.
    """

    node: str
    blocks: int
    left: int


class OrderMembers(msgspec.Struct, frozen=True):
    """The node's daemon shares objects with these, itself among them."""

    node: str
    members: tuple[Node, ...]


class OrderClear(msgspec.Struct, frozen=True):
    """The node's daemon is to forget all blocks of a namespace or of a tenant, one of them."""

    node: str
    order: int
    namespace: int | None
    tenant: int | None


class OrderForget(msgspec.Struct, frozen=True):
    """The node's daemon is to drop these blocks from DRAM, as far as nobody holds them. keys: 16 bytes each."""

    node: str
    keys: bytes


Action: TypeAlias = (
    SendToGateway | SendToWorker | OrderDump | OrderReplicate | OrderClear | OrderForget | OrderMembers | TellMoved
)
