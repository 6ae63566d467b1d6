"""The OpenAI HTTP API as data: requests parsed and checked, answers and errors built. No I/O.

Reference: the OpenAI API specification (chat completions, completions, models, errors). Fields it does not know are
ignored, as such servers do; fields that would change the answer and are not supported yet are refused by name.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Any, Literal, NamedTuple

import msgspec

from pyengine.gateway.request import ADMISSION_KINDS, ErrorKind, RequestError
from pyengine.scheduler.types import SamplingParams

#: Tokens a completion gets when the client names no number (the API's own default).
COMPLETION_TOKENS = 16
#: Cap on a chat answer when the client names no number: one forgotten field must not hold a worker for a whole context.
CHAT_TOKENS = 4096
#: Stop strings (the API says 4; a few more harm nobody) and their length, stop ids, prompts of one request.
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_IDS = 1024
MAX_PROMPTS = 256
#: Longest salt, in bytes: a name or a digest, not a document.
MAX_SALT = 256
#: Seconds, a day: what a client waits for longer than that is no request. And steps of priority, to either side of 0.
MAX_TIMEOUT = 86_400
MAX_PRIORITY = 1_000
#: Token ids of one request: beyond any model's context, and few enough to be looked at in a blink.
MAX_PROMPT_IDS = 1 << 20

#: Fields that would change the answer, and the values that do not.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tools": ([],),
    "top_logprobs": (0,),
}


class ApiError(Exception):
    """What the client gets instead of an answer. retry_after in seconds becomes the Retry-After header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


_STATUS = {
    ErrorKind.BUSY: (429, "rate_limit_exceeded"),
    ErrorKind.UNAVAILABLE: (503, "service_unavailable"),
    ErrorKind.TOO_LARGE: (400, "context_length_exceeded"),
    ErrorKind.TIMEOUT: (504, "timeout"),
    ErrorKind.DENIED: (401, "invalid_api_key"),
    ErrorKind.BUG: (500, "internal_error"),
}


def api_error(error: RequestError) -> ApiError:
    status, code = _STATUS[error.kind]
    # Of a 429 the code says which objective would be missed, or that others come first.
    code = error.detail if error.detail in ADMISSION_KINDS else code
    return ApiError(status, error.reason, code=code, retry_after=error.retry_after)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that chat and plain completions share, as the client sent them."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    return_token_ids: bool | None = None
    #: vLLM's name: KV is shared only among requests of one salt. So it names the tenant, by which quotas are counted.
    cache_salt: str | None = None
    #: Seconds from arrival after which the answer is worthless: it is stopped everywhere then.
    timeout: float | None = None
    #: vLLM's: lower is served earlier, 0 is everybody's.
    priority: int | None = None
    #: Name of a class of objectives that this server is configured with; "auto" and "default": its default.
    service_tier: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None


