"""The nouns of the scheduler. Read this file first; rust/transfer/src/types.rs spells the shared ones alike.

Everything here is immutable data (msgspec structs, so that it can cross a socket as msgpack) and knows no clock,
socket or framework. Durations are seconds, sizes bytes, lengths tokens, unless a name says otherwise.
"""

from __future__ import annotations

import enum
import hashlib

import msgspec

BLOCK_TOKENS = 16
KEY_BYTES = 16


class Role(enum.Enum):
    """What a worker accepts."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


class Medium(enum.Enum):
    """Where a pool keeps a block. In the order of preference."""

    DRAM = "dram"
    SSD = "ssd"


#: Where a block may lie, as packed changes number it: a worker's pages, a node's DRAM, its SSD.
TIERS = ("device", "dram", "ssd")


class KvGroup(msgspec.Struct, frozen=True):
    """Layers whose KV has one shape. window: sliding-window length in tokens, None for full attention."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None


class KvSpec(msgspec.Struct, frozen=True):
    """How a block's bytes are cut into strips: [layer][k|v][kv_head][token][head_dim], dense, little-endian."""

    groups: tuple[KvGroup, ...]
    block_tokens: int = BLOCK_TOKENS

    @property
    def strips(self) -> int:
        return sum(group.layers * 2 * group.kv_heads for group in self.groups)

    @property
    def layers(self) -> int:
        return sum(group.layers for group in self.groups)

    def strips_of(self, layers: range) -> range:
        """The strips of a run of layers (of the one group there is today)."""
        (group,) = self.groups
        each = 2 * group.kv_heads
        return range(layers.start * each, layers.stop * each)

    @property
    def strip_bytes(self) -> int:
        """Bytes of one strip; all groups must agree (one group today)."""
        sizes = {self.block_tokens * group.head_dim * DTYPE_BYTES[group.dtype] for group in self.groups}
        (size,) = sizes
        return size

    @property
    def block_bytes(self) -> int:
        return self.strips * self.strip_bytes


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Namespace(msgspec.Struct, frozen=True):
    """All that makes KV reusable. Two workers share blocks only if every field is equal."""

    weights: str
    config: str
    compute_dtype: str
    weight_quantization: str
    kv: KvSpec
    layout_version: int = 1

    def digest(self) -> bytes:
        """32 bytes that name this namespace in block keys."""
        return hashlib.blake2b(msgspec.json.encode(self, order="sorted"), digest_size=32).digest()

    def owner(self) -> int:
        """The same in 64 bits: as pools know whose blocks they keep."""
        return int.from_bytes(self.digest()[:8], "little")

    def difference(self, other: Namespace) -> str | None:
        """In words, the first field that differs and its values ("`kv.block_tokens` differs: 16 and 32"), or None."""
        mine, others = _fields(self), _fields(other)
        for name in mine | others:
            if (one := mine.get(name, "none")) != (another := others.get(name, "none")):
                return f"`{name}` differs: {one} and {another}"
        return None


def _fields(namespace: Namespace) -> dict[str, str]:
    """Its fields, and those of its KV, by dotted name. Groups are numbered where there are several."""
    fields = {name: str(getattr(namespace, name)) for name in namespace.__struct_fields__ if name != "kv"}
    kv = namespace.kv
    fields |= {"kv.block_tokens": str(kv.block_tokens), "kv.groups": str(len(kv.groups))}
    for number, group in enumerate(kv.groups):
        prefix = "kv." if len(kv.groups) == 1 else f"kv.groups[{number}]."
        fields |= {prefix + name: str(getattr(group, name)) for name in group.__struct_fields__}
    return fields


#: Most of the likeliest tokens that are told beside a chosen one, and most ids with a bias of their own. Both are
#: OpenAI's limits, rounded up; a request carries its biases to each worker, and a step has those of all its rows.
MOST_LOGPROBS, MOST_BIASES = 20, 1024
GRAMMARS = ("json_object", "json_schema", "regex", "choice", "lark", "tools")


