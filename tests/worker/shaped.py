"""The oracle of shaped answers: the whole rule in plain Python, computed anew from the whole history for each token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pyengine.backends.fake import EOS, VOCAB, chain, hashed, kv_rows, logits_of
from pyengine.scheduler.types import Logprobs, SamplingParams

Logits = Sequence[float] | np.ndarray[Any, np.dtype[np.floating]]


def shaped(
    logits: Logits, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams, ends: frozenset[int]
) -> list[float]:
    """What is left of the logits of the token behind prompt and answer. ends: ids that end a request by themselves."""
    counts, bias = Counter(answer), dict(params.logit_bias)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else ends)
    out = []
    for token, logit in enumerate(map(float, logits)):
        if token in counts or token in prompt:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit += bias.get(token, 0.0)
        logit -= params.presence_penalty * (counts[token] > 0) + params.frequency_penalty * counts[token]
        out.append(-math.inf if len(answer) < params.min_tokens and token in stops else logit)
    return out


def told(logits: Logits, token: int, count: int) -> Logprobs:
    total = math.log(sum(math.exp(float(logit)) for logit in logits))
    ranked = sorted(range(len(logits)), key=lambda id: (-logits[id], id))
    top = tuple((id, float(logits[id]) - total) for id in ranked[:count])
    return Logprobs(float(logits[token]) - total, ranked.index(token) + 1, top)


def fake_answer(
    prompt: Sequence[int], params: SamplingParams, held: Sequence[int] = ()
) -> tuple[list[int], list[Logprobs]]:
    """What a FakeBackend answers, `held` included, and what is told of the rest."""
    answer, logprobs = list(held), []
    while len(answer) < params.max_tokens:
        ids = [*prompt, *answer]
        logits = logits_of(hashed(kv_rows(chain(0, ids), 8, 8), params, len(ids)), VOCAB)
        left = shaped(logits, prompt, answer, params, frozenset({EOS}))
        answer.append(left.index(max(left)))
        logprobs.append(told(logits, answer[-1], params.logprobs or 0))
        if answer[-1] in params.stop_token_ids or (answer[-1] == EOS and not params.ignore_eos):
            break
    return answer, logprobs


def alike(one: Logprobs, other: Logprobs) -> bool:
    """Equal but for roundings."""
    values = [one.chosen, *(value for _, value in one.top)], [other.chosen, *(value for _, value in other.top)]
    ids = [id for id, _ in one.top] == [id for id, _ in other.top]
    return ids and one.rank == other.rank and np.allclose(*values, atol=2e-5)
