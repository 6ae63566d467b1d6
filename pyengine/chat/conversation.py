"""A conversation as clients send it, and as chat templates take it."""

from __future__ import annotations

from typing import Any

import msgspec

from pyengine.chat.errors import Unservable
from pyengine.chat.structured import ToolCall
from pyengine.chat.tools import knows_tools
from pyengine.chat.tools.prompting import in_words


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    #: Of an assistant that has called, and of the tool that answers.
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    #: What the assistant thought; some templates show it.
    reasoning_content: str | None = None


def conversation(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: role and text, and what else there is. Raises Unservable."""
    return [_plain(message, at) for at, message in enumerate(messages)]


def _plain(message: ChatMessage, at: int) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": _text(message, at)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if value := getattr(message, name):
            plain[name] = value
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        plain["tool_calls"] = [call.plain(f"messages[{at}].tool_calls[{number}]") for number, call in calls]
    return plain


def templated(
    messages: list[ChatMessage], tools: list[dict[str, Any]], options: dict[str, Any] | None, template: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What a chat template is given: messages, and all else by name. tools: that the model is to be told of."""
    plain, named = conversation(messages), dict(options or {})
    if not knows_tools(template):
        return in_words(plain, tools), named
    return plain, named | ({"tools": tools} if tools else {})


def _text(message: ChatMessage, at: int) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type != "text" or part.text is None:
            text = f"messages[{at}].content: a part of type {part.type!r} is not supported; send parts of type 'text'"
            raise Unservable(text, param="messages")
    return "".join(part.text or "" for part in message.content)
