"""What callers ask for, made into requests: token ids, sampling, the form of the answer and who reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pyengine.chat.conversation import ChatMessage, templated
from pyengine.chat.structured import (
    Form,
    NamedFunction,
    NamedTool,
    StructuredOutputs,
    ToolChoice,
    Wanted,
    form_of,
    reasoning_counts,
)
from pyengine.llm.functions import Tool, described
from pyengine.llm.outputs import Output, output_of
from pyengine.llm.request import Completion, Request
from pyengine.scheduler.types import SamplingParams
from pyengine.text import Tokenizer

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
Tools = Sequence[Tool]


class Asked(NamedTuple):
    """One prompt, checked. chat: its answer is read for reasoning and calls."""

    ids: list[int]
    sampling: SamplingParams
    form: Form
    chat: bool
    output: Output | None
    tokenizer: Tokenizer

    def request(self, on_news: Callable[[], None], *, streamed: bool = False) -> Request:
        counts = reasoning_counts(self.tokenizer, self.form, [self.ids], self.chat)
        return Request(
            self.ids,
            self.sampling,
            self.tokenizer,
            on_news,
            streamed=streamed,
            parser=None if self.form.plain else self.form.parser(),
            count=counts[0] if counts else None,
            keep=self.form.keep,
        )

    def completion(self, request: Request) -> Completion:
        """Raises what the request has failed with, and ValueError for an answer that is not of the type `output`."""
        answer = request.completion()
        if self.output is None or answer.tool_calls:
            return answer
        return msgspec.structs.replace(answer, output=self.output.parse(answer.text, answer.finish_reason))


class Asker:
    """Of one model. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def prompts(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        *,
        output: Any,
        structured: StructuredOutputs | None,
    ) -> list[Asked]:
        """Raises ValueError."""
        batch = [self._ids(prompt) for prompt in prompts]
        params = [sampling or SamplingParams()] * len(batch) if not isinstance(sampling, Sequence) else list(sampling)
        if len(params) != len(batch):
            raise ValueError(
                f"{len(batch)} prompts and {len(params)} sampling parameters: give one for all, or one each"
            )
        made = output_of(output)
        wanted = _wanted((), None, made, structured)
        form = form_of(wanted, self._tokenizer, None)
        return [
            Asked(ids, self._formed(each, form), form, False, made, self._tokenizer)
            for ids, each in zip(batch, params, strict=True)
        ]

    def conversations(
        self,
        conversations: Sequence[Conversation],
        sampling: SamplingParams | None,
        *,
        tools: Tools,
        tool_choice: str | None,
        output: Any,
        structured: StructuredOutputs | None,
        options: Mapping[str, Any] | None,
    ) -> list[Asked]:
        """Raises ValueError."""
        made = output_of(output)
        wanted = _wanted(tools, tool_choice, made, structured)
        asked = []
        for messages in conversations:
            if not messages:
                raise ValueError("a conversation is empty: give at least one message")
            given = [_message(message, at) for at, message in enumerate(messages)]
            options = dict(options or {})
            ids = self._tokenizer.chat(*templated(given, wanted.shown, options, self._tokenizer.template))
            form = form_of(wanted, self._tokenizer, ids)
            params = self._formed(sampling or SamplingParams(), form)
            asked.append(Asked(self._ids(ids), params, form, True, made, self._tokenizer))
        return asked

    def _formed(self, sampling: SamplingParams, form: Form) -> SamplingParams:
        if any(token >= self._vocab_size for token, _ in sampling.logit_bias):
            raise ValueError(f"logit_bias names an id that is not below {self._vocab_size}")
        if form.grammar is None:
            return sampling
        if sampling.grammar is not None:
            raise ValueError(
                "the answer has two forms: leave out SamplingParams.grammar, or output, structured and tools"
            )
        return msgspec.structs.replace(sampling, grammar=form.grammar)

    def _ids(self, prompt: Prompt) -> list[int]:
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not ids:
            raise ValueError("a prompt is empty: give at least one token")
        if not all(0 <= token < self._vocab_size for token in ids):
            raise ValueError(f"token ids must be between 0 and {self._vocab_size - 1}")
        return ids


def _wanted(
    tools: Tools, tool_choice: str | None, output: Output | None, structured: StructuredOutputs | None
) -> Wanted:
    if output is not None and structured is not None:
        raise ValueError("the answer has two forms: give output or structured, not both")
    if output is not None:
        structured = StructuredOutputs(json=output.schema)
    choice: ToolChoice | None
    match tool_choice:
        case None | "none" | "auto" | "required":
            choice = tool_choice
        case name:
            choice = NamedTool("function", NamedFunction(name))
    wanted = Wanted(structured_outputs=structured, tools=[described(tool) for tool in tools], tool_choice=choice)
    wanted.check()
    return wanted


def _message(message: Mapping[str, Any], at: int) -> ChatMessage:
    try:
        return msgspec.convert(dict(message), ChatMessage)
    except msgspec.ValidationError as error:
        raise ValueError(f"messages[{at}]: {error}") from error


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts, or one (a text, or a sequence of ids) as a batch of one. Raises ValueError."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [int(prompt) for prompt in prompts if isinstance(prompt, int | np.integer)]
    many: list[Prompt] = [prompt for prompt in prompts if not isinstance(prompt, int | np.integer)]
    if ids and many:
        raise ValueError("token ids and prompts are mixed: give one prompt as ids, or a list of prompts")
    return [ids] if ids else many
