"""What is simulated: a cluster, as a TOML file or in code. Everything a report needs to be repeated is in here."""

from __future__ import annotations

import msgspec

from ..types import Role, Slo

MAX_WORKERS = 100_000
#: Seconds for a message between processes of one data centre, its handling included.
MESSAGE_DELAY = 5e-4


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`count` workers alike, each on a node of its own.

    model: cost model, a name under `models/` or a path. stages: nodes that compute one prompt as a pipeline of layers
    (1: none). pages: device pages, of block_tokens each. step_overhead: seconds of a step beside its computation, which
    the worker's loop spends; no cost model knows of them. discipline: "ours" is the production Batcher as it serves;
    the names of `baselines.py` are models of others.
    """

    role: Role
    count: int
    model: str = "llama3-70b-a800"
    stages: int = 1
    pages: int = 2_600
    max_tokens_per_step: int = 8_192
    max_sequences: int = 256
    max_queue: int = 100_000
    step_overhead: float = 0.0
    discipline: str = "ours"


class NodeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Each node's pool and links. Sizes in tokens of KV; rates in bytes per second; evict: a name of `_native`.

    device_rate: between DRAM and device pages. link_rate: in and out of a node, each, shared by its transfers.
    """

    dram_tokens: int = 3_000_000
    ssd_tokens: int = 0
    evict: str = "lru"
    device_rate: float = 140e9
    ssd_rate: float = 6e9
    link_rate: float = 100e9
    link_delay: float = 1e-3


class ClusterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole. kv_bytes: of one token. fabric_rate: of all links together, None: no limit but theirs. message_delay:
    seconds for a message between two processes, its handling included. handoff_delay: seconds from the end of a
    prompt's last chunk until all its KV is at the decode node, beside what the last layer's bytes take; handoff_rate:
    bytes per second by which the last chunk's KV adds to that, None: it has gone layer by layer, beside the steps.
    """

    workers: tuple[WorkerSpec, ...]
    node: NodeSpec = NodeSpec()
    block_tokens: int = 512
    kv_bytes: int = 327_680
    layers: int = 80
    fabric_rate: float | None = None
    message_delay: float = MESSAGE_DELAY
    handoff_delay: float = 0.0
    handoff_rate: float | None = None
    slo: Slo = Slo()


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """At `at` seconds a worker, or a node with all on it, dies; it is back `seconds` later (None: never).

    drains: a node that is stopped, not one that dies: it takes on nothing new, and goes, with its workers, as soon as
    they have nothing to do and the conductor has had moved what it alone has; after so many seconds at the latest.
    """

    at: float
    worker: str | None = None
    node: str | None = None
    seconds: float | None = None
    drains: float = 0.0


class RunSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How it is scheduled. Names as `conductor serve` takes them.

    pacing: the gateway shows the first token with the second, while its objective allows.
    fast_forward: decode steps between two changes of a batch are computed at once; the digest is the same without.
    write_through: blocks that fill while decoding go to the pool (traces do not name them, so they are never hit).
    exact_limits: clients allow an answer as many tokens as it will have, as those of `conductor replay` do; otherwise
    nobody is told.
    """

    policy: str = "kvcache-centric"
    admission: str = "none"
    seed: int = 0
    roles: bool = False
    fast_forward: bool = True
    exact_limits: bool = False
    write_through: bool = False
    pacing: bool = True
    failures: tuple[Failure, ...] = ()
