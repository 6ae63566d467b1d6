"""What SmolLM2 answers according to transformers: its own GGUF path, fp32, greedy.

20 varied prompts times 48 tokens, each with the two highest logits. Computed once (a minute or two) and kept under
.pytest_cache, keyed by the model file, the versions and the prompts. Greedy decoding is not unique where the two
highest logits are equal but for rounding: `Comparison` goes on teacher-forced there.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from pyengine.checkpoint.sources import smollm2_file

TOKENS = 48
TIE = 1e-3  # logits closer than this are a tie; fp32 rounding over 30 layers is an order below
SHORT = 64  # prompts up to this length are decoded as one batch
TIES_ALLOWED = 0.01  # of all positions
CACHE = Path(__file__).parents[1] / ".pytest_cache" / "oracle"
MODELS = CACHE / "models"  # give it to `resolve` as its cache, so that one session converts the GGUF once
FORMAT = 2


Best = tuple[int, float, int, float]


class Case(msgspec.Struct, frozen=True):
    """One prompt and the oracle's answer.

    content: a text, or chat messages. ids: the prompt. tokens: the TOKENS greedy ones, end-of-sequence ignored.
    best: per token the two highest logits as (id, logit, id, logit).
    """

    name: str
    content: str | list[dict[str, str]]
    ids: list[int]
    tokens: list[int]
    best: list[Best]

    def is_tie(self, index: int) -> bool:
        _, first, _, second = self.best[index]
        return first - second < TIE


class Comparison:
    """Compares an engine's greedy tokens with a case's, going on teacher-forced behind ties.

    while (wanted := comparison.wanted()) is not None:
        comparison.feed(generate(*wanted))
    """

    def __init__(self, case: Case, tokens: int | None = None) -> None:
        """tokens: compares so many only; None: all that the oracle has."""
        self.case = case
        self.ties: list[int] = []
        self._tokens = len(case.tokens) if tokens is None else tokens
        self._known = 0

    def wanted(self) -> tuple[list[int], int] | None:
        """The next prompt to continue, and for how many tokens; None at the end."""
        if self._known >= self._tokens:
            return None
        return self.case.ids + self.case.tokens[: self._known], self._tokens - self._known

    def feed(self, answer: Sequence[int]) -> None:
        """Takes the answer to `wanted`. Raises AssertionError unless it equals the oracle's up to its end or a tie."""
        expected = self.case.tokens[self._known : self._tokens]
        assert len(answer) == len(expected), f"{self.case.name}: {len(answer)} tokens instead of {len(expected)}"
        for index, (token, oracle) in enumerate(zip(answer, expected, strict=True), start=self._known):
            if token != oracle:
                first, logit, second, other = self.case.best[index]
                assert self.case.is_tie(index), (
                    f"{self.case.name}: token {index} is {token}; the oracle has {first} ({logit:.4f}), "
                    f"then {second} ({other:.4f})"
                )
                assert token == second, f"{self.case.name}: token {index} is {token}, not one of the tie"
                self.ties.append(index)
                self._known = index + 1
                return
        self._known = self._tokens


def assert_few_ties(comparisons: Sequence[Comparison]) -> None:
    """Names the ties that were passed (among pytest's warnings), and asserts that they are rare."""
    ties = [(comparison.case.name, index) for comparison in comparisons for index in comparison.ties]
    if ties:
        warnings.warn(f"passed teacher-forced where the oracle has a tie: {ties}", stacklevel=2)
    tokens = sum(len(comparison.case.tokens) for comparison in comparisons)
    assert len(ties) <= TIES_ALLOWED * tokens, f"too many ties: {ties}"


def load() -> list[Case]:
    """All cases; computes them with transformers if they are not known yet."""
    model = smollm2_file()
    with model.open("rb") as file:
        key = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    key.update(json.dumps([FORMAT, version("transformers"), version("torch"), version("gguf"), prompts()]).encode())
    path = CACHE / f"{key.hexdigest()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test processes beside each other compute it once
        if not path.is_file():
            partial = path.with_suffix(".partial")
            partial.write_bytes(msgspec.json.encode(_compute(model)))
            partial.rename(path)
    return msgspec.json.decode(path.read_bytes(), type=list[Case])


