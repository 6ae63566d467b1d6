"""What gateways, the conductor and workers say to each other over ZeroMQ: msgpack, one list of messages per frame.

Sockets: the conductor binds a ROUTER that gateways and workers dial (DEALER); each worker binds a ROUTER (its `work`
endpoint) that gateways dial (DEALER). A frame is [PROTOCOL, message, ...]; another protocol number is refused.
Every message about a request carries (request, attempt); whoever gets one of a stale attempt drops it.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import msgspec

from .explanation import Explanation
from .types import (
    FinishReason,
    Logprobs,
    Namespace,
    Node,
    Plan,
    Rejection,
    Role,
    SamplingParams,
    Slo,
    Source,
    WorkerInfo,
)

PROTOCOL = 1

#: Everybody sends something at least this often (seconds); silence of DEAD_AFTER means dead.
HEARTBEAT_EVERY = 0.5
DEAD_AFTER = 3.0

#: No worker has so many tokens of anything; sums over all of them are still exact.
MOST = 1 << 40
#: Lengths of prompts, in seconds, for which a worker tells its queue (`ahead.py`): from a step of a small model to what
#: hardly anybody has, by half octaves.
QUEUE_LENGTHS = tuple(2.0 ** (k / 2) for k in range(-12, 9))


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: the class name is the msgpack tag."""


# -- gateway -> conductor ------------------------------------------------------------------------------------------


class GatewayHello(Message, frozen=True):
    """First message; the conductor answers with a ClusterState, and sends one again whenever it changed."""

    gateway: str
    incarnation: int


class GatewayAlive(Message, frozen=True):
    """Heartbeat."""

    gateway: str


class Route(Message, frozen=True):
    """Ask for a plan. keys: 16 bytes per full block of the prompt, no prompt. exclude: workers that just failed it.

    priority: higher goes first; 0 is everybody's. waited: seconds since the client's request arrived, of what slo
    counts. admitted: an earlier attempt was planned, so this one is not refused for its objectives.

    Raises ValueError, so that no frame with them is taken, for lengths and times that no request has.
    """

    request: int
    attempt: int
    model: str
    namespace: bytes
    keys: bytes
    prompt_tokens: int
    max_tokens: int
    slo: Slo = Slo()
    tenant: str = ""
    exclude: tuple[str, ...] = ()
    priority: int = 0
    waited: float = 0.0
    admitted: bool = False

    def __post_init__(self) -> None:
        slo = self.slo
        lengths = 0 <= self.prompt_tokens <= MOST and 0 <= self.max_tokens <= MOST
        times = (
            0.0 <= self.waited < math.inf
            and (slo.ttft is None or slo.ttft > 0.0)
            and (slo.tbt is None or slo.tbt > 0.0)
            and (slo.deadline is None or slo.deadline > 0.0)
        )
        if not lengths or not times or abs(self.priority) > MOST:
            numbers = (self.prompt_tokens, self.max_tokens, self.waited, self.priority, self.slo)
            raise ValueError(f"a request's numbers are negative or none: {numbers}")


class RouteEnded(Message, frozen=True):
    """The attempt is over (done, failed or aborted): its load is to be forgotten.

    ttft: seconds from the client's request to the attempt's first token; tbt: mean of the longest tenth of the gaps
    between its tokens; negative: there were none. generated: tokens of this attempt. finished: the answer is whole;
    else it would have been longer. Raises ValueError for what cannot have come.
    """

    request: int
    attempt: int
    ttft: float = -1.0
    generated: int = 0
    tbt: float = -1.0
    finished: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ttft) and math.isfinite(self.tbt) and 0 <= self.generated <= MOST):
            raise ValueError(f"what came of a request is no number: {self.ttft}, {self.tbt}, {self.generated}")


class Clear(Message, frozen=True):
    """Forget all blocks of a namespace or of a tenant (in 64 bits, as pools know them) on all nodes; -> ClearOutcome.

    Whoever has said a GatewayHello may ask: a gateway, or `conductor clear`.
    """

    number: int
    namespace: int | None = None
    tenant: int | None = None


class OrderRole(Message, frozen=True):
    """Have this worker take on a role. Whoever has said a GatewayHello may ask. A worker that is away does not hear."""

    worker: str
    role: Role


class Explain(Message, frozen=True):
    """Why did this request, or the latest one, go where it went? -> Explained. Who may ask: as for Clear.

    route: a request that nobody has sent: where would it go, and why? Nothing comes of the question.
    """

    number: int
    request: int | None = None
    route: Route | None = None


