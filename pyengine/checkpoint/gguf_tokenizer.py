"""The tokenizer of a GGUF file as Hugging Face's tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

from pyengine.checkpoint.errors import ModelError
from pyengine.checkpoint.gguf_fields import Fields

CONTROL, USER_DEFINED = 3, 4  # token types of the GGUF specification

# How text is cut before the merges apply, by the GGUF field tokenizer.ggml.pre. An empty pattern: GPT-2's own. The
# oracle is transformers, id for id, so smollm is not cut at digits here, though llama.cpp does so.
PRE_TOKENIZERS = {
    "default": "",
    "gpt-2": "",
    "smollm": "",
    "llama-bpe": (
        r"(?i:'(?:s|t|re|ve|m|ll|d))|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def convert_tokenizer(fields: Fields, folder: Path) -> None:
    """Builds tokenizer.json (byte-level BPE), tokenizer_config.json and chat_template.jinja from GGUF metadata."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    kind = fields["tokenizer.ggml.model"]
    if kind != "gpt2":
        raise ModelError(
            f"{fields.path}: tokenizer {kind!r} is not supported in a GGUF file; supported: 'gpt2' (byte-level BPE). "
            "Use the model's Hugging Face folder instead"
        )
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(
            f"{fields.path}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}. "
            "Use the model's Hugging Face folder instead"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    types: list[int] = fields.get("tokenizer.ggml.token_type", [])

    try:
        tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # the library raises nothing more exact
        raise ModelError(
            f"{fields.path}: the tokenizer's vocabulary and merges do not fit together ({error})"
        ) from error
    if PRE_TOKENIZERS[pre]:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PRE_TOKENIZERS[pre]), behavior="isolated"),
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
    if bos is not None and fields.get("tokenizer.ggml.add_bos_token"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    special_tokens = {"bos_token": bos, "eos_token": token_of("eos"), "unk_token": token_of("unknown")}
    (folder / "tokenizer_config.json").write_text(json.dumps(special_tokens, indent=1))
    if "tokenizer.chat_template" in fields:
        (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])
