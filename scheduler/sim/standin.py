"""Stands in for what is not here yet: a node's pool of DRAM only, least recently used first, and fast-forward."""

from __future__ import annotations

from collections import OrderedDict

from ..batcher import Batcher, Sequence, State
from ..changes import RECORD
from ..types import KEY_BYTES


class NodePool:
    """A node's blocks, without memory."""

    def __init__(self, evict: str, dram: int, ssd: int) -> None:
        self.slots = dram
        self.evictions = 0
        self._pins: dict[bytes, int] = {}
        self._lru: OrderedDict[bytes, None] = OrderedDict()
        self._where: dict[bytes, tuple[bytes, int]] = {}
        self._tags: dict[int, tuple[list[bytes], set[bytes], int]] = {}
        self._out: list[bytes] = []
        self._xor = 0
        self._reserved = 0

    def find(self, keys: bytes) -> tuple[int, int]:
        count = len(keys) // KEY_BYTES
        for i in range(count):
            if keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] not in self._where:
                return i, i
        return count, count

    def take(self, tag: int, keys: bytes, private: int) -> bool:
        assert tag not in self._tags
        named = [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
        new = [key for key in named if key not in self._where]
        evictable = len(self._lru) - sum(key in self._lru for key in named)
        if len(new) + private > self.free + evictable:
            return False
        lacking = len(new) + private - self.free
        for key in named:
            if key in self._where:
                self._pin(key)
        for _ in range(lacking):
            self._remove(self._lru.popitem(last=False)[0])
        self._tags[tag] = (named, set(named) - set(new), len(new) + private)
        self._reserved += len(new) + private
        return True

    def commit(self, tag: int, keys: bytes) -> None:
        named, held, reserved = self._tags[tag]
        position = {key: i for i, key in enumerate(named)}
        for i in range(0, len(keys), KEY_BYTES):
            key = keys[i : i + KEY_BYTES]
            if key in held:
                continue
            held.add(key)
            reserved -= 1
            self._reserved -= 1
            if key not in self._where:
                at = position[key]
                parent = named[at - 1] if at else bytes(KEY_BYTES)
                self._where[key] = (parent, at)
                self._xor ^= int.from_bytes(key, "little")
                self._out.append(RECORD.pack(0, 1, 0, at, key, parent))
            self._pin(key)
        self._tags[tag] = (named, held, reserved)

    def release(self, tag: int) -> None:
        if tag not in self._tags:
            return
        named, held, reserved = self._tags.pop(tag)
        self._reserved -= reserved
        for key in reversed(named):
            if key in held:
                self._pins[key] -= 1
                if not self._pins[key]:
                    del self._pins[key]
                    self._lru[key] = None

    def _pin(self, key: bytes) -> None:
        self._pins[key] = self._pins.get(key, 0) + 1
        self._lru.pop(key, None)

    def _remove(self, key: bytes) -> None:
        del self._where[key]
        self.evictions += 1
        self._xor ^= int.from_bytes(key, "little")
        self._out.append(RECORD.pack(1, 1, 0, 0, key, bytes(KEY_BYTES)))

    def changes(self) -> bytes:
        out, self._out = b"".join(self._out), []
        return out

    def contents(self) -> bytes:
        return b"".join(RECORD.pack(0, 1, 0, at, key, parent) for key, (parent, at) in self._where.items())

    @property
    def count(self) -> int:
        return len(self._where)

    @property
    def digest(self) -> bytes:
        return self._xor.to_bytes(KEY_BYTES, "little")

    @property
    def free(self) -> int:
        return self.slots - self._reserved - len(self._where)

    @property
    def cached(self) -> int:
        return len(self._lru)

    @property
    def held(self) -> int:
        return len(self._pins) + self._reserved

    def check(self) -> None:
        assert self.free >= 0


class _Runs(Batcher):
    def run_length(self) -> int:
        running, tokens = self._in[State.RUNNING].values(), self.pool.block_tokens
        if self._waiting or not running or len(running) > self.max_tokens:
            return 0
        count = 1 << 30
        for sequence in running:
            if sequence.first_only or len(sequence.tokens) - sequence.computed != 1:
                return 0
            if len(sequence.pages) * tokens < len(sequence.tokens):
                return 0
            left = sequence.sampling.max_tokens - sequence.generated - 1
            count = min(count, tokens - 1 - sequence.computed % tokens, left)
        return count

    def run(self, count: int) -> None:
        for sequence in self._in[State.RUNNING].values():
            sequence.tokens += [sequence.tokens[-1]] * count
            sequence.computed += count
            sequence.high_water = max(sequence.high_water, sequence.computed)

    def in_state(self, state: State) -> list[Sequence]:
        return list(self._in[state].values())


def discipline(name: str) -> type[_Runs]:
    return _Runs
