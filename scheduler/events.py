"""What happens to the conductor, and what it asks for: plain data, made and carried out by a shell.

Reports of daemons mirror `pyengine._native`, which the conductor must not import.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .messages import ConductorToGateway, ConductorToWorker, GatewayToConductor, WorkerToConductor
from .types import Node

# -- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromGateway:
    """gateway: the name it gave in its GatewayHello."""

    gateway: str
    message: GatewayToConductor


@dataclass(frozen=True, slots=True)
class FromWorker:
    message: WorkerToConductor


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """Its link is gone."""

    gateway: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Its link is gone."""

    worker: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. To be sent a few times a second: silence is noticed by it."""


@dataclass(frozen=True, slots=True)
class DaemonHello:
    node: Node
    next_sequence: int


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """Consecutive changes of what the node holds, packed (`changes.py`). sequence: number of the first of them."""

    node: Node
    sequence: int
    changes: bytes


@dataclass(frozen=True, slots=True)
class BlockDump:
    """Part of a dump of all blocks, packed as changes, cut before change `sequence`; `last` ends it.

    A block is named once for each medium that has it.
    """

    node: Node
    sequence: int
    part: int
    blocks: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class DaemonHeartbeat:
    """count, xor: of all blocks published before change `next_sequence`, as `Index` counts them.

    draining: it takes on nothing new.
    """

    node: Node
    next_sequence: int
    count: int
    xor: bytes
    counters: dict[str, int]
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Replicated:
    node: Node
    order: int
    stored: int
    missing: int


@dataclass(frozen=True, slots=True)
class Cleared:
    node: Node
    order: int
    dropped: int
    held: int
    durable: bool


@dataclass(frozen=True, slots=True)
class DaemonGone:
    node: Node


DaemonReport: TypeAlias = DaemonHello | BlocksChanged | BlockDump | DaemonHeartbeat | Replicated | Cleared | DaemonGone
Event: TypeAlias = FromGateway | FromWorker | GatewayLost | WorkerLost | Tick | DaemonReport

# -- actions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendToGateway:
    gateway: str
    message: ConductorToGateway


@dataclass(frozen=True, slots=True)
class SendToWorker:
    worker: str
    message: ConductorToWorker


@dataclass(frozen=True, slots=True)
class OrderDump:
    """The node's daemon is to send all its published blocks."""

    node: str


@dataclass(frozen=True, slots=True)
class OrderReplicate:
    """The node's daemon is to copy these blocks from `source`. keys: 16 bytes each; position: index of the first."""

    node: str
    order: int
    keys: bytes
    parent: bytes
    position: int
    source: Node


@dataclass(frozen=True, slots=True)
class TellMoved:
    """The node's daemon, which drains, is to know how many of its blocks are elsewhere because of that, and how many
    are still to go: none, and it need not wait.
    """

    node: str
    blocks: int
    left: int


@dataclass(frozen=True, slots=True)
class OrderMembers:
    """The node's daemon shares objects with these, itself among them."""

    node: str
    members: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class OrderClear:
    """The node's daemon is to forget all blocks of a namespace or of a tenant, one of them."""

    node: str
    order: int
    namespace: int | None
    tenant: int | None


@dataclass(frozen=True, slots=True)
class OrderForget:
    """The node's daemon is to drop these blocks from DRAM, as far as nobody holds them. keys: 16 bytes each."""

    node: str
    keys: bytes


Action: TypeAlias = (
    SendToGateway | SendToWorker | OrderDump | OrderReplicate | OrderClear | OrderForget | OrderMembers | TellMoved
)
