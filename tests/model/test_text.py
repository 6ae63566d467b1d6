"""Goal: text in, text out, nothing half: detokenization gives only what is final, chats become the template's prompt.

Method: properties over random ids, splits and stop strings against the decoded whole; small tokenizers made here
(byte-level and SentencePiece-like), so that no model is needed.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, normalizers

from pyengine.text import ChatError, Detokenizer, Tokenizer
from tests.model.checkpoints import write_tiny


def sentencepiece_folder(folder: Path) -> Path:
    """A BPE with byte fallback and the replaced space of SentencePiece, as Llama 2 has it."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghé中", "▁a", "bc"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "a"), ("b", "c")]
    tokenizer = LibraryTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("text")
    return {
        "bytes": Tokenizer.load("bytes"),
        "byte-level": Tokenizer.load(write_tiny(folder / "tiny")),
        "sentencepiece": Tokenizer.load(sentencepiece_folder(folder / "pieces")),
    }


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


@given(ids=st.lists(st.integers(0, 257), max_size=60), cuts=st.lists(st.integers(0, 1000), max_size=10))
def test_pieces_are_the_decoded_whole_whatever_the_ids(
    tokenizers: dict[str, Tokenizer], ids: list[int], cuts: list[int]
) -> None:
    """Random bytes, mostly not UTF-8 at all."""
    for name in ("bytes", "byte-level"):
        detokenizer = Detokenizer(tokenizers[name])
        pieces = [detokenizer.push(piece) for piece in split(ids, cuts)]
        assert "".join(pieces) + detokenizer.finish() == tokenizers[name].decode(ids)


@given(text=st.text(alphabet="abcdefgh é中🙂ж\n", max_size=40), cuts=st.lists(st.integers(0, 1000), max_size=10))
def test_pieces_are_the_decoded_whole_for_text(tokenizers: dict[str, Tokenizer], text: str, cuts: list[int]) -> None:
    for name, tokenizer in tokenizers.items():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text, name
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.push(piece) for piece in split(ids, cuts)]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) + detokenizer.finish() == text, name


@given(
    text=st.text(alphabet="abc ", max_size=40),
    stop=st.lists(st.text(alphabet="abc ", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 1000), max_size=10),
)
def test_stop_strings_never_show(tokenizers: dict[str, Tokenizer], text: str, stop: list[str], cuts: list[int]) -> None:
    """The answer is cut before the stop string that ends first; no piece ever shows a part of it."""
    ends = [(text.index(word) + len(word), text.index(word)) for word in stop if word in text]
    expected = text[: min(ends)[1]] if ends else text
    for name, tokenizer in tokenizers.items():
        detokenizer = Detokenizer(tokenizer, tuple(stop))
        shown = ""
        for piece in split(tokenizer.encode(text), cuts):
            shown += detokenizer.push(piece)
            assert expected.startswith(shown), name
        shown += detokenizer.finish()
        assert shown == expected, name
        assert detokenizer.stopped == bool(ends), name
        assert detokenizer.push(tokenizer.encode("more")) == "" or not ends


@given(
    text=st.text(alphabet="abcé ", max_size=30),
    stop=st.lists(st.text(alphabet="abcé ", min_size=1, max_size=3), max_size=2),
    exempt=st.integers(0, 40),
    cuts=st.lists(st.integers(0, 1000), max_size=10),
)
def test_no_stop_string_is_sought_in_the_first_tokens(
    tokenizers: dict[str, Tokenizer], text: str, stop: list[str], exempt: int, cuts: list[int]
) -> None:
    """They are given out, and the text behind them is treated as if it were all; with no stop strings, the whole is."""
    for name, tokenizer in tokenizers.items():
        ids = tokenizer.encode(text)
        first = Detokenizer(tokenizer).push(ids[:exempt])
        behind = text[len(first) :]
        ends = [(behind.index(word) + len(word), behind.index(word)) for word in stop if word in behind]
        detokenizer = Detokenizer(tokenizer, tuple(stop), exempt)
        shown = "".join(detokenizer.push(piece) for piece in split(ids, cuts)) + detokenizer.finish()
        assert shown == first + (behind[: min(ends)[1]] if ends else behind), name
        assert detokenizer.stopped == bool(ends), name


def test_text_is_given_out_as_soon_as_it_is_certain(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["bytes"]
    detokenizer = Detokenizer(tokenizer, ("STOP",))
    assert detokenizer.push(b"good S") == "good "
    assert detokenizer.push(b"T") == ""
    assert detokenizer.push(b"ay") == "STay"
    assert detokenizer.push("é".encode()[:1]) == ""
    assert detokenizer.push("é".encode()[1:]) == "é"
    assert detokenizer.push(b" STO") == " "
    assert detokenizer.finish() == "STO"


def test_special_tokens_are_left_out(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    ids = [tokenizer.bos_token_id or 0, *tokenizer.encode("hi"), *tokenizer.eos_token_ids]
    assert tokenizer.decode(ids) == "hi"
    assert Detokenizer(tokenizer).push(ids) == "hi"
    assert tokenizer.eos_token_ids == {257}


def test_an_id_beyond_the_vocabulary_is_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    assert Detokenizer(tokenizers["byte-level"]).push([290]) == ""


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "{% if message['role'] == 'tool' %}\n{{ raise_exception('no tools') }}\n{% endif %}\n"
    "[{{ message['role'] }}]{{ message['content'] | tojson }}\n"
    "{% endfor %}\n{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_chat_templates(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    with pytest.raises(ChatError, match="no chat template"):
        Tokenizer.load(folder).chat([{"role": "user", "content": "x"}])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.chat([{"role": "user", "content": "<é>"}])
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == '[user]"<é>"\n[assistant]'
    with pytest.raises(ChatError, match="no tools"):
        tokenizer.chat([{"role": "tool", "content": "x"}])
    with pytest.raises(ChatError, match="messages is empty"):
        tokenizer.chat([])
    (folder / "chat_template.jinja").write_text("from the file")  # wins over tokenizer_config.json
    assert Tokenizer.load(folder).decode(Tokenizer.load(folder).chat([{}])) == "from the file"


def test_a_template_cannot_reach_out(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(ChatError, match="chat template"):
        Tokenizer.load(folder).chat([{"role": "user", "content": "x"}])
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="does not compile"):
        Tokenizer.load(folder)


def test_lone_surrogates_are_no_crash(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b" or tokenizer is tokenizers["sentencepiece"]


@pytest.mark.parametrize(("content", "message"), [(None, "no tokenizer.json"), ("{", "not a tokenizer")])
def test_a_bad_folder_says_what_is_wrong(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path)
