"""What each field of a request means, beside what its type says. docs/fields.md is made of both:

python -m pyengine.gateway.fields > docs/fields.md
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from pyengine.chat.structured import RENAMED
from pyengine.gateway.openai import (
    CHAT_TOKENS,
    COMPLETION_TOKENS,
    MAX_CHOICES,
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pyengine.scheduler.types import MOST_BIASES

#: Title, kind, and what to say above its fields, in the order of the page.
_REQUESTS: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("`POST /v1/chat/completions`", ChatRequest),
    ("`POST /v1/completions`", CompletionRequest),
    ("`POST /tokenize`", TokenizeRequest),
    ("`POST /detokenize`", DetokenizeRequest),
)

#: By name; by "Type.name" where a name means something else in another place.
MEANINGS = {
    "model": "name of a model of `/v1/models`; left out: the one that is served",
    "messages": "the conversation, for the model's chat template",
    "prompt": "text, or token ids; a list of texts or of lists of ids is several prompts",
    "TokenizeRequest.prompt": "text to cut; either this or `messages`",
    "TokenizeRequest.messages": "conversation to cut, as the chat template makes it; either this or `prompt`",
    "max_tokens": f"most tokens of one (chat: what fits, at most {CHAT_TOKENS}; completions: {COMPLETION_TOKENS})",
    "max_completion_tokens": "the same; wins over `max_tokens`",
    "min_tokens": "no end and no stop string before so many (0)",
    "temperature": "0: always the likeliest token (1)",
    "top_p": "draws among the likeliest tokens that have this much of the probability together (1)",
    "top_k": "draws among so many of the likeliest; 0 and -1: among all (0)",
    "min_p": "draws among tokens that are at least this part as likely as the likeliest (0)",
    "presence_penalty": "subtracted from the logit of what the answer has already (0)",
    "frequency_penalty": "the same, for each time that it has it (0)",
    "repetition_penalty": "divides the logits of what prompt or answer have; above 1: less of it (1)",
    "logit_bias": f"by token id, as text: added to its logit; at most {MOST_BIASES}",
    "seed": "the same seed and the same prompt give the same answer (drawn)",
    "stop": "the answer ends before the first of these texts",
    "stop_token_ids": "the answer ends at one of these tokens",
    "ignore_eos": "goes on behind the model's end token; not with an answer that has a form",
    "stream": "the answer comes as server-sent events, as it is made",
    "stream_options": "of a stream",
    "include_usage": "an event with `usage` before the end",
    "continuous_usage_stats": "`usage` so far in every event; only with `include_usage`",
    "n": f"answers to each prompt, with the seeds `seed`, `seed + 1`, ... (1); at most {MAX_CHOICES} in one request",
    "return_token_ids": "token ids of prompt and answer are told",
    "cache_salt": "KV is shared among requests of one salt only; with API keys it narrows what the key's tenant finds",
    "timeout": "seconds from arrival after which the answer is worthless: 504, and all work on it ends",
    "priority": "lower is served earlier (0); with API keys at most what the tenant may",
    "service_tier": "class of objectives that this server is configured with; `auto`, `default`: its default",
    "user": "who asked, as the client names them: for the log",
    "response_format": "the form of the answer; either this or `structured_outputs`",
    "structured_outputs": "other forms of it; exactly one of its fields",
    "logprobs": "the logprob of each token is told",
    "CompletionRequest.logprobs": "so many of the likeliest tokens are told beside each, with logprobs",
    "top_logprobs": "so many of the likeliest tokens beside it; only with `logprobs`",
    "echo": "the prompt stands before the answer; with `logprobs` its own are told, too",
    "prompt_logprobs": "so many of the likeliest tokens are told beside each of the prompt's; not streamed",
    "CompletionRequest.max_tokens": "of the answer; 0 only scores the prompt (16)",
    "chat_template_kwargs": "handed to the chat template",
    "tools": "functions that the model may call",
    "tool_choice": "`auto`, `none`, `required`, or one by name (`auto`, if there are tools)",
    "parallel_tool_calls": "false: at most one call (true)",
    "add_special_tokens": "of a prompt: what the tokenizer puts before it (true)",
    "return_token_strs": "each token as text, too",
    "tokens": "ids to make text of",
    "role": "`system`, `user`, `assistant`, `tool`, or another that the template knows",
    "content": "text, or parts of type `text`",
    "text": "of a part",
    "tool_calls": "of an assistant that has called",
    "tool_call_id": "of a tool's answer: whose",
    "reasoning_content": "what the assistant thought; some templates show it",
    "type": "what it is",
    "json_schema": "for type `json_schema`",
    "schema": "JSON Schema that the answer is to satisfy",
    "strict": "true: keywords that cannot be followed are refused by name; else they are ignored",
    "json": "JSON Schema, as an object or as text",
    "regex": "regular expression that the whole answer matches",
    "choice": "the answer is one of these",
    "grammar": "in Lark, or in GBNF as llama.cpp writes it",
    "json_object": "true: any JSON object",
    "function": "the function",
    "name": "its name",
    "description": "for the model, in words",
    "parameters": "JSON Schema of its arguments",
    "arguments": "JSON, as text",
    "id": "of the call",
}


def document() -> str:
    """docs/fields.md."""
    lines = [
        "# Fields of requests",
        "",
        "Made from the code by `python -m pyengine.gateway.fields`; a test compares. How they go together:",
        "[api.md](api.md).",
        "In brackets: what is taken if a field is left out, or null. `/openapi.json` has the same for machines.",
    ]
    kinds = [kind for _, kind in _REQUESTS]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="{name}")
    for title, kind in _REQUESTS:
        lines += ["", f"## {title}", "", *_table(kind.__name__, schemas[kind.__name__])]
    lines += ["", "## Parts of requests"]
    for name in sorted(schemas.keys() - {kind.__name__ for kind in kinds}):
        lines += ["", f"### {name}", "", *_table(name, schemas[name])]
    lines += [
        "",
        "## Refused",
        "",
        "These would change the answer, and are not supported: 400, but with the value that changes nothing.",
        "",
        "| field | taken with | |",
        "|---|---|---|",
    ]
    for name in sorted(UNSUPPORTED.keys() | RENAMED.keys()):
        taken = ", ".join(f"`{json.dumps(value)}`" for value in UNSUPPORTED.get(name, ()))
        lines.append(f"| `{name}` | {taken} | {f'now `{RENAMED[name]}`' if name in RENAMED else ''} |")
    return "\n".join(lines) + "\n"


def _table(kind: str, schema: dict[str, Any]) -> list[str]:
    lines = ["| field | type | means |", "|---|---|---|"]
    needed = schema.get("required", ())
    for name, field in sorted(schema["properties"].items(), key=lambda item: item[0] not in needed):
        meaning = MEANINGS.get(f"{kind}.{name}") or MEANINGS[name]
        lines.append(f"| `{name}` | {_type(field)}{', required' if name in needed else ''} | {meaning} |")
    return lines


def _type(field: dict[str, Any]) -> str:
    """In words, with its bounds."""
    if "anyOf" in field:
        return " or ".join(_type(one) for one in field["anyOf"] if one != {"type": "null"})
    if "$ref" in field:
        return f"[{field['$ref']}](#{field['$ref'].lower()})"
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    name = {"string": "text", "integer": "whole number", "boolean": "truth"}.get(
        field.get("type", ""), field.get("type")
    )
    if name == "array":
        most = f", at most {field['maxItems']:,}" if "maxItems" in field else ""
        return f"list of {_type(field['items'])}{most}"
    if "pattern" in field:
        return f"text like `{field['pattern']}`".replace("|", "\\|")
    return f"{name or 'anything'}{_bounds(field)}"


def _bounds(field: dict[str, Any]) -> str:
    said = [
        f" {word} {field[key]:,}"
        for key, word in (
            ("minimum", "from"),
            ("exclusiveMinimum", "above"),
            ("maximum", "to"),
            ("exclusiveMaximum", "below"),
            ("minLength", "of"),
            ("maxLength", "to"),
        )
        if key in field
    ]
    return ",".join(said[:1]) + "".join(said[1:]) + (" characters" if "maxLength" in field else "")


if __name__ == "__main__":
    print(document(), end="")
