"""What shapes the next choice of a sequence, from its sampling parameters and the tokens that it has.

It follows the sequence: what a token changes is changed when it came, so a step costs what it has new, and to copy one
number for each different token of the answer. Who takes a request over (decode, or another worker after a failure) has
its tokens, and from these the same.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from pyengine.backend import U32, Shaping
from pyengine.grammar import Grammars, Matcher
from pyengine.scheduler.batcher import Sequence

NEVER = -np.inf


class Shaper:
    """Of one sequence, whose `tokens` grow.

    grammars, compiled: of the model, and what `prepare` of it gave; needed only if the sequence has a grammar. It is
    compiled before the first choice is asked for.
    """

    def __init__(
        self,
        sequence: Sequence,
        vocab_size: int,
        grammars: Grammars | None = None,
        compiled: Future[llguidance.LLMatcher] | None = None,
    ) -> None:
        sampling = sequence.sampling
        self._grammars = grammars
        #: Held from the beginning: what is kept compiled for all may be forgotten meanwhile.
        self._compiled = compiled
        self._matcher: Matcher | None = None
        self._matched = 0
        assert sampling.grammar is None or None not in (grammars, compiled), "who takes a grammar can follow it"
        self._tokens = sequence.tokens
        self._sampling = sampling
        self._stops = {token for token in sequence.stops if 0 <= token < vocab_size} if sampling.min_tokens else set()
        #: The answer begins here: tokens of earlier attempts are at the end of the prompt.
        self._answer = sequence.prompt_tokens - sequence.generated_before
        self._known = self._answer
        self._counts: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._ids, self._add = Growing(np.int32), Growing(np.float32)
        self._bias = dict(sampling.logit_bias)
        self._repeats = sampling.repetition_penalty != 1.0
        self._penalizes = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._seen_ids: set[int] = set()
        self._seen = Growing(np.int32)
        if self._repeats:
            self._see(sequence.tokens[: self._answer])
        self._forbids = False
        for token in self._bias:
            self._set(token)

    @staticmethod
    def of(
        sequence: Sequence,
        vocab_size: int,
        grammars: Grammars | None = None,
        compiled: Future[llguidance.LLMatcher] | None = None,
    ) -> Shaper | None:
        """None for a sequence whose choices nothing shapes, and of which nothing is told."""
        sampling = sequence.sampling
        shaped = sampling.follows_itself or sampling.logit_bias or sampling.min_tokens or sampling.logprobs is not None
        return Shaper(sequence, vocab_size, grammars, compiled) if shaped else None

    @property
    def flaw(self) -> str | None:
        """Why its grammar leaves no token."""
        return self._matcher.flaw if self._matcher is not None else None

    def matcher(self) -> Matcher | None:
        """Of its grammar, up to date; None if it has none."""
        grammar = self._sampling.grammar
        if grammar is None or self._grammars is None:
            return None
        if self._matcher is None:
            assert self._compiled is not None and self._compiled.done(), "no step waits for a grammar"
            self._matcher, self._matched = self._grammars.matcher(grammar, self._compiled), self._answer
            self._compiled = None
        self._matcher.accept(self._tokens[self._matched :])
        self._matched = len(self._tokens)
        return self._matcher

    def shaping(self, length: int) -> Shaping:
        """For the choice of the token behind `length` ones, of which those that shape it are there."""
        fresh = self._tokens[self._known :]
        self._known += len(fresh)
        if self._repeats:
            self._see(fresh)
        if self._penalizes:
            for token in fresh:
                self._counts[token] = self._counts.get(token, 0) + 1
                self._set(token)
        forbids = length - self._answer < self._sampling.min_tokens
        if forbids is not self._forbids:
            self._forbids = forbids
            for token in self._stops:
                self._set(token)
        return Shaping(
            # Of two steps the first may still be computed when the second is planned.
            ids=self._ids.values,
            add=self._add.values.copy(),
            seen=self._seen.values,
            repetition=self._sampling.repetition_penalty,
            mask=self._mask(),
            logprobs=self._sampling.logprobs,
        )

    def _mask(self) -> U32 | None:
        if (matcher := self.matcher()) is None or self._grammars is None:
            return None
        self._grammars.fill([matcher])
        return matcher.mask

    def _see(self, tokens: list[int]) -> None:
        for token in tokens:
            if token not in self._seen_ids:
                self._seen_ids.add(token)
                self._seen.append(token)

    def _set(self, token: int) -> None:
        """What is added to this token's logit has changed."""
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            self._ids.append(token)
            self._add.append(0.0)
        self._add.values[place] = self._added(token)

    def _added(self, token: int) -> float:
        if self._forbids and token in self._stops:
            return NEVER
        sampling, count = self._sampling, self._counts.get(token, 0)
        penalty = (sampling.presence_penalty if count else 0.0) + sampling.frequency_penalty * count
        return self._bias.get(token, 0.0) - penalty


class Growing:
    """An array that grows at its end. `values` given out before stay as they are but for what is written into them."""

    def __init__(self, kind: type[np.generic]) -> None:
        self._room: npt.NDArray[Any] = np.empty(16, kind)
        self._size = 0

    @property
    def values(self) -> npt.NDArray[Any]:
        return self._room[: self._size]

    def append(self, value: float) -> None:
        if self._size == len(self._room):
            self._room = np.resize(self._room, 2 * self._size)
        self._room[self._size] = value
        self._size += 1
