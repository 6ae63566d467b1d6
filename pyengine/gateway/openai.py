"""What the OpenAI HTTP API can be asked, as data: requests parsed and checked. No I/O.

Reference: the OpenAI API specification (chat completions, completions) and the fields that vLLM's server adds. What
`/openapi.json` says is made of the types below. Fields that they do not know are told to the client, and refused if it
wants that (`Prefer: handling=strict`); fields that would change the answer and are not supported are refused by name.
"""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pyengine.chat.conversation import ChatMessage, conversation
from pyengine.chat.errors import Unservable
from pyengine.chat.structured import (
    RENAMED,
    ResponseFormat,
    StructuredOutputs,
    ToolChoice,
    ToolParam,
    Wanted,
)
from pyengine.gateway.bodies import decode
from pyengine.gateway.errors import ApiError, api_error
from pyengine.scheduler.types import MOST_BIASES, MOST_LOGPROBS, Grammar, SamplingParams

#: Tokens a completion gets when the client names no number (the API's own default).
COMPLETION_TOKENS = 16
#: Cap on a chat answer when the client names no number: one forgotten field must not hold a worker for a whole context.
CHAT_TOKENS = 4096
#: Stop strings (the API says 4; a few more harm nobody) and their length, stop ids.
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_IDS = 1024
#: Choices of one request: each is a sequence of its own on the workers. And those of one prompt (the API's limit).
MAX_CHOICES = 256
MAX_N = 128
#: Longest salt, in bytes: a name or a digest, not a document.
MAX_SALT = 256
#: Seconds, a day: what a client waits for longer than that is no request. And steps of priority, to either side of 0.
MAX_TIMEOUT = 86_400
MAX_PRIORITY = 1_000
#: Token ids of one request: beyond any model's context, and few enough to be looked at in a blink.
MAX_PROMPT_IDS = 1 << 20

#: Fields that would change the answer, and the values that do not.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "structural_tag": (),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Positive = Annotated[int, Meta(ge=1)]
LogprobCount = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


class StreamOptions(msgspec.Struct, frozen=True):
    """continuous_usage_stats: every event has the usage so far (vLLM's); only with include_usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that chat and plain completions share, as the client sent them."""

    model: str | None = None
    max_tokens: Positive | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    return_token_ids: bool | None = None
    #: vLLM's name: KV is shared only among requests of one salt. So it names the tenant, by which quotas are counted.
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT)] | None = None
    #: Seconds from arrival after which the answer is worthless: it is stopped everywhere then.
    timeout: Annotated[float, Meta(gt=0.0, le=float(MAX_TIMEOUT))] | None = None
    #: vLLM's: lower is served earlier, 0 is everybody's.
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    #: Name of a class of objectives that this server is configured with; "auto" and "default": its default.
    service_tier: str | None = None
    #: Who asked, as the client names them: for the log.
    user: str | None = None
    response_format: ResponseFormat | None = None
    #: vLLM's: other forms of the answer.
    structured_outputs: StructuredOutputs | None = None
    #: vLLM's: what the model thought of the prompt's tokens, with so many of the likeliest beside each.
    prompt_logprobs: LogprobCount | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1


