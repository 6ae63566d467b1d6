"""Goal: text of a GGUF model is cut into the ids that its Hugging Face tokenizer gives.

Method: a byte-pair vocabulary learned here goes into a GGUF file; transformers' tokenizer over the same vocabulary is
the oracle. SmolLM2's own vocabulary: test_real_model.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer as Trained
from tokenizers import models, pre_tokenizers, trainers

from pyengine.checkpoint import resolve
from pyengine.text import Tokenizer
from tests.model.checkpoints import QWEN2, write_tiny
from tests.model.gguf_files import write_gguf

CORPUS = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
TEXTS = [
    "",
    " ",
    "  leading, trailing  ",
    "\n\n\t \r\n mixed \u00a0 white\u2003space \u200b",
    "1234567890 3.14159 0x1F 2024-11-29 \u00b2\u00bd \u0661\u0662\u0663 12  34   5",
    "don't can't we've I'll they're he'd 'tis DON'T",
    "def write_tiny(folder: Path, *, seed: int = 0) -> Path:\n    return folder\n",
    "\u00dcn\u00efc\u00f6d\u00e9 \u2014 na\u00efve; U\u0308n i\u0308 e\u0301 \u1e9b\u0323 \u212b",  # composed or not
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01 \u041f\u0440\u0438\u0432\u0435\u0442 \ud55c\uad6d",
    "\U0001f44d\U0001f3fd \U0001f1eb\U0001f1f7",
    "<s>user\nnested </s> specials<tool>x",
    "<s",
    "\x00\x01\x7f\ufffd\ufeff",
]


def learned(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of byte pairs, from the tests' own text."""
    tokenizer = Trained(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet))
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    known = list(vocabulary)
    # Merges are the pairs in the order of what they give.
    pairs = [
        (vocabulary[token], token[:cut], token[cut:])
        for token in known
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return vocabulary, [(left, right) for _, left, right in sorted(pairs)]


def as_gguf(folder: Path, pre: str, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Path:
    """A model whose tokenizer has this vocabulary, then <s>, </s> and <tool>."""
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__), "<s>", "</s>", "<tool>"]

    def change(writer: gguf.GGUFWriter) -> None:
        values: dict[str, Any] = writer.kv_data[0]
        for name in list(values):
            if name.startswith("tokenizer."):
                del values[name]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(vocabulary) + [3, 3, 4])
        writer.add_token_merges([" ".join(merge) for merge in merges])
        writer.add_bos_token_id(len(vocabulary))
        writer.add_eos_token_id(len(vocabulary) + 1)

    source = write_tiny(folder / "model", **QWEN2, vocab_size=len(tokens))
    return write_gguf(folder / "tiny.gguf", source, change=change)


def mixed(count: int) -> list[str]:
    random = np.random.default_rng(0)
    alphabet = [*"aZ09 _-'.\n\t", "\u00e9", "e\u0301", "\u0436", "\u4e2d", "  ", "</s>", "<tool>", "ing", "the", "def "]
    return ["".join(random.choice(alphabet, 40)) for _ in range(count)]


def test_qwen2_cuts_as_qwen2_does(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    vocabulary, merges = learned(700)
    ours = Tokenizer.load(resolve(str(as_gguf(tmp_path, "qwen2", vocabulary, merges)), tmp_path / "cache").folder)
    size = len(vocabulary)
    theirs = Qwen2Tokenizer(
        vocab=vocabulary | {"<s>": size, "</s>": size + 1, "<tool>": size + 2},
        merges=merges,
        unk_token=None,
        bos_token="<s>",
        eos_token="</s>",
        pad_token=None,
    )
    theirs.add_tokens(["<tool>"])
    for text in TEXTS + mixed(100):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], repr(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), repr(text)
    assert ours.vocab_size == size + 3
    assert ours.bos_token_id == size


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2"])
def test_others_cut_as_transformers_reads_the_file(pre: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    vocabulary, merges = learned(700)
    path = as_gguf(tmp_path, pre, vocabulary, merges)
    ours = Tokenizer.load(resolve(str(path), tmp_path / "cache").folder)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    begin = [len(vocabulary)] if pre == "llama-bpe" else []  # llama.cpp begins with it unless the file says no
    for text in TEXTS + mixed(100):
        assert ours.encode(text) == begin + theirs(text, add_special_tokens=False)["input_ids"], repr(text)


def test_llama_takes_a_known_piece_whole(tmp_path: Path) -> None:
    """As its tokenizer.json says (ignore_merges), where no merges lead to the token."""
    vocabulary, merges = learned(400)
    vocabulary["\u0120quasar"] = len(vocabulary)
    for pre, whole in (("llama-bpe", True), ("qwen2", False)):
        folder = tmp_path / pre
        path = as_gguf(folder, pre, vocabulary, merges)
        ids = Tokenizer.load(resolve(str(path), tmp_path / "cache").folder).encode("a quasar")
        assert (vocabulary["\u0120quasar"] in ids) == whole
