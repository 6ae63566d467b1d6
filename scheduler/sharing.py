"""Which workers can share KV, and in words, why two cannot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from .types import Namespace, WorkerInfo


class Shares(Protocol):
    """What decides it."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def namespace(self) -> Namespace: ...


def difference(one: Shares, other: Shares) -> str | None:
    """In words, what keeps two workers of one model from sharing KV, or None: they can."""
    if one.vocab_size != other.vocab_size:
        # The configurations differ as well then, but say so by digests only.
        return f"`vocab_size` differs: {one.vocab_size} and {other.vocab_size}"
    return one.namespace.difference(other.namespace)


def stranger(info: WorkerInfo, others: Iterable[WorkerInfo]) -> str | None:
    """A sentence on a worker that shares no KV with some other of its model, or None."""
    for other in others:
        if other.model == info.model and other.worker != info.worker and (field := difference(other, info)):
            return f"{other.worker} and {info.worker} serve {info.model!r} and cannot share KV: {field}"
    return None
