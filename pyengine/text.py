"""Text to token ids and back: tokenizer, chat template, and detokenization that only ever says what is final."""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

BYTES = "bytes"
NOTHING: Mapping[int, str] = MappingProxyType({})
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
BYTES_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class ChatError(ValueError):
    """These messages cannot be made into a prompt; the message says why."""


class Tokenizer(ABC):
    """One model's vocabulary and chat template. Immutable; threads may share it."""

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    #: The text of its chat template, "" if it has none.
    template: str = ""

    @staticmethod
    def load(folder: str | Path) -> Tokenizer:
        """From a Hugging Face folder (tokenizer.json), or "bytes": the fake backend's (0-255 bytes, 256 bos, 257 eos).

        Raises ValueError saying what is missing.
        """
        if str(folder) == BYTES:
            return _ByteTokenizer()
        return _FileTokenizer(Path(folder))

    @abstractmethod
    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a prompt, with the special tokens the tokenizer adds (bos, if the model wants it), if `special`."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens are left out, broken UTF-8 becomes U+FFFD."""

    @abstractmethod
    def chat(self, messages: Sequence[dict[str, Any]], options: Mapping[str, Any] = NO_OPTIONS) -> list[int]:
        """Ids of a conversation, ready for the assistant's turn. options: what else the template is given, by name.

        Raises ChatError.
        """

    @abstractmethod
    def token_bytes(self, token: int) -> bytes | None:
        """What one token adds to the text, b"" for a special one; None if tokens do not stand for bytes one by one."""

    @abstractmethod
    def definition(self) -> str | None:
        """The text of its tokenizer.json, for libraries that read one; None if it has none: then tokens are bytes."""

    @abstractmethod
    def mark(self, name: str) -> int | None:
        """The id of the added token of this name, special or not; None if there is no such one."""

    @abstractmethod
    def name(self, token: int) -> str:
        """One token as text to look at: a special one by its name, of others what they say alone."""


class _ByteTokenizer(Tokenizer):
    vocab_size = 258
    bos_token_id = 256
    eos_token_ids = frozenset({257})

    template = BYTES_TEMPLATE

    def __init__(self) -> None:
        self._template = _compile_template(BYTES_TEMPLATE)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def chat(self, messages: Sequence[dict[str, Any]], options: Mapping[str, Any] = NO_OPTIONS) -> list[int]:
        return self.encode(_render(self._template, messages, {}, options))

    def name(self, token: int) -> str:
        return {256: "<bos>", 257: "<eos>"}.get(token) or self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def definition(self) -> None:
        return None

    def mark(self, name: str) -> int | None:
        return None


