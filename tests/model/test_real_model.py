"""Goal: SmolLM2 answers as transformers does, and its text is cut into the same ids.

Method: the oracle of tests/oracle.py against the backend of either framework alone, in chunks and in batches; the two
highest logits of every token too, teacher-forced. The cluster's tests use the same oracle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine.backend import Slice
from pyengine.backends import lacking, load_backend
from pyengine.checkpoint import SMOLLM2, resolve
from pyengine.scheduler.types import SamplingParams
from pyengine.text import Detokenizer, Tokenizer
from tests import oracle

torch = pytest.importorskip("torch", reason="needs the torch extra")
pytestmark = pytest.mark.timeout(900)  # the first session computes the oracle

GREEDY = SamplingParams(temperature=0.0)
CHUNK = 512
PAGES_EACH = 112
#: The shortest prompts, and of each answer so much, on JAX: each further size of a step is another program to compile.
JAX_CASES, JAX_TOKENS = 6, 16


@pytest.fixture(scope="module")
def cases() -> list[oracle.Case]:
    return oracle.load()


@pytest.fixture(scope="module")
def cache() -> Path:
    return oracle.MODELS


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_token_and_its_two_best_logits(framework: str, cases: list[oracle.Case], cache: Path) -> None:
    """All prompts in chunks; then all decode in one batch, each fed the oracle's tokens."""
    if reason := lacking(framework):
        pytest.skip(reason)
    tokens = oracle.TOKENS
    if framework == "jax":
        tokens = JAX_TOKENS
        cases = sorted(cases, key=lambda case: len(case.ids))[:JAX_CASES]
    backend: Any = load_backend(framework, SMOLLM2, cache=cache, dtype="float32")
    backend.allocate(PAGES_EACH * len(cases))
    order = np.random.default_rng(0).permutation(PAGES_EACH * len(cases)).astype(np.int32)
    tables = order.reshape(len(cases), PAGES_EACH)

    def slice_of(tokens: list[int], start: int, row: int, sampling: SamplingParams | None = GREEDY) -> Slice:
        return Slice(np.array(tokens, dtype=np.uint32), start, tables[row], sampling)

    logits = []
    for row, case in enumerate(cases):
        last = (len(case.ids) - 1) // CHUNK * CHUNK
        for start in range(0, last, CHUNK):
            backend.execute([slice_of(case.ids[start : start + CHUNK], start, row, None)])
        logits.append(backend.logits([slice_of(case.ids[last:], last, row)]))
    comparisons = [oracle.Comparison(case, tokens) for case in cases]
    answers: list[list[int]] = [[] for _ in cases]
    worst = 0.0
    for index in range(tokens):
        now = (
            logits
            if index == 0
            else backend.logits(
                [slice_of([case.tokens[index - 1]], len(case.ids) + index - 1, row) for row, case in enumerate(cases)]
            )
        )
        for answer, case, row_logits in zip(answers, cases, now, strict=True):
            flat = np.asarray(row_logits).reshape(-1)
            answer.append(int(flat.argmax()))
            first, first_logit, second, second_logit = case.best[index]
            worst = max(worst, abs(float(flat[first]) - first_logit), abs(float(flat[second]) - second_logit))
    print(f"largest difference of a logit: {worst:.2e}")
    for comparison, answer in zip(comparisons, answers, strict=True):
        while (wanted := comparison.wanted()) is not None:
            comparison.feed(answer[-wanted[1] :])
    oracle.assert_few_ties(comparisons)
    assert worst < 2e-3
    backend.close()


def test_ids_equal_the_oracles(cases: list[oracle.Case], cache: Path) -> None:
    tokenizer = Tokenizer.load(resolve(SMOLLM2, cache).folder)
    for case in cases:
        ids = tokenizer.encode(case.content) if isinstance(case.content, str) else tokenizer.chat(case.content)
        assert ids == case.ids, case.name


TEXTS = [
    "",
    " ",
    "  leading, trailing  ",
    "\n\n\t \r\n mixed \u00a0 white\u2003space \u200b",
    "1234567890 3.14159 0x1F 2024-11-29 ²½ ١٢٣ ⅷ 12  34   5",
    "don't can't we've I'll they're he'd 'tis DON'T",
    "snake_case camelCase kebab-case CONSTANT_CASE __init__ a->b c::d e//f",
    'for (int i = 0; i < n; ++i) {\n\tprintf("%d\\n", a[i]);\n}\n',
    "Ünïcödé — naïve façade; “quotes” ‘single’ … • † ‡ €£¥",
    "Здравствуй, мир! Γειά σου Κόσμε שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "你好，世界！こんにちは世界 안녕하세요 세계 𠜎𠜱",
    "👍🏽👩‍👩‍👧‍👦🏳️‍🌈🇫🇷 e\u0301 \u1e9b\u0323",
    "<|im_start|>user\nnested <|im_end|> specials<|endoftext|><repo_name>x<file_sep>",
    "<|im_start|",
    "a" * 1000,
    "\x00\x01\x7f\ufffd\ufeff",
]


def test_texts_of_all_kinds_give_transformers_ids(cache: Path) -> None:
    theirs = oracle.tokenizer()
    ours = Tokenizer.load(resolve(SMOLLM2, cache).folder)
    random = np.random.default_rng(0)
    alphabet = [*"aZ09 _-'.\n\t", "é", "ж", "中", "🙂", "  ", "<|im_end|>", "ing", "the", "def "]
    mixed = ["".join(random.choice(alphabet, 40)) for _ in range(100)]
    for text in TEXTS + mixed:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], repr(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), repr(text)
        detokenizer = Detokenizer(ours)
        assert "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish() == ours.decode(ids)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_ids == {theirs.eos_token_id}
    assert ours.bos_token_id == theirs.bos_token_id


@pytest.mark.parametrize("text", ["你好，世界！🙂👍🏽", "👩‍👩‍👧‍👦 한국어 🇫🇷", "a𠜎b日本語\n🏳️‍🌈"])
def test_no_split_of_tokens_halves_a_character(cache: Path, text: str) -> None:
    """Most of these characters are several tokens. Every split into three is tried, and into single tokens."""
    tokenizer = Tokenizer.load(resolve(SMOLLM2, cache).folder)
    ids = tokenizer.encode(text)
    assert any("\ufffd" in tokenizer.decode([token]) for token in ids), "no token is a part of a character"
    splits = [[ids[:i], ids[i:j], ids[j:]] for i in range(len(ids) + 1) for j in range(i, len(ids) + 1)]
    for split in [*splits, [[token] for token in ids]]:
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push(part) for part in split]
        assert "".join(pieces) + detokenizer.finish() == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_chats_give_transformers_ids(cache: Path) -> None:
    theirs = oracle.tokenizer()
    ours = Tokenizer.load(resolve(SMOLLM2, cache).folder)
    user, system = {"role": "user", "content": "Hi\n there "}, {"role": "system", "content": "Be brief."}
    assistant = {"role": "assistant", "content": " Hello! 🎉"}
    for messages in ([user], [system, user], [user, assistant, user], [system, user, assistant, user], [assistant]):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.chat(messages) == expected
