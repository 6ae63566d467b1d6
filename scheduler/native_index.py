"""The fast index: `_native.PrefixIndex`, with answers of the types that `prefix_index.Index` promises."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pyengine import _native

from .prefix_index import Run
from .types import Medium


class NativeIndex(_native.PrefixIndex):
    """An `Index`. Most of it is inherited as it is; calls from several threads wait for each other."""

    def runs(self, keys: bytes, first: int, avoid: Iterable[str]) -> list[Run]:
        runs = self._runs(keys, first, list(avoid))
        return [Run(node, start, end, Medium(medium)) for node, start, end, medium in runs]

    def shared(self, keys: bytes, run: Run, avoid: Iterable[str]) -> dict[str, int]:
        return dict(self._shared(keys, run.first, run.last, run.medium is Medium.SSD, [run.node, *avoid]))

    def only_at(self, node: str, others: Iterable[str]) -> Callable[[bytes], tuple[bytes, int] | None]:
        known = list(others)
        return lambda key: self._only_at(key, node, known)

    def only_on_ssd(self, keys: bytes, node: str) -> list[Run]:
        return [Run(node, first, last, Medium.SSD) for first, last in self._only_on_ssd(keys, node)]
