"""Goal: an answer under a grammar follows it, wherever and however often it is begun again; what cannot be followed is
told to the one who asked.

Method: masks against brute force over finite languages and small vocabularies; answers of real worker loops over the
fake backend (harness.py) against an oracle that begins anew for each token, and against a JSON schema validator.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Trained
from tokenizers import decoders, models, pre_tokenizers, trainers

from pyengine.backends.fake import EOS, VOCAB, FakeBackend, chain, hashed, kv_rows, logits_of
from pyengine.grammar import KEPT, KEPT_TEXT, LONGEST, MOST_WAITING, GrammarError, Grammars, Matcher
from pyengine.llm import LLM
from pyengine.scheduler.types import FinishReason, Grammar, SamplingParams
from pyengine.text import Tokenizer
from pyengine.worker.core import HOPELESS_STEPS
from tests.worker.harness import Cluster
from tests.worker.schemas import SCHEMAS
from tests.worker.test_worker import backend, one_node, prompt, two_nodes

BYTES = Grammars("bytes", VOCAB, frozenset({EOS}))
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "tags": {"type": "array", "items": {"enum": ["é{", 7]}, "maxItems": 3},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    }
)


def allowed(matcher: Matcher, grammars: Grammars = BYTES, vocab: int = VOCAB) -> set[int]:
    grammars.fill([matcher])
    assert matcher.mask is not None
    bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
    assert not bits[vocab:].any()
    return set(np.flatnonzero(bits).tolist())


# --- masks against brute force ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Grammars, int]:
    """A vocabulary with tokens of several bytes and of parts of characters, two ends, and three ids of nothing."""
    folder = tmp_path_factory.mktemp("pairs")
    trained = Trained(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = ["abab abba aab cab caca éé 日本 👍👍 abc acb ba bb"] * 5
    trained.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>", "<over>"])
    )
    trained.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    vocab = tokenizer.vocab_size + 3
    return tokenizer, Grammars(tokenizer, vocab, frozenset({0, 1})), vocab


ALPHABETS = ["ab", "abc", "aé", "日本a", "👍b"]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_masks_are_what_brute_force_allows(pairs: tuple[Tokenizer, Grammars, int], data: st.DataObject) -> None:
    """A token is allowed where some word of the language goes on with it, an end where the word is one.

    Bytes that are certain are spelled as the tokenizer would, in no other way: then the mask is a part of what brute
    force finds. Where a token is a byte both are the same.
    """
    alphabet = data.draw(st.sampled_from(ALPHABETS))
    words = data.draw(st.sets(st.text(alphabet, min_size=1, max_size=6), min_size=1, max_size=6))
    kind = data.draw(st.sampled_from(["choice", "regex", "lark"]))
    exact = data.draw(st.booleans())
    tokenizer, grammars, vocab = (Tokenizer.load("bytes"), BYTES, VOCAB) if exact else pairs
    ends = {EOS} if exact else {0, 1}
    text = {
        "choice": json.dumps(sorted(words)),
        "regex": "|".join(sorted(words)),
        "lark": "start: " + " | ".join(json.dumps(word) for word in sorted(words)),
    }[kind]
    matcher = grammars.matcher(Grammar(kind, text))
    language = {word.encode() for word in words}
    spelled = {token: tokenizer.token_bytes(token) or b"" for token in range(vocab)}
    ids: list[int] = []
    while True:
        answer = b"".join(spelled[token] for token in ids)
        expected = {
            token
            for token, piece in spelled.items()
            if piece and any(word.startswith(answer + piece) for word in language)
        } | (ends if answer in language else set())
        found = allowed(matcher, grammars, vocab)
        assert matcher.complete == (answer in language)
        assert found == expected if exact else found and found <= expected
        if found <= ends:
            assert found == ends and matcher.ended
            return
        ids.append(data.draw(st.sampled_from(sorted(found - ends))))
        matcher.accept(ids[-1:])


@pytest.mark.parametrize("pattern", ["[ab]{2,4}c?", "a*b|cd", "(ab|ba){0,3}", r"\d\d?"])
def test_regular_languages_are_regexps(pattern: str) -> None:
    """Every byte is tried at every place of some walks: what is refused, no word of the language has there."""
    one = re.compile(pattern)
    letters = "abcd0123456789"
    words = {""}
    for _ in range(4 if "d" not in pattern else 3):
        words |= {word + letter for word in words for letter in letters if len(word) < 4}
    language = {word for word in words if one.fullmatch(word)}
    prefixes = {word[:cut] for word in language for cut in range(len(word))}
    for prefix in sorted(prefixes, key=len)[:40]:
        matcher = BYTES.matcher(Grammar("regex", pattern))
        matcher.accept(list(prefix.encode()))
        found = {chr(token) for token in allowed(matcher) if token < 128}
        assert found >= {word[len(prefix)] for word in language if word.startswith(prefix) and word != prefix}
        if len(prefix) < 2:  # what goes on from here ends within the words that were tried
            assert found == {word[len(prefix)] for word in language if word.startswith(prefix) and word != prefix}
        assert (EOS in allowed(matcher)) == (prefix in language)


# --- answers ----------------------------------------------------------------------------------------------------------


def oracle(ids: list[int], params: SamplingParams, grammars: Grammars = BYTES) -> list[int]:
    """What a FakeBackend answers: for each token a new matcher reads the whole answer."""
    answer: list[int] = []
    while len(answer) < params.max_tokens:
        assert params.grammar is not None
        matcher = grammars.matcher(params.grammar)
        matcher.accept(answer)
        history = [*ids, *answer]
        logits = logits_of(hashed(kv_rows(chain(0, history), 8, 8), params, len(history)), VOCAB)
        answer.append(max(allowed(matcher), key=lambda token: (logits[token], -token)))
        if answer[-1] == EOS:
            break
    return answer


def held_to(kind: str, text: str, seed: int = 1, most: int = 300) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=most, grammar=Grammar(kind, text))


def written(tokens: Iterable[int]) -> str:
    tokens = list(tokens)
    assert tokens[-1] == EOS, "it has not ended by itself"
    return bytes(tokens[:-1]).decode()


@settings(max_examples=25, deadline=None)
@given(SCHEMAS, st.integers(0, 2**31))
def test_answers_parse_and_validate(schema: dict[str, Any], seed: int) -> None:
    params = held_to("json_schema", json.dumps(schema), seed)
    with one_node() as cluster:
        request = cluster.submit(prompt(20), "prefill", "decode", sampling=params)
        cluster.run(request)
        assert request.failed is None and request.finish is FinishReason.STOP
        value = json.loads(written(request.ids))
        assert jsonschema_rs.is_valid(schema, value)


GRAMMARS = {
    "schema": held_to("json_schema", SCHEMA),
    "regex": held_to("regex", r"[a-f]{5,30}-(日本|👍){2}"),
    "choice": held_to("choice", '["yes, surely", "yes, perhaps", "no"]'),
    "lark": held_to("lark", 'start: "(" start* ")" | WORD\nWORD: /[a-z]{1,3}/', most=24),
}


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("overlaps", [False, True])
def test_apart_and_in_one_worker_equal_the_oracle(name: str, overlaps: bool) -> None:
    ids, params = prompt(40), GRAMMARS[name]
    expected = oracle(ids, params)
    with Cluster() as cluster:
        for worker in ("prefill", "decode"):
            cluster.add_node(worker, 64, backend())
            cluster.add_worker(worker, worker, FakeBackend(overlaps=overlaps))
        free = cluster.submit(ids, "decode", "decode", sampling=SamplingParams(max_tokens=60, ignore_eos=True))
        apart = cluster.submit(ids, "prefill", "decode", sampling=params)
        both = cluster.submit(ids, "decode", "decode", sampling=params)
        cluster.run(apart, both, free)
        assert apart.ids == both.ids == expected
        cluster.settle()


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("killed", ["prefill", "decode"])
def test_who_takes_over_goes_on_alike(name: str, killed: str) -> None:
    """A worker is gone, and with it its matchers: the next one has the prompt and the tokens that the gateway holds."""
    ids, params = prompt(40), GRAMMARS[name]
    expected = oracle(ids, params)
    held = 0 if killed == "prefill" else len(expected) // 2
    with two_nodes() as cluster:
        whole = cluster.submit(ids, "prefill", "decode", sampling=params)
        if held:
            cluster.until(lambda: len(whole.tokens) >= held)
        first = [whole.tokens[index] for index in range(held)]
        cluster.abort(whole)
        del cluster.workers[killed], cluster._pools[killed]
        cluster.add_node("c", 64, backend())
        cluster.add_worker("next", "c", backend())
        parts = ("next", "decode") if killed == "prefill" else ("prefill", "next")
        again = cluster.submit(ids + first, *parts, sampling=params, attempt=2, number=whole.number, generated=held)
        cluster.run(again)
        assert first + [again.tokens[index] for index in range(held, len(expected))] == expected


def test_few_pages_and_many_grammars_beside_each_other() -> None:
    """Preempted and resumed: each is what it is alone."""
    kinds = list(GRAMMARS.values()) * 2
    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        worker = cluster.add_worker("both", "a", FakeBackend(overlaps=True), pages=9)
        requests = cluster.together(
            "both", lambda: [cluster.submit(prompt(40, i), "both", "both", sampling=p) for i, p in enumerate(kinds)]
        )
        cluster.run(*requests)
        assert worker.counters["preempted"] > 0
        for index, (request, params) in enumerate(zip(requests, kinds, strict=True)):
            assert request.ids == oracle(prompt(40, index), params)
        cluster.settle()


def test_cut_by_length_it_is_a_beginning_of_the_whole() -> None:
    ids = prompt(30)
    whole = oracle(ids, GRAMMARS["schema"])
    with one_node() as cluster:
        cut = held_to("json_schema", SCHEMA, most=len(whole) - 3)
        request = cluster.submit(ids, "prefill", "decode", sampling=cut)
        cluster.run(request)
        assert (request.ids, request.finish) == (whole[:-3], FinishReason.LENGTH)


# --- what cannot be followed ------------------------------------------------------------------------------------------

#: A million ways to choose one alternative of each.
WIDE = {
    "allOf": [
        {"oneOf": [{"type": "object", "properties": {f"p{i}_{j}": {"type": "null"}}} for j in range(10)]}
        for i in range(6)
    ]
}
NESTED = '{"type": "array", "items": ' * 400 + "true" + "}" * 400
BAD = {
    "no schema": (Grammar("json_schema", '{"type": "strin"}'), "JSON schema.*strin"),
    "no json": (Grammar("json_schema", "{"), "JSON schema"),
    "unsupported": (Grammar("json_schema", '{"not": {"type": "null"}}'), 'JSON schema.*"not"'),
    "not here": (Grammar("json_schema", '{"$ref": "http://127.0.0.1:9/x"}'), "JSON schema.*registry"),
    "explodes": (Grammar("json_schema", json.dumps(WIDE)), "JSON schema.*too large"),
    "deep": (Grammar("json_schema", NESTED), "JSON schema.*recursion"),
    "long": (Grammar("json_schema", " " * LONGEST + "{}"), "are the most"),
    "empty": (Grammar("json_schema", '{"enum": []}'), "JSON schema"),
    "no regex": (Grammar("regex", "["), "regular expression.*unclosed"),
    "looks ahead": (Grammar("regex", "(?=a)b"), "regular expression.*look-ahead"),
    "no choice": (Grammar("choice", "[]"), "choice must be"),
    "empty choice": (Grammar("choice", '["a", ""]'), "choice must be"),
    "no list": (Grammar("choice", "[" * 5000), "choice must be"),
    "no lark": (Grammar("lark", "start: nothing"), "grammar.*nothing"),
    "endless": (Grammar("lark", "start: start"), "grammar"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_followed_is_refused_with_the_reason(name: str) -> None:
    grammar, reason = BAD[name]
    with pytest.raises(GrammarError, match=reason):
        BYTES.prepare(grammar).result()


BOMBS = {
    "states": (Grammar("regex", r"(\w+\s?){1,500}(\d+\w*){1,500}x"), "ab1 "),
    "ambiguous": (Grammar("lark", 'start: e\ne: e e e | e e | "a" "b"? | "ab"'), "ab"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_grows_without_end_is_given_up(name: str) -> None:
    """Nobody sees it by the grammar: it is the answer that makes it grow."""
    grammar, letters = BOMBS[name]
    matcher = BYTES.matcher(grammar)
    random = np.random.default_rng(1)
    for _ in range(1000):
        may = sorted(allowed(matcher) & set(letters.encode()))
        if matcher.flaw is not None:
            break
        matcher.accept([int(random.choice(may))])
    assert matcher.flaw is not None and "too complex" in matcher.flaw
    assert not allowed(matcher)
    # Who asks once more begins at the beginning.
    assert allowed(BYTES.matcher(grammar))


def test_large_schemas_are_no_bombs() -> None:
    """300 optional fields, and 200 alternatives."""
    fields = {f"field{i}": {"anyOf": [{"type": "string"}, {"type": "null"}]} for i in range(300)}
    for schema in (
        {"type": "object", "properties": fields, "additionalProperties": False},
        {"anyOf": [{"type": "object", "properties": {"kind": {"const": i}, f"field{i}": {}}} for i in range(200)]},
    ):
        matcher = BYTES.matcher(Grammar("json_schema", json.dumps(schema)))
        for byte in b'{"field7": "x" ,  "field9": null, "field150": "y"}' if "type" in schema else b'{"kind": 7 }':
            assert byte in allowed(matcher), matcher.flaw
            matcher.accept([byte])
        assert matcher.complete


def test_a_worker_refuses_it_alone() -> None:
    """Should it come here all the same: the others go on, and so does the worker."""
    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        cluster.add_worker("both", "a", backend())
        good = cluster.submit(prompt(20), "both", "both", sampling=GRAMMARS["schema"])
        params = SamplingParams(grammar=BAD["no regex"][0])
        bad = [cluster.submit(prompt(20, i), "both", "both", sampling=params) for i in range(4)]
        cluster.run(good, *bad)
        assert good.ids == oracle(prompt(20), GRAMMARS["schema"])
        assert all(each.failed and each.failed.kind == "refused" and "unclosed" in each.failed.reason for each in bad)
        cluster.settle()


def test_tokens_that_do_not_follow_it_are_told() -> None:
    """An attempt's tokens were made by other rules: nothing can be right behind them."""
    params = held_to("choice", '["yes"]')
    with one_node() as cluster:
        request = cluster.submit([*prompt(20), ord("n")], "prefill", "decode", sampling=params, generated=1)
        cluster.run(request)
        assert request.failed is not None and request.failed.kind == "refused"
        assert "does not follow the grammar" in request.failed.reason


