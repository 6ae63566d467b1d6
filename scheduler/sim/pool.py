"""A modelled node's pool: the production pool and eviction policies, in tokens of KV and without their bytes.

All rules are Rust's (`rust/transfer/src/pool/model.rs`); here they get the sizes of a `NodeSpec`. What is answered, and
what `changes` says, is what the node's daemon would say at that moment; a simulator adds how long things take.

    find ── take ──(fetch, load, compute)── commit ── ... ── release
             └ False: no room now; ask again when something was released
"""

from __future__ import annotations

import difflib

from pyengine._native import EVICTION_POLICIES, GiveUpError, PoolModel

from .compute import StepTime
from .spec import NodeSpec

#: What `find` says of a block: as packed changes number the tiers (`types.TIERS`).
DRAM, SSD = 1, 2


class NodePool:
    """One node's. Keys are 16 bytes each, one after the other, from the head of a prefix on. Tags are numbers of the
    caller's choice. What every method does, and raises, stands in `_native.pyi`: PoolModel.

    costs: says what it takes to compute a block again, for policies that weigh it. Raises ValueError for a size or a
    policy that is impossible.
    """

    def __init__(self, spec: NodeSpec, block_tokens: int, costs: StepTime) -> None:
        if spec.evict not in EVICTION_POLICIES:
            near = difflib.get_close_matches(spec.evict, EVICTION_POLICIES, 1, 0.4)
            guess = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"there is no eviction policy {spec.evict!r}: known are {', '.join(EVICTION_POLICIES)}{guess}"
            )
        own = costs.coefficients
        sizes = (spec.dram_tokens // block_tokens, spec.ssd_tokens // block_tokens)
        if min(sizes) < 0 or max(sizes) >= 2**32:
            raise ValueError(f"dram_tokens {spec.dram_tokens} and ssd_tokens {spec.ssd_tokens} are no sizes of a pool")
        try:
            self.model = PoolModel(spec.evict, *sizes, costs=(own.token, own.pair, float(block_tokens)), changes=True)
        except GiveUpError as error:
            raise ValueError(f"dram_tokens {spec.dram_tokens}, ssd_tokens {spec.ssd_tokens}: {error}") from None
        self._dram = sizes[0]
        # Bound once: a simulation calls them a million times.
        self.find = self.model.find
        self.take = self.model.take
        self.commit = self.model.commit
        self.release = self.model.release
        self.drop = self.model.drop
        self.changes = self.model.changes
        self.check = self.model.check

    def restart(self) -> None:
        """The node's next life: the SSD has what it had, and nothing else is there."""
        self.model.restart()

    @property
    def count(self) -> int:
        """Blocks in DRAM and on the SSD; one that is on both counts twice, as in a daemon's heartbeat."""
        return self.model.digest()[0]

    @property
    def digest(self) -> bytes:
        """XOR of their keys, as a daemon's heartbeat says it."""
        return self.model.digest()[1]

    @property
    def available(self) -> int:
        """DRAM slots that a new tag could have: empty ones, and blocks that nobody uses."""
        return max(self.model.available - 1, 0)

    @property
    def free(self) -> int:
        """DRAM slots in which nothing is, those that are reserved for what is to come among them."""
        return self._dram - self.model.counts()["in_dram"]

    @property
    def evictions(self) -> int:
        """Blocks that made room in DRAM so far."""
        return self.model.counts()["evictions"]
