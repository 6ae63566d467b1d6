"""What bfloat16 costs in accuracy: perplexity of a model on this repository's own documents, in float32 and bfloat16.

Method: pieces of TOKENS tokens from README.md, ARCHITECTURE.md, DECISIONS.md and docs/, fed token by token, all pieces
side by side; the negative log-likelihood of each token given those before it in its piece. Both types see the same
tokens, so their difference is far less uncertain than either: its standard error is over the pieces.

Prints one JSON object a line: bench, case, value, unit, against, ratio (of the perplexities: below 1 is worse).
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bench.common import line
from pyengine import env
from pyengine.backend import Slice
from pyengine.backends.torch import TorchBackend
from pyengine.checkpoint import SMOLLM2
from pyengine.scheduler.types import BLOCK_TOKENS, SamplingParams
from pyengine.text import Tokenizer

PIECES, TOKENS = 24, 384
GREEDY = SamplingParams(temperature=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the text")
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=env.read().state_dir / "models", help="converted models")
    arguments = parser.parse_args()
    count = PIECES // 4 if arguments.quick else PIECES
    losses: dict[str, npt.NDArray[np.float64]] = {}
    for dtype in ("float32", "bfloat16"):
        backend = TorchBackend.load(arguments.model, cache=arguments.cache, threads=arguments.threads, dtype=dtype)
        losses[dtype] = negative_log_likelihoods(backend, pieces(backend, count))
        backend.close()
    wide, half = (losses[dtype].mean(axis=1) for dtype in ("float32", "bfloat16"))
    perplexity = math.exp(wide.mean())
    line("perplexity", "float32", perplexity, "perplexity", tokens=float(losses["float32"].size))
    line(
        "perplexity",
        "bfloat16",
        math.exp(half.mean()),
        "perplexity",
        against="float32",
        ratio=perplexity / math.exp(half.mean()),
        difference=math.exp(half.mean()) - perplexity,
        standard_error=float((half - wide).std(ddof=1) / math.sqrt(count)) * perplexity,
        largest_of_a_token=float(np.abs(losses["bfloat16"] - losses["float32"]).max()),
    )


def pieces(backend: TorchBackend, count: int) -> list[list[int]]:
    """Evenly spread over the documents."""
    root = Path(__file__).parent.parent
    files = [root / "README.md", root / "ARCHITECTURE.md", root / "DECISIONS.md", *sorted((root / "docs").glob("*.md"))]
    text = "\n\n".join(file.read_text() for file in files)
    tokens = Tokenizer.load(backend.tokenizer).encode(text)
    starts = np.linspace(0, len(tokens) - TOKENS, count).astype(int).tolist()
    return [tokens[start : start + TOKENS] for start in starts]


def negative_log_likelihoods(backend: TorchBackend, texts: list[list[int]]) -> npt.NDArray[np.float64]:
    """Of each token but the first: [pieces, TOKENS - 1]."""
    each = -(-TOKENS // BLOCK_TOKENS)
    backend.allocate(each * len(texts))
    tables = np.arange(each * len(texts), dtype=np.int32).reshape(len(texts), each)
    losses = np.empty((len(texts), TOKENS - 1))
    for position in range(TOKENS - 1):
        step = [
            Slice(np.array(text[position : position + 1], np.uint32), position, table, GREEDY)
            for text, table in zip(texts, tables, strict=True)
        ]
        likelihoods = torch.log_softmax(backend.logits(step).double(), dim=-1).numpy()
        losses[:, position] = [-row[text[position + 1]] for row, text in zip(likelihoods, texts, strict=True)]
    return losses


if __name__ == "__main__":
    main()
