"""Answers as values of a type: its JSON schema for the model, and its parser for what the model wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec


class Output(NamedTuple):
    """schema: JSON schema, objects closed. read: text -> value; raises ValueError."""

    name: str
    schema: dict[str, Any]
    read: Callable[[str], Any]

    def parse(self, text: str, finish_reason: str) -> Any:
        """Raises ValueError for what is no such value, as an answer that was cut by its length."""
        try:
            return self.read(text)
        except ValueError as error:
            cut = "; it was cut by its length: raise max_tokens" if finish_reason == "length" else ""
            raise ValueError(f"the answer is no {self.name}: {error}{cut}; it is: {text[:200]!r}") from error


def output_of(wanted: Any) -> Output | None:
    """wanted: msgspec.Struct, dataclass, TypedDict, pydantic model, or whatever else msgspec reads; None: none.

    Raises ValueError for a type that JSON cannot be read as.
    """
    if wanted is None:
        return None
    name = getattr(wanted, "__name__", str(wanted))
    # pydantic is asked by what its models have: nobody need install it.
    if hasattr(wanted, "model_json_schema"):
        return Output(name, closed(wanted.model_json_schema()), wanted.model_validate_json)
    try:
        schema, decoder = msgspec.json.schema(wanted), msgspec.json.Decoder(wanted)
    except TypeError as error:
        text = f"output: {name} cannot be read from JSON: {error}; give a msgspec.Struct, dataclass or TypedDict"
        raise ValueError(text) from error
    return Output(name, closed(schema), decoder.decode)


def closed(schema: Any) -> Any:
    """The schema with no other properties than those it names: else a model may go on inventing some."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        name: value if name in ("default", "const", "enum", "examples") else closed(value)
        for name, value in schema.items()
    }
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made