class FindHot(Message, frozen=True):
    """Which prefixes are reused most these days? -> HotPrefixes, at most `most` of them. Who may ask: as for Clear."""

    number: int
    most: int


# -- conductor -> gateway ------------------------------------------------------------------------------------------


class Planned(Message, frozen=True):
    plan: Plan


class Rejected(Message, frozen=True):
    rejection: Rejection


class ClusterState(Message, frozen=True):
    """Workers that are alive, and all counters of the cluster by Prometheus sample name, for /metrics."""

    workers: tuple[WorkerInfo, ...]
    counters: dict[str, float]


class ClearedNode(msgspec.Struct, frozen=True):
    """What one node has done. held: blocks that somebody uses, which stay until he lets go. durable: what was on SSD is
    gone for good.
    """

    node: str
    dropped: int
    held: int
    durable: bool


class ClearOutcome(Message, frozen=True):
    """Answer to a Clear. away: nodes that were not there, or went, or did not answer: what they have is not cleared.

    refused: why nothing was done; empty: it was.
    """

    number: int
    nodes: tuple[ClearedNode, ...]
    away: tuple[str, ...]
    refused: str = ""


class Explained(Message, frozen=True):
    """Answer to an Explain. None: it is not among the latest decisions."""

    number: int
    explanation: Explanation | None


class HotPrefix(msgspec.Struct, frozen=True):
    """A prefix that requests reuse. key: of its last block. blocks: how many it has. heat: hits, each worth half after
    a minute. ago: seconds since the last one. nodes: who has that block.
    """

    key: bytes
    blocks: int
    heat: float
    ago: float
    nodes: tuple[str, ...]


class HotPrefixes(Message, frozen=True):
    """Answer to a FindHot, the hottest first."""

    number: int
    prefixes: tuple[HotPrefix, ...]


# -- worker -> conductor -------------------------------------------------------------------------------------------


class WorkerHello(Message, frozen=True):
    """Dialled in (again): all that the conductor must know.

    Raises ValueError, so that no frame with it is taken, for a worker that cannot be: it would be divided by.
    """

    info: WorkerInfo

    def __post_init__(self) -> None:
        info, kv = self.info, self.info.namespace.kv
        counts = (info.max_positions, info.pages, info.max_tokens_per_step, info.max_sequences, kv.block_tokens)
        try:
            block_bytes = kv.block_bytes
        except (KeyError, ValueError):
            block_bytes = 0  # of an unknown dtype, or layers of several shapes
        if (
            min(counts) < 1
            or info.pool_slots < 0
            or not 0 < block_bytes <= MOST
            or max(*counts, info.pool_slots) > MOST
        ):
            raise ValueError(f"worker {info.worker!r} says what no worker is: {counts}, {info.pool_slots}, {kv}")


class CostFit(msgspec.Struct, frozen=True):
    """What a worker has learnt of the time its steps take (`cost.py`).

    coefficients: seconds per step, prompt token, token of a prompt token's context, decoding sequence, token of a
    decoding sequence's context. samples: steps measured, 0: these are guesses. error: of predictions, relative, running
    mean. prompt_context, decode_context: mean context of a computed prompt token and of a decoding sequence, lately.

    Raises ValueError, so that no frame with them is taken, for numbers no fit can have.
    """

    coefficients: tuple[float, float, float, float, float]
    samples: int = 0
    error: float = 1.0
    prompt_context: float = 0.0
    decode_context: float = 0.0

    def __post_init__(self) -> None:
        numbers = (*self.coefficients, self.samples, self.error, self.prompt_context, self.decode_context)
        if not all(0.0 <= number < math.inf for number in numbers):
            raise ValueError(f"a cost is negative or no number: {numbers}")

    @property
    def measured(self) -> bool:
        return self.samples > 0


class LoadSample(msgspec.Struct, frozen=True):
    """One measured load of a prefix: bytes and seconds, from that node's DRAM, or from its SSD if it is the worker's
    own.

    device: from the own node's DRAM into the worker's pages.
    """

    source: str
    size: int
    seconds: float
    device: bool = False