@functools.cache
def tokenizer() -> Any:
    """transformers' tokenizer of the same GGUF file."""
    from transformers import AutoTokenizer

    model = smollm2_file()
    return AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name)


def _compute(model: Path) -> list[Case]:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    encoder = tokenizer()
    llama = AutoModelForCausalLM.from_pretrained(str(model.parent), gguf_file=model.name, dtype=torch.float32).eval()
    ids = {name: _ids(encoder, content) for name, content in prompts().items()}
    short = [name for name in ids if len(ids[name]) <= SHORT]
    answers = dict(zip(short, greedy(llama, [ids[name] for name in short]), strict=True))
    for name in ids.keys() - answers.keys():
        (answers[name],) = greedy(llama, [ids[name]])
    return [Case(name, content, ids[name], *answers[name]) for name, content in prompts().items()]


def _ids(encoder: Any, content: str | list[dict[str, str]]) -> list[int]:
    if isinstance(content, str):
        return list(encoder(content)["input_ids"])
    return list(encoder.apply_chat_template(content, add_generation_prompt=True, return_dict=False))


def greedy(llama: Any, batch: list[list[int]], count: int = TOKENS) -> list[tuple[list[int], list[Best]]]:
    """`count` greedy tokens for each prompt, padded on the left, with the two highest logits of each.

    llama: a causal model of transformers, of any architecture.
    """
    import torch

    width = max(map(len, batch))
    given = torch.tensor([[0] * (width - len(ids)) + ids for ids in batch])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in batch])
    answers: list[tuple[list[int], list[Best]]] = [([], []) for _ in batch]
    past = None
    with torch.inference_mode():
        for _ in range(count):
            out = llama(
                input_ids=given,
                attention_mask=mask,
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, -given.shape[1] :],
                past_key_values=past,
                use_cache=True,
                logits_to_keep=1,
            )
            past = out.past_key_values
            values, indices = out.logits[:, -1].topk(2)
            for (tokens, best), (logit, other), (first, second) in zip(
                answers, values.tolist(), indices.tolist(), strict=True
            ):
                tokens.append(first)
                best.append((first, logit, second, other))
            given = indices[:, :1]
            mask = torch.cat((mask, torch.ones_like(given)), dim=1)
    return answers


def prompts() -> dict[str, str | list[dict[str, str]]]:
    """The prompts by name: texts for completion, lists of messages for chat."""

    def ask(content: str, system: str | None = None) -> list[dict[str, str]]:
        first = [] if system is None else [{"role": "system", "content": system}]
        return [*first, {"role": "user", "content": content}]

    report = "\n".join(
        f"Station {index}: {30 + index * 7 % 45} trains, {index * 13 % 11} of them late, platform {1 + index % 6} "
        f"closed for {index % 5} hours; {('rain', 'sun', 'fog', 'snow')[index % 4]} all day."
        for index in range(52)
    )
    return {
        "one token": "The",
        "sentence": "The quick brown fox jumps over the lazy dog. In the morning, the",
        "capital": ask("What is the capital of France?"),
        "poem": ask("Write a short poem about the sea."),
        "system": ask("Who are you?", "You are a pirate. Answer in one sentence."),
        "turns": [
            {"role": "user", "content": "My name is Ada."},
            {"role": "assistant", "content": "Nice to meet you, Ada!"},
            {"role": "user", "content": "What is my name?"},
        ],
        "arithmetic": ask("What is 17 + 25? Explain step by step."),
        "python": 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
        "rust": "fn main() {\n    let mut total: u64 = 0;\n    for i in 1..=10 {\n",
        "json": '{"name": "Alice", "age": 30, "tags": ["a", "b"]}\n{"name": "Bob", "age":',
        "german": "Es war einmal ein kleines Mädchen, das wohnte",
        "russian": "Москва — столица России. Париж —",
        "chinese": "北京是中国的首都。东京是",
        "arabic": ask("ما هي عاصمة مصر؟"),
        "emoji": "🎉🎂 Happy birthday 👩‍👩‍👧! 🎁",
        "whitespace": "  a\t\tb\n\n\n   c    d\r\n      e",
        "list": ask("Name five fruits, one per line."),
        "medium": ask("Summarize: " + report[:2200]),
        "long": report + "\nIn short, the stations were",
        "long chat": ask(report + "\nWhich station had the most trains?", "You read reports with great care."),
    }