class _FileTokenizer(Tokenizer):
    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder}: no tokenizer.json; other tokenizer formats are not read, convert it first")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more exact
            raise ValueError(f"{path}: not a tokenizer ({error}); get the file again") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _optional_json(folder / "tokenizer_config.json")
        self._special_texts = {
            name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of(self._special_texts["bos_token"])
        self.eos_token_ids = self._eos(folder)
        sources = _templates_of(folder, config)
        self._templates = {name: _compile_template(source) for name, source in sources.items()}
        self.template = sources.get(TOOL_USE) or sources.get(DEFAULT) or ""
        added = self._tokenizer.get_added_tokens_decoder()
        self._marks = {token.content: index for index, token in added.items()}
        self._special = {index for index, token in added.items() if token.special}
        decoder = json.loads(path.read_bytes()).get("decoder") or {}
        self._bytes: dict[int, bytes] = {}
        self._byte_level = decoder.get("type") == "ByteLevel"

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self._tokenizer.encode(_encodable(text), add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[dict[str, Any]], options: Mapping[str, Any] = NO_OPTIONS) -> list[int]:
        template = (self._templates.get(TOOL_USE) if options.get("tools") else None) or self._templates.get(DEFAULT)
        if template is None:
            raise ChatError("this model has no chat template; use /v1/completions")
        text = _render(template, messages, self._special_texts, options)
        return list(self._tokenizer.encode(_encodable(text), add_special_tokens=False).ids)

    def token_bytes(self, token: int) -> bytes | None:
        if not self._byte_level:
            return None
        known = self._bytes.get(token)
        if known is None:
            # Each token of the vocabulary at most, and whatever a padded head can choose beyond it.
            known = self._bytes[token] = self._spell(token)
        return known

    def _spell(self, token: int) -> bytes:
        if token in self._special:
            return b""
        text = self._tokenizer.id_to_token(token)
        if text is None:  # ids beyond the vocabulary, which a padded output head can choose
            return b""
        try:
            return bytes(BYTE_OF_CHARACTER[character] for character in text)
        except KeyError:  # an added token is spelled as it is
            return str(text).encode()

    def definition(self) -> str:
        return str(self._tokenizer.to_str())

    def mark(self, name: str) -> int | None:
        return self._marks.get(name)

    def name(self, token: int) -> str:
        if token in self._special:
            return str(self._tokenizer.id_to_token(token))
        return self.decode([token])

    def _id_of(self, text: str | None) -> int | None:
        return None if text is None else self._tokenizer.token_to_id(text)

    def _eos(self, folder: Path) -> frozenset[int]:
        for name in ("generation_config.json", "config.json"):
            value = _optional_json(folder / name).get("eos_token_id")
            if value is not None:
                return frozenset(value if isinstance(value, list) else [value])
        token = self._id_of(self._special_texts["eos_token"])
        return frozenset() if token is None else frozenset({token})


def _encodable(text: str) -> str:
    """Lone surrogates, which JSON can carry and UTF-8 cannot, become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _optional_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); get the file again") from error
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str | None:
    """Special tokens are written as text or as {"content": text}."""
    return value.get("content") if isinstance(value, dict) else value


def _byte_characters() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary. Source: GPT-2's encoder.

    Printable Latin-1 bytes are themselves; the others are the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _byte_characters()


# --- chat templates ---------------------------------------------------------------------------------------------------


#: Names of templates, where a model has several: one for conversations with tools, one for all others.
DEFAULT, TOOL_USE = "default", "tool_use"


def _templates_of(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    source = path.read_text() if path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        return {entry["name"]: entry["template"] for entry in source if entry["name"] in (DEFAULT, TOOL_USE)}
    return {} if source is None else {DEFAULT: source}


def _compile_template(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the model's chat template does not compile ({error})") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    """jinja2's own filter escapes for HTML, which prompts are not."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise ChatError(message)


def _render(
    template: jinja2.Template,
    messages: Sequence[dict[str, Any]],
    special: dict[str, str | None],
    options: Mapping[str, Any],
) -> str:
    if not messages:
        raise ChatError("messages is empty; at least one message is needed")
    if taken := sorted({"messages", "add_generation_prompt", *special} & options.keys()):
        raise ChatError(f"the chat template gets {taken[0]} from this server; leave it out")
    known = {name: text for name, text in special.items() if text is not None}
    try:
        return template.render({**options, "messages": list(messages), "add_generation_prompt": True, **known})
    except ChatError:
        raise
    except Exception as error:  # the model's code on a client's data: it may raise anything
        raise ChatError(f"the model's chat template does not take these messages ({error})") from error


# --- detokenization ---------------------------------------------------------------------------------------------------


class Detokenizer:
    """Turns one answer's ids into text as they come.

    What `push` returns is final: no half character, nothing of a stop string. All pieces together are the decoded
    whole, cut before the stop string that ends first, however the ids were split. Memory and time per token do not grow
    with the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Iterable[str] = (),
        min_tokens: int = 0,
        keep: Mapping[int, str] = NOTHING,
    ) -> None:
        """stop: strings that end the answer; empty ones are ignored. min_tokens: none is sought in the text of so many
        first tokens. keep: special tokens to be seen, as what.
        """
        self._keep = keep
        self._stop = tuple(filter(None, stop))
        self._exempt = min_tokens if self._stop else 0
        self._decode = _ByteDecoder(tokenizer) if tokenizer.token_bytes(0) is not None else _WindowDecoder(tokenizer)
        self._held = ""
        self.stopped = False
        #: Text is as it is decoded: nothing is sought in it, and nothing is added.
        self._bare = not self._stop and not keep

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids; returns the text that is certain now. After `stopped` always ""."""
        if self._bare:
            return self._decode.push(ids)
        if self.stopped:
            return ""
        if not self._exempt:
            return self._release(self._text(ids))
        ids = list(ids)
        exempt, rest = ids[: self._exempt], ids[self._exempt :]
        self._exempt -= len(exempt)
        text = self._text(exempt)
        return text + self._release(self._text(rest)) if rest else text

    def _text(self, ids: Sequence[int]) -> str:
        if not self._keep:
            return self._decode.push(ids)
        text = ""
        for token in ids:
            kept = self._keep.get(token)
            # A special token is no part of a character, so what was begun before it has ended.
            text += self._decode.push([token]) if kept is None else self._decode.finish() + kept
        return text

    def finish(self) -> str:
        """Takes the end of the answer; returns what was held back. Call once."""
        if self.stopped:
            return ""
        text = self._release(self._decode.finish())
        if self.stopped:
            return text
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._held + text
        # The match that ends first wins, not the one that starts first: else the answer would depend on the splits.
        matches = [(text.index(stop) + len(stop), text.index(stop)) for stop in self._stop if stop in text]
        if matches:
            self.stopped = True
            self._held = ""
            return text[: min(matches)[1]]
        held = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class _ByteDecoder:
    """For tokenizers whose every token is a run of bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.token_bytes
        #: The beginning of a character.
        self._rest = b""

    def push(self, ids: Sequence[int]) -> str:
        bytes_of = self._bytes_of
        if len(ids) == 1 and not self._rest:
            # Nearly always one, and most often all of it is text.
            data = bytes_of(ids[0]) or b""
            if data.isascii():
                return data.decode("ascii")
        data = self._rest + b"".join([bytes_of(token) or b"" for token in ids])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def finish(self) -> str:
        return self._rest.decode("utf-8", "replace")


class _WindowDecoder:
    """For tokenizers whose tokens depend on their neighbours (SentencePiece): decodes a window of the last ids.

    The window is the ids of the last text given out, as context, and those after it. A window that ends in U+FFFD may
    be in the middle of a character and waits for at most LONGEST ids.
    """

    LONGEST = 16  # a character is at most 4 byte tokens; more is broken text, given out as it is

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        text = ""
        for token in ids:
            self._pending.append(token)
            text += self._advance(self._pending_text(), final=len(self._pending) >= self.LONGEST)
        return text

    def finish(self) -> str:
        return self._advance(self._pending_text(), final=True)

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]

    def _advance(self, text: str, *, final: bool) -> str:
        if not text or (text.endswith("\ufffd") and not final):
            return ""
        self._context, self._pending = self._pending, []
        return text
