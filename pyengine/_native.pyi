"""The Rust side: block keys, a node's pool, and the links between nodes.

Bytes arguments accept anything with the buffer protocol. A `keys` argument is 16 bytes per key, concatenated.
Nothing here blocks longer than it says; every wait releases the GIL. Loading this module loads no torch.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self, TypeAlias, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer, disjoint_base

# numpy's stubs say that arrays are buffers only from Python 3.12 on.
_Bytes: TypeAlias = Buffer | npt.NDArray[Any]

__version__: str
KEY_BYTES: int
NOTE_LIMIT: int
NOTIFICATION_LIMIT: int
#: Names of the policies by which a pool makes room, the default first.
EVICTION_POLICIES: tuple[str, ...]
#: Names of the instruction sets by which this processor can multiply matrices, the best last; the first is "scalar",
#: which is slow.
LINEAR_LEVELS: tuple[str, ...]
PANEL: int

class TransferError(Exception):
    """Root of the tree. Its three children say what to do."""

class RetryError(TransferError):
    """Not now: the peer is unreachable, restarting or busy. The same call may succeed later."""

class GiveUpError(TransferError):
    """Never: refused for a reason that a repetition does not change (secret, layout, size, version, configuration)."""

class BugError(TransferError):
    """The caller broke the contract (unknown tag, index out of range, buffer of the wrong size)."""

def derive_key(secret: _Bytes, purpose: str) -> bytes:
    """32 bytes derived from the cluster secret (BLAKE3 derive_key): purpose "session", "hash" or "object"."""

def root_key(namespace: _Bytes, adapter: _Bytes, salt: _Bytes, hash_key: _Bytes) -> bytes:
    """key[-1] of the chain: 16 bytes, keyed BLAKE3 over the three length-prefixed fields. `hash_key` is 32 bytes."""

def block_keys(tokens: _Bytes, block_tokens: int, parent: _Bytes, hash_key: _Bytes) -> bytes:
    """Keys of all full blocks: key[i] = H(key[i-1] || tokens[i] as u32 LE), 16 bytes each.

    tokens: u32 little-endian ids (numpy uint32 or bytes, length a multiple of 4); parent: 16 bytes (`root_key`, or
    the key of the block before). Raises BugError for a bad length.
    """

@final
class NodeAddress:
    """Where a node's daemon listens, and which life of it is meant. Hashable."""
    def __new__(cls, node: str, address: str, incarnation: int) -> NodeAddress: ...
    @property
    def node(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def incarnation(self) -> int: ...

@final
class Tag:
    """One attempt of one request on one worker's life. request < 2**63, attempt < 2**32, worker < 2**64. Hashable."""
    def __new__(cls, request: int, attempt: int, worker: int) -> Tag: ...
    @property
    def request(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def worker(self) -> int: ...

@final
class Slot:
    """Where one block of a grant lies in the local arena. `committed`: readable already (pinned), else reserved."""
    @property
    def slot(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def committed(self) -> bool: ...

# What a PoolClient's `events` returns. `refusal` is None or one of: "full" "too_large" "ended" "unreachable"
# "deadline" "protocol" "corrupt" "missing".

@final
class Granted:
    """The grant is held: one slot per key, then the private one."""

    __match_args__ = ("tag", "slots")
    @property
    def tag(self) -> Tag: ...
    @property
    def slots(self) -> list[Slot]: ...

@final
class Located:
    """Answer to `lookup`: the pinned leading blocks. behind: so many after these can be fetched from the node's SSD."""

    __match_args__ = ("tag", "slots", "behind")
    @property
    def tag(self) -> Tag: ...
    @property
    def slots(self) -> list[Slot]: ...
    @property
    def behind(self) -> int: ...

@final
class Refused:
    """A grant, open, push or the whole tag failed. The client still owes `end`."""

    __match_args__ = ("tag", "refusal")
    @property
    def tag(self) -> Tag: ...
    @property
    def refusal(self) -> str: ...

@final
class Opened:
    """Answer to `open`. `slots` is empty unless the grant lies in this node's own arena."""

    __match_args__ = ("tag", "committed", "slots")
    @property
    def tag(self) -> Tag: ...
    @property
    def committed(self) -> list[bool]: ...
    @property
    def slots(self) -> list[Slot]: ...

@final
class Arrived:
    """These blocks of the own grant have become readable."""

    __match_args__ = ("tag", "indices")
    @property
    def tag(self) -> Tag: ...
    @property
    def indices(self) -> list[int]: ...

@final
class Complete:
    """Every block of the own grant is readable and the pusher's note is here. Sent once."""

    __match_args__ = ("tag", "note")
    @property
    def tag(self) -> Tag: ...
    @property
    def note(self) -> bytes: ...

@final
class Fetched:
    """Outcome of one index of a `fetch`: readable (refusal None), or why not.

    slot: where the block lies, which may be another slot than was granted. origin: "dram" or "ssd" of this node,
    "peer_dram" or "peer_ssd".
    """

    __match_args__ = ("tag", "index", "refusal", "slot", "origin")
    @property
    def tag(self) -> Tag: ...
    @property
    def index(self) -> int: ...
    @property
    def refusal(self) -> str | None: ...
    @property
    def slot(self) -> Slot | None: ...
    @property
    def origin(self) -> str | None: ...

@final
class Pushed:
    """These pushed blocks are applied and verified at the destination; `note`: so is the note."""

    __match_args__ = ("tag", "indices", "note")
    @property
    def tag(self) -> Tag: ...
    @property
    def indices(self) -> list[int]: ...
    @property
    def note(self) -> bool: ...

@final
class Counters:
    """Answer to `counters`: the daemon's counters by Prometheus sample name with labels."""

    __match_args__ = ("values",)
    @property
    def values(self) -> dict[str, int]: ...

@final
class Flushed:
    """Answer to `flush`. ok: what was published then, and has not been evicted since, outlives the daemon's process.
    Otherwise some of it may be in DRAM only: there is no SSD, it fails, or the daemon is about to stop.
    """

    __match_args__ = ("ok",)
    @property
    def ok(self) -> bool: ...

@final
class Kept:
    """Answer to `keep` and `unkeep`, per key: "done"; "coming" (it is being read from SSD, to be kept); "missing" (it
    is not here, or was not kept in this name); "full" (all that may be kept is).
    """

    __match_args__ = ("outcomes",)
    @property
    def outcomes(self) -> list[str]: ...

@final
class Disconnected:
    """The daemon is gone. No other event follows; all tags have ended."""

    __match_args__ = ("reason",)
    @property
    def reason(self) -> str: ...

PoolEvent: TypeAlias = (
    Granted
    | Located
    | Refused
    | Opened
    | Arrived
    | Complete
    | Fetched
    | Pushed
    | Counters
    | Flushed
    | Kept
    | Disconnected
)

@final
class PoolClient:
    """A worker's link to its node's pool: control over a unix socket (or in process), bytes in the shared arena.

    Requests return at once; their outcomes come from `events`. A block is spoken of by its index in the grant: full
    blocks in prefix order, then the private partial one. When the client is closed or its process dies, all its tags
    end. Use from one thread.
    """
    @staticmethod
    def connect(
        socket: str,
        session_key: _Bytes,
        incarnation: int,
        strips: int,
        strip_bytes: int,
        namespace: int = 0,
        timeout: float = 5.0,
    ) -> PoolClient:
        """Dials the daemon's unix socket, proves the session key both ways, maps the arena.

        namespace: 64 bits of the digest of the blocks that this client makes, for quotas and deletion.

        Raises RetryError if nobody answers within `timeout` seconds, GiveUpError if the layout or the key is refused.
        """
    @property
    def node(self) -> NodeAddress: ...
    @property
    def slots(self) -> int:
        """Slots in the arena."""
    def fileno(self) -> int:
        """A descriptor that is readable while events wait (for poll, ZeroMQ pollers, asyncio)."""
    def events(self) -> list[PoolEvent]:
        """Takes what has come. Never blocks."""
    def wait(self, timeout: float) -> bool:
        """Blocks up to `timeout` seconds until an event waits; True if one does."""
    def grant(
        self, tag: Tag, keys: _Bytes, private: bool, parent: _Bytes, position: int, mode: str, tenant: int = 0
    ) -> None:
        """Reserves or pins a slot per key, plus one private slot: all or nothing; -> Granted or Refused.

        parent: the key before keys[0] (16 zero bytes at the head); position: index of keys[0] in its prefix.
        mode: "wait" waits in arrival order for room; "now" is refused "full" at once; "staging" waits ahead of "wait"
        and may take the last slot, which the others leave: for single blocks that are let go when a push has arrived.
        """
    def lookup(self, tag: Tag, keys: _Bytes) -> None:
        """Pins the longest leading run of committed keys under `tag`; -> Located."""
    def commit(self, tag: Tag, indices: Sequence[int]) -> None:
        """Publishes own reserved blocks whose strips have all been stored."""
    def fetch(self, tag: Tag, indices: Sequence[int], sources: Sequence[NodeAddress]) -> None:
        """Fills own reserved blocks from this node's SSD, else from these peers' pools; -> one Fetched per index."""
    def prefetch(self, keys: _Bytes, parent: _Bytes, position: int, sources: Sequence[NodeAddress]) -> None:
        """A hint: these blocks of one prefix are wanted soon, so they may be brought into DRAM. Nothing is answered."""
    def open(self, tag: Tag, to: NodeAddress, within: float) -> None:
        """Waits up to `within` seconds for the grant `tag` at the node `to`; -> Opened or Refused."""
    def push(
        self,
        local: Tag,
        tag: Tag,
        indices: Sequence[int],
        first: int = 0,
        note: _Bytes | None = None,
        strips: tuple[int, int] | None = None,
    ) -> None:
        """Sends blocks held (committed) under the grant `local` to these indices of the opened grant `tag`; -> Pushed.

        Block i is taken from index i - first of `local`. strips: only these of each block, [first, end), which are
        written and will be written no more; the block need not be committed. Those of one block go in order, without
        gaps; Pushed comes when all of them have arrived. Not within one arena.
        If `tag` lies in this arena (Opened had slots), the blocks written there are committed and `local` is ignored.
        The note (at most NOTE_LIMIT bytes) arrives after the last commit; give it with the last push.
        """
    def corrupt(self, tag: Tag, index: int) -> None:
        """Reports that `load` found a bad checksum: the block is unpublished and counted."""
    def end(self, tag: Tag) -> None:
        """Ends the tag in every way it is known: waiting, granted, looked up, opened, pushing. Idempotent.

        By this call the client promises to write the tag's slots no more.
        """
    def request_counters(self) -> None:
        """-> Counters."""
    def flush(self) -> None:
        """Writes all published blocks to this node's SSD and makes them durable; -> Flushed, in the order of calls."""
    def keep(self, keys: _Bytes, ttl: float, by: str) -> None:
        """Keeps blocks in this node's memory for `ttl` seconds (at most a day), whoever else needs room, and reads them
        from its SSD if need be; -> Kept, in the order of calls.

        They stay when this client has gone, and not when the daemon has. by: in whose name, 1 to 64 bytes; who keeps a
        block again has a new time for it. At most half of the memory can be kept.
        """
    def unkeep(self, keys: _Bytes, by: str) -> None:
        """Keeps them no more in this name; -> Kept."""
    def store(
        self, slot: int, generation: int, source: _Bytes, first_strip: int = 0, run: int = 1, stride: int = 1
    ) -> None:
        """Copies whole strips into a reserved slot and stores their checksums beside it.

        source: contiguous, n * strip_bytes bytes. They become strips first_strip, first_strip + 1, ...; of fewer heads
        than the block has, `run` of every `stride` strips from first_strip on. Raises BugError if out of range.
        """
    def load(
        self, slot: int, generation: int, into: _Bytes, first_strip: int = 0, run: int = 1, stride: int = 1
    ) -> bool:
        """Copies whole strips out of a slot into a writable buffer, verifying each checksum on the copied bytes.

        False: a checksum did not hold, or the slot's life is over; `into` holds garbage then. Strips as for `store`.
        """
    def share(self) -> tuple[list[int], int, int]:
        """For another process that writes and reads this client's slots: (descriptors, arena_bytes, slots), the first
        arguments of its SharedSlots. The descriptors are the caller's: to send over a unix socket, and to close.

        The daemon gives this client's slots to others when it is closed (or dead) and so are all SharedSlots; where the
        daemon is in this process, they are to be closed before the client is. Raises RetryError: the daemon is gone.
        """
    def close(self) -> None: ...

@final
class SharedSlots:
    """The slots of another process's PoolClient, which says what may be written when. Use from one thread."""
    def __new__(
        cls, descriptors: Sequence[int], arena_bytes: int, slots: int, strips: int, strip_bytes: int
    ) -> SharedSlots:
        """As `PoolClient.share` has returned them there; the descriptors are given away. GiveUpError: no arena."""
    def store(
        self, slot: int, generation: int, source: _Bytes, first_strip: int = 0, run: int = 1, stride: int = 1
    ) -> None:
        """As PoolClient.store; never RetryError."""
    def load(
        self, slot: int, generation: int, into: _Bytes, first_strip: int = 0, run: int = 1, stride: int = 1
    ) -> bool:
        """As PoolClient.load."""
    def close(self) -> None:
        """Nothing is written through it any more; what it was made of is closed."""

@final
class Daemon:
    """A node's daemon inside this process: the same code as the `transferd` binary."""
    def __new__(
        cls,
        *,
        node: str,
        dram_bytes: int,
        session_key: _Bytes,
        listen: str | None = None,
        socket: str | None = None,
        conductor: str | None = None,
        peers: Sequence[str] = ...,
        transport: str = "auto",
        tls: bool = False,
        ssd_dirs: Sequence[str] = ...,
        ssd_bytes: int = 0,
    ) -> Daemon:
        """Starts it. listen: "host:port" for peers (port 0: any; None: no peers); socket: path for local workers;
        conductor: address of a ReportEndpoint; peers: "host:port" of daemons that share objects; transport: "auto",
        "shm", "tcp" or "rdma" to peers; tls: TCP is encrypted, to peers and to the conductor, which must want the same;
        ssd_dirs: directories that keep blocks behind the arena and over restarts, one a device, with ssd_bytes in all.
        Raises GiveUpError for an impossible configuration (arena larger than memory, port in use, path too long), with
        what to do.
        """
    @property
    def address(self) -> NodeAddress: ...
    def attach(self, incarnation: int, strips: int, strip_bytes: int, namespace: int = 0) -> PoolClient:
        """A client within this process, with no socket."""
    def objects(self, object_key: _Bytes) -> ObjectPool:
        """The pool of objects, for this process. `object_key` is 32 bytes (`derive_key` with "object")."""
    def counters(self) -> dict[str, int]: ...
    def stop(self) -> None:
        """Ends all links and threads; returns when they are gone. Idempotent."""

# The index of blocks. `scheduler/prefix_index.py` says what all of this means; `NativeIndex` is what users use.

@final
class Match:
    """How much of one prefix each holder has, by slot; the last row is zero."""

    @property
    def best(self) -> int: ...
    @property
    def held(self) -> npt.NDArray[np.int64]: ...
    @property
    def ssd(self) -> npt.NDArray[np.int64]: ...

@final
class Inflight:
    """Blocks that will be there; `scheduler/inflight.py` says what all of this means. A request's number is of 64 bits,
    else OverflowError.
    """

    def __new__(cls) -> Self: ...
    def __len__(self) -> int: ...
    def add(
        self, request: tuple[str, int], keys: _Bytes, block_tokens: int, workers: dict[str, float], now: float
    ) -> None: ...
    def end(self, request: tuple[str, int]) -> None: ...
    def lost(self, worker: str) -> None: ...
    def expire(self, now: float) -> None: ...
    def find(self, keys: _Bytes, block_tokens: int, now: float) -> dict[str, tuple[int, float]]: ...
    def check(self) -> None: ...

@disjoint_base
class PrefixIndex:
    """Block keys to holders. Raises ValueError for bytes that are not whole keys or changes, and if it is full."""

    def __new__(cls) -> Self: ...
    @property
    def epoch(self) -> int: ...
    @property
    def size(self) -> int:
        """Bytes that its tables occupy."""
    def slot(self, node: str) -> int: ...
    def slots(self, nodes: Sequence[str]) -> npt.NDArray[np.int64]: ...
    def name(self, slot: int) -> str: ...
    def count(self, node: str) -> int: ...
    def digest(self, node: str) -> bytes: ...
    def holds(self, node: str, key: _Bytes) -> bool: ...
    def holders(self, key: _Bytes) -> list[str]: ...
    def apply(self, node: str, changes: _Bytes) -> None: ...
    def clear(self, node: str) -> None: ...
    def forget(self, node: str) -> None: ...
    def replace(self, node: str, changes: _Bytes) -> None: ...
    def begin(self, node: str) -> None: ...
    def stage(self, node: str, changes: _Bytes) -> None: ...
    def adopt(self, node: str) -> None: ...
    def dump(self, node: str) -> bytes: ...
    def match(self, keys: _Bytes) -> Match: ...
    def check(self) -> None: ...
    def _runs(self, keys: _Bytes, first: int, avoid: Sequence[str]) -> list[tuple[str, int, int, str]]: ...
    def _shared(
        self, keys: _Bytes, first: int, last: int, on_ssd: bool, avoid: Sequence[str]
    ) -> list[tuple[str, int]]: ...
    def _only_at(self, key: _Bytes, node: str, others: Sequence[str]) -> tuple[bytes, int] | None: ...
    def _only_on_ssd(self, keys: _Bytes, node: str) -> list[tuple[int, int]]: ...

# Objects. `pyengine.pool` says what all of this means, and is what users use.

_Key: TypeAlias = str | bytes

@final
class View:
    """The value of an object, read-only: a buffer. A context manager, which closes it.

    Its bytes stay, and do not change, until it is closed, or it and all buffers made from it are gone.
    """

    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

    def __len__(self) -> int: ...
    @property
    def pinned(self) -> bool:
        """True if it lies in the pool itself; False if it is a copy, as a value of more than 1 MiB is."""
    @property
    def closed(self) -> bool: ...
    def verify(self) -> bool:
        """True if the bytes are those that were put, by the checksums that were made then."""
    def close(self) -> None:
        """Lets go of it. Idempotent. Raises BufferError while a buffer made from it is in use."""
    def __enter__(self) -> View: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class ObjectPool:
    """A client of a node's objects, from `connect` or `Daemon.objects`. Use it from any thread."""
    @staticmethod
    def connect(socket: str, session_key: _Bytes, object_key: _Bytes, timeout: float) -> ObjectPool: ...
    def put(self, keys: Sequence[_Key], values: Sequence[_Bytes], copies: int = 1) -> list[bool]: ...
    def get(self, keys: Sequence[_Key]) -> list[View | None]: ...
    def get_into(self, keys: Sequence[_Key], buffers: Sequence[_Bytes]) -> list[int | None]: ...
    def exists(self, keys: Sequence[_Key]) -> list[bool]: ...
    def media(self, keys: Sequence[_Key]) -> list[str | None]:
        """Per key: "dram", "ssd" or None."""
    def flush(self) -> bool:
        """True if all that could be got when it was asked outlives the daemon's process."""
    def remove(self, keys: Sequence[_Key]) -> list[bool]: ...
    def replicate(self, keys: Sequence[_Key], copies: int) -> list[int]: ...
    def pin(self, keys: Sequence[_Key], ttl: float, by: str) -> list[str]:
        """Per key "done", "coming", "missing" or "full", as `Kept` says."""
    def unpin(self, keys: Sequence[_Key], by: str) -> list[bool]: ...
    def list(
        self, prefix: _Key, cursor: tuple[int, bytes | None] | None, limit: int
    ) -> tuple[list[tuple[bytes, int]], tuple[int, bytes | None] | None]:
        """Some (key, bytes of the value), and where the list goes on; None: there is no more."""
    def stats(self) -> dict[str, int]:
        """By the names of `pyengine.pool.PoolStats`."""
    def close(self) -> None: ...

# What a ReportEndpoint's `events` returns. Blocks are packed as `scheduler/changes.py` draws them.

@final
class DaemonHello:
    __match_args__ = ("node", "socket", "next_sequence")
    @property
    def node(self) -> NodeAddress: ...
    @property
    def socket(self) -> str: ...
    @property
    def next_sequence(self) -> int: ...

@final
class BlocksChanged:
    """Consecutive changes of what the node holds, packed. sequence: number of the first."""

    __match_args__ = ("node", "sequence", "changes")
    @property
    def node(self) -> NodeAddress: ...
    @property
    def sequence(self) -> int: ...
    @property
    def changes(self) -> bytes: ...

@final
class BlockDump:
    """Part of a dump: all blocks published before change `sequence`; parts are numbered from 0, `last` ends it."""

    __match_args__ = ("node", "sequence", "part", "blocks", "last")
    @property
    def node(self) -> NodeAddress: ...
    @property
    def sequence(self) -> int: ...
    @property
    def part(self) -> int: ...
    @property
    def blocks(self) -> bytes: ...
    @property
    def last(self) -> bool: ...

@final
class DaemonHeartbeat:
    """xor: XOR of all published keys. draining: it takes on nothing new."""

    __match_args__ = ("node", "next_sequence", "count", "xor", "counters", "draining")
    @property
    def node(self) -> NodeAddress: ...
    @property
    def next_sequence(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def xor(self) -> bytes: ...
    @property
    def counters(self) -> dict[str, int]: ...
    @property
    def draining(self) -> bool: ...

@final
class Replicated:
    __match_args__ = ("node", "order", "stored", "missing")
    @property
    def node(self) -> NodeAddress: ...
    @property
    def order(self) -> int: ...
    @property
    def stored(self) -> int: ...
    @property
    def missing(self) -> int: ...

@final
class Cleared:
    """held: blocks that somebody uses, which stay. durable: what was on SSD is gone for good."""

    __match_args__ = ("node", "order", "dropped", "held", "durable")
    @property
    def node(self) -> NodeAddress: ...
    @property
    def order(self) -> int: ...
    @property
    def dropped(self) -> int: ...
    @property
    def held(self) -> int: ...
    @property
    def durable(self) -> bool: ...

@final
class DaemonGone:
    """The session ended: disconnect, or 3 s of silence."""

    __match_args__ = ("node",)
    @property
    def node(self) -> NodeAddress: ...

DaemonReport: TypeAlias = DaemonHello | BlocksChanged | BlockDump | DaemonHeartbeat | Replicated | Cleared | DaemonGone

@final
class ReportEndpoint:
    """Where daemons dial in to the conductor: an authenticated session each, hosted in the conductor's process."""
    def __new__(cls, listen: str, session_key: _Bytes, *, tls: bool = False) -> ReportEndpoint:
        """listen: "host:port", port 0 for any. tls: for daemons with TLS. Raises GiveUpError if it cannot bind."""
    @property
    def address(self) -> str: ...
    def fileno(self) -> int: ...
    def events(self) -> list[DaemonReport]: ...
    def order_dump(self, node: str) -> None: ...
    def order_members(self, node: str, members: Sequence[NodeAddress]) -> None: ...
    def order_replicate(
        self, node: str, order: int, keys: _Bytes, parent: _Bytes, position: int, source: NodeAddress
    ) -> None: ...
    def order_moved(self, node: str, blocks: int, left: int) -> None: ...
    def order_clear(self, node: str, order: int, namespace: int | None, tenant: int | None) -> None:
        """The node forgets all blocks of one of them, on every medium; -> Cleared."""
    def order_forget(self, node: str, keys: _Bytes) -> None:
        """The node drops these blocks from its DRAM, but for those that somebody holds; its events tell which went."""
    def close(self) -> None: ...

# The transfer engine. `pyengine.transfer` says what all of this means, and is what users use.

@final
class Region:
    """Registered memory, until `unregister` or the engine's `close` (forgetting this object changes nothing).

    Memory that the engine has allocated is a buffer: `region.memory`, or `numpy.frombuffer(region, …)`.
    """
    @property
    def memory(self) -> memoryview:
        """The memory, if the engine has allocated it. It outlives the registration, as long as somebody looks at it."""
    @property
    def handle(self) -> bytes:
        """What a peer needs to name it: plain bytes, to be given to peers by any means."""
    @property
    def nbytes(self) -> int: ...
    @property
    def name(self) -> str | None: ...
    @property
    def registered(self) -> bool: ...
    def unregister(self, timeout: float = 10.0) -> None:
        """Fences it and waits until nobody touches it; then a buffer's export is released. Idempotent.

        Raises RetryError if it is still touched after so many seconds: it stays fenced, and its memory must stay too.
        """
    def __enter__(self) -> Region: ...
    def __exit__(self, *_error: object) -> None: ...

@final
class RemoteRegion:
    """A peer's region, by its handle. Raises GiveUpError if these bytes are none."""
    def __new__(cls, handle: _Bytes) -> RemoteRegion: ...
    @property
    def handle(self) -> bytes: ...
    @property
    def node(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def readable(self) -> bool: ...
    @property
    def writable(self) -> bool: ...

@final
class Copies:
    """A list of (region, offset, remote region, offset, length), checked; arrays stand for several copies."""
    def __new__(cls, copies: Iterable[tuple[Region, Any, RemoteRegion, Any, Any]]) -> Copies: ...
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

@final
class Notification:
    """A few bytes that a peer has sent, after the data of its transfer were applied."""
    @property
    def node(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def payload(self) -> bytes: ...

@final
class Peer:
    @property
    def address(self) -> NodeAddress: ...
    def paths(self) -> list[tuple[str, Literal["up", "connecting", "down", "none"], str, bool]]:
        """(transport, state, why not, taken), the preferred first."""
    def down(self) -> str | None: ...
    def find(self, name: str, timeout: float = 10.0) -> RemoteRegion: ...
    def close(self) -> None: ...

@final
class Watcher:
    """Tells an event loop which transfers have ended: readable while tokens wait."""
    def __new__(cls) -> Watcher: ...
    def fileno(self) -> int: ...
    def take(self) -> list[int]: ...

@final
class Transfer:
    @property
    def number(self) -> int: ...
    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float | None) -> bool:
        """False if the time was over before it ended."""
    def result(self) -> None:
        """Raises what went wrong, if something did."""
    def cancel(self) -> None: ...
    def progress(self) -> tuple[int, int]: ...
    def outcome(
        self,
    ) -> tuple[
        Literal["pending", "done", "cancelled", "deadline", "fenced", "denied", "corrupt", "unreachable"],
        str | None,
        bool,
        int,
    ]:
        """(outcome, transport, fell back, retries)."""
    def watch(self, watcher: Watcher, token: int) -> None:
        """Gives the watcher this token when it has ended."""

@final
class Endpoint:
    """The transfer engine of this process."""
    def __new__(
        cls,
        *,
        session_key: _Bytes,
        node: str | None = None,
        listen: str | None = None,
        advertise: str | None = None,
        transports: Sequence[str] | None = None,
        checksums: bool = True,
        inbox: int = 1024,
        tls: bool = False,
    ) -> Endpoint: ...
    @property
    def address(self) -> NodeAddress: ...
    @property
    def transports(self) -> list[str]: ...
    def register(
        self, memory: _Bytes | tuple[int, int], *, read: bool = True, write: bool = True, name: str | None = None
    ) -> Region: ...
    def allocate(self, length: int, *, read: bool = True, write: bool = True, name: str | None = None) -> Region: ...
    def connect(self, address: str, *, transport: str | None = None, timeout: float = 10.0) -> Peer: ...
    def submit(
        self,
        peer: Peer,
        op: str,
        copies: Copies,
        *,
        priority: str = "normal",
        deadline: float | None = None,
        retries: int | None = None,
        notify: _Bytes | None = None,
        wait: float = 0.0,
        attend: bool = False,
    ) -> Transfer: ...
    def notifications(self, at_most: int) -> list[Notification]: ...
    def wait_notification(self, timeout: float | None) -> bool: ...
    def fileno(self) -> int:
        """Readable while notifications wait."""
    def counters(self) -> dict[str, int]: ...
    def close(self) -> None: ...

@final
class LinearThreads:
    """Threads that share out products: the caller's and `count` - 1 helpers, which sleep when there is nothing to do.

    One product at a time is shared out; who comes meanwhile computes alone. Not usable after a fork.
    """
    def __new__(cls, count: int) -> LinearThreads:
        """count: 0 is one for each core that the process may use. Raises OSError."""
    @property
    def count(self) -> int: ...

@final
class LinearWeights:
    """A constant matrix W [outputs, inputs], packed for y = x @ W.T. A copy: its sources are not needed any more."""
    def __new__(
        cls,
        parts: Sequence[tuple[_Bytes, int]],
        inputs: int,
        dtype: Literal["float32", "bfloat16"],
        threads: LinearThreads,
    ) -> LinearWeights:
        """parts: dense matrices of float32, or of bfloat16 in 16 bits each, with their numbers of rows; they are packed
        one above the other. dtype: what is kept; bfloat16 is rounded to nearest, and summed in float32 all the same.

        Raises BugError if the sizes do not fit, MemoryError.
        """
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def size(self) -> int:
        """Bytes."""
    def multiply(
        self,
        x: int,
        stride: int,
        out: int,
        out_stride: int,
        rows: int,
        threads: LinearThreads,
        level: str | None = None,
    ) -> None:
        """out = x @ W.T in float32, without the GIL. A row of it does not depend, to the last bit, on those beside it,
        on the threads or on the level.

        x, out: addresses of matrices of float32 with `rows` dense rows, `stride` and `out_stride` numbers apart. The
        caller keeps both, and nobody else uses them meanwhile; they do not overlap. level: one of LINEAR_LEVELS, the
        best by default. Raises BugError.
        """

def pack_linear(
    parts: Sequence[tuple[_Bytes, int]],
    inputs: int,
    dtype: Literal["float32", "bfloat16"],
    out: _Bytes,
    threads: LinearThreads,
) -> None:
    """Packs a matrix as LinearWeights does, into memory of the caller's: 32-bit numbers [panels, steps, PANEL], with a
    panel for each PANEL outputs and a step for each input, or for two of bfloat16. Raises BugError if the sizes do not
    fit.
    """

def xla_handlers(threads: int) -> dict[str, Any]:
    """What XLA can call on a CPU (`rust/xla`): capsules for `jax.ffi.register_ffi_target`, by name.

    threads: with which all of them compute; the first call in a process decides, 0: one for each core. Raises OSError.
    """

@final
class AttentionPlan:
    """Attention of one step of some sequences: what is the same for all layers."""
    def __new__(
        cls,
        rows: Sequence[int],
        lengths: Sequence[int],
        tables: _Bytes,
        window: int | None,
        group: int,
        pages: int,
        page_tokens: int,
    ) -> AttentionPlan:
        """rows, lengths, tables (int32): as `kernels.inputs.Sequences` has them; window: positions that a token sees,
        or None; group: query heads for each KV head; pages, page_tokens: of the page tensors. Raises BugError if these
        do not fit each other, or a page is named that does not exist.
        """

@final
class CpuKernels:
    """The contracts of kernels/ on CPUs: see kernels/reference.py. Without the GIL; results do not depend, to the last
    bit, on threads or level.

    Tensors are addresses and ways (from row to row, from head to head, ... in numbers), dense in their last axis;
    float32, or bfloat16 where `half` (activations) or `half_pages` says so. The caller keeps them, they are as large
    as is said, and nobody else uses them meanwhile. pages: (address, ways from keys to values, from head to head, from
    page to page, from token to token, then how many heads, pages, tokens of a page, numbers of a head).
    """
    def __new__(cls, threads: LinearThreads, level: str | None = None) -> CpuKernels:
        """level: one of LINEAR_LEVELS, the best by default. Raises BugError."""
    def rms_norm(
        self,
        x: tuple[int, int],
        residual: tuple[int, int],
        weight: int,
        out: tuple[int, int],
        rows: int,
        width: int,
        eps: float,
        half: bool,
    ) -> None:
        """residual: its address is 0 where there is none; else it becomes the sum. out may be x."""
    def rope_write(
        self,
        qkv: tuple[int, int, int],
        tokens: int,
        heads: int,
        pages: tuple[int, Sequence[int], Sequence[int]],
        cosines: tuple[int, int],
        sines: tuple[int, int],
        slots: int,
        norms: tuple[int, int, float] | None,
        half: bool,
        half_pages: bool,
    ) -> None:
        """Queries are rotated where they are. heads: of queries. norms: two weights and eps."""
    def swiglu(self, gate_up: tuple[int, int], rows: int, width: int, half: bool) -> None:
        """The result is written over the gate."""
    def attend(
        self,
        plan: AttentionPlan,
        query: tuple[int, int, int],
        out: tuple[int, int, int],
        rows: int,
        pages: tuple[int, Sequence[int], Sequence[int]],
        half: bool,
        half_pages: bool,
    ) -> None:
        """out may be the query. Raises BugError if the plan is for other pages or more rows."""
    def copy_pages(
        self,
        pages: int,
        page_ways: Sequence[int],
        strips: int,
        strip_ways: Sequence[int],
        shape: tuple[int, int, int, int],
        page_ids: Sequence[int],
        scatter: bool,
    ) -> None:
        """Whole pages to strips, or back. page_ways: bytes from layer to layer, from keys to values, from head to head,
        from page to page, from token to token; strip_ways: from block to block, from layer to layer, from keys to
        values, from head to head, from token to token; shape: layers, heads, tokens of a page, bytes of a head.
        """

@final
class PoolModel:
    """Which blocks a node would have: the production pool and eviction policies without a memory, for simulations.

    Deterministic: the same calls give the same answers. Requests take, commit and release blocks by their keys (16
    bytes each, one after the other), or, where time does not count, access the pool one after the other.
    """
    def __new__(
        cls,
        policy: str,
        dram_blocks: int,
        ssd_blocks: int = 0,
        *,
        costs: tuple[float, float, float] | None = None,
        changes: bool = False,
    ) -> PoolModel:
        """Empty. policy: one of EVICTION_POLICIES; dram_blocks: 2 or more; ssd_blocks: 0 is no SSD.

        For policies that weigh costs, costs: seconds for a token, seconds for a pair of tokens in attention, tokens of
        a block (by default LLaMA3-70B on eight A800, 16). changes: they are kept until `changes` is called.

        Raises GiveUpError for an unknown policy or an impossible capacity.
        """
    @property
    def policy(self) -> str: ...
    @property
    def available(self) -> int:
        """Slots that nobody uses; one of them is kept for staging."""
    def find(self, keys: _Bytes) -> bytes:
        """Where the leading blocks lie, as far as all are here, a byte each: 1 DRAM, 2 on the SSD alone."""
    def take(
        self, tag: int, keys: _Bytes, private: int = 0, *, position: int = 0, parent: _Bytes | None = None
    ) -> bool:
        """Pins those of these blocks that are in DRAM, and reserves slots for the others and for `private` nameless
        ones: all, or nothing if there is no room now. position, parent: index of the first in its prefix, and the key
        before it.

        Raises GiveUpError if the pool can never have so many; BugError if the tag has taken something already, or a key
        is there twice.
        """
    def commit(self, tag: int, keys: _Bytes) -> None:
        """All may read these now, of those that the tag has taken. Raises BugError if it has not."""
    def release(self, tag: int) -> bool:
        """Lets go of all that the tag has; what it has not committed is lost. False if it had nothing."""
    def drop(self, keys: _Bytes) -> int:
        """Drops these blocks from DRAM, but for those in use, as a daemon that is told to forget them: what the SSD has
        stays. Returns how many.
        """
    def restart(self) -> None:
        """The node's next life: DRAM is empty, nobody holds anything, and the SSD has what it had. Changes begin anew,
        with what is there; counts go on.
        """
    def changes(self) -> bytes:
        """What has changed since the last call, as `scheduler/changes.py` packs it."""
    def digest(self) -> tuple[int, bytes]:
        """Number and XOR of the keys, as DaemonHeartbeat says them."""
    def access(self, ids: _Bytes) -> tuple[int, int]:
        """A request with these blocks (numpy.uint64, or 8 bytes each, little-endian): how many leading ones are in
        DRAM, and how many follow on the SSD. All are in DRAM afterwards, or as many as fit.

        Raises BugError if a block is there twice, or somebody has taken blocks.
        """
    def counts(self) -> dict[str, int]:
        """So far: requests, blocks, dram_hits, ssd_hits, evictions (from DRAM), dropped (from the SSD).
        Now: in_dram, in_ssd.
        """
    def check(self) -> None:
        """Asserts the pool's invariants (slow: for tests)."""

def transferd_main(arguments: Sequence[str]) -> int:
    """The `transferd` command line (console script of the wheel). Returns the exit status."""
