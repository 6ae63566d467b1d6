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
from pyengine.text import Detokenizer, Tokenizer
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


def pieces(size: int) -> list[str]:
    """A SentencePiece vocabulary of the tests' own text, the best piece first."""
    tokenizer = Trained(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=size))
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    known = sorted(vocabulary, key=vocabulary.__getitem__)
    return [piece for piece in known if len(piece) > 1] + [piece for piece in known if len(piece) == 1]


def as_sentencepiece_gguf(folder: Path, *, spaced: bool | None) -> Path:
    learned_pieces = pieces(700)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned_pieces, "<tool>"]

    def change(writer: gguf.GGUFWriter) -> None:
        values: dict[str, Any] = writer.kv_data[0]
        for name in list(values):
            if name.startswith("tokenizer."):
                del values[name]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * 259 + [-float(rank // 20) for rank in range(len(learned_pieces))] + [0.0])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(learned_pieces) + [4])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if spaced is not None:
            writer.add_add_space_prefix(spaced)

    source = write_tiny(folder / "model", vocab_size=len(tokens))
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


@pytest.mark.parametrize("spaced", [None, True])
def test_sentencepiece_cuts_as_transformers_reads_the_file(spaced: bool | None, tmp_path: Path) -> None:
    """Llama 2's and Mistral's: pieces with scores (twenty have the same), bytes for what has no piece."""
    from transformers import AutoTokenizer

    path = as_sentencepiece_gguf(tmp_path, spaced=spaced)
    ours = Tokenizer.load(resolve(str(path), tmp_path / "cache").folder)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
    for text in TEXTS + mixed(100):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], repr(text)
        assert ids[0] == 1
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), repr(text)
        detokenizer = Detokenizer(ours)
        assert "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish() == ours.decode(ids)
    assert ours.bos_token_id == 1
    assert ours.eos_token_ids == {2}


def test_a_text_may_begin_without_a_space(tmp_path: Path) -> None:
    ours = Tokenizer.load(resolve(str(as_sentencepiece_gguf(tmp_path, spaced=False)), tmp_path / "cache").folder)
    for text in ("def", " def", "x"):
        assert ours.decode(ours.encode(text)) == text
    spaced = Tokenizer.load(resolve(str(as_sentencepiece_gguf(tmp_path / "spaced", spaced=True)), tmp_path).folder)
    assert spaced.encode("def") == ours.encode(" def") != ours.encode("def")


def test_llama_takes_a_known_piece_whole(tmp_path: Path) -> None:
    """As its tokenizer.json says (ignore_merges), where no merges lead to the token."""
    vocabulary, merges = learned(400)
    vocabulary["\u0120quasar"] = len(vocabulary)
    for pre, whole in (("llama-bpe", True), ("qwen2", False)):
        folder = tmp_path / pre
        path = as_gguf(folder, pre, vocabulary, merges)
        ids = Tokenizer.load(resolve(str(path), tmp_path / "cache").folder).encode("a quasar")
        assert (vocabulary["\u0120quasar"] in ids) == whole
