"""The runs behind the tables: which trace, which cluster, which scheduler. One set of parameters for all figures.

Sixteen nodes of eight A800 each; what is not stated (threshold of Algorithm 1, pages, chunk) is as the simulator's
cluster files have it, the same everywhere. None is tuned for a figure.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pyengine.scheduler.sim.spec import ClusterSpec, NodeSpec, RunSpec, WorkerSpec
from pyengine.scheduler.types import Role, Slo

#: The two decode models: the one that gives the paper's gaps, and the one that single requests imply.
MODELS = {"calibrated": "llama3-70b-a800", "single": "llama3-70b-a800-single"}
NODES = 16
#: The paper's own scheduler.
GLOBAL = RunSpec(policy="kvcache-centric")
#: vLLM's requests are spread evenly: nothing is said of how.
SPREAD = RunSpec(policy="round-robin")
#: vLLM 0.5.1: tokens of KV in the HBM of a node, and its limit of sequences.
VLLM_TOKENS, VLLM_SEQUENCES, VLLM_CHUNK = 1_330_000, 256, 2048
BLOCK = 512


@dataclass(frozen=True)
class Trace:
    """name: a file of the papers' authors, or "tool", our reconstruction of the one that was not published.

    repeat: so many times one after the other, until `limit` requests. speed: arrivals so many times as fast. output:
    all answers have this many tokens, None: as recorded.
    """

    name: str
    repeat: int = 1
    speed: float = 1.0
    limit: int | None = None
    output: int | None = None


@dataclass(frozen=True)
class Case:
    """One run of the simulator."""

    trace: Trace
    cluster: ClusterSpec
    run: RunSpec


def disaggregated(prefill: int, decode: int, model: str, slo: Slo = Slo(), **node: float) -> ClusterSpec:  # noqa: B008
    """Prefill and decode nodes apart."""
    return ClusterSpec(
        workers=(
            WorkerSpec(role=Role.PREFILL, count=prefill, model=model),
            WorkerSpec(role=Role.DECODE, count=decode, model=model),
        ),
        node=msgspec.structs.replace(NodeSpec(), **node),
        slo=slo,
    )


def coupled(discipline: str, model: str) -> ClusterSpec:
    """Sixteen nodes that each do both, as vLLM 0.5.1 would."""
    return ClusterSpec(
        workers=(
            WorkerSpec(
                role=Role.BOTH,
                count=NODES,
                model=model,
                discipline=discipline,
                pages=VLLM_TOKENS // BLOCK,
                max_sequences=VLLM_SEQUENCES,
                max_tokens_per_step=VLLM_CHUNK if discipline == "vllm-cp" else 131_072,
            ),
        )
    )
