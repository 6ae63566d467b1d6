"""A request that nobody has sent, asked about as a gateway would: its prompt from a file, or of a length alone."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from pyengine import _native
from pyengine.text import Tokenizer

from ..explanation import UNSENT
from ..messages import MOST, Route
from ..types import KEY_BYTES, Slo, WorkerInfo, cacheable_blocks
from .guard import InputError

#: Tokens of an answer, if nobody says how many: a gateway's own default is what the model has room for.
MAX_TOKENS = 256


class Unsent(msgspec.Struct, frozen=True):
    """prompt: a text, sent as to /v1/completions; None: `tokens` of them, of which nobody holds anything. model: may be
    "" where only one is served. tenant: as `cache_salt` names it.
    """

    prompt: str | None = None
    tokens: int = 0
    max_tokens: int = MAX_TOKENS
    model: str = ""
    tenant: str = ""
    slo: Slo = Slo()

    def route(self, workers: Sequence[WorkerInfo], hash_key: bytes) -> Route:
        """What a gateway would ask the conductor of these workers. hash_key: the cluster's, of block keys.

        Raises InputError: no such model, or no prompt.
        """
        info = self._info(workers)
        digest, tokens, keys = info.namespace.digest(), self.tokens, b""
        if self.prompt is not None:
            try:
                ids = Tokenizer.load(info.tokenizer).encode(self.prompt)
            except ValueError as error:
                raise InputError(f"the tokenizer of {info.model}: {error}") from None
            tokens, block_tokens = len(ids), info.namespace.kv.block_tokens
            root = _native.root_key(digest, b"", self.tenant.encode(), hash_key)
            keys = _native.block_keys(np.asarray(ids, np.uint32), block_tokens, root, hash_key)
            keys = keys[: KEY_BYTES * cacheable_blocks(tokens, block_tokens)]
        if not 0 < tokens <= MOST:
            raise InputError(f"a prompt of {tokens} tokens is none: it has at least one")
        try:
            return Route(
                request=0,
                attempt=UNSENT,
                model=info.model,
                namespace=digest,
                keys=keys,
                prompt_tokens=tokens,
                max_tokens=self.max_tokens,
                slo=self.slo,
                tenant=self.tenant,
            )
        except ValueError as error:
            raise InputError(str(error)) from None

    def _info(self, workers: Sequence[WorkerInfo]) -> WorkerInfo:
        models = {info.model: info for info in workers}
        if not models:
            raise InputError("the conductor knows no worker: wait until some have come")
        if not self.model and len(models) == 1:
            return next(iter(models.values()))
        if self.model in models:
            return models[self.model]
        near = difflib.get_close_matches(self.model, models, 1, 0.4)
        said = f"no worker serves {self.model!r}" if self.model else "there are several models"
        guess = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{said}: name one of {', '.join(sorted(models))} (--model){guess}")


def read_prompt(path: Path) -> str:
    """Raises InputError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text: {error}") from None


__all__ = ["MAX_TOKENS", "Unsent", "read_prompt"]