class ChatRequest(_Common, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    #: Handed to the model's chat template beside the messages (vLLM's).
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def wanted(self) -> Wanted:
        return Wanted(
            response_format=self.response_format,
            structured_outputs=self.structured_outputs,
            tools=self.tools or (),
            tool_choice=self.tool_choice,
            parallel=self.parallel_tool_calls is not False,
        )

    @property
    def told(self) -> int | None:
        """How many of the likeliest tokens are told beside each; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def scores(self) -> int | None:
        """How many of the likeliest tokens are told beside each of the prompt's; None: its logprobs are not."""
        return self.prompt_logprobs


class CompletionRequest(_Common, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    #: 0: only the prompt is scored.
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    echo: bool | None = None
    logprobs: LogprobCount | None = None

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt: text, or token ids. Raises ApiError."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError(400, "prompt: is empty; send at least one token or a string", param="prompt")
        ids = max(len(prompt), sum(len(item) for item in prompt if isinstance(item, list)))
        if ids > MAX_PROMPT_IDS:
            text = f"prompt: {ids} token ids; send at most {MAX_PROMPT_IDS} in one request"
            raise ApiError(400, text, param="prompt", code="context_length_exceeded")
        if all(type(item) is int for item in prompt):
            return [list(prompt)]  # type: ignore[arg-type]
        if any(type(item) is int or item == [] for item in prompt):
            text = "prompt: expected a string, a list of strings, a list of token ids, or a list of such lists"
            raise ApiError(400, text, param="prompt")
        return list(prompt)  # type: ignore[arg-type]

    @property
    def wanted(self) -> Wanted:
        return Wanted(response_format=self.response_format, structured_outputs=self.structured_outputs)

    @property
    def told(self) -> int | None:
        return self.logprobs

    @property
    def scores(self) -> int | None:
        """How many of the likeliest tokens are told beside each of the prompt's; None: its logprobs are not."""
        echoed = self.logprobs if self.echo else None
        return max((each for each in (echoed, self.prompt_logprobs) if each is not None), default=None)


def parse_chat(body: bytes) -> tuple[ChatRequest, list[str]]:
    """The request and the paths of its fields that nobody knows. Raises ApiError 400 naming what is wrong."""
    request, unknown = decode(body, ChatRequest, UNSUPPORTED, RENAMED)
    _check(request, prompts=1)
    if request.top_logprobs is not None and not request.logprobs:
        text = "top_logprobs: send logprobs true with it"
        raise ApiError(400, text, param="top_logprobs")
    return request, unknown


def parse_completion(body: bytes) -> tuple[CompletionRequest, list[str]]:
    """The request and the paths of its fields that nobody knows. Raises ApiError 400 naming what is wrong."""
    request, unknown = decode(body, CompletionRequest, UNSUPPORTED, RENAMED)
    _check(request, prompts=len(request.prompts()))
    if request.max_tokens == 0 and request.scores is None:
        text = "max_tokens: 0 only scores a prompt; send echo with logprobs, or prompt_logprobs, or at least 1"
        raise ApiError(400, text, param="max_tokens")
    return request, unknown


def _check(request: ChatRequest | CompletionRequest, prompts: int) -> None:
    """What types cannot say."""
    if prompts * request.choices > MAX_CHOICES:
        param = "n" if request.choices > 1 else "prompt"
        text = f"{param}: {prompts} prompts with {request.choices} answers each; send at most {MAX_CHOICES} at once"
        raise ApiError(400, text, param=param)
    salt = request.cache_salt
    if salt is not None and len(salt.encode()) > MAX_SALT:
        raise ApiError(400, f"cache_salt: send 1 to {MAX_SALT} bytes, or leave it out", param="cache_salt")
    options = request.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        text = "stream_options.continuous_usage_stats: send include_usage true with it"
        raise ApiError(400, text, param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        text = "prompt_logprobs: are told in whole answers only; leave stream out"
        raise ApiError(400, text, param="prompt_logprobs")
    _biases(request.logit_bias, None)
    try:
        request.wanted.check()
        formed = request.wanted.must_call or request.wanted.grammar() is not None
        if isinstance(request, ChatRequest):
            conversation(request.messages)
    except Unservable as error:
        raise api_error(error) from error
    if request.ignore_eos and formed:
        text = "ignore_eos: an answer that has a form has an end; leave one of them out"
        raise ApiError(400, text, param="ignore_eos")


def _biases(biases: dict[str, float] | None, vocab_size: int | None) -> tuple[tuple[int, float], ...]:
    """As workers take them. Raises ApiError for what is no id."""
    if not biases:
        return ()
    if len(biases) > MOST_BIASES:
        text = f"logit_bias: {len(biases)} ids; send at most {MOST_BIASES}"
        raise ApiError(400, text, param="logit_bias")
    made: dict[int, float] = {}
    for name, bias in biases.items():
        # Only one way to write a number: "1" and "01" would be one id twice.
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", name, re.ASCII):
            text = f"logit_bias: {name[:20]!r} is no token id; send ids as decimal numbers"
            raise ApiError(400, text, param="logit_bias")
        made[int(name)] = bias
        if vocab_size is not None and int(name) >= vocab_size:
            text = f"logit_bias: {name} is no token id of this model; ids are 0 to {vocab_size - 1}"
            raise ApiError(400, text, param="logit_bias")
    return tuple(made.items())


def sampling(
    request: ChatRequest | CompletionRequest,
    prompt_tokens: int,
    max_positions: int,
    room: int,
    vocab_size: int | None = None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Sampling parameters of one prompt's first answer (`nth` makes the others'); the seed is drawn if none was given.

    max_positions: of the model; room: tokens the largest decode worker can hold, which bounds the default only.
    Raises ApiError 400 if the prompt leaves no position for an answer, or fewer than are asked for at least.
    """
    if prompt_tokens >= max_positions:
        text = f"the prompt has {prompt_tokens} tokens, the model holds {max_positions} with the answer: shorten it"
        field = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise ApiError(400, text, param=field, code="context_length_exceeded")
    wanted = request.max_tokens
    if isinstance(request, ChatRequest):
        wanted = request.max_completion_tokens or wanted or max(1, min(CHAT_TOKENS, room - prompt_tokens))
    most = min(COMPLETION_TOKENS if wanted is None else wanted, max_positions - prompt_tokens)
    least = request.min_tokens or 0
    if least > most:
        text = f"min_tokens: {least} are more than the answer may have at most, {most}; send less, or a larger maximum"
        raise ApiError(400, text, param="min_tokens")
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    return SamplingParams(
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=min(max(request.top_k or 0, 0), 2**31),
        min_p=_or(request.min_p, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=_biases(request.logit_bias, vocab_size),
        # Any 64-bit seed a client may send is folded into the range ours has.
        seed=secrets.randbits(63) if request.seed is None else request.seed % 2**63,
        # One that scores its prompt only has an answer as well, which nobody sees.
        max_tokens=max(most, 1),
        min_tokens=least,
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=request.told,
        grammar=grammar,
        prompt_logprobs=request.scores,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def nth(params: SamplingParams, answer: int) -> SamplingParams:
    """Those of a prompt's answer number `answer`, from 0: the same, with a seed of its own that follows the first's.

    The prompt is told of with the first.
    """
    if not answer:
        return params
    return msgspec.structs.replace(params, seed=((params.seed or 0) + answer) % 2**63, prompt_logprobs=None)


# -- the other endpoints -----------------------------------------------------------------------------------------------


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_IDS)]