class WorkerAlive(Message, frozen=True):
    """Heartbeat, on its own thread.

    progress: rounds of the worker's loop, which turns every second at least, also while all wait for KV from elsewhere;
    it stands still when the loop hangs. queued_tokens: prompt tokens accepted and not computed yet; queue_seconds:
    until they are, as the worker predicts. queue_ahead: how long a newcomer waits, by its length (`ahead.py`); empty:
    for all of the queue. running_context: tokens in the pages of what runs; expected_tokens: that those accepted will
    bring there that have no pages yet. accepted: (request, attempt) taken in since the last heartbeat: what was planned
    for them is in these numbers now. cost: as fitted so far. counters by Prometheus sample name.

    Raises ValueError, so that no frame with them is taken, for a load that nobody can have.
    """

    worker: str
    progress: int
    queued_requests: int
    queued_tokens: int
    running: int
    free_pages: int
    cost: CostFit
    counters: dict[str, float]
    loads: tuple[LoadSample, ...] = ()
    queue_seconds: float = 0.0
    running_context: int = 0
    expected_tokens: int = 0
    accepted: tuple[tuple[int, int], ...] = ()
    queue_ahead: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        counts = (
            self.queued_requests,
            self.queued_tokens,
            self.running,
            self.free_pages,
            self.running_context,
            self.expected_tokens,
        )
        if not 0.0 <= self.queue_seconds < math.inf or min(counts) < 0 or max(counts) > MOST:
            raise ValueError(f"a load is negative or no number: {counts}, {self.queue_seconds}")
        ahead = self.queue_ahead
        if ahead and not (len(ahead) == len(QUEUE_LENGTHS) and min(ahead) >= 0.0 and sum(ahead) < math.inf):
            raise ValueError(f"no queue is told by length as {ahead}")


class PagesChanged(Message, frozen=True):
    """What the worker's device pages have, as packed changes (`changes.py`, tier device). first: all before is void.

    Sent after every WorkerHello with `first` and all pages that have a key, and then whenever that changes.
    """

    worker: str
    changes: bytes
    first: bool = False


class WorkerLeaving(Message, frozen=True):
    """A clean stop: finish nothing more, route nothing here."""

    worker: str


# -- conductor -> worker -------------------------------------------------------------------------------------------


class SetRole(Message, frozen=True):
    """Take on this role: finish what was accepted, answer "wrong_role" to later work, and say WorkerHello anew.

    The role it has: say WorkerHello anew. Who was taken for dead is heard again.
    """

    role: Role


# -- gateway -> worker ---------------------------------------------------------------------------------------------


class Work(Message, frozen=True):
    """One attempt of one request, sent to its prefill and its decode worker at once (once only for role both).

    part: which of the plan's workers the receiver is: "prefill", "decode" or "both".
    token_ids: uint32 LE bytes: the prompt, behind it the `generated` tokens the gateway holds from earlier attempts.
    keys: 16 bytes per full block of token_ids. root: key[-1] of the chain. sampling.seed is set.
    Token numbering continues: the first new token has index `generated`; max_tokens counts from the request's start.
    tenant: for whom, in 64 bits; 0: nobody in particular.
    deadline: seconds from receipt after which the attempt is worthless; the grant is waited for at most as long.
    decode_incarnation: the decode worker's, part of the hand-off's tag.
    sources, cached_blocks: as in Plan. slo, waited, priority: as in Route.
    """

    request: int
    attempt: int
    part: str
    token_ids: bytes
    generated: int
    root: bytes
    keys: bytes
    sampling: SamplingParams
    namespace: bytes
    decode_node: Node
    decode_incarnation: int
    sources: tuple[Source, ...] = ()
    cached_blocks: int = 0
    tenant: int = 0
    deadline: float = 60.0
    slo: Slo = Slo()
    waited: float = 0.0
    priority: int = 0


class Abort(Message, frozen=True):
    """Stop this attempt and release all it holds. Idempotent; unknown attempts are ignored (and remembered a while)."""

    request: int
    attempt: int


class GatewayPing(Message, frozen=True):
    """Heartbeat; the first on a connection names the gateway. Silence: the worker aborts that gateway's requests."""

    gateway: str


# -- worker -> gateway ---------------------------------------------------------------------------------------------


class PrefillReport(Message, frozen=True):
    """Counted by the prefill worker when the prompt is computed. cached: tokens reused.

    tiers: where they were found: "device" (pages of this worker), "dram" or "ssd" of its node, "peer_dram", "peer_ssd".
    queued, loading, computing: seconds there until the first block was loaded or computed, until all were loaded, and
    until all were computed.
    """

    request: int
    attempt: int
    cached: int
    computed: int
    tiers: dict[str, int] = {}
    queued: float = 0.0
    loading: float = 0.0
    computing: float = 0.0


