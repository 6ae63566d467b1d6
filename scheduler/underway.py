"""Blocks of prompts that somebody here is about to compute, so that nobody computes the same ones beside it.

A sequence whose next missing block is underway at another one waits ("parked") until the last block that both have in
common is there, or until the other has gone: then it looks again for what it can reuse. It holds nothing meanwhile, and
the one it waits for holds its pages and waits for nobody, so there is no circle. Whoever waits lends its urgency.
"""

from __future__ import annotations

from .sequence import Sequence


class Underway:
    """Sequences here are those that are LOADING or RUNNING and have prompt left to compute."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._owner: dict[bytes, Sequence] = {}
        self._parked: dict[bytes, list[Sequence]] = {}
        self._key: dict[int, bytes] = {}

    def __bool__(self) -> bool:
        return bool(self._owner)

    @property
    def parked(self) -> int:
        return len(self._key)

    def begin(self, sequence: Sequence, first: int) -> None:
        """It will compute the full blocks of its prompt from `first` on, but for those that another one does."""
        for key in self._blocks(sequence, first):
            self._owner.setdefault(key, sequence)

    def park(self, sequence: Sequence, first: int, most: int) -> Sequence | None:
        """Lets it wait if another one computes its block `first`; returns that one. most: blocks it can reuse."""
        if first >= most:
            return None
        owner = self._owner.get(sequence.keys[first])
        if owner is None:
            return None
        last = first
        while last + 1 < most and self._owner.get(sequence.keys[last + 1]) is owner:
            last += 1
        key = self._key[sequence.arrival] = sequence.keys[last]
        self._parked.setdefault(key, []).append(sequence)
        return owner

    def leave(self, sequence: Sequence) -> bool:
        """It waits no more; False if it did not."""
        key = self._key.pop(sequence.arrival, None)
        if key is None:
            return False
        waiting = self._parked[key]
        waiting.remove(sequence)
        if not waiting:
            del self._parked[key]
        return True

    def done(self, sequence: Sequence, key: bytes) -> list[Sequence]:
        """A block is there (or will not be); returns who waited for it."""
        if self._owner.get(key) is not sequence:
            return []
        del self._owner[key]
        woken = self._parked.pop(key, [])
        for each in woken:
            del self._key[each.arrival]
        return woken

    def end(self, sequence: Sequence) -> list[Sequence]:
        """It computes no more of its prompt; returns who waited for what it has not computed."""
        if not self._owner:
            return []
        return [
            each
            for key in self._blocks(sequence, sequence.computed // self._block_tokens)
            for each in self.done(sequence, key)
        ]

    def _blocks(self, sequence: Sequence, first: int) -> list[bytes]:
        return sequence.keys[first : sequence.prompt_tokens // self._block_tokens]

    def check(self, computing: list[Sequence], waiting: list[Sequence]) -> None:
        """Raises AssertionError if a block is underway at nobody, or somebody waits for nothing."""
        numbers = {sequence.arrival for sequence in computing}
        for key, owner in self._owner.items():
            assert owner.arrival in numbers, "a block is underway at a sequence that does not run"
            assert key in self._blocks(owner, owner.computed // self._block_tokens), "a block is there and underway"
        assert set(self._parked) <= set(self._owner), "somebody waits for a block that nobody computes"
        parked = {s.arrival: key for key, sequences in self._parked.items() for s in sequences}
        assert parked == self._key, "who waits for what is told in two ways"
        assert set(parked) <= {sequence.arrival for sequence in waiting}
