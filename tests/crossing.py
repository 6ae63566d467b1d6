"""Tiny random models in both frameworks, and what transformers says to twenty prompts: for tests of KV that crosses."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests import oracle
from tests.model.checkpoints import write_tiny

PROMPTS = 20
#: Tokens of each answer; a fifth of them come after the first block that decode fills itself.
TOKENS = 20


def write_model(folder: Path) -> Path:
    """A Llama of 3 layers with 2 KV heads, and 512 positions."""
    return write_tiny(folder)


def cases(model: Path) -> list[oracle.Case]:
    """Twenty random prompts of 1 to 150 tokens, and transformers' greedy answers in float32."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    llama = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
    prompts = []
    for number in range(PROMPTS):
        generator = np.random.default_rng([number, 3])
        length = 1 + number * 149 // (PROMPTS - 1)
        prompts.append([int(token) for token in generator.integers(0, 256, length)])
    answers = oracle.greedy(llama, prompts, TOKENS)
    return [oracle.Case(f"{len(ids)} tokens", "", ids, *answer) for ids, answer in zip(prompts, answers, strict=True)]