def test_too_many_wait() -> None:
    """Beyond the limit who comes is sent away, and taken once there is room."""
    loading = threading.Event()

    class Slow(Grammars):
        def _load(self) -> Any:
            loading.wait()
            return super()._load()

    grammars = Slow("bytes", VOCAB, frozenset({EOS}))
    many = [Grammar("regex", chr(97 + at % 26) * (1 + at // 26)) for at in range(MOST_WAITING + 1)]
    for each in many[:-1]:
        grammars.prepare(each)
    with pytest.raises(BufferError, match="again in a second"):
        grammars.prepare(many[-1])
    loading.set()
    for each in many[:-1]:
        assert allowed(grammars.matcher(each)) == {ord(each.text[0])}
    assert allowed(grammars.matcher(many[-1])) == {ord(many[-1].text[0])}
    grammars.close()


class Gated(Grammars):
    """Compiles the grammars that begin with "slow" when `open` is set."""

    def __init__(self, open: threading.Event) -> None:
        super().__init__("bytes", VOCAB, frozenset({EOS}))
        self._open = open

    def _compile(self, grammar: Grammar) -> Any:
        if grammar.text.startswith("slow"):
            assert self._open.wait(60.0)
        return super()._compile(grammar)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Set at the end, or a test that fails leaves a thread behind that waits."""
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.mark.parametrize("parts", [("both", "both"), ("prefill", "decode")])
def test_nobody_waits_for_the_grammar_of_another(parts: tuple[str, str], gate: threading.Event) -> None:
    """While one is compiled others are answered; it can be aborted, and is answered when it is there."""
    woken = threading.Event()
    params = held_to("regex", "slow[a-z]{3}")
    with Cluster() as cluster:
        for name in dict.fromkeys(parts):
            cluster.add_node(name, 64, backend())
            worker = cluster.add_worker(name, name, backend())
            worker.grammars, worker.wake = Gated(gate), woken.set
        slow, dropped = (cluster.submit(prompt(20, i), *parts, sampling=params) for i in range(2))
        free = cluster.submit(prompt(20, 2), *parts)
        other = cluster.submit(prompt(20, 3), *parts, sampling=SamplingParams(max_tokens=4, logprobs=1))
        cluster.run(free, other)
        assert not slow.over and not woken.is_set()
        cluster.abort(dropped)
        gate.set()
        assert woken.wait(60.0), "nobody says that it can begin"
        cluster.run(slow)
        assert slow.ids == oracle(prompt(20), params) and not dropped.tokens
        cluster.settle()
        for worker in cluster.workers.values():
            worker.grammars.close()


def test_who_waits_keeps_its_grammar(gate: threading.Event) -> None:
    """More sequences than grammars are kept, and so many compiled at once that no further one may wait."""
    with Cluster() as cluster:
        cluster.add_node("a", 400, backend())
        worker = cluster.add_worker("both", "a", backend(), pages=2000)
        worker.grammars = Gated(gate)
        requests = []
        for i in range(KEPT + 40):
            params = held_to("choice", f'["x{i}"]')
            requests.append(cluster.submit(prompt(20, i), "both", "both", sampling=params))
            assert params.grammar is not None
            worker.grammars.prepare(params.grammar).result()
        for i in range(MOST_WAITING):
            worker.grammars.prepare(Grammar("regex", f"slow{i}"))
        late = cluster.submit(prompt(20, 999), "both", "both", sampling=held_to("choice", '["y"]'))
        cluster.run(*requests, late)
        assert [written(each.ids) for each in requests] == [f"x{i}" for i in range(KEPT + 40)]
        assert late.failed is not None and late.failed.kind == "retry"
        gate.set()
        cluster.settle()
        worker.grammars.close()


def test_a_compiler_that_breaks_is_the_fault_of_one() -> None:
    class Breaks(Grammars):
        def _compile(self, grammar: Grammar) -> Any:
            if grammar.text == "bad":
                raise MemoryError("none left")
            return super()._compile(grammar)

    with Cluster() as cluster:
        cluster.add_node("a", 64, backend())
        worker = cluster.add_worker("both", "a", backend())
        worker.grammars = Breaks("bytes", VOCAB, frozenset({EOS}))
        bad = []
        for i in range(HOPELESS_STEPS):
            bad.append(cluster.submit(prompt(20, i), "both", "both", sampling=held_to("regex", "bad")))
            cluster.run(bad[-1])
        good = cluster.submit(prompt(20), "both", "both", sampling=held_to("regex", "good"))
        cluster.run(good)
        assert written(good.ids) == "good"
        assert all(each.failed and each.failed.kind == "bug" and "none left" in each.failed.reason for each in bad)
        cluster.settle()


def test_what_is_kept_is_bounded_by_its_text_too(gate: threading.Event) -> None:
    """What is forgotten is compiled again; who is still to be compiled is not forgotten."""
    grammars = Gated(gate)
    big = [Grammar("regex", f"{chr(97 + i)}(" + "|" * (KEPT_TEXT // 4) + ")") for i in range(6)]
    futures = []
    for each in big:
        futures.append(grammars.prepare(each))
        futures[-1].exception()
    assert grammars.prepare(big[-1]) is futures[-1] and grammars.prepare(big[-2]) is futures[-2]
    assert sum(len(each.text) for each in grammars._compiled) <= KEPT_TEXT
    waiting = grammars.prepare(Grammar("regex", "slow"))
    more = [Grammar("regex", "slow" * (KEPT_TEXT // 40) + str(i)) for i in range(12)]
    for each in more:
        grammars.prepare(each)
    assert grammars.prepare(Grammar("regex", "slow")) is waiting
    gate.set()
    assert waiting.result() is not None
    grammars.close()


def test_a_model_without_an_end_follows_none() -> None:
    with pytest.raises(GrammarError, match="ends an answer"):
        Grammars("bytes", VOCAB, frozenset()).prepare(Grammar("regex", "a")).result()
    with pytest.raises(ValueError, match="ignore_eos"):
        SamplingParams(grammar=Grammar("regex", "a"), ignore_eos=True)


def test_an_llm_follows_one(tmp_path: Path) -> None:
    with LLM("fake", backend="fake", dram_bytes=8 << 20, state_dir=tmp_path) as llm:
        answer = llm.generate(prompt(20), GRAMMARS["schema"])[0]
        assert jsonschema_rs.is_valid(json.loads(SCHEMA), json.loads(answer.text))
        with pytest.raises(GrammarError, match="unclosed"):
            llm.generate(prompt(20), SamplingParams(grammar=BAD["no regex"][0]))
        assert llm.generate(prompt(20), GRAMMARS["schema"])[0].text == answer.text
        # More than are kept compiled, in one batch.
        many = [held_to("choice", f'["x{i}"]') for i in range(KEPT + MOST_WAITING + 4)]
        answers = llm.generate([prompt(20)] * len(many), many)
        assert [each.text for each in answers] == [f"x{i}" for i in range(len(many))]
