"""Blocks that are not there yet and will be: what planned requests will leave at their workers, until events tell.

    plan ──> expected at its prefill worker (and, handed off, at its decode worker) from a predicted time on
         ──> over when the request ends, a worker of it dies, or the time has passed by far

A key names its whole prefix, so whoever expects a block expects all before it: only every so many of a prompt's keys
are kept, and its last. An expectation that proves wrong costs a miss and a recompute, never a wrong answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache

from .types import KEY_BYTES

#: Tokens between two kept keys. What two prompts share beyond the last of them is computed twice.
STRIDE_TOKENS = 256
#: Requests whose blocks are expected at once; beyond, the oldest is forgotten.
MAX_REQUESTS = 8192
#: An expectation holds for so many times as long as was predicted, and so long at least (seconds).
GRACE = 2.0
SHORTEST = 2.0


@dataclass(frozen=True, slots=True)
class Coming:
    """Leading blocks that a worker and its node will have, and when the last of them is there (conductor's clock)."""

    blocks: int
    ready: float


@dataclass(slots=True)
class _Promise:
    """One request's blocks. places: the kept keys, with the number of blocks up to each. workers: when each has all."""

    places: list[tuple[bytes, int]]
    workers: dict[str, float]
    until: float


class Inflight:
    """The promises by request, and the workers at which each key is expected."""

    def __init__(self) -> None:
        self._promises: dict[tuple[str, int], _Promise] = {}
        #: By key and worker: when it is there, of each request that brings it.
        self._expected: dict[bytes, dict[str, dict[tuple[str, int], float]]] = {}
        self._ends: list[tuple[float, tuple[str, int]]] = []

    def __len__(self) -> int:
        return len(self._promises)

    def add(
        self,
        request: tuple[str, int],
        keys: bytes,
        block_tokens: int,
        workers: dict[str, float],
        now: float,
    ) -> None:
        """The request was planned. keys: of the prompt's full blocks; workers: when each will have all of them."""
        self.end(request)
        places = [(_key(keys, n), n) for n in marks(len(keys) // KEY_BYTES, block_tokens)]
        if not places:
            return
        until = now + max(GRACE * (max(workers.values()) - now), SHORTEST)
        self._promises[request] = _Promise(places, workers, until)
        heapq.heappush(self._ends, (until, request))
        for key, _ in places:
            expected = self._expected.setdefault(key, {})
            for worker, ready in workers.items():
                expected.setdefault(worker, {})[request] = ready
        self.expire(now)
        while len(self._promises) > MAX_REQUESTS:
            self.end(next(iter(self._promises)))

    def end(self, request: tuple[str, int]) -> None:
        """It is over, however: what it has left is in the index."""
        promise = self._promises.pop(request, None)
        if promise is None:
            return
        for key, _ in promise.places:
            expected = self._expected[key]
            for worker in promise.workers:
                requests = expected[worker]
                del requests[request]
                if not requests:
                    del expected[worker]
            if not expected:
                del self._expected[key]

    def lost(self, worker: str) -> None:
        """The worker is gone: what it was to compute, or to receive, will not come."""
        for request in [name for name, promise in self._promises.items() if worker in promise.workers]:
            self.end(request)

    def expire(self, now: float) -> None:
        """Promises that are late by far are none."""
        while self._ends and self._ends[0][0] <= now:
            until, request = heapq.heappop(self._ends)
            promise = self._promises.get(request)
            if promise is not None and promise.until == until:
                self.end(request)
        if len(self._ends) > 2 * MAX_REQUESTS:
            self._ends = [(promise.until, request) for request, promise in self._promises.items()]
            heapq.heapify(self._ends)

    def find(self, keys: bytes, blocks: int, block_tokens: int, now: float) -> dict[str, Coming]:
        """By worker, what is expected there of this prompt's first `blocks` blocks; who expects nothing is left out."""
        if not self._promises:
            return {}
        coming: dict[str, Coming] = {}
        shared = _shared(keys, blocks, block_tokens, self._expected)
        # Whoever expects a longer part expects the shortest.
        everybody = len(self._expected[_key(keys, shared[-1])]) if shared else 0
        for n in shared:
            if len(coming) == everybody:
                break
            for worker, requests in self._expected[_key(keys, n)].items():
                if worker not in coming:
                    coming[worker] = Coming(n, max(min(requests.values()), now))
        return coming

    def check(self) -> None:
        """Raises AssertionError if the two directions disagree."""
        told = {
            (key, worker, request): ready
            for key, workers in self._expected.items()
            for worker, requests in workers.items()
            for request, ready in requests.items()
        }
        known = {
            (key, worker, request): ready
            for request, promise in self._promises.items()
            for key, _ in promise.places
            for worker, ready in promise.workers.items()
        }
        assert told == known, "an expectation has no request, or a request's is forgotten"
        assert all(workers and all(workers.values()) for workers in self._expected.values()), "an empty entry is kept"
        assert len(self._promises) <= MAX_REQUESTS, "too many requests are remembered"


@lru_cache(maxsize=4096)
def marks(blocks: int, block_tokens: int) -> tuple[int, ...]:
    """Numbers of leading blocks whose last key is kept, ascending."""
    stride = max(STRIDE_TOKENS // block_tokens, 1)
    places = list(range(stride, blocks + 1, stride))
    if blocks and (not places or places[-1] != blocks):
        places.append(blocks)
    return tuple(places)


def _key(keys: bytes, n: int) -> bytes:
    """Of the n-th block."""
    return keys[(n - 1) * KEY_BYTES : n * KEY_BYTES]


def _shared(keys: bytes, blocks: int, block_tokens: int, known: Container[bytes]) -> list[int]:
    """Marks of this prompt whose keys are known, the longest first."""
    found: list[int] = []
    for n in marks(blocks, block_tokens):
        if _key(keys, n) not in known:
            break  # and so none behind it is, but for one that ends there
        found.append(n)
    return found[::-1]
