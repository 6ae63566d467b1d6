"""The runs behind the tables: which trace, which cluster, which scheduler. One set of parameters for all figures.

What the paper states: sixteen nodes of eight A800 with 80 GB each, links of 4 x 200 Gbit/s, LLaMA3-70B.

What it does not state, fixed here once, and the reason:

KV in the devices   1.33 M tokens of a node: 8 x 80 GB, less 141 GB of weights and a tenth for activations, over 320 KiB
                    a token. Prefill and decode nodes have as much; so have the baselines, which hold KV nowhere else
DRAM of a node      3 M tokens (about 1 TB): what the paper gives its nodes where it compares caches
a step              8,192 tokens of prompts at most in a prefill worker; 256 sequences at most, as in the baselines
order at a worker   first come, first served: requests have no objective, so none has a slack to be ordered by
the threshold       1 in Algorithm 1 (a row shows 3)
requests' tenants   none: the order of one's own must not depend on another

The production conductor has what the paper does not speak of, and no switch for it: a prompt whose prefix another one
computes just now waits for it, and what is planned counts as cached. Copies of hot prefixes ahead of requests have one,
and are off but for a row of their own; prompts within decode batches need an objective and so never happen here.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pyengine.scheduler.sim.baselines import baseline
from pyengine.scheduler.sim.spec import ClusterSpec, NodeSpec, RunSpec, WorkerSpec
from pyengine.scheduler.types import Role, Slo

#: The two decode models: the one that gives the paper's gaps, and the one that single requests imply.
MODELS = {"calibrated": "llama3-70b-a800", "single": "llama3-70b-a800-single"}
NODES = 16
BLOCK = 512
KV_TOKENS = 1_330_000
DRAM_TOKENS = 3_000_000
#: Bytes per second of 4 x 200 Gbit/s.
LINK_RATE = 100e9
#: Algorithm 1 as printed.
ALGORITHM_1 = "kvcache-centric:replicates=false"
GLOBAL = RunSpec(policy=ALGORITHM_1, pacing=False)
#: vLLM's requests are spread evenly: nothing is said of how.
SPREAD = RunSpec(policy="round-robin", pacing=False)
NO_OBJECTIVE = Slo()


@dataclass(frozen=True)
class Trace:
    """name: a file of the paper's authors ("report": the head of their technical report's trace), or "tool", our
    reconstruction of the one that was not published.

    repeat: so many times one after the other, until `limit` requests. speed: arrivals so many times as fast. output:
    all answers have this many tokens, None: as recorded. shared: False, no prompt has anything in common with another.
    """

    name: str
    repeat: int = 1
    speed: float = 1.0
    limit: int | None = None
    output: int | None = None
    shared: bool = True


@dataclass(frozen=True)
class Case:
    """One run of the simulator."""

    trace: Trace
    cluster: ClusterSpec
    run: RunSpec


def with_policy(policy: str, admission: str = "none") -> RunSpec:
    return msgspec.structs.replace(GLOBAL, policy=policy, admission=admission)


def nodes(slo: Slo = NO_OBJECTIVE, *, model: str, link_rate: float = LINK_RATE, **counts: int) -> ClusterSpec:
    """A cluster of our workers. counts: by role."""
    return ClusterSpec(
        workers=tuple(
            WorkerSpec(role=Role(role), count=count, model=model, pages=KV_TOKENS // BLOCK, max_tokens_per_step=8_192)
            for role, count in counts.items()
        ),
        node=NodeSpec(dram_tokens=DRAM_TOKENS, link_rate=link_rate),
        block_tokens=BLOCK,
        slo=slo,
    )


def coupled(name: str, model: str) -> ClusterSpec:
    """Sixteen nodes that each do both, as vLLM 0.5.1 would: one of `scheduler.sim.baselines`."""
    worker = baseline(name, NODES, model=model, block_tokens=BLOCK)
    return ClusterSpec(workers=(worker,), node=NodeSpec(dram_tokens=DRAM_TOKENS), block_tokens=BLOCK)