class Grammar(msgspec.Struct, frozen=True):
    """What an answer must look like. kind: of GRAMMARS; text: the schema, expression, list or grammar itself."""

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in GRAMMARS:
            raise ValueError(f"a grammar is one of {', '.join(GRAMMARS)}, not {self.kind!r}")


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """What the model itself thought of a token that was chosen, before anything shaped its logits (vLLM's
    "raw_logprobs").

    chosen: natural logarithm of the token's probability; rank: 1 for the likeliest, equal ones in the order of ids;
    top: (id, logprob) of the likeliest, as many as were asked for, in the order of ranks.
    """

    chosen: float
    rank: int
    top: tuple[tuple[int, float], ...]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when a request ends. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are
    off. `seed` None: the gateway draws one. Random numbers are counters over (seed, position): batch, worker and retry
    do not change them. `stop` strings are the gateway's business, ids and counts the worker's.

    What is done to the logits before a choice, in this order (`Shaping` in kernels/inputs.py). repetition_penalty:
    positive logits of tokens in prompt or answer are divided by it, negative ones multiplied. logit_bias: (id, added).
    presence_penalty is taken from the logits of tokens in the answer, frequency_penalty for each time that they are
    there. min_tokens: until the answer has so many, no token that would end it is chosen (and no stop string sought).
    grammar: tokens that it does not allow are not chosen. Then temperature, min_p, top_k, top_p.

    logprobs: how many of the likeliest tokens are told beside each chosen one; None: nothing is told, 0: the chosen
    one's only. prompt_logprobs: the same of the prompt's own tokens but its first; whoever computes the prompt tells.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be between 0 and 100, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, not {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be between 0 and 2**63 - 1, not {self.seed}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be between 0 and 1, not {self.min_p}")
        if not -2.0 <= self.presence_penalty <= 2.0:
            raise ValueError(f"presence_penalty must be between -2 and 2, not {self.presence_penalty}")
        if not -2.0 <= self.frequency_penalty <= 2.0:
            raise ValueError(f"frequency_penalty must be between -2 and 2, not {self.frequency_penalty}")
        if not 0.01 <= self.repetition_penalty <= 100.0:
            raise ValueError(f"repetition_penalty must be between 0.01 and 100, not {self.repetition_penalty}")
        if self.grammar is not None and self.ignore_eos:
            raise ValueError("ignore_eos must be off where there is a grammar, as the end is a part of it")
        if self.logit_bias:
            self._check_biases()
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), not {self.min_tokens}")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and not 0 <= count <= MOST_LOGPROBS:
                raise ValueError(f"{name} must be between 0 and {MOST_LOGPROBS}, not {count}")

    def _check_biases(self) -> None:
        if len(self.logit_bias) > MOST_BIASES:
            raise ValueError(f"logit_bias must have at most {MOST_BIASES} ids, not {len(self.logit_bias)}")
        if len(dict(self.logit_bias)) < len(self.logit_bias):
            raise ValueError("logit_bias must name each id once")
        for token, bias in self.logit_bias:
            if not (0 <= token < 2**31 and -100.0 <= bias <= 100.0):
                raise ValueError(f"logit_bias must be between -100 and 100 for ids from 0 on, not {bias} for {token}")

    @property
    def follows_itself(self) -> bool:
        """Its next token cannot be asked for before its last one is known."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or self.grammar is not None
        )


class FinishReason(enum.Enum):
    """Why a sequence ended. The gateway turns `stop_string` (its own finding) into "stop" as well."""

    STOP = "stop"
    LENGTH = "length"


class Node(msgspec.Struct, frozen=True):
    """A node's daemon as others reach it: its data-plane address and which life of it is meant."""

    node: str
    address: str
    incarnation: int


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself when it dials the conductor. work: the ZeroMQ endpoint where gateways send work.

    pinned: it keeps its role, whatever the conductor would like.
    """

    worker: str
    incarnation: int
    role: Role
    node: Node
    work: str
    model: str
    tokenizer: str
    namespace: Namespace
    vocab_size: int
    max_positions: int
    pages: int
    pool_slots: int
    max_tokens_per_step: int
    max_sequences: int
    pinned: bool = False


class WorkerRef(msgspec.Struct, frozen=True):
    """A worker as a plan names it: enough to send it work and to reach its node's pool."""

    worker: str
    incarnation: int
    node: Node
    work: str


class Source(msgspec.Struct, frozen=True):
    """Blocks `first` to `last` (exclusive) of the prefix can be had from this node, which has them on this medium.

    From the very node that wants them: its SSD alone has them there, or they are coming. ready: seconds from the plan
    until somebody will have computed them, as predicted; they may be late, or never come. 0: they are there.
    """

    node: Node
    first: int
    last: int
    medium: Medium = Medium.DRAM
    ready: float = 0.0


class Slo(msgspec.Struct, frozen=True):
    """What a client was promised, in seconds; None: nothing.

    ttft: arrival to first token. tbt: gap between tokens. deadline: arrival to last token, after which the answer is
    worthless and whoever works on it stops.
    """

    ttft: float | None = None
    tbt: float | None = None
    deadline: float | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Where one request goes and why. prefill is decode for a worker of role both.

    sources: who has what the prefill node lacks in DRAM; where they overlap, the earlier ones are to be preferred.
    cached_blocks: blocks the conductor expects to be at the prefill node, fetched or already there.
    """

    request: int
    attempt: int
    prefill: WorkerRef
    decode: WorkerRef
    sources: tuple[Source, ...] = ()
    cached_blocks: int = 0
    predicted_ttft: float = 0.0
    predicted_tbt: float = 0.0
    why: str = ""


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was not planned. retry_after: predicted wait in seconds, None: never by waiting.

    kind: as the conductor counts it ("absent", "too_large"...); "slo_ttft", "slo_tbt", "slo_deadline" and "share" are
    those of admission.
    """

    request: int
    attempt: int
    reason: str
    retry_after: float | None = None
    kind: str = ""


def cacheable_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """Most blocks a hit may cover: at least one token is computed (design, life of a request, 1)."""
    return max(prompt_tokens - 1, 0) // block_tokens


def tenant_number(tenant: str) -> int:
    """A tenant as pools know it; 0 for nobody in particular."""
    return int.from_bytes(hashlib.blake2b(tenant.encode(), digest_size=8).digest(), "little") if tenant else 0
