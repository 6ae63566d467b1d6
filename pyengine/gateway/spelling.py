"""What the API tells of single tokens: their text, bytes and logprobs. Pure.

A token that is no whole text (a third of a character) is told as `bytes:\\xe2\\x82`, which is OpenAI's way: so two such
tokens have two names.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Logprobs of one choice, piece by piece. With texts' offsets, for plain completions: characters from `start`."""

    def __init__(self, tokenizer: Tokenizer, start: int = 0) -> None:
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer)
        self._at = start

    def chat(self, ids: Sequence[int], told: Sequence[Logprobs]) -> dict[str, Any]:
        """As chat completions have them. told: one for each of `ids`."""
        content = []
        for token, one in zip(ids, told, strict=True):
            top = [self._entry(other, value) for other, value in one.top]
            content.append({**self._entry(token, one.chosen), "top_logprobs": top})
        return {"content": content, "refusal": None}

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


def _number(value: float) -> float:
    return max(value, NEVER)
