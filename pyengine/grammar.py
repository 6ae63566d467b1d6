"""Grammars over one model's vocabulary: which tokens an answer may continue with.

llguidance (Rust) does the work; this file bounds it, and says what is wrong in words. A `Matcher` follows one answer.
It is made of the grammar and takes the answer's tokens in order, so whoever has these has its state: that is how it
crosses from prefill to decode, and survives a restart of either.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par

from pyengine.backend import U32
from pyengine.scheduler.types import Grammar
from pyengine.text import Tokenizer

#: Longest text of a grammar, characters. The largest schemas of public collections have some 100,000.
LONGEST = 256 << 10
#: Grammars kept compiled, and how many may wait to be compiled: each takes half a second at most, the limits below say.
KEPT, MOST_WAITING = 64, 32
#: Characters of all that are kept: compiled they take some 80 bytes each.
KEPT_TEXT = 4 * LONGEST
#: Whitespace between JSON's tokens: enough for four levels of indentation, and no model indents for ever.
WHITESPACE = r"[ \n\t]{0,16}"


def _limits(row: int) -> llguidance.LLParserLimits:
    """What one grammar may cost. Fuel and items of a step are llguidance's own defaults (20 ms to begin with, then at
    most 14 and 2.5 ms a mask). Its 250,000 states, at 1 to 2 kB each, would be half a gigabyte for one request.
    """
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=row,
        max_lexer_states=20_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


#: Ambiguous grammars take time that grows with the square of a row, which no fuel bounds: 2,000 items took 0.4 s a
#: token, 500 take 30 ms. Schemas are not ambiguous, and have rows of 15 items for each alternative.
_WRITTEN, _DERIVED = _limits(500), _limits(4000)


class GrammarError(ValueError):
    """No answer can be held to this grammar; the message says why."""


class Matcher:
    """One answer's place in its grammar."""

    def __init__(self, grammar: Grammar, compiled: llguidance.LLMatcher | None, flaw: str | None = None) -> None:
        self._grammar = grammar
        self._matcher = compiled
        #: Why no token is left, if that is so.
        self.flaw = flaw
        #: ceil(vocab_size / 32) words, bit i of word i // 32 for token i: as `Grammars.fill` left it last.
        self.mask: U32 | None = None

    @property
    def complete(self) -> bool:
        """The answer may end here."""
        return self._matcher is not None and bool(self._matcher.is_accepting())

    @property
    def ended(self) -> bool:
        """Nothing but the end may follow."""
        return self._matcher is None or bool(self._matcher.is_stopped())

    def accept(self, tokens: Sequence[int]) -> None:
        """The answer has grown. A token that was not allowed leaves nothing to choose from then on, and a `flaw`."""
        if tokens:
            self.mask = None
            if self.flaw is None and self._matcher is not None and not self._matcher.consume_tokens(list(tokens)):
                self.flaw = _flaw(self._matcher, "the answer so far does not follow the grammar")


