"""Blocks that are not there yet and will be: what planned requests will leave at their workers, until events tell.

    plan ──> expected at its prefill worker (and, handed off, at its decode worker) from a predicted time on
         ──> over when the request ends, a worker of it dies, or the time has passed by far

A key names its whole prefix, so whoever expects a block expects all before it: only every so many of a prompt's keys
are kept, and its last. An expectation that proves wrong costs a miss and a recompute, never a wrong answer.

`Expectations` is the contract. `Inflight` is its plain twin, which tests believe; `_native.Inflight` is the fast one,
which serves. Both answer alike.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

from .types import KEY_BYTES

#: Tokens between two kept keys. What two prompts share beyond the last of them is computed twice.
STRIDE_TOKENS = 256
#: Requests whose blocks are expected at once; beyond, the oldest is forgotten.
MAX_REQUESTS = 8192
#: An expectation holds for so many times as long as was predicted, and so long at least (seconds).
GRACE = 2.0
SHORTEST = 2.0


#: Leading blocks that a worker and its node will have, and when the last of them is there (conductor's clock).
Coming: TypeAlias = tuple[int, float]


class Expectations(Protocol):
    """Requests, by gateway and number, and the blocks that they will leave. keys: 16 bytes per block, in order."""

    def __len__(self) -> int:
        """Requests whose blocks are expected."""

    def add(
        self, request: tuple[str, int], keys: bytes, block_tokens: int, workers: dict[str, float], now: float
    ) -> None:
        """The request was planned. keys: of the prompt's full blocks; workers: when each will have all of them."""

    def end(self, request: tuple[str, int]) -> None:
        """It is over, however: what it has left is in the index."""

    def lost(self, worker: str) -> None:
        """The worker is gone: what it was to compute, or to receive, will not come."""

    def expire(self, now: float) -> None:
        """Promises that are late by far are none."""

    def find(self, keys: bytes, block_tokens: int, now: float) -> dict[str, Coming]:
        """By worker, what is expected there of this prompt; who expects nothing is left out."""

    def check(self) -> None:
        """Raises if the two directions disagree."""


@dataclass(slots=True, eq=False)
class _Promise:
    """One request's blocks. keys: those that are kept. workers: when each has all of them."""

    request: tuple[str, int]
    keys: list[bytes]
    workers: dict[str, float]
    until: float


#: Who expects a block: by worker, when it is there, of each request that brings it. Most are expected of one request
#: only, the end of its own prompt: then it is that promise, which costs no more dictionaries.
_Expected: TypeAlias = "_Promise | dict[str, dict[tuple[str, int], float]]"


class Inflight:
    """The plain twin: the promises by request, and the workers at which each key is expected."""

    def __init__(self) -> None:
        self._promises: dict[tuple[str, int], _Promise] = {}
        self._expected: dict[bytes, _Expected] = {}
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
        self.end(request)
        kept = [_key(keys, n) for n in marks(len(keys) // KEY_BYTES, block_tokens)]
        if not kept:
            return
        until = now + max(GRACE * (max(workers.values()) - now), SHORTEST)
        promise = self._promises[request] = _Promise(request, kept, workers, until)
        heapq.heappush(self._ends, (until, request))
        for key in kept:
            expected = self._expected.get(key)
            if expected is None:
                self._expected[key] = promise
                continue
            if isinstance(expected, _Promise):
                first = expected.request
                expected = {worker: {first: ready} for worker, ready in expected.workers.items()}
                self._expected[key] = expected
            for worker, ready in workers.items():
                expected.setdefault(worker, {})[request] = ready
        self.expire(now)
        while len(self._promises) > MAX_REQUESTS:
            self.end(next(iter(self._promises)))

    def end(self, request: tuple[str, int]) -> None:
        promise = self._promises.pop(request, None)
        if promise is None:
            return
        for key in promise.keys:
            expected = self._expected[key]
            if isinstance(expected, _Promise):
                del self._expected[key]
                continue
            for worker in promise.workers:
                requests = expected[worker]
                del requests[request]
                if not requests:
                    del expected[worker]
            if not expected:
                del self._expected[key]

    def lost(self, worker: str) -> None:
        for request in [name for name, promise in self._promises.items() if worker in promise.workers]:
            self.end(request)

    def expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            until, request = heapq.heappop(self._ends)
            promise = self._promises.get(request)
            if promise is not None and promise.until == until:
                self.end(request)
        if len(self._ends) > 2 * MAX_REQUESTS:
            self._ends = [(promise.until, request) for request, promise in self._promises.items()]
            heapq.heapify(self._ends)

    def find(self, keys: bytes, block_tokens: int, now: float) -> dict[str, Coming]:
        if not self._promises:
            return {}
        coming: dict[str, Coming] = {}
        shared = self._shared(keys, len(keys) // KEY_BYTES, block_tokens)
        # Whoever expects a longer part expects the shortest.
        everybody = len(_by_worker(shared[0][1])) if shared else 0
        for n, expected in reversed(shared):
            if len(coming) == everybody:
                break
            if isinstance(expected, _Promise):
                for worker, ready in expected.workers.items():
                    if worker not in coming:
                        coming[worker] = (n, ready if ready > now else now)
                continue
            for worker, requests in expected.items():
                if worker not in coming:
                    ready = min(requests.values())
                    coming[worker] = (n, ready if ready > now else now)
        return coming

    def _shared(self, keys: bytes, blocks: int, block_tokens: int) -> list[tuple[int, _Expected]]:
        """Marks of this prompt that are expected somewhere, ascending."""
        found: list[tuple[int, _Expected]] = []
        for n in marks(blocks, block_tokens):
            expected = self._expected.get(_key(keys, n))
            if expected is None:
                break  # and so none behind it is, but for one that ends there
            found.append((n, expected))
        return found

    def check(self) -> None:
        """Raises AssertionError if the two directions disagree."""
        told = {
            (key, worker, request): ready
            for key, expected in self._expected.items()
            for worker, requests in _by_worker(expected).items()
            for request, ready in requests.items()
        }
        known = {
            (key, worker, request): ready
            for request, promise in self._promises.items()
            for key in promise.keys
            for worker, ready in promise.workers.items()
        }
        assert told == known, "an expectation has no request, or a request's is forgotten"
        everything = [_by_worker(expected) for expected in self._expected.values()]
        assert all(workers and all(workers.values()) for workers in everything), "an empty entry is kept"
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


def _by_worker(expected: _Expected) -> dict[str, dict[tuple[str, int], float]]:
    if isinstance(expected, _Promise):
        return {worker: {expected.request: ready} for worker, ready in expected.workers.items()}
    return expected
