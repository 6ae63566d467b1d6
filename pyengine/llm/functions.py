"""Python functions as tools: a description for the model, made of name, hints and docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

import msgspec

from pyengine.chat.structured import Function, ToolParam
from pyengine.llm.outputs import closed

Tool = Callable[..., Any] | Mapping[str, Any]


def described(tool: Tool) -> ToolParam:
    """A function, or OpenAI's description of one, {"type": "function", "function": {...}}. Raises ValueError."""
    if isinstance(tool, Mapping):
        try:
            return msgspec.convert(dict(tool), ToolParam)
        except msgspec.ValidationError as error:
            raise ValueError(f"tools: {error}; give a function, or OpenAI's description of one") from error
    name = getattr(tool, "__name__", "")
    text = inspect.getdoc(tool) or ""
    about = _arguments(text)
    made = {"name": name, "parameters": _parameters(tool, name, about)}
    if text:
        made["description"] = text.partition("\n\n")[0].replace("\n", " ")
    try:
        return ToolParam("function", msgspec.convert(made, Function))
    except msgspec.ValidationError as error:
        raise ValueError(f"tools: {name or tool!r}: {error}; give a function that has a plain name") from error


def _parameters(tool: Callable[..., Any], name: str, about: Mapping[str, str]) -> dict[str, Any]:
    """JSON schema of the keyword arguments."""
    hints = get_type_hints(tool, include_extras=True)
    fields: list[Any] = []
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            text = f"tools: {name}: its parameter {parameter.name!r} has no name in a call; give it a plain one"
            raise ValueError(text)
        kind = hints.get(parameter.name)
        if kind is None:
            raise ValueError(f"tools: {name}: its parameter {parameter.name!r} has no type; write a hint")
        if parameter.name in about:
            kind = Annotated[kind, msgspec.Meta(description=about[parameter.name])]
        required = parameter.default is parameter.empty
        fields.append((parameter.name, kind) if required else (parameter.name, kind, parameter.default))
    try:
        struct = msgspec.defstruct("Arguments", fields, kw_only=True)
        (top,), parts = msgspec.json.schema_components([struct], ref_template="#/$defs/{name}")
    except TypeError as error:
        raise ValueError(f"tools: {name}: {error}; give its parameters types that JSON has") from error
    schema = dict(parts.pop(top["$ref"].rpartition("/")[2]))
    schema.pop("title", None)
    return dict(closed(schema | ({"$defs": parts} if parts else {})))


def _arguments(text: str) -> dict[str, str]:
    """What a docstring says under "Args:" (Google's form), by name."""
    section = re.search(r"^Args?(?:uments)?:\n((?:[ \t]+.*(?:\n|$)|\n)+)", text, re.MULTILINE)
    if section is None:
        return {}
    lines = re.findall(r"^[ \t]+(\w+)(?: \([^)]*\))?: (.+)$", section[1], re.MULTILINE)
    return {name: said.strip() for name, said in lines}