class Handoff(msgspec.Struct, frozen=True):
    """How a decode worker came to its first token, in seconds, one part behind the other.

    waited: from the work to the first KV. arriving: until all KV and the note were there. loading: until the first step
    began with it, its KV in pages. computing: that step.
    """

    waited: float
    arriving: float
    loading: float
    computing: float


class PromptTold(Message, frozen=True):
    """What the model thought of prompt tokens, if that was asked for: of those from position `first` on, one each. The
    first token of a prompt has none. All are there before the first token of the answer; some may come twice.
    """

    request: int
    attempt: int
    first: int
    logprobs: tuple[Logprobs, ...]


class Tokens(Message, frozen=True, omit_defaults=True):
    """Consecutive tokens; `first` is the index of tokens[0]. finish: the request has ended with the last of them.

    logprobs: one for each token, if they were asked for. handoff: with the first that a decode worker has computed.
    """

    request: int
    attempt: int
    first: int
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    logprobs: tuple[Logprobs, ...] | None = None
    handoff: Handoff | None = None


class Failed(Message, frozen=True):
    """This attempt is over at this worker. kind tells the gateway what to do:

    "retry": ask for a new plan (a peer died, KV is lost). "need_prefill": likewise (design, life of a request, 6).
    "wrong_role": likewise. "too_large": it can never fit, the client gets `reason`. "bug": the client gets 500.
    "refused": what it asks for cannot be done by anybody, the client gets 400 and `reason`.
    "late": the client's deadline has passed or cannot be met any more, and to try again would be as late: 504.
    """

    request: int
    attempt: int
    worker: str
    kind: str
    reason: str


class WorkerPing(Message, frozen=True):
    """Heartbeat to every connected gateway. Another incarnation than planned means that the worker restarted."""

    worker: str
    incarnation: int


GatewayToConductor: TypeAlias = GatewayHello | GatewayAlive | Route | RouteEnded | Clear | OrderRole | Explain | FindHot
WorkerToConductor: TypeAlias = WorkerHello | WorkerAlive | PagesChanged | WorkerLeaving
ConductorToWorker: TypeAlias = SetRole
ToConductor: TypeAlias = GatewayToConductor | WorkerToConductor
ConductorToGateway: TypeAlias = Planned | Rejected | ClusterState | ClearOutcome | Explained | HotPrefixes
GatewayToWorker: TypeAlias = Work | Abort | GatewayPing
WorkerToGateway: TypeAlias = PrefillReport | PromptTold | Tokens | Failed | WorkerPing


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What travels with a push from prefill to decode worker (msgpack, at most NOTE_LIMIT bytes)."""

    first_token: int
    cached: int
    computed: int


class ProtocolError(ValueError):
    """A frame is of another version or not decodable; the text says which."""


class Codec:
    """Encodes lists of messages and decodes frames of one union."""

    def __init__(self, union: Any) -> None:
        # The protocol's number and the messages in one pass, which takes a third of the time that a pass for each does.
        self._decoder = msgspec.msgpack.Decoder(list[int | union])
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, messages: list[Message]) -> bytes:
        return self._encoder.encode([PROTOCOL, *messages])

    def decode(self, frame: bytes) -> list[Message]:
        """Raises ProtocolError for a frame of another protocol, with an unknown message, or nested without end."""
        try:
            protocol, *messages = self._decoder.decode(frame)
        except (ValueError, RecursionError) as error:
            _refuse_another(frame)
            raise ProtocolError(f"not a frame of this protocol: {error}") from error
        if protocol != PROTOCOL:
            _refuse_another(frame)
            raise ProtocolError("not a frame of this protocol: it has no number")
        for message in messages:
            if type(message) is int:
                raise ProtocolError("not a frame of this protocol: a number is no message")
        return messages  # type: ignore[return-value]


def _refuse_another(frame: bytes) -> None:
    """Raises ProtocolError if the frame is of another protocol, whose messages nobody here knows."""
    try:
        version, *_ = msgspec.msgpack.decode(frame, type=list[msgspec.Raw])
        protocol = msgspec.msgpack.decode(version, type=int)
    except (ValueError, RecursionError):
        return
    if protocol != PROTOCOL:
        raise ProtocolError(f"peer speaks protocol {protocol}, this is {PROTOCOL}: upgrade the older one")


__all__ = [name for name, value in list(globals().items()) if isinstance(value, type) and issubclass(value, Message)]
__all__ += [
    "ClearedNode",
    "Codec",
    "CostFit",
    "Handoff",
    "HotPrefix",
    "LoadSample",
    "Namespace",
    "Note",
    "ProtocolError",
]
