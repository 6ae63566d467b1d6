"""The tokenizer of a GGUF file as Hugging Face's tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pyengine.checkpoint.errors import ModelError
from pyengine.checkpoint.gguf_fields import Fields

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # token types of the GGUF specification

_PIECE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Cut(msgspec.Struct, frozen=True):
    """How text is cut before the merges apply.

    pattern: of one piece; None: GPT-2's. composed: characters are composed first (NFC). whole: a piece that is a token
    is one, whatever the merges say. bos: a text begins with it where the file does not say.
    """

    pattern: str | None = None
    composed: bool = False
    whole: bool = False
    bos: bool = False


#: By the GGUF field tokenizer.ggml.pre. The oracle is transformers, id for id, so smollm is not cut at digits here,
#: though llama.cpp does so. `whole` and `bos` are llama.cpp's, and in Llama 3's own tokenizer.json.
CUTS = {
    "default": Cut(),
    "gpt-2": Cut(),
    "smollm": Cut(),
    "llama-bpe": Cut(_PIECE.replace("DIGITS", "{1,3}"), whole=True, bos=True),
    "qwen2": Cut(_PIECE.replace("DIGITS", ""), composed=True),
}


def convert_tokenizer(fields: Fields, folder: Path) -> None:
    """Builds tokenizer.json, tokenizer_config.json and chat_template.jinja from GGUF metadata."""
    from tokenizers import AddedToken, processors

    kind = fields["tokenizer.ggml.model"]
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{fields.path}: tokenizer {kind!r} is not supported in a GGUF file; supported: 'gpt2' (byte-level BPE), "
            "'llama' (SentencePiece). Use the model's Hugging Face folder instead"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    try:
        tokenizer, begins = _byte_level(fields, tokens) if kind == "gpt2" else _sentencepiece(fields, tokens)
    except ModelError:
        raise
    except Exception as error:  # the library raises nothing more exact
        raise ModelError(f"{fields.path}: its vocabulary and merges do not fit together ({error})") from error
    types: list[int] = fields.get("tokenizer.ggml.token_type", [])
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, kind in zip(tokens, types, strict=False)
            if kind == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)

    def token_of(name: str) -> str | None:
        key = f"tokenizer.ggml.{name}_token_id"
        return tokens[fields[key]] if key in fields else None

    bos = token_of("bos")
    if bos is not None and fields.get("tokenizer.ggml.add_bos_token", begins):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    special_tokens = {"bos_token": bos, "eos_token": token_of("eos"), "unk_token": token_of("unknown")}
    (folder / "tokenizer_config.json").write_text(json.dumps(special_tokens, indent=1))
    if "tokenizer.chat_template" in fields:
        (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])


def _byte_level(fields: Fields, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """The tokenizer, and whether a text begins with its first token where the file does not say."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in CUTS:
        raise ModelError(
            f"{fields.path}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(CUTS)}. "
            "Use the model's Hugging Face folder instead"
        )
    cut = CUTS[pre]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut.whole))
    if cut.composed:
        tokenizer.normalizer = normalizers.NFC()
    if cut.pattern is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(cut.pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.bos


def _sentencepiece(fields: Fields, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """The same for Llama 2 and Mistral: the file has a score for each token, and pairs merge into the best first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores: list[float] = fields["tokenizer.ggml.scores"]
    pairs = [
        (-score, -cut, cut - len(token), token[:cut], token[cut:])
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    pairs.sort(key=lambda pair: pair[:3])  # among equals the order of the vocabulary
    merges = [pair[3:] for pair in pairs]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True))
    spaced = fields.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if spaced else "never", split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if spaced else [])])
    return tokenizer, True