class ChatRequest(_Common, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """Messages as chat templates take them: role and text."""
        return [{"role": message.role, "content": _text(message, at)} for at, message in enumerate(self.messages)]


class CompletionRequest(_Common, frozen=True, kw_only=True):
    prompt: str | list[Any]

    def prompts(self) -> list[str | list[int]]:
        """One entry per choice: text, or token ids. Raises ApiError."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError(400, "prompt: is empty; send at least one token or a string", param="prompt")
        ids = max(len(prompt), sum(len(item) for item in prompt if isinstance(item, list)))
        if ids > MAX_PROMPT_IDS:
            text = f"prompt: {ids} token ids; send at most {MAX_PROMPT_IDS} in one request"
            raise ApiError(400, text, param="prompt", code="context_length_exceeded")
        if all(_is_int(item) for item in prompt):
            return [list(prompt)]
        if len(prompt) > MAX_PROMPTS:
            raise ApiError(400, f"prompt: {len(prompt)} prompts; send at most {MAX_PROMPTS} at once", param="prompt")
        for item in prompt:
            if not isinstance(item, str) and not (isinstance(item, list) and item and all(map(_is_int, item))):
                text = "prompt: expected a string, a list of strings, a list of token ids, or a list of such lists"
                raise ApiError(400, text, param="prompt")
        return list(prompt)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(message: ChatMessage, at: int) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type != "text" or part.text is None:
            text = f"messages[{at}].content: a part of type {part.type!r} is not supported; send parts of type 'text'"
            raise ApiError(400, text, param="messages")
    return "".join(part.text or "" for part in message.content)


_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
#: The unsupported fields alone: others are skipped, so a large body is not built twice.
_unsupported = msgspec.json.Decoder(msgspec.defstruct("_Unsupported", [(name, Any, None) for name in _UNSUPPORTED]))


def parse_chat(body: bytes) -> ChatRequest:
    """Raises ApiError 400 naming the field and what was expected."""
    request: ChatRequest = _decode(_chat, body)
    if not request.messages:
        raise ApiError(400, "messages: is empty; send at least one message", param="messages")
    _check(request)
    _at_least("max_completion_tokens", request.max_completion_tokens, 1)
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises ApiError 400 naming the field and what was expected."""
    request: CompletionRequest = _decode(_completion, body)
    _check(request)
    request.prompts()
    return request


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        request = decoder.decode(body)
        fields = _unsupported.decode(body)
    except msgspec.ValidationError as error:
        raise _field_error(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply: send plain values", code="invalid_json") from error
    for name, neutral in _UNSUPPORTED.items():
        value = getattr(fields, name)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name}: is not supported by this version; leave it out", param=name)
    return request


def _field_error(error: msgspec.ValidationError) -> ApiError:
    """`Expected `int`, got `str` - at `$.max_tokens`` -> `max_tokens: expected `int`, got `str``, param max_tokens."""
    text = str(error)
    if (missing := re.search(r"missing required field `(\w+)`", text)) and " - at `$." not in text:
        return ApiError(400, f"{missing[1]}: is required; send it", param=missing[1], code="missing_required_parameter")
    what, _, path = text.partition(" - at `$.")
    if not path:
        return ApiError(400, f"the body must be a JSON object: {text}", code="invalid_type")
    path = path.rstrip("`")
    what = what[:1].lower() + what[1:]
    param = re.split(r"[.\[]", path)[0]
    return ApiError(400, f"{path}: {what}; send the type that is expected", param=param, code="invalid_type")


def _check(request: _Common) -> None:
    """What types cannot say."""
    if request.n is not None and request.n != 1:
        raise ApiError(400, f"n: only 1 is supported by this version, not {request.n}; send n requests", param="n")
    salt = request.cache_salt
    if salt is not None and not 0 < len(salt.encode()) <= MAX_SALT:
        raise ApiError(400, f"cache_salt: send 1 to {MAX_SALT} bytes, or leave it out", param="cache_salt")
    if request.timeout is not None and not 0.0 < request.timeout <= MAX_TIMEOUT:
        text = f"timeout: send seconds above 0 and at most {MAX_TIMEOUT}, not {request.timeout:g}"
        raise ApiError(400, text, param="timeout")
    if request.priority is not None and abs(request.priority) > MAX_PRIORITY:
        text = f"priority: send a number from {-MAX_PRIORITY} (first) to {MAX_PRIORITY} (last), not {request.priority}"
        raise ApiError(400, text, param="priority")
    _at_least("max_tokens", request.max_tokens, 1)
    _at_least("top_k", request.top_k, -1)
    for name, low, high in (("temperature", 0.0, 100.0), ("top_p", 0.0, 1.0)):
        value = getattr(request, name)
        if value is not None and not low <= value <= high:
            raise ApiError(400, f"{name}: must be between {low:g} and {high:g}, not {value:g}", param=name)
    if request.top_p == 0.0:
        raise ApiError(400, "top_p: must be above 0; for the likeliest token send temperature 0", param="top_p")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        text = f"stop: send at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters"
        raise ApiError(400, text, param="stop")
    ids = request.stop_token_ids or []
    if len(ids) > MAX_STOP_IDS or any(not 0 <= token < 2**32 for token in ids):
        text = f"stop_token_ids: send at most {MAX_STOP_IDS} token ids, none of them negative"
        raise ApiError(400, text, param="stop_token_ids")


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ApiError(400, f"{name}: must be at least {least}, not {value}", param=name)


def sampling(
    request: ChatRequest | CompletionRequest, prompt_tokens: int, max_positions: int, room: int
) -> SamplingParams:
    """Sampling parameters of one prompt; the seed is drawn if the client gave none.

    max_positions: of the model; room: tokens the largest decode worker can hold, which bounds the default only.
    Raises ApiError 400 if the prompt leaves no position for an answer.
    """
    if prompt_tokens >= max_positions:
        text = f"the prompt has {prompt_tokens} tokens, the model holds {max_positions} with the answer: shorten it"
        field = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise ApiError(400, text, param=field, code="context_length_exceeded")
    wanted = request.max_tokens
    if isinstance(request, ChatRequest):
        wanted = request.max_completion_tokens or wanted or max(1, min(CHAT_TOKENS, room - prompt_tokens))
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=min(max(request.top_k or 0, 0), 2**31),
        # Any 64-bit seed a client may send is folded into the range ours has.
        seed=secrets.randbits(63) if request.seed is None else request.seed % 2**63,
        max_tokens=min(wanted or COMPLETION_TOKENS, max_positions - prompt_tokens),
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
    )


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one HTTP request, over all its choices. cached: of the prompt, as the prefill worker counted them.

    tiers: where it found them (see PrefillReport); our extension of OpenAI's API.
    """

    prompt: int
    completion: int
    cached: int
    tiers: dict[str, int] = {}

    def json(self) -> dict[str, Any]:
        details: dict[str, Any] = {"cached_tokens": self.cached}
        if self.tiers:
            details["cached_tokens_by_tier"] = self.tiers
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": details,
        }


class Piece(NamedTuple):
    """What is new of one choice: text, the tokens it came of, and the finish reason with the last piece."""

    choice: int
    text: str
    ids: list[int]
    finish: str | None


class Answer:
    """Builds the JSON of one HTTP request's answer, whole or in events. `kind`: which of the two endpoints.

    token_ids: choices carry the ids beside the text (vLLM's extension `return_token_ids`).
    """

    def __init__(
        self,
        kind: Literal["chat", "completion"],
        model: str,
        include_usage: bool = False,
        token_ids: bool = False,
    ) -> None:
        self.id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"
        self._chat = kind == "chat"
        self._created = int(time.time())
        self._model = model
        self._include_usage = include_usage
        self._token_ids = token_ids
        self._encoder = msgspec.json.Encoder()

    def whole(self, choices: list[Piece], usage: Usage) -> bytes:
        """choices: each in one piece, in order."""
        built = [
            {
                "index": piece.choice,
                **({"message": {"role": "assistant", "content": piece.text}} if self._chat else {"text": piece.text}),
                "logprobs": None,
                "finish_reason": piece.finish,
                **self._ids(piece),
            }
            for piece in choices
        ]
        kind = "chat.completion" if self._chat else "text_completion"
        return self._encoder.encode({**self._head(kind), "choices": built, "usage": usage.json()})

    def opening(self, choices: int) -> bytes:
        """First events: chat names the role of each choice before its first text."""
        if not self._chat:
            return b""
        role = {"role": "assistant", "content": ""}
        return b"".join(self._event([self._choice(index, {"delta": role}, None)]) for index in range(choices))

    def delta(self, piece: Piece) -> bytes:
        """Event for new text of a choice, or its end."""
        content = {"content": piece.text} if piece.text else {}
        body: dict[str, Any] = {"delta": content} if self._chat else {"text": piece.text}
        return self._event([self._choice(piece.choice, body | self._ids(piece), piece.finish)])

    def closing(self, usage: Usage) -> bytes:
        """Last events: usage, if asked for, and the end mark."""
        if not self._include_usage:
            return b"data: [DONE]\n\n"
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        event = self._encoder.encode({**self._head(kind), "choices": [], "usage": usage.json()})
        return b"data: " + event + b"\n\ndata: [DONE]\n\n"

    @staticmethod
    def failure(error: ApiError) -> bytes:
        """Events for an error after the stream has begun."""
        return b"data: " + error.body() + b"\n\ndata: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _ids(self, piece: Piece) -> dict[str, list[int]]:
        return {"token_ids": piece.ids} if self._token_ids else {}

    def _choice(self, index: int, body: dict[str, Any], finish: str | None) -> dict[str, Any]:
        return {"index": index, **body, "logprobs": None, "finish_reason": finish}

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        event = {**self._head(kind), "choices": choices}
        if self._include_usage:
            event["usage"] = None
        return b"data: " + self._encoder.encode(event) + b"\n\n"


def models(names: list[str], max_positions: dict[str, int]) -> bytes:
    """Body of /v1/models."""
    data = [
        {"id": name, "object": "model", "created": 0, "owned_by": "pyengine", "max_model_len": max_positions[name]}
        for name in names
    ]
    return msgspec.json.encode({"object": "list", "data": data})
