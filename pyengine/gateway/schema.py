"""The OpenAPI document of the gateway, made of the types that parse its requests. Served as `/openapi.json`."""

from __future__ import annotations

from typing import Any

import msgspec

from pyengine.gateway.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from pyengine.gateway.request_ids import VALID

#: What answers look like, as far as clients may count on it.
_ANSWERS: dict[str, dict[str, Any]] = {
    "Completion": {
        "id": {"type": "string"},
        "object": {"enum": ["chat.completion", "text_completion"]},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": {"$ref": "#/components/schemas/Choice"}},
        "usage": {"$ref": "#/components/schemas/Usage"},
    },
    "Choice": {
        "index": {"type": "integer", "minimum": 0},
        "finish_reason": {"type": "string"},
        "logprobs": {"type": ["object", "null"]},
    },
    "Usage": {
        name: {"type": "integer", "minimum": 0} for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    },
    "Error": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "Model": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "max_model_len": {"type": "integer"},
    },
    "Models": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {"$ref": "#/components/schemas/Model"}},
    },
    "Tokens": {
        "count": {"type": "integer", "minimum": 0},
        "max_model_len": {"type": "integer"},
        "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    },
    "Text": {"prompt": {"type": "string"}},
    "Version": {"version": {"type": "string"}},
    "ServerLoad": {"server_load": {"type": "integer", "minimum": 0}},
    "Checks": {
        "status": {"enum": ["ok", "unavailable"]},
        "failing": {"type": "array", "items": {"type": "string"}},
        "checks": {"type": "array"},
    },
    "Health": {"status": {"enum": ["ok", "unavailable"]}, "workers": {"type": "object"}},
}

#: Path, method, request type, schema of the answer (None: text), what it is for.
_OPERATIONS: tuple[tuple[str, str, type[msgspec.Struct] | None, str | None, str], ...] = (
    ("/v1/chat/completions", "post", ChatRequest, "Completion", "Answers a conversation"),
    ("/v1/completions", "post", CompletionRequest, "Completion", "Goes on with a text"),
    ("/v1/models", "get", None, "Models", "The models that are served"),
    ("/v1/models/{name}", "get", None, "Model", "One of them"),
    ("/tokenize", "post", TokenizeRequest, "Tokens", "Token ids of a text or conversation"),
    ("/detokenize", "post", DetokenizeRequest, "Text", "Text of token ids"),
    ("/version", "get", None, "Version", "This server's version"),
    ("/load", "get", None, "ServerLoad", "Requests that this gateway holds"),
    ("/health", "get", None, "Health", "Whether requests can be served, and by whom"),
    ("/livez", "get", None, "Checks", "Whether this gateway lives"),
    ("/readyz", "get", None, "Checks", "Whether requests can be served"),
    ("/cluster", "get", None, None, "What the workers can do"),
    ("/metrics", "get", None, None, "Counters for Prometheus"),
)

#: For who asks for a path that is none.
KNOWN = ", ".join(f"{method.upper()} {path}" for path, method, *_ in _OPERATIONS)

#: Statuses of errors, and what they mean to a client.
_REFUSED = {"400": "The request is wrong: `param` says where", "413": "The body is too large"}
_UNSERVED = {
    "429": "Too much to do, or it would come too late: Retry-After says when to ask again",
    "503": "Nobody is there to serve it: Retry-After says when to ask again",
    "504": "It took longer than its deadline",
}
_PATTERN = f"^{VALID.pattern.decode()}$"
_NUMBER = {"name": "X-Request-Id", "in": "header", "schema": {"type": "string", "pattern": _PATTERN}}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _document() -> dict[str, Any]:
    kinds = [kind for _, _, kind, _, _ in _OPERATIONS if kind is not None]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas = schemas | {name: _object(properties) for name, properties in _ANSWERS.items()}
    paths: dict[str, Any] = {}
    for path, method, kind, answer, summary in _OPERATIONS:
        operation: dict[str, Any] = {"summary": summary, "parameters": [_NUMBER]}
        statuses: dict[str, Any] = {"400": _error("X-Request-Id is none")}
        if kind is not None:
            body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
            operation["requestBody"] = {"required": True, "content": body}
            statuses |= {status: _error(text) for status, text in {**_REFUSED, **_UNSERVED}.items()}
        if kind is not None or "{" in path:
            statuses["404"] = _error("There is no such model")
        if "{name}" in path:
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            operation["parameters"] = [_NUMBER, name]
            statuses["503"] = _error(_UNSERVED["503"])
        content: dict[str, Any] = {"application/json": {}}
        if answer is not None:
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{answer}"}}}
        elif path == "/metrics":
            content = {"text/plain": {}}
        if answer == "Completion":
            content["text/event-stream"] = {}
        statuses["200"] = {"description": summary, "content": content}
        if path in ("/health", "/readyz", "/livez"):
            statuses["503"] = {"description": "They cannot", "content": content}
        operation["responses"] = dict(sorted(statuses.items()))
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "pyengine", "version": "1", "description": "OpenAI's API, and vLLM's additions to it"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _error(text: str) -> dict[str, Any]:
    schema = {"schema": {"$ref": "#/components/schemas/Error"}}
    return {"description": text, "content": {"application/json": schema}}


DOCUMENT = msgspec.json.encode(_document())
