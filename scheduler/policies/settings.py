"""Settings in a policy's name: `sglang:ratio=0.5,fetch=true` is the policy `sglang` with two of its fields set."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Callable, Iterable
from typing import TypeVar

Made = TypeVar("Made")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


#: How a setting of each type is written.
_READ: dict[type, tuple[str, Callable[[str], object]]] = {
    float: ("a number", _number),
    int: ("a whole number", int),
    bool: ("true or false", lambda text: {"true": True, "false": False}[text.lower()]),
    str: ("a word", str),
}


class UnknownName(ValueError):
    """The name, or a setting in it, makes no policy or admission; the text says what there is, or what failed."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UnknownName:
    """There is no such thing: lists what there is, and suggests the nearest."""
    near = difflib.get_close_matches(name, known, 1, 0.4)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return UnknownName(f"there is no {kind} {name!r}: known are {', '.join(known)}{guess}")


def split(text: str) -> tuple[str, dict[str, str]]:
    """A name and the settings behind it, as written. Raises UnknownName if they are not `knob=value,...`."""
    name, colon, rest = text.partition(":")
    settings: dict[str, str] = {}
    for item in rest.split(",") if colon else []:
        knob, equals, value = (part.strip() for part in item.partition("="))
        if not (knob and equals and value):
            raise UnknownName(f"{item!r} in {text!r} is no setting: write {name}:knob=value,knob=value")
        if knob in settings:
            raise UnknownName(f"{knob!r} is set twice in {text!r}")
        settings[knob] = value
    return name, settings


def knobs(maker: Callable[[], object]) -> dict[str, tuple[type, object]]:
    """What can be set of a policy: type and default by name. Nothing, if it is no dataclass."""
    if not (isinstance(maker, type) and dataclasses.is_dataclass(maker)):
        return {}
    types = typing.get_type_hints(maker)
    fields = [field for field in dataclasses.fields(maker) if field.init and types[field.name] in _READ]
    return {field.name: (types[field.name], field.default) for field in fields}


def make(maker: Callable[[], Made], name: str, settings: dict[str, str]) -> Made:
    """The policy with these settings. Raises UnknownName for one it has not, or a value that is none for it."""
    there = knobs(maker)
    values = {}
    for knob, text in settings.items():
        if knob not in there:
            if not there:
                raise UnknownName(f"the policy {name!r} has no settings, so {knob!r} cannot be set")
            raise unknown(f"setting of {name!r} named", knob, there)
        what, read = _READ[there[knob][0]]
        try:
            values[knob] = read(text)
        except (ValueError, KeyError):
            raise UnknownName(f"{knob!r} of {name!r} must be {what}, not {text!r}") from None
    try:
        return maker(**values)
    except ValueError as error:
        raise UnknownName(f"{name!r}: {error}") from error
