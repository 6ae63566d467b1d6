"""Goal: where transformers defines what shapes a choice as vLLM and we do, we choose what it chooses.

Method: its `generate` and its logits processors over tiny checkpoints, against `LLM`; its own logits for what is told.
Presence and frequency penalties it has not; its biases come before its repetition penalty, ours behind, so they are
compared one at a time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine.kernels import reference
from pyengine.kernels.inputs import Draws
from pyengine.llm import LLM
from pyengine.scheduler.types import Logprobs, SamplingParams
from tests.model.checkpoints import write_tiny
from tests.worker.shaped import alike, told

torch = pytest.importorskip("torch", reason="needs the torch extra")

EOS = 257
PROMPTS = [np.random.default_rng(seed).integers(0, 256, 5 + 20 * seed).tolist() for seed in range(4)]
LENGTH = 30
#: Ours, and transformers' words for it.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition": ({"repetition_penalty": 5.0}, {"repetition_penalty": 5.0}),
    "repetition below 1": ({"repetition_penalty": 0.6}, {"repetition_penalty": 0.6}),
    "bias": (
        {"logit_bias": ((7, 1.5), (281, -3.0), (11, 1.0))},
        {"sequence_bias": {(7,): 1.5, (281,): -3.0, (11,): 1.0}},
    ),
    "min_tokens": (
        {"min_tokens": 11, "logit_bias": ((EOS, 50.0),)},
        {"min_new_tokens": 11, "sequence_bias": {(EOS,): 50.0}},
    ),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def test_greedy_answers_and_what_is_told_are_those_of_transformers(tiny: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    with LLM(str(tiny), dram_bytes=1 << 22, pages=64, state_dir=tmp_path, threads=1) as llm:
        for name, (ours, theirs) in CASES.items():
            params = SamplingParams(temperature=0.0, max_tokens=LENGTH, logprobs=5, **ours)
            plain = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=LENGTH))
            completions = llm.generate(PROMPTS, params)
            assert [one.token_ids for one in completions] != [one.token_ids for one in plain], f"{name} must matter"
            for prompt, completion in zip(PROMPTS, completions, strict=True):
                answer, logits = generate(model, prompt, theirs)
                assert completion.token_ids == answer
                assert name != "min_tokens" or len(answer) == 12
                assert completion.logprobs is not None
                expected = [told(row, token, 5) for row, token in zip(logits, answer, strict=True)]
                assert all(near(one, other) for one, other in zip(completion.logprobs, expected, strict=True))


def generate(model: Any, prompt: list[int], options: dict[str, Any]) -> tuple[list[int], list[np.ndarray[Any, Any]]]:
    """(answer, the model's logits of each of its tokens before anything shaped them)."""
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=LENGTH,
            pad_token_id=EOS,
            eos_token_id=EOS,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
    return out.sequences[0, len(prompt) :].tolist(), [row[0].numpy() for row in out.logits]


def near(one: Logprobs, other: Logprobs) -> bool:
    """Ranks of logits that differ by a rounding may change places."""
    return alike(one, other) or abs(one.chosen - other.chosen) < 1e-4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float, temperature: float) -> None:
    """Tokens that can be drawn, over all random numbers, are those that its processor leaves."""
    from transformers import MinPLogitsWarper

    logits = np.random.default_rng(1).normal(size=60).astype(np.float32) * 2
    count = 20_000
    draws = Draws(
        temperature=np.full(count, temperature),
        min_p=np.full(count, min_p),
        top_k=np.zeros(count, np.int32),
        top_p=np.ones(count),
        uniform=np.arange(count) / count,
    )
    drawn = set(reference.sample(np.tile(logits, (count, 1)), draws).tolist())
    left = MinPLogitsWarper(min_p)(torch.zeros(1, 1), torch.from_numpy(logits)[None] / temperature)[0]
    weights = torch.softmax(left, -1)
    kept = set(np.flatnonzero(np.isfinite(left.numpy())).tolist())
    assert drawn <= kept
    assert {token for token in kept if weights[token] > 2 / count} <= drawn
