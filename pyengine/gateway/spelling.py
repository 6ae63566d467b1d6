"""What the API tells of single tokens: their text, bytes and logprobs. Pure.

A token that is no whole text (a third of a character) is told as `bytes:\\xe2\\x82`, which is OpenAI's way: so two such
tokens have two names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyengine.scheduler.types import Logprobs
from pyengine.text import Detokenizer, Tokenizer

#: What JSON has no number for: a token that nothing could have chosen has the logprob that stands for "never" there.
NEVER = -9999.0


def spell(tokenizer: Tokenizer, token: int) -> tuple[str, bytes]:
    """The token as text, and its bytes; of a special token its name."""
    data = tokenizer.token_bytes(token)
    if not data:
        text = tokenizer.name(token)
        return text, text.encode("utf-8", "replace")
    try:
        return data.decode(), data
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


class Teller:
    """Logprobs of one choice, piece by piece. With texts' offsets, for plain completions.

    most: of the likeliest tokens beside each of a prompt's.
    """

    def __init__(self, tokenizer: Tokenizer, most: int = 0) -> None:
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer)
        self._most = most
        self._at = 0

    def chat(self, ids: Sequence[int], told: Sequence[Logprobs]) -> dict[str, Any]:
        """As chat completions have them. told: one for each of `ids`."""
        content = []
        for token, one in zip(ids, told, strict=True):
            top = [self._entry(other, value) for other, value in one.top]
            content.append({**self._entry(token, one.chosen), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def prompt(self, ids: Sequence[int], told: Sequence[Logprobs]) -> dict[str, Any]:
        """Those of the prompt that a plain completion begins with, before its first piece: nothing precedes the first
        of `ids`, of the others `told` has one each.
        """
        first = self.completion(ids[:1], [Logprobs(0.0, 1, ())])
        first["token_logprobs"] = first["top_logprobs"] = [None]
        shorter = [Logprobs(one.chosen, one.rank, one.top[: self._most]) for one in told]
        return behind(first, self.completion(ids[1:], shorter)) or first

    def completion(self, ids: Sequence[int], told: Sequence[Logprobs]) -> dict[str, Any]:
        """As plain completions have them: beside the likeliest tokens stands the chosen one, if it is none of them."""
        texts = [spell(self._tokenizer, token)[0] for token in ids]
        offsets = []
        for token in ids:
            offsets.append(self._at)
            self._at += len(self._text.push((token,)))
        tops = []
        for text, one in zip(texts, told, strict=True):
            top = {spell(self._tokenizer, token)[0]: _number(value) for token, value in one.top}
            tops.append(top | {text: _number(one.chosen)})
        return {
            "tokens": texts,
            "token_logprobs": [_number(one.chosen) for one in told],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text, data = spell(self._tokenizer, token)
        return {"token": text, "logprob": _number(value), "bytes": list(data)}


class Scored:
    """Logprobs of prompts. of: those of a choice's prompt, from its second token on. most: of the likeliest tokens
    beside each, where vLLM has them; None: they are not asked for there.
    """

    def __init__(self, tokenizer: Tokenizer, of: Callable[[int], list[Logprobs]], most: int | None) -> None:
        self.of = of
        self.most = most
        self._tokenizer = tokenizer

    def listed(self, ids: Sequence[int], choice: int) -> list[dict[str, Any] | None]:
        """As vLLM tells them: for each of `ids` the likeliest tokens and itself, by id; null for the first."""
        listed: list[dict[str, Any] | None] = [None]
        for token, one in zip(ids[1:], self.of(choice), strict=True):
            ranked = {other: (rank, value) for rank, (other, value) in enumerate(one.top[: self.most], 1)}
            ranked.setdefault(token, (one.rank, one.chosen))
            listed.append({str(other): self._entry(other, *found) for other, found in ranked.items()})
        return listed

    def _entry(self, token: int, rank: int, value: float) -> dict[str, Any]:
        return {"logprob": _number(value), "rank": rank, "decoded_token": spell(self._tokenizer, token)[0]}


def behind(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Two plain completions' logprobs as one; either may be missing."""
    if first is None or second is None:
        return first if second is None else second
    return {name: first[name] + second[name] for name in first}


def _number(value: float) -> float:
    return max(value, NEVER)