class Grammars:
    """All grammars of one model in this process. Threads may share it.

    Args:
        tokenizer: the model's, as `Tokenizer.load` takes it, or one that is loaded.
        vocab_size: of the model's output; ids beyond the tokenizer's are never allowed.
        ends: ids that end an answer. They are allowed where the grammar is complete, and only there.
    """

    def __init__(self, tokenizer: str | Tokenizer, vocab_size: int, ends: frozenset[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._ends = sorted(ends)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, Future[llguidance.LLMatcher]] = OrderedDict()
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._masks: llguidance.LLExecutor | None = None

    def load(self) -> None:
        """The vocabulary, before the first grammar needs it: that keeps all threads of the process waiting, for a third
        of a second if it is a large one. What is wrong with it is told by each grammar.
        """
        with contextlib.suppress(Exception):
            self._vocabulary = self._load()

    def prepare(self, grammar: Grammar) -> Future[llguidance.LLMatcher]:
        """Begins to compile, on a thread of its own; for `matcher`. The future raises GrammarError.

        Who will need it holds the future: only some are kept here, for whoever asks for the same again.
        Raises BufferError if too many wait.
        """
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known
            if sum(not future.done() for future in self._compiled.values()) >= MOST_WAITING:
                raise BufferError(f"{MOST_WAITING} grammars wait to be compiled; send this one again in a second")
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "grammar")
            future = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            self._forget()
            return future

    def _forget(self) -> None:
        """Those used longest ago, beyond what is kept. Who is still to be compiled stays, or too many might wait."""
        size = sum(len(each.text) for each in self._compiled)
        for grammar, future in list(self._compiled.items()):
            if len(self._compiled) <= KEPT and size <= KEPT_TEXT:
                return
            if future.done():
                del self._compiled[grammar]
                size -= len(grammar.text)

    def matcher(self, grammar: Grammar, compiled: Future[llguidance.LLMatcher] | None = None) -> Matcher:
        """At the beginning of an answer; with a `flaw` if the grammar has one.

        compiled: what `prepare` gave for it. Without, it is prepared and waited for; raises BufferError as that does.
        """
        try:
            return Matcher(grammar, (compiled or self.prepare(grammar)).result().deep_copy())
        except GrammarError as error:
            return Matcher(grammar, None, str(error))

    def fill(self, matchers: Sequence[Matcher]) -> None:
        """Makes the masks that are not there. Many are made by several threads at once."""
        wanted = [matcher for matcher in matchers if matcher.mask is None]
        if not wanted:
            return
        # Fresh memory: a step under way may still read the masks of before.
        rows = np.zeros((len(wanted), -(-self._vocab_size // 32)), np.int32)
        sound = [(each._matcher, row) for row, each in enumerate(wanted) if each.flaw is None and each._matcher]
        if sound:
            if self._masks is None:
                self._masks = llguidance.LLExecutor()
            fill_next_token_bitmask_par(self._masks, sound, rows)
        for row, matcher in zip(rows, wanted, strict=True):
            if matcher.flaw is None and matcher._matcher is not None and matcher._matcher.is_error():
                matcher.flaw = _flaw(matcher._matcher, "the grammar can be followed no further")
                row[:] = 0
                # Copies share what they have found out, and so its limit: who comes next begins with nothing.
                with self._lock:
                    self._compiled.pop(matcher._grammar, None)
            elif matcher.flaw is None and not row.any():
                matcher.flaw = "no token of this model continues the answer as the grammar demands"
            matcher.mask = row.view(np.uint32)

    def close(self) -> None:
        """What waits is not compiled."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        text = source(grammar)
        if self._vocabulary is None:
            self._vocabulary = self._load()
        limits = _WRITTEN if grammar.kind == "lark" else _DERIVED
        compiled = llguidance.LLMatcher(self._vocabulary, text, limits=limits, log_level=0)
        if compiled.is_error():
            raise GrammarError(f"{_NAMES[grammar.kind]} cannot be followed: {_reason(compiled)}")
        first = Matcher(grammar, compiled.deep_copy())
        self.fill([first])
        if first.flaw is not None:
            raise GrammarError(f"{_NAMES[grammar.kind]} cannot be followed: {first.flaw}")
        return compiled

    def _load(self) -> llguidance.LLTokenizer:
        tokenizer = self._source if isinstance(self._source, Tokenizer) else Tokenizer.load(self._source)
        if not self._ends:
            raise GrammarError("this model names no token that ends an answer, so nothing can end by a grammar")
        definition = tokenizer.definition()
        wrapped: Any = _Bytes(tokenizer, self._vocab_size, self._ends) if definition is None else definition
        return llguidance.LLTokenizer(wrapped, n_vocab=self._vocab_size, eos_token=self._ends)


_NAMES = {
    "json_object": "the JSON object",
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the choice",
    "lark": "the grammar",
    "tools": "the grammar of the tools",
}


def source(grammar: Grammar) -> str:
    """A grammar as llguidance takes it. Raises GrammarError for what is none.

    json_object: `text` says nothing. json_schema: the schema; its "x-guidance": {"lenient": true} ignores keywords that
    are not supported. choice: a JSON list of strings. lark, tools: Lark as llguidance extends it, or its JSON list of
    named grammars.
    """
    text = grammar.text
    if len(text) > LONGEST:
        raise GrammarError(f"{_NAMES[grammar.kind]} has {len(text)} characters; {LONGEST} are the most")
    match grammar.kind:
        case "json_object":
            return _schema('{"type": "object"}')
        case "json_schema":
            return _schema(text)
        case "regex":
            return str(llguidance.LLMatcher.grammar_from_regex(text))
        case "choice":
            return str(llguidance.LLMatcher.grammar_from_lark("start: " + choice(text)))
        case _:
            return text if text.lstrip().startswith("{") else str(llguidance.LLMatcher.grammar_from_lark(text))


def choice(text: str) -> str:
    """The alternatives of a JSON list of strings, as a Lark expression. Raises GrammarError."""
    with contextlib.suppress(ValueError, RecursionError):
        options = json.loads(text)
        if isinstance(options, list) and options and all(isinstance(each, str) and each for each in options):
            return " | ".join(map(json.dumps, dict.fromkeys(options)))
    raise GrammarError("the choice must be a list of strings, none of them empty")


def _schema(text: str) -> str:
    try:
        return str(llguidance.LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE}))
    except ValueError as error:
        raise GrammarError(f"the JSON schema is none: {error}") from error


def _flaw(matcher: llguidance.LLMatcher, otherwise: str) -> str:
    beyond = matcher.stop_reason() in ("ParserTooComplex", "LexerTooComplex") or re.search(
        "too many states|max is", matcher.get_error()
    )
    return ("the grammar is too complex to be followed" if beyond else otherwise) + f": {_reason(matcher)}"


def _reason(matcher: llguidance.LLMatcher) -> str:
    """The first line of what llguidance says: the others draw the grammar."""
    text = str(matcher.get_error()).replace("<non-verbose/>", "").strip()
    return re.sub(r"\s+", " ", text.split("\n\n")[0])[:300] or "no reason is known"


class _Bytes:
    """A tokenizer whose tokens are bytes, in the form in which llguidance takes foreign ones."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: list[int]) -> None:
        self.eos_token_id = ends[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) or b"" for token in range(vocab_size)]
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]
        for token in self.special_token_ids:
            self.tokens[token] = f"<special_{token}>".encode()
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))
