"""The tokenizer of a GGUF file as Hugging Face's tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from pyengine.checkpoint.errors import ModelError
from pyengine.checkpoint.gguf_fields import Fields

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
    """Builds tokenizer.json (byte-level BPE), tokenizer_config.json and chat_template.jinja from GGUF metadata."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    kind = fields["tokenizer.ggml.model"]
    if kind != "gpt2":
        raise ModelError(
            f"{fields.path}: tokenizer {kind!r} is not supported in a GGUF file; supported: 'gpt2' (byte-level BPE). "
            "Use the model's Hugging Face folder instead"
        )
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in CUTS:
        raise ModelError(
            f"{fields.path}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(CUTS)}. "
            "Use the model's Hugging Face folder instead"
        )
    cut = CUTS[pre]
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    types: list[int] = fields.get("tokenizer.ggml.token_type", [])

    try:
        vocabulary = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut.whole))
    except Exception as error:  # the library raises nothing more exact
        raise ModelError(
            f"{fields.path}: the tokenizer's vocabulary and merges do not fit together ({error})"
        ) from error
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
    if bos is not None and fields.get("tokenizer.ggml.add_bos_token", cut.bos):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    special_tokens = {"bos_token": bos, "eos_token": token_of("eos"), "unk_token": token_of("unknown")}
    (folder / "tokenizer_config.json").write_text(json.dumps(special_tokens, indent=1))
    if "tokenizer.chat_template" in fields:
        (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])
